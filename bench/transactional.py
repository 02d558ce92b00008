"""The transactional mode on PostgreSQL: one business insert in a transaction, unprotected and protected.

Sixteen clients with a connection each. Where Semel opens the transaction, BEGIN travels with the guard and COMMIT with
the record, so both sides send three messages; in the caller's own, the guard and the record are two more. With
``execute_once`` the insert and its record are one message. *By hand* are
the same messages without the library: what the driver and the server leave to be reached. Beside them, for contrast,
the same insert under a lease, and in DBOS.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench import by_hand, job, transactional_dbos
from bench.contest import Contestant, Match
from bench.turns import tasks, threads
from semel import AsyncPostgresStore, AsyncSemel, PostgresStore, Semel
from semel.stores.postgres import migrate

__all__ = ["BARE", "BY_HAND", "CLIENTS", "IN_THE_CALLERS", "LEASED", "ONE_STATEMENT", "OPENED_BY_SEMEL", "matches"]

CLIENTS: Final = 16
BARE: Final = "unprotected"
OPENED_BY_SEMEL: Final = "Semel opens and commits"
IN_THE_CALLERS: Final = "in the caller's transaction"
BY_HAND: Final = "by hand: "
LEASED: Final = "under a lease"
ONE_STATEMENT: Final = "in one statement"
_TABLE: Final = "CREATE TABLE IF NOT EXISTS bench_payment (id bigserial PRIMARY KEY, account text, amount integer)"
_INSERT: Final = "INSERT INTO bench_payment (account, amount) VALUES ('acme', 4200)"


@contextmanager
def matches(url: str, clients: int = CLIENTS) -> Iterator[list[Match]]:
    """On a database that may be filled."""
    migrate(url)
    with ExitStack() as stack:
        awaited, threaded = _asyncpg(stack, url, clients), _psycopg(stack, url, clients)
        dbos, why_not = transactional_dbos.contestants(stack, url, clients, _INSERT)
        yield [
            Match("transactional", f"Transactions, asyncio (asyncpg), {clients} clients", awaited),
            Match("transactional", f"Transactions, threads (psycopg), {clients} clients", [*threaded, *dbos], why_not),
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

    async def bare(connection: Any) -> None:
        async with connection.transaction():
            await connection.fetch(_INSERT)
            await job.async_handler()

    async def opened(connection: Any) -> None:
        async def work() -> Any:
            await connection.fetch(_INSERT)
            return await job.async_handler()

        await guard.run_in_transaction(connection, job.OPERATION, key=job.fresh_key(), call=work, own_transaction=True)

    async def within(connection: Any) -> None:
        async def work() -> Any:
            await connection.fetch(_INSERT)
            return await job.async_handler()

        async with connection.transaction():
            await guard.run_in_transaction(connection, job.OPERATION, key=job.fresh_key(), call=work)

    async def opened_by_hand(connection: Any) -> None:
        record = by_hand.Record()
        await connection.execute(f"BEGIN; SELECT WHERE {record.guard} IS NOT NULL")
        await connection.fetch(_INSERT)
        await job.async_handler()
        await connection.execute(f"{record.keep}; COMMIT")

    async def within_by_hand(connection: Any) -> None:
        record = by_hand.Record()
        async with connection.transaction():
            await connection.fetch("SELECT semel_guard($1, $2)", record.id, record.place)
            await connection.fetch(_INSERT)
            await job.async_handler()
            await connection.fetch(by_hand.KEEP_NUMBERED, *record.values)

    async def leased(connection: Any) -> None:
        async def work() -> Any:
            async with connection.transaction():
                await connection.fetch(_INSERT)
                return await job.async_handler()

        await guard.run(job.OPERATION, key=job.fresh_key(), call=work)

    async def one_statement(connection: Any) -> None:
        await guard.execute_once(connection, job.OPERATION, key=job.fresh_key(), statement=_INSERT)

    def with_a_connection(call: Callable[[Any], Any]) -> Callable[[int], Any]:
        async def once(number: int) -> None:
            connection = await free.get()
            await call(connection)
            free.put_nowait(connection)

        return once

    calls = (bare, one_statement, opened, opened_by_hand, within, within_by_hand, leased)
    return [
        Contestant(name, "first", clients, tasks(runner, with_a_connection(call), clients), yardstick=name == BARE)
        for name, call in zip(_NAMES, calls, strict=True)
    ]


def _psycopg(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import psycopg

    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(clients):
        free.put(stack.enter_context(psycopg.connect(url, autocommit=True)))
    with psycopg.connect(url) as connection:
        connection.execute(_TABLE)
    guard = stack.enter_context(Semel(PostgresStore(url, listen=False), sweep_every=None))

    def bare(connection: Any) -> None:
        with connection.transaction():
            connection.execute(_INSERT)
            job.handler()

    def opened(connection: Any) -> None:
        def work() -> Any:
            connection.execute(_INSERT)
            return job.handler()

        guard.run_in_transaction(connection, job.OPERATION, key=job.fresh_key(), call=work, own_transaction=True)

    def within(connection: Any) -> None:
        def work() -> Any:
            connection.execute(_INSERT)
            return job.handler()

        with connection.transaction():
            guard.run_in_transaction(connection, job.OPERATION, key=job.fresh_key(), call=work)

    def opened_by_hand(connection: Any) -> None:
        record = by_hand.Record()
        connection.execute(f"BEGIN; SELECT {record.guard}", prepare=False)
        connection.execute(_INSERT)
        job.handler()
        connection.execute(f"{record.keep}; COMMIT", prepare=False)

    def within_by_hand(connection: Any) -> None:
        record = by_hand.Record()
        with connection.transaction():
            connection.execute("SELECT semel_guard(%s, %s)", (record.id, record.place))
            connection.execute(_INSERT)
            job.handler()
            connection.execute(by_hand.KEEP_FORMAT, record.values)

    def leased(connection: Any) -> None:
        def work() -> Any:
            with connection.transaction():
                connection.execute(_INSERT)
                return job.handler()

        guard.run(job.OPERATION, key=job.fresh_key(), call=work)

    def one_statement(connection: Any) -> None:
        guard.execute_once(connection, job.OPERATION, key=job.fresh_key(), statement=_INSERT)

    def with_a_connection(call: Callable[[Any], None]) -> Callable[[int], None]:
        def once(number: int) -> None:
            connection = free.get()
            call(connection)
            free.put(connection)

        return once

    calls = (bare, one_statement, opened, opened_by_hand, within, within_by_hand, leased)
    return [
        Contestant(name, "first", clients, threads(with_a_connection(call), clients), yardstick=name == BARE)
        for name, call in zip(_NAMES, calls, strict=True)
    ]


_NAMES: Final = (
    BARE, ONE_STATEMENT, OPENED_BY_SEMEL, BY_HAND + "one opens and commits", IN_THE_CALLERS,
    BY_HAND + "in the caller's", LEASED,
)  # fmt: skip
"""Each measure of Semel's with its limit below it."""


def _closing(runner: asyncio.Runner, connection: Any) -> Callable[[], None]:
    return lambda: runner.run(connection.close())
