"""The outbox on PostgreSQL: one business insert in a transaction, alone and with a message.

Sixteen clients with a connection each. *By hand* is the same message by a plain insert, without a stream, without its
sequence and without waking a relay: what a table costs in any case.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench.contest import Contestant, Match
from bench.peer_outboxes import FASTSTREAM, TXOUTBOX, faststream_adder, txoutbox_adder
from bench.turns import Turn, tasks, threads
from semel import AsyncPostgresStore, PostgresStore
from semel.messaging import AsyncOutbox, Outbox
from semel.stores.postgres import migrate

__all__ = ["CLIENTS", "IN_A_STREAM", "WITH_A_MESSAGE", "matches"]

CLIENTS: Final = 16
WITH_A_MESSAGE: Final = "with a message"
IN_A_STREAM: Final = "with a message of a stream"
_TABLE: Final = "CREATE TABLE IF NOT EXISTS bench_payment (id bigserial PRIMARY KEY, account text, amount integer)"
_INSERT: Final = "INSERT INTO bench_payment (account, amount) VALUES ('acme', 4200)"
_BY_HAND: Final = (
    "INSERT INTO semel_outbox (sequence, due, created, lane, starts, redrives, id, type, source, destination, stream, "
    "subject, content_type, headers, data) VALUES (0, now(), now(), 0, 0, 0, gen_random_uuid()::text, 'paid', '', '', "
    "'', '', 'application/json', '{}', '{\"order\":1}')"
)
_EVENT: Final = {"order": 1}


@contextmanager
def matches(url: str, clients: int = CLIENTS) -> Iterator[list[Match]]:
    """On a database that may be filled."""
    migrate(url)
    with ExitStack() as stack:
        yield [
            Match("outbox", f"Outbox, asyncio (asyncpg), {clients} clients", _asyncpg(stack, url, clients)),
            Match("outbox", f"Outbox, threads (psycopg), {clients} clients", _psycopg(stack, url, clients)),
            Match("outbox", f"Outbox, asyncio (SQLAlchemy), {clients} clients", _sqlalchemy(stack, url, clients)),
        ]


def _asyncpg(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import asyncpg

    runner = stack.enter_context(asyncio.Runner())
    free: asyncio.Queue[Any] = asyncio.Queue()

    async def prepare() -> AsyncOutbox:
        for _ in range(clients):
            connection = await asyncpg.connect(url)
            stack.callback(_closing(runner, connection))
            free.put_nowait(connection)
        await connection.execute(_TABLE)
        return AsyncOutbox(AsyncPostgresStore(url, listen=False))

    outbox = runner.run(prepare())
    stack.callback(lambda: runner.run(outbox.store.close()))

    def turn(add: Callable[[Any, int], Any] | None) -> Turn:
        async def once(number: int) -> None:
            connection = await free.get()
            async with connection.transaction():
                await connection.fetch(_INSERT)
                if add is not None:
                    await add(connection, number)
            free.put_nowait(connection)

        return tasks(runner, once, clients)

    found = _contestants(clients, turn, outbox, lambda connection, number: connection.fetch(_BY_HAND))
    if (peer := txoutbox_adder(free)) is not None:
        schema, add = peer
        connection = runner.run(free.get())
        runner.run(connection.execute(schema))
        free.put_nowait(connection)
        found.append(Contestant(TXOUTBOX, "first", clients, turn(add), peer=True))
    return found


def _sqlalchemy(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import create_async_engine

    runner = stack.enter_context(asyncio.Runner())
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"), pool_size=clients, max_overflow=0)
    stack.callback(lambda: runner.run(engine.dispose()))

    async def prepare() -> AsyncOutbox:
        return AsyncOutbox(AsyncPostgresStore(url, listen=False))

    outbox = runner.run(prepare())
    stack.callback(lambda: runner.run(outbox.store.close()))
    insert, by_hand = sa.text(_INSERT), sa.text(_BY_HAND.replace(":1", "\\:1"))

    def turn(add: Callable[[Any, int], Any] | None) -> Turn:
        async def once(number: int) -> None:
            async with engine.begin() as connection:
                await connection.execute(insert)
                if add is not None:
                    await add(connection, number)

        return tasks(runner, once, clients)

    found = _contestants(clients, turn, outbox, lambda connection, number: connection.execute(by_hand))
    if (peer := faststream_adder()) is not None:
        metadata, add = peer

        async def create() -> None:
            async with engine.begin() as connection:
                await connection.run_sync(metadata.create_all)

        runner.run(create())
        found.append(Contestant(FASTSTREAM, "first", clients, turn(add), peer=True))
    return found


def _psycopg(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import psycopg

    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(clients):
        free.put(stack.enter_context(psycopg.connect(url, autocommit=True)))
    with psycopg.connect(url) as connection:
        connection.execute(_TABLE)
    outbox = Outbox(PostgresStore(url, listen=False))
    stack.callback(outbox.store.close)

    def turn(add: Callable[[Any, int], Any] | None) -> Turn:
        def once(number: int) -> None:
            connection = free.get()
            with connection.transaction():
                connection.execute(_INSERT)
                if add is not None:
                    add(connection, number)
            free.put(connection)

        return threads(once, clients)

    return _contestants(clients, turn, outbox, lambda connection, number: connection.execute(_BY_HAND))


def _contestants(
    clients: int,
    turn: Callable[[Callable[[Any, int], Any] | None], Turn],
    outbox: Any,
    by_hand: Callable[[Any, int], Any],
) -> list[Contestant]:
    calls: dict[str, Callable[[Any, int], Any] | None] = {
        "unprotected": None,
        WITH_A_MESSAGE: lambda connection, number: outbox.add(connection, "paid", _EVENT),
        IN_A_STREAM: lambda connection, number: outbox.add(connection, "paid", _EVENT, stream=f"order-{number}"),
        "by hand: a plain insert": by_hand,
    }
    return [Contestant(name, "first", clients, turn(add), yardstick=add is None) for name, add in calls.items()]


def _closing(runner: asyncio.Runner, connection: Any) -> Callable[[], None]:
    return lambda: runner.run(connection.close())
