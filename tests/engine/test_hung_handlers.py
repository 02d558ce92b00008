"""A handler that hangs in a thread: it cannot be stopped, but it must not hold its key for longer than its lease."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from semel import (
    InProgress,
    LeaseLost,
    OutcomeUnknown,
    Policy,
    PolicyError,
    State,
    StoreUnavailable,
    Wait,
    current_operation,
)
from semel.core.ops import Complete, Renew
from tests.engine.driving import Engine
from tests.engine.scripted import PATIENCE, Gate

LEASE = 0.2


class Hung:
    """A plain function that hangs under the guard's first call, until it is freed."""

    def __init__(self, engine: Engine, **settings: Any) -> None:
        self.inside, self.free, self.lost = Gate(), Gate(), Gate()
        self.runs = 0
        settings = {"key": "key", "operation": "op", "lease": LEASE, **settings}
        self.here = engine.guard.once(**settings)(self.hang)
        """The function under the guard whose handler hangs."""
        self.elsewhere = engine.new_guard().once(**settings)(self.work)
        """The same operation in another process."""
        self.call: Future[Any] = engine.start(self.here, "k")
        self.inside.wait()

    def hang(self, key: str) -> str:
        self.runs += 1
        if self.runs > 1:
            return "second"
        op = current_operation()
        assert op is not None
        self.inside.open()
        pause = threading.Event()
        while not self.free.is_open:
            if op.lease_lost:
                self.lost.open()
            pause.wait(0.002)
        return "too late"

    def work(self, key: str) -> str:
        return "in time"

    def end(self) -> Any:
        self.free.open()
        return self.call.result(PATIENCE)


def test_a_call_after_the_lease_is_lost_asks_the_store(engine: Engine) -> None:
    hung = Hung(engine)
    try:
        with pytest.raises(InProgress):
            engine.do(hung.here, "k")
        release_elsewhere(engine)
        assert engine.do(hung.elsewhere, "k") == "in time"
        hung.lost.wait()
        assert engine.do(hung.here, "k") == "in time"
    finally:
        assert hung.end() == "in time", "the late result is refused, and its caller gets the new owner's"
    assert engine.do(hung.here, "k") == "in time"
    assert hung.runs == 1


def test_a_call_after_the_lease_is_lost_may_take_over(engine: Engine) -> None:
    hung = Hung(engine)
    try:
        release_elsewhere(engine)
        hung.lost.wait()
        assert engine.do(hung.here, "k") == "second"
    finally:
        assert hung.end() == "second"


def test_a_call_that_waits_is_woken_when_the_lease_is_lost(engine: Engine) -> None:
    """It would wait for the hung handler otherwise, and not for what the store knows."""
    hung = Hung(engine, on_duplicate=Wait("60s"), lease="30s")
    try:
        waiting = engine.start(hung.here, "k")
        release_elsewhere(engine)
        assert engine.do(hung.elsewhere, "k") == "in time"
        for lease in list(engine.guard.driver.keeper.leases.held.values()):
            lease.due = 0.0
        look_now(engine)
        assert waiting.result(PATIENCE) == "in time"
    finally:
        hung.end()


def test_a_call_that_comes_while_a_renewal_hangs_asks_the_store(engine: Engine) -> None:
    """The keeper cannot say that the lease is lost while the store does not answer it, but the lease has ended."""
    held = Gate()
    renewing = engine.script.on(Renew, hold_before=held, times=10**6)
    hung = Hung(engine)
    try:
        renewing.seen.wait()
        release_elsewhere(engine)
        assert engine.do(hung.elsewhere, "k") == "in time"
        while True:
            try:
                assert engine.do(hung.here, "k") == "in time"
                break
            except InProgress:  # the lease has not ended yet
                threading.Event().wait(0.01)
    finally:
        held.open()
        hung.end()


def test_many_calls_after_the_lease_is_lost_share_one_claim(quick_engine: Engine) -> None:
    engine = quick_engine
    hung = Hung(engine)
    try:
        release_elsewhere(engine)
        hung.lost.wait()
        calls = [engine.start(hung.here, "k") for _ in range(20)]
        results = {("in progress" if call.exception(PATIENCE) else call.result()) for call in calls}
        assert results <= {"second", "in progress"}
        assert hung.runs == 2
        record = engine.record()
        assert record is not None
        assert record.state is State.DONE
    finally:
        hung.end()


def release_elsewhere(engine: Engine) -> None:
    engine.do(engine.new_guard().release, "op", "k", force=True)
    engine.clock.advance(1)  # the next owner's token is a later one


def look_now(engine: Engine) -> None:
    """Have the keeper look at its leases."""
    keeper = engine.guard.driver.keeper
    if engine.is_async:
        engine.loop.call_soon_threadsafe(keeper._set, 0.0)  # type: ignore[attr-defined]
    else:
        with keeper._condition:
            keeper._condition.notify()


# -- a longest run time


def test_a_handler_that_runs_for_too_long_loses_its_lease(engine: Engine) -> None:
    """Its key is free for others when the lease has ended, although it hangs for ever."""
    hung = Hung(engine, max_run_time="100ms")
    try:
        hung.lost.wait()
        assert len(engine.guard.driver.keeper.leases) == 0
        renewals = engine.script.count(Renew)
        with pytest.raises(InProgress):
            engine.do(hung.elsewhere, "k")
        engine.clock.advance(1)
        assert engine.do(hung.elsewhere, "k") == "in time"
        assert engine.script.count(Renew) == renewals
    finally:
        assert hung.end() == "in time"


def test_an_async_handler_that_runs_for_too_long_is_cancelled(engine: Engine) -> None:
    if not engine.is_async:
        pytest.skip("a thread cannot be stopped")
    ended: list[str] = []

    def body() -> Iterator[Any]:
        try:
            yield asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(LeaseLost):
        engine.run(body, max_run_time="50ms")
    assert ended == ["cancelled"]
    record = engine.record()
    assert record is not None
    assert record.state is State.RUNNING, "nobody knows what it did, so the key is not free before the lease has ended"


@pytest.mark.parametrize("guarantee", ["effectively_once", "at_most_once"])
def test_it_is_then_as_if_the_process_had_died(engine: Engine, guarantee: Any) -> None:
    hung = Hung(engine, max_run_time="50ms", guarantee=guarantee)
    try:
        hung.lost.wait()
        engine.clock.advance(31)
        if guarantee == "at_most_once":
            with pytest.raises(OutcomeUnknown):
                engine.do(hung.here, "k")
        else:
            assert engine.do(hung.here, "k") == "second"
    finally:
        hung.end()


def test_a_handler_that_ends_in_time_is_left_alone(engine: Engine) -> None:
    renewed = engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield renewed.took_effect
        return "in time"

    engine.renew_early()
    assert engine.run(body, max_run_time="1h") == "in time"


def test_the_time_of_the_handler_does_not_count_for_an_outcome_that_is_stored_later(engine: Engine) -> None:
    engine.script.on(Complete, before=StoreUnavailable("down"), times=10**6)
    assert engine.run(lambda: "paid", lease=LEASE, max_run_time="50ms", completion_timeout=0) == "paid"
    first, second = engine.script.on(Renew), engine.script.on(Renew)
    first.took_effect.wait()
    second.took_effect.wait()
    assert len(engine.guard.driver.keeper.leases) == 1


@pytest.mark.parametrize("wrong", [0, -1, "soon"])
def test_a_longest_run_time_is_a_duration(wrong: Any) -> None:
    with pytest.raises(PolicyError, match="max_run_time"):
        Policy(max_run_time=wrong)
