"""The suite as pytest classes. The test file of a store derives from one of them and overrides ``open_store``.

Every proof of every family is one test, such as ``test_claim[an_absent_record_is_won]``. ``test_model`` plays random
Ops and compares the answers with the pure model of ``core/semantics.py``.

A stage plays scripts on a store: ``Stage`` on a sync one with threads, ``AsyncStage`` on an async one with tasks. Both
are written by hand, with the same methods in the same order, because threads and tasks are started and joined
differently.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, Final

import pytest

from semel.core.ops import Lookup
from semel.engine.ports import AsyncStore, Store
from semel.errors import StoreError
from semel.testing.conformance import claims, concurrency, lifetimes, listing, owners, steps
from semel.testing.conformance.script import (
    Batch,
    Elapse,
    Elsewhere,
    Family,
    Linger,
    MovableClock,
    Proof,
    Request,
    Script,
    Together,
    WaitForChange,
)

FAMILIES = (
    *(claims.CLAIM, owners.LEASE, owners.FENCING, claims.REPLAY, lifetimes.EXPIRY, steps.STEPS, owners.RESOLVE),
    *(lifetimes.SWEEP, claims.VALUES, concurrency.BATCH, concurrency.RACE, concurrency.WAKEUP, lifetimes.COUNT),
    *(steps.RESUME, listing.LIST, listing.MEASURE),
)
"""All proofs, grouped by the operation that they test."""
PATIENCE: Final = 90.0
"""Seconds after which the proof fails if the store has not answered."""


class Stage:
    """Plays scripts on a sync store."""

    def __init__(self, store: Store, second: Store | None = None, clock: MovableClock | None = None) -> None:
        self._store = store
        self._second = second or store
        self._clock = clock

    def play(self, script: Script) -> Any:
        """Run the script to its end. Returns what the script returns, or raises its AssertionError."""
        try:
            request = next(script)
            while True:
                try:
                    answer = self._perform(request, self._store)
                except StoreError as error:
                    request = script.throw(error)
                else:
                    request = script.send(answer)
        except StopIteration as stop:
            return stop.value

    def _perform(self, request: Request, store: Store) -> Any:
        match request:
            case Elsewhere(inner):
                return self._perform(inner, self._second)
            case Elapse(seconds):
                self._clock.advance(seconds) if self._clock is not None else time.sleep(seconds)
            case Linger(seconds):
                time.sleep(seconds)
            case Batch(ops):
                return store.execute_many(ops)
            case WaitForChange(id, seconds):
                began = time.monotonic()
                store.wait(id, seconds)
                return time.monotonic() - began
            case Together(parts):
                return self._together([self._part(part) for part in parts])
            case op:
                return store.execute(op)
        return None

    def _part(self, part: Request | Script) -> Callable[[], Any]:
        return lambda: self.play(part) if isinstance(part, Generator) else self._perform(part, self._store)

    def _together(self, parts: list[Callable[[], Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(parts)
        errors: list[BaseException] = []
        barrier = threading.Barrier(len(parts))

        def run(index: int) -> None:
            try:
                barrier.wait(PATIENCE)
                answers[index] = parts[index]()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"the store did not answer within {PATIENCE:.0f} s"
        if errors:
            raise errors[0]
        return answers


class AsyncStage:
    """Plays scripts on an async store."""

    def __init__(self, store: AsyncStore, second: AsyncStore | None = None, clock: MovableClock | None = None) -> None:
        self._store = store
        self._second = second or store
        self._clock = clock

    async def play(self, script: Script) -> Any:
        """Run the script to its end. Returns what the script returns, or raises its AssertionError."""
        try:
            request = next(script)
            while True:
                try:
                    answer = await self._perform(request, self._store)
                except StoreError as error:
                    request = script.throw(error)
                else:
                    request = script.send(answer)
        except StopIteration as stop:
            return stop.value

    async def _perform(self, request: Request, store: AsyncStore) -> Any:
        match request:
            case Elsewhere(inner):
                return await self._perform(inner, self._second)
            case Elapse(seconds):
                self._clock.advance(seconds) if self._clock is not None else await asyncio.sleep(seconds)
            case Linger(seconds):
                await asyncio.sleep(seconds)
            case Batch(ops):
                return await store.execute_many(ops)
            case WaitForChange(id, seconds):
                began = time.monotonic()
                await store.wait(id, seconds)
                return time.monotonic() - began
            case Together(parts):
                return await self._together(parts)
            case op:
                return await store.execute(op)
        return None

    async def _together(self, parts: Sequence[Request | Script]) -> list[Any]:
        tasks = [self.play(part) if isinstance(part, Generator) else self._perform(part, self._store) for part in parts]
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


def play(
    proof: Proof, open_store: Callable[[], Store], *, shared: bool = True, clock: MovableClock | None = None
) -> None:
    """Play one proof on a store that is opened for it. The store is closed twice afterwards, as the contract allows."""
    store = open_store()
    second = open_store() if shared else None
    try:
        Stage(store, second, clock).play(proof.script())
    finally:
        for opened in (store, second, store):
            if opened is not None:
                opened.close()


def play_async(
    proof: Proof, open_store: Callable[[], AsyncStore], *, shared: bool = True, clock: MovableClock | None = None
) -> None:
    """Play one proof on an async store, in an event loop of its own."""

    async def main() -> None:
        store = open_store()
        second = open_store() if shared else None
        try:
            await AsyncStage(store, second, clock).play(proof.script())
        finally:
            for opened in (store, second, store):
                if opened is not None:
                    await opened.close()

    asyncio.run(main())


def _declared(store: Store | AsyncStore | type[_Suite]) -> tuple[bool, ...]:
    return store.wakes, store.counts, store.resumes, store.lists


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
    """``play`` or ``play_async``."""

    @pytest.fixture
    def open_store(self) -> Callable[[], Any]:
        """Override this: return a function without arguments that opens the store. The suite closes it."""
        pytest.fail(f"{type(self).__name__} needs a fixture open_store that returns a function", pytrace=False)

    @pytest.fixture
    def clock(self) -> MovableClock | None:
        """Override this if the suite can move the store's clock, so that it need not sleep. See ``ManualClock``."""
        return None

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
        store = open_store()
        declared = _declared(store)
        store.close()
        assert declared == _declared(type(self)), "the suite and the store must declare the same"

    def test_opens_again(self, open_store: Callable[[], Store]) -> None:
        store = open_store()
        for _ in range(2):
            assert store.execute(Lookup(bytes(16))) is None
            store.close()
            store.open()
        store.close()

    def test_model(self, open_store: Callable[[], Store], clock: MovableClock | None) -> None:
        pytest.importorskip("hypothesis")
        from semel.testing.conformance.machine import check, machine_for

        check(machine_for(open_store, clock=clock, forgets_expired=self.forgets_expired), self.examples)


class AsyncStoreSuite(_Suite):
    """The suite for an async store. Derive from it and override ``open_store``. It is called inside the event loop."""

    _player = staticmethod(play_async)

    def test_declares_what_it_can_do(self, open_store: Callable[[], AsyncStore]) -> None:
        async def ask() -> tuple[bool, ...]:
            store = open_store()
            declared = _declared(store)
            await store.close()
            return declared

        declared = asyncio.run(ask())
        assert declared == _declared(type(self)), "the suite and the store must declare the same"

    def test_opens_again(self, open_store: Callable[[], AsyncStore]) -> None:
        async def use() -> None:
            store = open_store()
            for _ in range(2):
                assert await store.execute(Lookup(bytes(16))) is None
                await store.close()
                store.open()
            await store.close()

        asyncio.run(use())

    def test_model(self, open_store: Callable[[], AsyncStore], clock: MovableClock | None) -> None:
        pytest.importorskip("hypothesis")
        from semel.testing.conformance.machine import async_machine_for, check

        check(async_machine_for(open_store, clock=clock, forgets_expired=self.forgets_expired), self.examples)
