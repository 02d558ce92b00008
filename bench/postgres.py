"""PostgreSQL by three drivers: two bare prepared statements sent one by one, beside Semel on as many connections."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal, TypeAlias

from bench import guarded, job
from bench.contest import BARE_FIRST, BARE_REPLAY, Contestant, Match
from bench.turns import Turn, tasks, threads
from semel import AsyncPostgresStore, PostgresStore
from semel.stores.postgres import migrate
from semel.stores.settings import CONNECTIONS

__all__ = ["matches"]

_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS bare (id bytea PRIMARY KEY, state smallint, token bigint, lease_end timestamptz,"
    " snapshot bytea) WITH (fillfactor = 75)"
)
_INSERT: Final = "INSERT INTO bare (id, state, token, lease_end) VALUES ($1, 1, $2, now() + interval '30 seconds')"
_UPDATE: Final = "UPDATE bare SET state = 2, snapshot = $1 WHERE id = $2"
_SELECT: Final = "SELECT state, token, lease_end, snapshot FROM bare WHERE id = $1"
_SNAPSHOT: Final = b'{"id":"pay_1001","amount":4200,"ok":true}'
_EACH: Final = f"{BARE_FIRST}, a connection each"
"""For the reader; not what Semel is measured by, which has fewer connections."""
_Pool: TypeAlias = "asyncio.Queue[Callable[..., Awaitable[Any]]]"


@contextmanager
def matches(url: str, callers: int, connections: int = CONNECTIONS) -> Iterator[list[Match]]:
    """On a database that may be filled."""
    migrate(url)
    with ExitStack() as stack:
        found = [
            _match(
                f"PostgreSQL, threads (psycopg), {connections} connections", _threads(stack, url, callers, connections)
            ),
        ]
        for driver in ("asyncpg", "psycopg"):
            runner = stack.enter_context(asyncio.Runner())
            found.append(
                _match(
                    f"PostgreSQL, asyncio ({driver}), {connections} connections",
                    _tasks(stack, runner, url, driver, callers, connections),
                )
            )
        yield found


def _match(title: str, contestants: list[Contestant]) -> Match:
    return Match("postgres", title, contestants)


def _threads(stack: ExitStack, url: str, callers: int, connections: int) -> list[Contestant]:
    import psycopg

    insert, update, select = (_percent(sql) for sql in (_INSERT, _UPDATE, _SELECT))

    def pool(size: int) -> queue.SimpleQueue[psycopg.Connection[Any]]:
        free: queue.SimpleQueue[psycopg.Connection[Any]] = queue.SimpleQueue()
        for _ in range(size):
            connection = stack.enter_context(psycopg.connect(url, autocommit=True))
            connection.prepare_threshold = 0
            free.put(connection)
        return free

    few, many = pool(connections), pool(callers)

    def execute(sql: Any, values: tuple[Any, ...], rows: bool = False, free: Any = few) -> None:
        connection = free.get()
        try:
            cursor = connection.execute(sql, values, prepare=True, binary=True)
            if rows:
                cursor.fetchall()
        finally:
            free.put(connection)

    execute(_TABLE, ())
    known = [job.raw_id() for _ in range(job.KNOWN)]
    for id in known:
        execute(insert, (id, 1))
        execute(update, (_SNAPSHOT, id))

    def first(number: int, free: Any = few) -> None:
        id = job.raw_id()
        execute(insert, (id, number), free=free)
        job.handler()
        execute(update, (_SNAPSHOT, id), free=free)

    def replay(number: int) -> None:
        execute(select, (known[number % job.KNOWN],), rows=True)

    store = PostgresStore(url, connections=connections)
    stack.callback(store.close)
    return [
        *_bare(threads, first, replay, callers),
        Contestant(_EACH, "first", callers, threads(lambda number: first(number, many), callers)),
        *guarded.sync_contestants(store, (1, callers)),
    ]


def _tasks(
    stack: ExitStack,
    runner: asyncio.Runner,
    url: str,
    driver: Literal["asyncpg", "psycopg"],
    callers: int,
    connections: int,
) -> list[Contestant]:
    few: _Pool = asyncio.Queue()
    many: _Pool = asyncio.Queue()
    connect = _asyncpg if driver == "asyncpg" else _async_psycopg

    async def execute(free: _Pool, sql: str, *values: Any) -> None:
        statement = await free.get()
        try:
            await statement(sql, *values)
        finally:
            free.put_nowait(statement)

    known = [job.raw_id() for _ in range(job.KNOWN)]

    async def prepare() -> None:
        for free, size in ((few, connections), (many, callers)):
            for _ in range(size):
                statement, close = await connect(url)
                stack.callback(_closing(runner, close))
                free.put_nowait(statement)
        for id in known:
            await execute(few, _INSERT, id, 1)
            await execute(few, _UPDATE, _SNAPSHOT, id)

    runner.run(prepare())

    async def first(number: int, free: _Pool = few) -> None:
        id = job.raw_id()
        await execute(free, _INSERT, id, number)
        await job.async_handler()
        await execute(free, _UPDATE, _SNAPSHOT, id)

    async def replay(number: int) -> None:
        await execute(few, _SELECT, known[number % job.KNOWN])

    store = AsyncPostgresStore(url, driver=driver, connections=connections)
    stack.callback(lambda: runner.run(store.close()))
    return [
        *_bare(lambda call, count: tasks(runner, call, count), first, replay, callers),
        Contestant(_EACH, "first", callers, tasks(runner, lambda number: first(number, many), callers)),
        *guarded.async_contestants(runner, store, (1, callers)),
    ]


def _bare(turn: Callable[[Any, int], Turn], first: object, replay: object, callers: int) -> list[Contestant]:
    return [
        Contestant(name, kind, count, turn(call, count), yardstick=True)
        for count in (1, callers)
        for name, kind, call in ((BARE_FIRST, "first", first), (BARE_REPLAY, "replay", replay))
    ]


def _closing(runner: asyncio.Runner, close: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: runner.run(close())


def _percent(sql: str) -> Any:
    """In psycopg's style; our statements name their parameters in order."""
    for number in (1, 2):
        sql = sql.replace(f"${number}", "%s")
    return sql


async def _asyncpg(url: str) -> tuple[Callable[..., Awaitable[Any]], Callable[[], Coroutine[Any, Any, None]]]:
    import asyncpg

    connection = await asyncpg.connect(url)
    return connection.fetch, connection.close  # prepares by itself, and remembers


async def _async_psycopg(url: str) -> tuple[Callable[..., Awaitable[Any]], Callable[[], Coroutine[Any, Any, None]]]:
    import psycopg

    connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
    connection.prepare_threshold = 0
    texts = {sql: _percent(sql) for sql in (_INSERT, _UPDATE, _SELECT)}

    async def execute(sql: str, *values: Any) -> Any:
        cursor = await connection.execute(texts[sql], values, prepare=True, binary=True)
        return await cursor.fetchall() if cursor.rownumber is not None else ()

    return execute, connection.close
