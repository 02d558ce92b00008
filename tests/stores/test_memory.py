"""The memory store: conformance, and what is its own."""

import asyncio
from collections.abc import Callable

import pytest

from semel import AsyncMemoryStore, MemoryStore, State, StoreUnavailable
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup
from semel.core.states import Takeover
from semel.testing import conformance


class TestMemoryStore(conformance.StoreSuite):
    shared = False
    wakes = True
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def clock(self) -> conformance.ManualClock:
        return conformance.ManualClock()

    @pytest.fixture
    def open_store(self, clock: conformance.ManualClock) -> Callable[[], MemoryStore]:
        return lambda: MemoryStore(clock=clock)


class TestAsyncMemoryStore(conformance.AsyncStoreSuite):
    shared = False
    wakes = True
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def clock(self) -> conformance.ManualClock:
        return conformance.ManualClock()

    @pytest.fixture
    def open_store(self, clock: conformance.ManualClock) -> Callable[[], AsyncMemoryStore]:
        return lambda: AsyncMemoryStore(clock=clock)


def claim(number: int, *, lease: float = 30.0, ttl: float = 3600.0) -> Claim:
    return Claim(b"%016d" % number, number, b"", lease, ttl, Takeover.RETRY, "", "test", None)


@pytest.fixture
def clock() -> conformance.ManualClock:
    return conformance.ManualClock()


def test_a_full_store_refuses_new_records_and_forgets_none(clock: conformance.ManualClock) -> None:
    store = MemoryStore(clock=clock, max_records=3)
    owners = [store.execute(claim(i)) for i in range(3)]
    with pytest.raises(StoreUnavailable, match="full"):
        store.execute(claim(3))
    for i, owner in enumerate(owners):
        record = store.execute(Lookup(claim(i).id))
        assert record is not None
        assert isinstance(owner, Claimed)
        assert record.token == owner.token
        assert isinstance(store.execute(claim(i)), Claimed)  # sent again: it has its place
    assert store.execute(Lookup(claim(3).id)) is None


def test_a_full_store_goes_on_with_the_records_it_has(clock: conformance.ManualClock) -> None:
    store = MemoryStore(clock=clock, max_records=1)
    owner = store.execute(claim(1))
    assert isinstance(owner, Claimed)
    assert store.execute(Complete(claim(1).id, owner.token, b"answer", 60.0))
    replay = store.execute(Claim(claim(1).id, 99, b"", 30.0, 60.0, Takeover.RETRY, "", "test", None))
    assert isinstance(replay, Existing)
    assert replay.record.snapshot == b"answer"
    refused, lookup = store.execute_many([claim(2), Lookup(claim(1).id)])
    assert isinstance(refused, StoreUnavailable)
    assert lookup.snapshot == b"answer"


def test_expired_records_make_room(clock: conformance.ManualClock) -> None:
    store = MemoryStore(clock=clock, max_records=3)
    for i in range(2):
        store.execute(claim(i, lease=1.0, ttl=1.0))
    store.execute(claim(2))
    clock.advance(2.0)
    assert isinstance(store.execute(claim(3)), Claimed)
    assert store.execute(Lookup(claim(2).id)) is not None


def test_what_is_in_doubt_makes_no_room(clock: conformance.ManualClock) -> None:
    store = MemoryStore(clock=clock, max_records=1)
    store.execute(Claim(b"1" * 16, 1, b"", 1.0, 1.0, Takeover.REJECT, "", "test", None))
    clock.advance(2.0)
    for i in (2, 3):
        with pytest.raises(StoreUnavailable, match="full"):
            store.execute(claim(i))
    record = store.execute(Lookup(b"1" * 16))
    assert record is not None
    assert record.state is State.UNKNOWN


def test_its_clock_is_the_only_one(clock: conformance.ManualClock) -> None:
    store = MemoryStore(clock=clock)
    store.execute(claim(1, lease=10.0))
    clock.advance(9.0)
    record = store.execute(Lookup(claim(1).id))
    assert record is not None
    assert (record.state, round(record.lease_left), round(record.age)) == (State.RUNNING, 1, 9)
    clock.advance(2.0)
    record = store.execute(Lookup(claim(1).id))
    assert record is not None
    assert record.state is State.ABANDONED


def test_the_async_store_is_bounded_too(clock: conformance.ManualClock) -> None:
    async def main() -> None:
        store = AsyncMemoryStore(clock=clock, max_records=1)
        await store.execute(claim(1))
        with pytest.raises(StoreUnavailable, match="full"):
            await store.execute(claim(2))
        refused, kept = await store.execute_many([claim(2), claim(1)])
        assert isinstance(refused, StoreUnavailable)
        assert isinstance(kept, Claimed)

    asyncio.run(main())
