"""An attempt that an adapter lost: nobody will say how it ended, so it ends as if the process had died."""

from __future__ import annotations

import asyncio
import gc

import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Policy, Semel
from semel.engine.drive.aio_driver import AsyncLeasedAttempt
from semel.engine.drive.driver import LeasedAttempt
from semel.engine.drive.leases import Lease


def test_its_lease_is_kept_no_longer_and_its_key_is_no_longer_in_the_air() -> None:
    with Semel(MemoryStore(), sweep_every=None) as guard:
        attempt = guard.begin(guard.make_call("pay", "k", "", b"", Policy()))
        assert isinstance(attempt, LeasedAttempt)
        assert guard.driver.flights.by_id
        assert len(guard.driver.keeper.leases) == 1
        del attempt
        gc.collect()
        assert not guard.driver.flights.by_id
        assert len(guard.driver.keeper.leases) == 0


def test_the_same_in_an_event_loop() -> None:
    async def run() -> None:
        async with AsyncSemel(AsyncMemoryStore(), sweep_every=None) as guard:
            attempt = await guard.begin(guard.make_call("pay", "k", "", b"", Policy()))
            assert isinstance(attempt, AsyncLeasedAttempt)
            assert guard.driver.flights.by_id
            assert len(guard.driver.keeper.leases) == 1
            del attempt
            gc.collect()
            assert not guard.driver.flights.by_id
            assert len(guard.driver.keeper.leases) == 0

    asyncio.run(run())


def test_one_that_was_ended_leaves_its_successor_alone() -> None:
    """What is given back when the attempt goes away must not be another's."""
    with Semel(MemoryStore(), sweep_every=None) as guard:
        first = guard.begin(guard.make_call("pay", "k", "", b"", Policy()))
        assert isinstance(first, LeasedAttempt)
        first.decline(None)
        second = guard.begin(guard.make_call("pay", "k", "", b"", Policy()))
        assert isinstance(second, LeasedAttempt)
        del first
        gc.collect()
        assert guard.driver.flights.by_id
        assert len(guard.driver.keeper.leases) == 1
        assert second.complete("paid").value == "paid"


def test_an_attempt_lives_until_its_ending_is_awaited() -> None:
    """An adapter may leave the ending to a task and forget the attempt: that is no lost one."""

    async def run() -> None:
        async with AsyncSemel(AsyncMemoryStore(), sweep_every=None) as guard:
            attempt = await guard.begin(guard.make_call("pay", "k", "", b"", Policy()))
            assert isinstance(attempt, AsyncLeasedAttempt)
            ending = attempt.complete("paid")
            del attempt
            gc.collect()
            assert len(guard.driver.keeper.leases) == 1
            assert (await ending).value == "paid"
            assert not guard.driver.flights.by_id
            assert len(guard.driver.keeper.leases) == 0

    asyncio.run(run())


def test_an_interruption_before_the_adapter_has_the_attempt_leaves_no_lease_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Semel(MemoryStore(), sweep_every=None) as guard:
        hold = guard.driver.keeper.hold

        def interrupted(lease: Lease) -> None:
            hold(lease)
            raise KeyboardInterrupt

        monkeypatch.setattr(guard.driver.keeper, "hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guard.begin(guard.make_call("pay", "k", "", b"", Policy()))
        assert not guard.driver.flights.by_id
        assert len(guard.driver.keeper.leases) == 0
