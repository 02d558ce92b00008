"""The transactional mode on PostgreSQL: one business insert in a transaction, unprotected and protected.

Sixteen clients with a connection each. Where Semel opens the transaction, BEGIN travels with the guard and COMMIT with
the record, so both sides send three messages; in the caller's own, the guard and the record are two more. With
``execute_once`` the insert and its record are one message. *By hand* are
the same messages without the library: what the driver and the server leave to be reached. Beside them, for contrast,
the same insert under a lease, and in DBOS. A replay is measured beside the same unprotected transaction.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from bench import by_hand, job, transactional_dbos
from bench.contest import Contestant, Match
from bench.turns import Turn, tasks, threads
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
        awaited, threaded = _awaited(stack, url, clients, "asyncpg"), _psycopg(stack, url, clients)
        dbos, why_not = transactional_dbos.contestants(stack, url, clients, _INSERT)
        yield [
            Match("transactional", f"Transactions, asyncio (asyncpg), {clients} clients", awaited),
            Match(
                "transactional",
                f"Transactions, asyncio (psycopg), {clients} clients",
                _awaited(stack, url, clients, "psycopg"),
            ),
            Match("transactional", f"Transactions, threads (psycopg), {clients} clients", [*threaded, *dbos], why_not),
        ]


def _awaited(stack: ExitStack, url: str, clients: int, driver: str) -> list[Contestant]:
    import asyncpg
    import psycopg

    runner = stack.enter_context(asyncio.Runner())
    free: asyncio.Queue[Any] = asyncio.Queue()

    async def prepare() -> AsyncSemel:
        for _ in range(clients):
            connection: Any = await (
                asyncpg.connect(url) if driver == "asyncpg" else psycopg.AsyncConnection.connect(url, autocommit=True)
            )
            stack.callback(_closing(runner, connection))
            free.put_nowait(connection)
        await connection.execute(_TABLE)
        return AsyncSemel(AsyncPostgresStore(url, listen=False), sweep_every=None)

    guard = runner.run(prepare())
    stack.callback(lambda: runner.run(guard.close()))

    insert: Callable[[Any], Any] = (
        (lambda connection: connection.fetch(_INSERT))
        if driver == "asyncpg"
        else (lambda connection: connection.execute(_INSERT))
    )

    async def bare(connection: Any, key: str) -> None:
        async with connection.transaction():
            await insert(connection)
            await job.async_handler()

    async def opened(connection: Any, key: str) -> None:
        async def work() -> Any:
            await insert(connection)
            return await job.async_handler()

        await guard.run_in_transaction(connection, job.OPERATION, key=key, call=work, own_transaction=True)

    async def within(connection: Any, key: str) -> None:
        async def work() -> Any:
            await insert(connection)
            return await job.async_handler()

        async with connection.transaction():
            await guard.run_in_transaction(connection, job.OPERATION, key=key, call=work)

    async def opened_by_hand(connection: Any, key: str) -> None:
        record = by_hand.Record()
        await connection.execute(f"BEGIN; SELECT WHERE {record.guard} IS NOT NULL")
        await connection.fetch(_INSERT)
        await job.async_handler()
        await connection.execute(f"{record.keep}; COMMIT")

    async def within_by_hand(connection: Any, key: str) -> None:
        record = by_hand.Record()
        async with connection.transaction():
            await connection.fetch("SELECT semel_guard($1, $2)", record.id, record.place)
            await connection.fetch(_INSERT)
            await job.async_handler()
            await connection.fetch(by_hand.KEEP_NUMBERED, *record.values)

    async def leased(connection: Any, key: str) -> None:
        async def work() -> Any:
            async with connection.transaction():
                await insert(connection)
                return await job.async_handler()

        await guard.run(job.OPERATION, key=key, call=work)

    async def one_statement(connection: Any, key: str) -> None:
        await guard.execute_once(connection, job.OPERATION, key=key, statement=_INSERT)

    def turn(call: Callable[[Any, str], Any], key: Callable[[int], str]) -> Turn:
        async def once(number: int) -> None:
            connection = await free.get()
            await call(connection, key(number))
            free.put_nowait(connection)

        return tasks(runner, once, clients)

    async def remember() -> None:
        connection = free.get_nowait()
        async with connection.transaction():
            for number in range(job.KNOWN):
                await guard.run_in_transaction(
                    connection, job.OPERATION, key=job.known_key(number), call=job.async_handler
                )
                await one_statement(connection, _STATEMENTS + job.known_key(number))
        free.put_nowait(connection)

    runner.run(remember())
    by_hand_too = (opened_by_hand, within_by_hand) if driver == "asyncpg" else (None, None)
    return _contestants(turn, clients, bare, one_statement, opened, by_hand_too[0], within, by_hand_too[1], leased)


def _psycopg(stack: ExitStack, url: str, clients: int) -> list[Contestant]:
    import psycopg

    free: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(clients):
        free.put(stack.enter_context(psycopg.connect(url, autocommit=True)))
    with psycopg.connect(url) as connection:
        connection.execute(_TABLE)
    guard = stack.enter_context(Semel(PostgresStore(url, listen=False), sweep_every=None))

    def bare(connection: Any, key: str) -> None:
        with connection.transaction():
            connection.execute(_INSERT)
            job.handler()

    def opened(connection: Any, key: str) -> None:
        def work() -> Any:
            connection.execute(_INSERT)
            return job.handler()

        guard.run_in_transaction(connection, job.OPERATION, key=key, call=work, own_transaction=True)

    def within(connection: Any, key: str) -> None:
        def work() -> Any:
            connection.execute(_INSERT)
            return job.handler()

        with connection.transaction():
            guard.run_in_transaction(connection, job.OPERATION, key=key, call=work)

    def opened_by_hand(connection: Any, key: str) -> None:
        record = by_hand.Record()
        connection.execute(f"BEGIN; SELECT {record.guard}", prepare=False)
        connection.execute(_INSERT)
        job.handler()
        connection.execute(f"{record.keep}; COMMIT", prepare=False)

    def within_by_hand(connection: Any, key: str) -> None:
        record = by_hand.Record()
        with connection.transaction():
            connection.execute("SELECT semel_guard(%s, %s)", (record.id, record.place))
            connection.execute(_INSERT)
            job.handler()
            connection.execute(by_hand.KEEP_FORMAT, record.values)

    def leased(connection: Any, key: str) -> None:
        def work() -> Any:
            with connection.transaction():
                connection.execute(_INSERT)
                return job.handler()

        guard.run(job.OPERATION, key=key, call=work)

    def one_statement(connection: Any, key: str) -> None:
        guard.execute_once(connection, job.OPERATION, key=key, statement=_INSERT)

    def turn(call: Callable[[Any, str], Any], key: Callable[[int], str]) -> Turn:
        def once(number: int) -> None:
            connection = free.get()
            call(connection, key(number))
            free.put(connection)

        return threads(once, clients)

    connection = free.get()
    with connection.transaction():
        for number in range(job.KNOWN):
            guard.run_in_transaction(connection, job.OPERATION, key=job.known_key(number), call=job.handler)
            one_statement(connection, _STATEMENTS + job.known_key(number))
    free.put(connection)
    return _contestants(turn, clients, bare, one_statement, opened, opened_by_hand, within, within_by_hand, leased)


_NAMES: Final = (
    BARE, ONE_STATEMENT, OPENED_BY_SEMEL, BY_HAND + "one opens and commits", IN_THE_CALLERS,
    BY_HAND + "in the caller's", LEASED,
)  # fmt: skip
"""Each measure of Semel's with its limit below it."""
_STATEMENTS: Final = "statement-"
"""Begins the known keys of statements, which have another result."""
_REPLAYED: Final = (BARE, ONE_STATEMENT, OPENED_BY_SEMEL, IN_THE_CALLERS)


def _contestants(turn: Callable[[Any, Callable[[int], str]], Turn], clients: int, *calls: Any) -> list[Contestant]:
    """First calls of all, and replays of those that have them; beside both the unprotected transaction."""
    found = []
    for name, call in zip(_NAMES, calls, strict=True):
        if call is not None:
            first = turn(call, lambda number: job.fresh_key())
            found.append(Contestant(name, "first", clients, first, yardstick=name == BARE))
        if name in _REPLAYED:
            of = _STATEMENTS if name == ONE_STATEMENT else ""
            again = turn(call, lambda number, of=of: of + job.known_key(number))  # type: ignore[misc]
            found.append(Contestant(name, "replay", clients, again, yardstick=name == BARE))
    return found


def _closing(runner: asyncio.Runner, connection: Any) -> Callable[[], None]:
    return lambda: runner.run(connection.close())
