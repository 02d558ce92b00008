"""A guard that was closed is opened again, on every kind of store: for the next lifespan of an application."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSemel, Semel, StoreUnavailable, Wait
from semel.core.ops import Lookup
from semel.stores.urls import migrate_store, open_async_store, open_store

KINDS = [
    "memory",
    "sqlite",
    *(
        pytest.param(kind, marks=[getattr(pytest.mark, server), pytest.mark.server])
        for kind, server in {
            "postgres": "postgres", "mariadb": "mariadb", "redis": "redis", "tiered": "redis", "dynamodb": "dynamodb",
        }.items()
    ),
]  # fmt: skip


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    def fixture(name: str) -> Any:
        return request.getfixturevalue(name)

    if request.param == "memory":
        return "memory:"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    if request.param == "redis":
        return str(fixture("redis_url"))
    if request.param == "tiered":
        return f"tiered:sqlite:///{tmp_path / 'app.db'},{fixture('redis_url')}"
    url = fixture("dynamodb").table() if request.param == "dynamodb" else str(fixture(f"{request.param}_url"))
    migrate_store(url)
    return url


OPS = [Lookup(b"1" * 16), Lookup(b"2" * 16)]


def test_each_op_that_a_closed_store_is_sent_is_answered_with_the_error(url: str) -> None:
    """``execute_many`` raises for no store what belongs to the Ops."""
    store = open_store(url)
    assert store.execute_many(OPS) == [None, None]
    store.close()
    answers = store.execute_many(OPS)
    assert [type(answer) for answer in answers] == ([type(None)] * 2 if url == "memory:" else [StoreUnavailable] * 2)
    assert store.execute_many([]) == []


def test_each_op_that_a_closed_async_store_is_sent_is_answered_with_the_error(url: str) -> None:
    async def main() -> list[Any]:
        store = open_async_store(url)
        assert await store.execute_many(OPS) == [None, None]
        await store.close()
        assert await store.execute_many([]) == []
        return await store.execute_many(OPS)

    answers = asyncio.run(main())
    assert [type(answer) for answer in answers] == ([type(None)] * 2 if url == "memory:" else [StoreUnavailable] * 2)


async def _never() -> str:
    raise AssertionError("it has run before")


def test_a_sync_guard_opens_again(url: str) -> None:
    guard = Semel(url, sweep_every=None)
    for run in range(3):
        with guard:
            assert guard.run("ship", key=run, call=lambda: "shipped") == "shipped"
            if run:
                assert guard.run_outcome("ship", key=run - 1, call=lambda: "again").replayed
            guard.check()
        if url != "memory:":
            with pytest.raises(StoreUnavailable, match=r"open\(\) of its guard opens it again"):
                guard.run("ship", key="late", call=lambda: "shipped")


@pytest.mark.parametrize("loops", ["one event loop", "an event loop each"])
def test_an_async_guard_opens_again(url: str, loops: str) -> None:
    guard = AsyncSemel(url, sweep_every=None)

    async def shipped() -> str:
        return "shipped"

    async def once(run: int) -> None:
        async with guard:
            assert await guard.run("ship", key=run, call=shipped) == "shipped"
            if run:
                assert (await guard.run_outcome("ship", key=run - 1, call=_never)).replayed
            await guard.check()
        if url != "memory:":
            with pytest.raises(StoreUnavailable, match=r"open\(\) of its guard opens it again"):
                await guard.run("ship", key="late", call=shipped)

    async def all_of_them() -> None:
        for run in range(3):
            await once(run)

    if loops == "one event loop":
        asyncio.run(all_of_them())
    else:
        for run in range(3):
            asyncio.run(once(run))


def test_those_who_wait_are_woken_after_opening_again(url: str) -> None:
    """Its listener, its thread or its task start again, too."""
    guard, other = Semel(url, sweep_every=None), Semel(url, sweep_every=None)
    if url == "memory:":
        other = guard
    for run in range(2):
        with guard:
            running, answer = threading.Event(), threading.Event()

            def ship(running: threading.Event = running, answer: threading.Event = answer) -> str:
                running.set()
                assert answer.wait(30)
                return "shipped"

            found: list[Any] = []
            first = threading.Thread(target=lambda run=run, ship=ship: other.run("ship", key=run, call=ship))
            first.start()
            assert running.wait(30)
            second = threading.Thread(
                target=lambda run=run, found=found: found.append(
                    guard.run("ship", key=run, call=lambda: "again", on_duplicate=Wait("30s"))
                )
            )
            second.start()
            answer.set()
            first.join(30)
            second.join(30)
            assert found == ["shipped"]
    other.close()


def test_leases_are_renewed_after_opening_again(tmp_path: Path) -> None:
    guard = Semel(f"sqlite:///{tmp_path / 'app.db'}", sweep_every=None)
    guard.close()
    guard.open()
    with guard:
        keeper = guard.driver.keeper
        renewed = threading.Event()
        execute_many = guard.store.execute_many

        def watched(ops: Any) -> Any:
            renewed.set()
            return execute_many(ops)

        guard.store.execute_many = watched  # type: ignore[method-assign]
        assert guard.run("ship", key=1, call=lambda: renewed.wait(30), lease="300ms") is True
        assert guard.driver.keeper is keeper


def test_async_functions_of_a_sync_guard_run_after_opening_again(tmp_path: Path) -> None:
    guard = Semel(f"sqlite:///{tmp_path / 'app.db'}", sweep_every=None)

    @guard.once(key="number")
    async def ship(number: int) -> str:
        return f"shipped {number}"

    async def main() -> None:
        for run in range(2):
            with guard:
                assert await ship(run) == f"shipped {run}"

    asyncio.run(main())
    with guard:
        assert asyncio.run(ship(7)) == "shipped 7"  # type: ignore[arg-type]
