"""A message with a fresh id, on a driver that prepares statements: one statement does what the function does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from semel import AsyncPostgresStore, PostgresStore
from semel.core.messaging.messages import OutboxMode
from semel.messaging import AsyncOutbox, Relay
from semel.stores.postgres import migrate
from tests.messaging.recording_broker import RecordingBroker

pytestmark = pytest.mark.server

LOCKED = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


class Writers:
    """Two connections of an application, a third one to look, and the outbox."""

    def __init__(self, outbox: AsyncOutbox, first: Any, second: Any, looking: Any) -> None:
        self.outbox, self.first, self.second, self.looking = outbox, first, second, looking

    async def add(self, connection: Any, type: str, stream: str | None = "s") -> None:
        await self.outbox.add(connection, type, "", stream=stream)

    async def add_alone(self, type: str, stream: str | None = "s") -> None:
        """On the second connection, in a transaction of its own."""
        async with self.second.transaction():
            await self.add(self.second, type, stream)

    async def until_waiting(self, task: asyncio.Task[Any], count: int = 1) -> None:
        while await self.looking.fetchval(LOCKED) < count:
            assert not task.done()
            await asyncio.sleep(0.01)


@pytest.fixture
def database(postgres_url: str) -> str:
    migrate(postgres_url)
    return postgres_url


@asynccontextmanager
async def writers(database: str) -> AsyncIterator[Writers]:
    store = AsyncPostgresStore(database, listen=False)
    connections = [await asyncpg.connect(database) for _ in range(3)]
    try:
        yield Writers(AsyncOutbox(store), *connections)
    finally:
        for connection in connections:
            await connection.close()
        await store.close()


def run(database: str, scene: Callable[[Writers], Awaitable[None]]) -> None:
    async def main() -> None:
        async with writers(database) as found:
            await scene(found)

    asyncio.run(main())


def sent(database: str) -> list[tuple[str, int]]:
    """Send all that there is; return types and sequences."""
    broker = RecordingBroker()
    store = PostgresStore(database, listen=False)
    try:
        Relay(store, broker).drain()
    finally:
        store.close()
    return [(one.type, one.sequence) for one in broker.taken]


def test_positions_of_a_stream_grow_in_the_order_of_the_commits(database: str) -> None:
    async def scene(w: Writers) -> None:
        async with w.first.transaction():
            await w.add(w.first, "one")
            rival = asyncio.create_task(w.add_alone("three"))
            await w.until_waiting(rival)  # for the stream: it must not have a position yet
            await w.add(w.first, "two")
        await rival

    run(database, scene)
    assert sent(database) == [("one", 1), ("two", 2), ("three", 3)]


def test_a_transaction_that_rolls_back_leaves_no_gap(database: str) -> None:
    async def scene(w: Writers) -> None:
        await w.add_alone("one")
        transaction = w.second.transaction()
        await transaction.start()
        await w.add(w.second, "lost")
        await transaction.rollback()
        async with w.second.transaction():
            savepoint = w.second.transaction()
            await savepoint.start()
            await w.add(w.second, "lost with a savepoint")
            await savepoint.rollback()
            await w.add(w.second, "two")

    run(database, scene)
    assert sent(database) == [("one", 1), ("two", 2)]


@pytest.mark.parametrize("mode", ["log", "wal"])
def test_the_other_modes_get_it_once(database: str, mode: OutboxMode) -> None:
    async def scene(w: Writers) -> None:
        await w.outbox.switch(mode)
        for stream in ("s", None, "s"):
            await w.add_alone("made", stream)
        assert await w.looking.fetchval("SELECT count(*) FROM semel_outbox") == 0

    run(database, scene)
    assert sent(database) == [("made", 1), ("made", 0), ("made", 2)]


def test_who_adds_while_the_mode_changes_waits_and_uses_the_new_one(database: str) -> None:
    async def scene(w: Writers) -> None:
        async with w.first.transaction():
            await w.add(w.first, "queued")
            switching = asyncio.create_task(w.outbox.switch("log"))
            await w.until_waiting(switching)
            adding = asyncio.create_task(w.add_alone("logged"))
            await w.until_waiting(adding, 2)
            # It waits without the lock of its stream, so those who are to end first can go on.
            await w.add(w.first, "queued too")
        await switching
        await adding
        assert await w.looking.fetchval("SELECT count(*) FROM semel_log") == 1

    run(database, scene)
    assert sent(database) == [("queued", 1), ("queued too", 2), ("logged", 3)]


def test_a_relay_is_woken(database: str) -> None:
    async def scene(w: Writers) -> None:
        woken: asyncio.Queue[str] = asyncio.Queue()
        await w.looking.add_listener("semel", lambda *told: woken.put_nowait(told[-1]))
        for stream in ("s", None):
            await w.add_alone("made", stream)
            assert bytes.fromhex(await asyncio.wait_for(woken.get(), 30)) == b"semel.outbox"

    run(database, scene)
