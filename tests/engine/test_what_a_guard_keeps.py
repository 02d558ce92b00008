"""What a guard keeps in memory is bounded, whatever names a program makes as it runs; and what it shows of itself."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, InProgress, MemoryStore, Policy, PolicyError, Semel, StoreUnavailable
from semel.core.encoding import serializers
from semel.core.ops import Lookup
from semel.engine.guard import REMEMBERED, check_operation
from semel.engine.threaded import ThreadedStore
from tests.engine.driving import Engine
from tests.engine.scripted import Gate


@pytest.mark.slow
def test_names_policies_and_types_made_at_run_time_do_not_pile_up() -> None:
    guard = Semel(MemoryStore(), sweep_every=None)
    for i in range(REMEMBERED * 2 + 10):
        made = dataclasses.make_dataclass(f"Made{i}", [("number", int)])
        assert guard.run(f"op {i}", key="k", call=lambda: None, ttl=60 + i, returns=made | None) is None
    kept = check_operation.cache_info().currsize, serializers._serializer_of.cache_info().currsize, len(guard._policies)
    assert all(0 < count <= REMEMBERED for count in kept)
    with pytest.raises(PolicyError):
        guard.run("", key="k", call=lambda: None)
    guard.close()


def test_a_guard_shows_its_policy_and_lets_nobody_change_it() -> None:
    policy = Policy(ttl=60)
    for guard in (Semel(MemoryStore(), policy=policy), AsyncSemel(AsyncMemoryStore(), policy=policy)):
        assert guard.policy is policy
        with pytest.raises(AttributeError):
            guard.policy = Policy()  # type: ignore[misc]
    assert Semel(MemoryStore()).policy == Policy()


def test_a_duplicate_answered_in_this_process_is_told_how_old_the_first_call_is(engine: Engine) -> None:
    """Told by the process's own clock, for the store was not asked."""
    inside, finish = Gate(), Gate()
    seen: list[Any] = []

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "answer"

    call = engine.start_run(body, tenant="acme")
    inside.wait()
    flight = next(iter(engine.guard.driver.flights.by_id.values()))
    flight.began -= 40.0
    with pytest.raises(InProgress):
        engine.run(body, tenant="acme")
    seen.append(flight.answer(time.monotonic()).record)
    finish.open()
    assert call.result(20) == "answer"
    seen.append(flight.answer(time.monotonic()).record)
    for record in seen:
        assert 40.0 <= record.age < 60.0
        assert record.expires_in == 86400.0
        assert (record.tenant, record.operation, record.key) == ("acme", "op", "k")


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def until(condition: Any) -> None:
    pause = threading.Event()
    for _ in range(2000):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError("it never happened")


def test_a_closed_guard_keeps_no_threads_for_its_async_functions() -> None:
    before = set(threads_of("semel-store"))
    guard = Semel(MemoryStore(), sweep_every=None)

    @guard.once(key="key")
    async def ship(key: str) -> str:
        return key

    asyncio.run(ship("a"))
    assert set(threads_of("semel-store")) - before
    guard.close()
    until(lambda: not set(threads_of("semel-store")) - before)


def test_threads_of_an_event_loop_that_is_gone_are_let_go() -> None:
    before = set(threads_of("semel-store"))
    guard = Semel(MemoryStore(), sweep_every=None)

    @guard.once(key="key")
    async def ship(key: str) -> str:
        return key

    for i in range(4):
        asyncio.run(ship(f"{i}"))
    until(lambda: len(set(threads_of("semel-store")) - before) <= 2)
    guard.close()


def test_a_closed_threaded_store_refuses_in_our_words() -> None:
    store = ThreadedStore(MemoryStore())

    async def main() -> None:
        await store.execute(Lookup(b"x" * 16))
        await store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.execute(Lookup(b"x" * 16))
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.execute_many([Lookup(b"x" * 16)])

    asyncio.run(main())
