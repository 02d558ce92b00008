"""Routes whose rows and answer are committed together: FastAPI on an async session, Flask on a sync connection."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import flask
import httpx
import psycopg
import pytest
import sqlalchemy as sa
from fastapi import FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from semel import (
    AsyncOperation,
    AsyncPostgresStore,
    AsyncSemel,
    AsyncSQLiteStore,
    Operation,
    PolicyError,
    PostgresStore,
    Semel,
    SQLiteStore,
)
from semel.http import fastapi as async_glue
from semel.http import flask as sync_glue
from semel.testing.crashpoints import crash_everywhere
from tests.http import transaction_scenario as scenario

TABLE = "CREATE TABLE IF NOT EXISTS payment (key text NOT NULL)"


class Shop:
    """A service and its table, whatever the framework and the database are."""

    rows: Callable[[], int]
    status = 201
    fails = False
    seen: Any = None

    def ask(self, key: str, path: str = "/pay") -> Any:
        raise NotImplementedError

    def answer(self) -> Any:
        if self.fails:
            raise RuntimeError("the handler broke")
        return {"paid": True}


class FastAPIShop(Shop):
    def __init__(self, url: str, store: Any, rows: Callable[[], int]) -> None:
        self.rows = rows
        self.loop = asyncio.Runner()
        self.engine = create_async_engine(url, poolclass=sa.NullPool)
        sessions = async_sessionmaker(self.engine)
        app = FastAPI()
        self.guard = AsyncSemel(self.loop.run(_made(store)), sweep_every=None)
        async_glue.install(app, guard=self.guard, tenant=lambda scope: "alice")

        @app.post("/pay", status_code=201)
        @async_glue.action(transaction=sessions, into="session")
        async def pay(session: AsyncSession, op: AsyncOperation) -> Any:
            assert op.connection is session
            await session.execute(sa.text("INSERT INTO payment VALUES (:key)"), {"key": op.key})
            if self.status != 201:
                raise HTTPException(self.status)
            return self.answer()

        self.app = app
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://shop"
        )

    def ask(self, key: str, path: str = "/pay") -> Any:
        return self.loop.run(self.client.post(path, headers={"Idempotency-Key": key}))

    def close(self) -> None:
        self.loop.run(self.client.aclose())
        self.loop.run(self.guard.close())
        self.loop.run(self.engine.dispose())
        self.loop.close()


async def _made(store: Callable[[], Any]) -> Any:
    return store()


class FlaskShop(Shop):
    def __init__(self, url: str, store: Any, rows: Callable[[], int]) -> None:
        self.rows = rows
        self.engine = sa.create_engine(url, poolclass=sa.NullPool)
        app = flask.Flask("shop")
        self.guard = Semel(store(), sweep_every=None)
        sync_glue.SemelFlask(app, guard=self.guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @sync_glue.action(transaction=self.engine.connect, into="conn")
        def pay(conn: sa.Connection, op: Operation) -> Any:
            assert op.connection is conn
            conn.execute(sa.text("INSERT INTO payment VALUES (:key)"), {"key": op.key})
            if self.status != 201:
                flask.abort(self.status)
            return self.answer(), 201

        self.app = app
        self.client = app.test_client()

    def ask(self, key: str, path: str = "/pay") -> Any:
        return self.client.post(path, headers={"Idempotency-Key": key})

    def close(self) -> None:
        self.guard.close()
        self.engine.dispose()


@pytest.fixture(params=["fastapi-sqlite", "fastapi-postgres", "flask-sqlite", "flask-postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    framework, database = request.param.split("-")
    kind = FastAPIShop if framework == "fastapi" else FlaskShop
    store: Any
    if database == "sqlite":
        path = str(tmp_path / "shop.db")
        with closing(sqlite3.connect(path)) as conn:
            conn.execute(TABLE)

        def count() -> int:
            with closing(sqlite3.connect(path)) as conn:
                return int(conn.execute("SELECT count(*) FROM payment").fetchone()[0])

        driver = "aiosqlite" if framework == "fastapi" else "pysqlite"
        store = AsyncSQLiteStore if framework == "fastapi" else SQLiteStore
        made = kind(f"sqlite+{driver}:///{path}", lambda: store(path), count)
    else:
        url: str = request.getfixturevalue("postgres_url")
        from semel.stores.postgres import migrate

        migrate(url)
        with psycopg.connect(url) as connection:
            connection.execute(TABLE.encode())

        def count() -> int:
            with psycopg.connect(url) as connection:
                row = connection.execute("SELECT count(*) FROM payment").fetchone()
                assert row is not None
                return int(row[0])

        driver = "asyncpg" if framework == "fastapi" else "psycopg"
        store = AsyncPostgresStore if framework == "fastapi" else PostgresStore
        made = kind(url.replace("postgresql:", f"postgresql+{driver}:"), lambda: store(url, lanes=1), count)
    yield made
    made.close()


def text(answer: Any) -> bytes:
    found: bytes = answer.content if hasattr(answer, "content") else answer.data
    return found


def test_the_row_and_the_answer_are_committed_together(shop: Any) -> None:
    first, again = shop.ask("k1"), shop.ask("k1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert text(again) == text(first)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.rows() == 1


def test_a_handler_that_raises_leaves_no_row_and_the_retry_writes_one(shop: Any) -> None:
    shop.fails = True
    assert shop.ask("k1").status_code == 500
    assert shop.rows() == 0
    shop.fails = False
    assert shop.ask("k1").status_code == 201
    assert shop.rows() == 1


def test_a_refusal_is_remembered_without_its_rows(shop: Any) -> None:
    shop.status = 410
    first = shop.ask("k1")
    shop.status = 201
    again = shop.ask("k1")
    assert (first.status_code, again.status_code) == (410, 410)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert shop.rows() == 0


@pytest.mark.parametrize("status", [409, 429, 503])
def test_an_answer_that_frees_the_key_leaves_nothing(shop: Any, status: int) -> None:
    shop.status = status
    assert shop.ask("k1").status_code == status
    assert shop.rows() == 0
    shop.status = 201
    assert shop.ask("k1").status_code == 201
    assert shop.rows() == 1


def test_the_answer_leaves_after_the_commit(shop: Any) -> None:
    """Whoever hears the answer finds the row, on a connection of its own."""
    found: list[int] = []
    if isinstance(shop, FlaskShop):
        inner = shop.app.wsgi_app

        def outer(environ: Any, start_response: Any) -> Any:
            def start(status: str, headers: Any, exc_info: Any = None) -> Any:
                found.append(shop.rows())
                return start_response(status, headers, exc_info)

            return inner(environ, start)

        shop.app.wsgi_app = outer
        shop.ask("k1")
    else:

        async def listen() -> None:
            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    found.append(await asyncio.to_thread(shop.rows))

            async def receive() -> Any:
                return {"type": "http.request", "body": b"", "more_body": False}

            scope = {
                "type": "http", "method": "POST", "path": "/pay", "raw_path": b"/pay", "query_string": b"",
                "headers": [(b"idempotency-key", b"k1")], "http_version": "1.1", "scheme": "http", "root_path": "",
            }  # fmt: skip
            await shop.app(scope, receive, send)

        shop.loop.run(listen())
    assert found == [1]


def test_a_key_with_another_request_is_refused_and_writes_nothing(shop: Any) -> None:
    assert shop.ask("k1").status_code == 201
    assert shop.ask("k1", "/pay?again").status_code == 422
    assert shop.rows() == 1


def test_mistakes_are_named_when_the_route_is_declared() -> None:
    def plain() -> None: ...

    async def awaited() -> None: ...

    with pytest.raises(PolicyError, match="it is an async def"):
        async_glue.action(transaction=plain)(plain)
    with pytest.raises(PolicyError, match="into='session' names no parameter"):
        async_glue.action(transaction=plain, into="session")(awaited)
    with pytest.raises(PolicyError, match="into= names the parameter for the connection"):
        async_glue.action(into="session")
    with pytest.raises(PolicyError, match="needs a key on every request"):
        async_glue.action(transaction=plain, required=False)
    with pytest.raises(PolicyError, match="needs a key on every request"):
        async_glue.conditional(transaction=plain)


@pytest.mark.slow
def test_killed_at_any_point_it_happens_once() -> None:
    report = crash_everywhere(scenario.world, scenario.pay, scenario.one_payment, teardown=scenario.remove)
    assert len(report.points) > 10
