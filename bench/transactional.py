"""The transactional mode on PostgreSQL: one business insert in a transaction, unprotected and protected.

Sixteen clients with a connection each. Where Semel opens the transaction, BEGIN travels with the guard and COMMIT with
the record, so both sides send three messages; in the caller's own, the guard and the record are two more.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench import job
from bench.contest import Contestant, Match
from bench.turns import tasks, threads
from semel import AsyncPostgresStore, AsyncSemel, PostgresStore, Semel
from semel.stores.postgres import migrate

__all__ = ["BARE", "CLIENTS", "IN_THE_CALLERS", "OPENED_BY_SEMEL", "matches"]

CLIENTS: Final = 16
BARE: Final = "unprotected"
OPENED_BY_SEMEL: Final = "Semel opens and commits"
IN_THE_CALLERS: Final = "in the caller's transaction"
_TABLE: Final = "CREATE TABLE IF NOT EXISTS bench_payment (id bigserial PRIMARY KEY, account text, amount integer)"
_INSERT: Final = "INSERT INTO bench_payment (account, amount) VALUES ('acme', 4200)"


@contextmanager
def matches(url: str, clients: int = CLIENTS) -> Iterator[list[Match]]:
    """On a database that may be filled."""
    migrate(url)
    with ExitStack() as stack:
        yield [
            Match(
                "transactional", f"Transactions, asyncio (asyncpg), {clients} clients", _asyncpg(stack, url, clients)
            ),
            Match(
                "transactional", f"Transactions, threads (psycopg), {clients} clients", _psycopg(stack, url, clients)
            ),
        ]


def _asyncpg(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import asyncpg

    runner = stack.enter_context(asyncio.Runner())
    free: asyncio.Queue[Any] = asyncio.Queue()

    async def prepare() -> AsyncSemel:
        for _ in range(clients):
            connection = await asyncpg.connect(url)
            stack.callback(_closing(runner, connection))
            free.put_nowait(connection)
        await connection.execute(_TABLE)
        return AsyncSemel(AsyncPostgresStore(url, listen=False), sweep_every=None)

    guard = runner.run(prepare())
    stack.callback(lambda: runner.run(guard.close()))

    async def bare(number: int) -> None:
        connection = await free.get()
        async with connection.transaction():
            await connection.fetch(_INSERT)
            await job.async_handler()
        free.put_nowait(connection)

    async def opened(number: int) -> None:
        connection = await free.get()

        async def work() -> Any:
            await connection.fetch(_INSERT)
            return await job.async_handler()

        await guard.transaction(connection, job.OPERATION, key=job.fresh_key(), call=work, begin=True)
        free.put_nowait(connection)

    async def within(number: int) -> None:
        connection = await free.get()

        async def work() -> Any:
            await connection.fetch(_INSERT)
            return await job.async_handler()

        async with connection.transaction():
            await guard.transaction(connection, job.OPERATION, key=job.fresh_key(), call=work)
        free.put_nowait(connection)

    return [
        Contestant(name, "first", clients, tasks(runner, call, clients), yardstick=name == BARE)
        for name, call in ((BARE, bare), (OPENED_BY_SEMEL, opened), (IN_THE_CALLERS, within))
    ]


def _psycopg(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import psycopg

    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(clients):
        free.put(stack.enter_context(psycopg.connect(url, autocommit=True)))
    with psycopg.connect(url) as connection:
        connection.execute(_TABLE)
    guard = stack.enter_context(Semel(PostgresStore(url, listen=False), sweep_every=None))

    def bare(number: int) -> None:
        connection = free.get()
        with connection.transaction():
            connection.execute(_INSERT)
            job.handler()
        free.put(connection)

    def opened(number: int) -> None:
        connection = free.get()

        def work() -> Any:
            connection.execute(_INSERT)
            return job.handler()

        guard.transaction(connection, job.OPERATION, key=job.fresh_key(), call=work, begin=True)
        free.put(connection)

    def within(number: int) -> None:
        connection = free.get()

        def work() -> Any:
            connection.execute(_INSERT)
            return job.handler()

        with connection.transaction():
            guard.transaction(connection, job.OPERATION, key=job.fresh_key(), call=work)
        free.put(connection)

    return [
        Contestant(name, "first", clients, threads(call, clients), yardstick=name == BARE)
        for name, call in ((BARE, bare), (OPENED_BY_SEMEL, opened), (IN_THE_CALLERS, within))
    ]


def _closing(runner: asyncio.Runner, connection: Any) -> Callable[[], None]:
    return lambda: runner.run(connection.close())
