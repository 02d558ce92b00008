"""The suite as pytest classes. The test file of a store derives from one of them and overrides ``open_store``.

Every proof of every family is one test, such as ``test_claim[an_absent_record_is_won]``. ``test_model`` plays random
Ops and compares the answers with the pure model of ``core/semantics.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from semel.engine.ports import AsyncStore, Store
from semel.testing.conformance import claims, concurrency, lifetimes, listing, owners, steps
from semel.testing.conformance.aio_stage import check_opens_again_async, declared_async, play_proof_async
from semel.testing.conformance.script import Family, MovableClock, Proof
from semel.testing.conformance.stage import check_opens_again, declared, play

FAMILIES = (
    *(claims.CLAIM, owners.LEASE, owners.FENCING, claims.REPLAY, lifetimes.EXPIRY, steps.STEPS, owners.RESOLVE),
    *(lifetimes.SWEEP, claims.VALUES, concurrency.BATCH, concurrency.RACE, concurrency.WAKEUP, lifetimes.COUNT),
    *(steps.RESUME, listing.LIST, listing.MEASURE),
)
"""All proofs, grouped by the operation that they test."""


def play_async(
    proof: Proof, open_store: Callable[[], AsyncStore], *, shared: bool = True, clock: MovableClock | None = None
) -> None:
    """Play one proof on an async store, in an event loop of its own."""
    asyncio.run(play_proof_async(proof, open_store, shared=shared, clock=clock))


class _Suite:
    """The tests of both suites, and the settings that say what the store supports."""

    shared: ClassVar[bool] = True
    """Whether two stores opened by ``open_store`` see the same records, as two processes would."""
    wakes: ClassVar[bool] = False
    """Whether the store wakes waiters when a record changes. Must equal the store's own ``wakes``."""
    counts: ClassVar[bool] = False
    """Whether the store counts a tenant's live records. Must equal the store's own ``counts``."""
    resumes: ClassVar[bool] = False
    """Whether the store lists resumable operations. Must equal the store's own ``resumes``."""
    lists: ClassVar[bool] = False
    """Whether the store lists and measures its records. Must equal the store's own ``lists``."""
    lists_twice: ClassVar[bool] = False
    """Whether two pages may show the same record while others come and go, as with the cursor of a hash table."""
    forgets_expired: ClassVar[bool] = False
    """Whether the store removes expired records by itself, such as with a server-side TTL, so that none are swept."""
    examples: ClassVar[int] = 40
    """How many random sequences ``test_model`` plays. Each has up to 30 steps."""
    _player: ClassVar[Callable[..., None]]
    """Plays one proof."""

    @pytest.fixture
    def open_store(self) -> Callable[[], Any]:
        """Override this: return a function without arguments that opens the store. The suite closes it."""
        pytest.fail(f"{type(self).__name__} needs a fixture open_store that returns a function", pytrace=False)

    @pytest.fixture
    def clock(self) -> MovableClock | None:
        """Override this if the suite can move the store's clock, so that it need not sleep. See ``ManualClock``."""
        return None

    def _declared(self) -> tuple[bool, ...]:
        return self.wakes, self.counts, self.resumes, self.lists

    def _prove(self, proof: Proof, open_store: Callable[[], Any], clock: MovableClock | None) -> None:
        if proof.second and not self.shared:
            pytest.skip("the store is not shared between instances")
        for name in ("wakes", "counts", "resumes", "lists"):
            if getattr(proof, name) and not getattr(self, name):
                pytest.skip(f"the store does not declare {name}")
        if proof.lists_once and self.lists_twice:
            pytest.skip("the pages of the store may show a record twice")
        if proof.keeps_expired and self.forgets_expired:
            pytest.skip("the store removes expired records by itself")
        self._player(proof, open_store, shared=self.shared, clock=clock)


def _test(family: Family) -> Callable[..., None]:
    """The test method of a family: one test for each of its proofs."""

    def test(self: _Suite, proof: Proof, open_store: Callable[[], Any], clock: MovableClock | None) -> None:
        self._prove(proof, open_store, clock)

    mark: Callable[[Callable[..., None]], Callable[..., None]] = pytest.mark.parametrize(
        "proof", family.proofs, ids=str
    )
    return mark(test)


for _family in FAMILIES:
    setattr(_Suite, f"test_{_family.name}", _test(_family))


class StoreSuite(_Suite):
    """The suite for a sync store. Derive from it and override ``open_store``."""

    _player = staticmethod(play)

    def test_declares_what_it_can_do(self, open_store: Callable[[], Store]) -> None:
        assert declared(open_store) == self._declared(), "the suite and the store must declare the same"

    def test_opens_again(self, open_store: Callable[[], Store]) -> None:
        check_opens_again(open_store)

    def test_model(self, open_store: Callable[[], Store], clock: MovableClock | None) -> None:
        pytest.importorskip("hypothesis")
        from semel.testing.conformance.machine import check, machine_for

        check(machine_for(open_store, clock=clock, forgets_expired=self.forgets_expired), self.examples)


class AsyncStoreSuite(_Suite):
    """The suite for an async store. Derive from it and override ``open_store``. It is called inside the event loop."""

    _player = staticmethod(play_async)

    def test_declares_what_it_can_do(self, open_store: Callable[[], AsyncStore]) -> None:
        found = asyncio.run(declared_async(open_store))
        assert found == self._declared(), "the suite and the store must declare the same"

    def test_opens_again(self, open_store: Callable[[], AsyncStore]) -> None:
        asyncio.run(check_opens_again_async(open_store))

    def test_model(self, open_store: Callable[[], AsyncStore], clock: MovableClock | None) -> None:
        pytest.importorskip("hypothesis")
        from semel.testing.conformance.machine import async_machine_for, check

        check(async_machine_for(open_store, clock=clock, forgets_expired=self.forgets_expired), self.examples)
