"""What one request costs, counted instead of timed: Python calls, objects, store commands and round trips.

Each case has two rows, for a first request and for its replay. The figures are upper bounds, taken on Python 3.11 and
3.13. To add a case, write a generator that yields a function of the key and the traffic that it causes, and add it to
CASES. The end of its name says where its records are, ``…_on_postgres``: that is the marker of the server.
"""

import asyncio
import contextlib
import gc
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from fastapi import FastAPI
from hiredis import Reader
from pydantic import BaseModel

from semel import (
    AsyncMemoryStore,
    AsyncPostgresStore,
    AsyncRedisStore,
    AsyncSemel,
    MemoryStore,
    PostgresStore,
    Semel,
    SQLiteStore,
)
from semel.http.asgi import ASGIMiddleware, idempotent
from semel.http.fastapi import idempotent as idempotent_endpoint
from semel.http.fastapi import install
from semel.stores.postgres import migrate

pytestmark = pytest.mark.slow  # it counts all objects of the process, again and again


class Cost(NamedTuple):
    """What one request may cost."""

    calls: int
    """Python calls of functions in semel. Each time that a generator or coroutine goes on counts as one."""
    objects: int
    """Objects that it leaves behind for the garbage collector, with the record itself if the store is in memory."""
    commands: int = 0
    """Commands or statements that the store is sent."""
    trips: int = 0
    """Round trips to a server, or commits of a file."""


class Traffic:
    """What was sent to the store."""

    commands = 0
    trips = 0


Case = Iterator[tuple[Callable[[str], object], Traffic]]


# -- the cases


def run_on_memory(where: Any) -> Case:
    with Semel(MemoryStore()) as guard:
        yield lambda key: guard.run("invoice", key=key, call=lambda: {"a": 1}), Traffic()


def run_on_sqlite(where: Any) -> Case:
    store, traffic = SQLiteStore(where("tmp_path") / "a.db"), Traffic()

    def note(statement: str) -> None:
        traffic.commands += 1
        traffic.trips += statement == "COMMIT"

    with Semel(store) as guard:
        writer: Any = store._combiner._connections[0]
        writer.open().raw.set_trace_callback(note)
        yield lambda key: guard.run("invoice", key=key, call=lambda: {"a": 1}), traffic


def fastapi_on_redis(where: Any) -> Case:
    with asyncio.Runner() as runner:
        store = AsyncRedisStore(where("redis_url"), listen=False)
        yield from over_asgi(runner, store, fastapi_app(guard := AsyncSemel(store)), guard)


def fastapi_on_memory(where: Any) -> Case:
    with asyncio.Runner() as runner:
        store = AsyncMemoryStore()
        yield from over_asgi(runner, store, fastapi_app(guard := AsyncSemel(store)), guard)


def asgi_at_the_edge_on_redis(where: Any) -> Case:
    with asyncio.Runner() as runner:
        store = AsyncRedisStore(where("redis_url"), listen=False)
        yield from over_asgi(runner, store, asgi_app(guard := AsyncSemel(store)), guard)


def asgi_at_the_edge_on_memory(where: Any) -> Case:
    with asyncio.Runner() as runner:
        store = AsyncMemoryStore()
        yield from over_asgi(runner, store, asgi_app(guard := AsyncSemel(store)), guard)


def session_on_postgres(where: Any) -> Case:
    from sqlalchemy import create_engine, event
    from sqlalchemy.orm import Session

    url, traffic = where("postgres_url"), Traffic()
    migrate(url)
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))

    def note(*_: object) -> None:
        traffic.commands += 1
        traffic.trips += 1

    event.listen(engine, "before_cursor_execute", note)

    def once(key: str) -> None:
        with Session(engine) as session, session.begin():
            guard.run_in_transaction(session, "invoice", key=key, call=lambda: {"a": 1})

    with Semel(PostgresStore(url, listen=False), sweep_every=None) as guard:
        yield once, traffic
    engine.dispose()


def psycopg_on_postgres(where: Any) -> Case:
    url = where("postgres_url")
    migrate(url)

    def once(key: str) -> None:
        with connection.transaction():
            guard.run_in_transaction(connection, "invoice", key=key, call=lambda: {"a": 1})

    with (
        Semel(PostgresStore(url, listen=False), sweep_every=None) as guard,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        yield once, Traffic()


def one_statement_of_psycopg_on_postgres(where: Any) -> Case:
    url = where("postgres_url")
    migrate(url)
    with (
        Semel(PostgresStore(url, listen=False), sweep_every=None) as guard,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        connection.execute("CREATE TABLE invoice (id text)")
        insert = "INSERT INTO invoice VALUES (%s) RETURNING id"

        def once(key: str) -> None:
            guard.execute_once(connection, "invoice", key=key, statement=insert, parameters=[key])

        for number in range(8):  # until the statement is prepared
            once(f"prepared {number}")
        yield once, Traffic()


def asyncpg_on_postgres(where: Any) -> Case:
    async def once(guard: AsyncSemel, connection: Any, key: str) -> None:
        async with connection.transaction():
            await guard.run_in_transaction(connection, "invoice", key=key, call=answer)

    yield from on_asyncpg(where, once)


def one_statement_of_asyncpg_on_postgres(where: Any) -> Case:
    insert = "INSERT INTO invoice VALUES ($1) RETURNING id"

    async def once(guard: AsyncSemel, connection: Any, key: str) -> None:
        await guard.execute_once(connection, "invoice", key=key, statement=insert, parameters=[key])

    yield from on_asyncpg(where, once)


def on_asyncpg(where: Any, once: Callable[[AsyncSemel, Any, str], Awaitable[None]]) -> Case:
    import asyncpg

    url, traffic = where("postgres_url"), Traffic()
    migrate(url)

    async def opened() -> tuple[AsyncSemel, Any]:
        connection = await asyncpg.connect(url)
        await connection.execute("CREATE TABLE invoice (id text)")
        connection.add_query_logger(note)
        return AsyncSemel(AsyncPostgresStore(url, listen=False), sweep_every=None), connection

    def note(_: object) -> None:
        traffic.commands += 1
        traffic.trips += 1

    with asyncio.Runner() as runner:
        guard, connection = runner.run(opened())
        yield lambda key: runner.run(once(guard, connection, key)), traffic  # type: ignore[arg-type]
        runner.run(connection.close())
        runner.run(guard.close())


async def answer() -> dict[str, int]:
    return {"a": 1}


CASES: dict[Callable[[Any], Case], tuple[Cost, Cost]] = {
    run_on_memory: (Cost(42, 3), Cost(21, 3)),
    run_on_sqlite: (Cost(56, 9, commands=7, trips=2), Cost(26, 2, commands=1)),
    fastapi_on_memory: (Cost(67, 4), Cost(39, 2)),
    fastapi_on_redis: (Cost(83, 3, commands=2, trips=2), Cost(49, 2, commands=1, trips=1)),
    session_on_postgres: (Cost(60, 9, commands=2, trips=2), Cost(47, 9, commands=1, trips=1)),
    psycopg_on_postgres: (Cost(61, 9), Cost(47, 9)),
    one_statement_of_psycopg_on_postgres: (Cost(50, 9), Cost(79, 9)),
    asyncpg_on_postgres: (Cost(65, 9, commands=4, trips=4), Cost(49, 9, commands=3, trips=3)),
    one_statement_of_asyncpg_on_postgres: (Cost(61, 9, commands=1, trips=1), Cost(89, 9, commands=2, trips=2)),
    asgi_at_the_edge_on_memory: (Cost(64, 4), Cost(22, 2)),
    asgi_at_the_edge_on_redis: (Cost(78, 3, commands=2, trips=2), Cost(29, 2, commands=1, trips=1)),
}


# -- counting


def params() -> Iterator[Any]:
    for case in CASES:
        server = case.__name__.rpartition("_on_")[2]
        marks = [] if server in ("memory", "sqlite") else [pytest.mark.server, getattr(pytest.mark, server)]
        yield pytest.param(case, marks=marks, id=case.__name__)


@pytest.mark.parametrize("case", list(params()))
def test_a_request_costs_no_more_than_this(case: Callable[[Any], Case], request: pytest.FixtureRequest) -> None:
    with contextlib.contextmanager(case)(request.getfixturevalue) as (once, traffic):
        for warm in ("a", "b", "c"):
            once(warm)
            once(warm)
        # Three times: threads that other tests have left behind may make objects meanwhile.
        rounds = [(count(once, traffic, key), count(once, traffic, key)) for key in ("k", "l", "m")]
    first, replay = (Cost(*map(min, zip(*costs, strict=True))) for costs in zip(*rounds, strict=True))
    allowed = CASES[case]
    assert all(cost <= bound for cost, bound in zip((*first, *replay), (*allowed[0], *allowed[1]), strict=True)), (
        f"{case.__name__} costs {first} and {replay}, and may cost {allowed[0]} and {allowed[1]}"
    )


def count(once: Callable[[str], object], traffic: Traffic, key: str) -> Cost:
    """Count what a request with this key costs."""
    commands, trips, calls = traffic.commands, traffic.trips, 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        # The name, not the file: the constructor of a dataclass is in no file.
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("semel.")

    gc.collect()
    gc.disable()
    try:
        left = len(gc.get_objects())
        sys.setprofile(note)
        try:
            once(key)
        finally:
            sys.setprofile(None)
        return Cost(calls, len(gc.get_objects()) - left, traffic.commands - commands, traffic.trips - trips)
    finally:
        gc.enable()


# -- requests


def fastapi_app(guard: AsyncSemel) -> Any:
    app = FastAPI()
    install(app, guard=guard, tenant=lambda _: "t1")

    @app.post("/pay", status_code=201)
    @idempotent_endpoint(ttl="24h")
    async def pay(payment: Payment) -> dict[str, int]:
        return {"ok": payment.amount}

    return app


class Payment(BaseModel):
    amount: int


def asgi_app(guard: AsyncSemel) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"ok":5}'})

    return ASGIMiddleware(app, guard=guard, tenant=lambda _: "t1", routes={"POST /pay": idempotent(ttl="24h")})


class CountedTransport:
    """Counts what a connection to Redis writes."""

    def __init__(self, transport: Any, traffic: Traffic) -> None:
        self._transport, self._traffic = transport, traffic
        self._reader = Reader()

    def write(self, data: bytes) -> None:
        self._traffic.trips += 1
        self._reader.feed(data)
        while self._reader.gets():
            self._traffic.commands += 1
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def over_asgi(runner: asyncio.Runner, store: Any, app: Any, guard: AsyncSemel) -> Case:
    traffic = Traffic()
    runner.run(post(app, "z"))
    if isinstance(store, AsyncRedisStore):
        connection: Any = store._servers.only
        connection._transport = CountedTransport(connection._transport, traffic)
    yield lambda key: runner.run(post(app, key)), traffic
    runner.run(guard.close())


async def post(app: Callable[..., Awaitable[None]], key: str) -> None:
    body, messages = json.dumps({"amount": 5}).encode(), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": "/pay",
        "raw_path": b"/pay", "root_path": "", "scheme": "http", "query_string": b"", "client": ("1", 1),
        "server": ("x", 80), "headers": [
            (b"host", b"x"), (b"content-type", b"application/json"), (b"idempotency-key", key.encode()),
            (b"content-length", b"%d" % len(body)),
        ],
    }  # fmt: skip
    await app(scope, receive, send)
    assert messages[0]["status"] == 201
