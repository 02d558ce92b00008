"""Routes whose rows and answer are committed together: FastAPI, Flask, and the kinds of views that Django has."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import flask
import httpx
import psycopg
import pytest
import sqlalchemy as sa
from django.db import connections, transaction
from fastapi import FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from semel import (
    AsyncMemoryStore,
    AsyncOperation,
    AsyncPostgresStore,
    AsyncSemel,
    AsyncSQLiteStore,
    ConfigurationError,
    MemoryStore,
    Operation,
    Policy,
    PolicyError,
    PostgresStore,
    Semel,
    SQLiteStore,
)
from semel.http import django as django_glue
from semel.http import fastapi as async_glue
from semel.http import flask as sync_glue
from semel.http.contract.routes import Endpoint
from semel.http.contract.rules import idempotent
from semel.http.describe.design import example_exchange
from semel.http.wsgi import middleware as wsgi
from semel.testing.crashpoints import crash_everywhere
from tests.http import transaction_scenario as scenario
from tests.http import transaction_scenario_django as in_django
from tests.http.apps_django_shop import DjangoService

TABLE = "CREATE TABLE IF NOT EXISTS payment (key text NOT NULL)"


class Shop:
    """A service and its table, whatever the framework and the database are."""

    rows: Callable[[], int]
    status = 201
    fails = False
    commits = False
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
        async_glue.install(app, guard=self.guard, tenant=lambda request: "alice")

        @app.post("/pay", status_code=201)
        @async_glue.idempotent(connection=sessions, connection_parameter="session")
        async def pay(session: AsyncSession, op: AsyncOperation) -> Any:
            assert op.connection is session
            await session.execute(sa.text("INSERT INTO payment VALUES (:key)"), {"key": op.key})
            if self.commits:
                await session.commit()
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
        sync_glue.install(app, guard=self.guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @sync_glue.idempotent(connection=self.engine.connect, connection_parameter="conn")
        def pay(conn: sa.Connection, op: Operation) -> Any:
            assert op.connection is conn
            conn.execute(sa.text("INSERT INTO payment VALUES (:key)"), {"key": op.key})
            if self.commits:
                conn.commit()
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


class DjangoShop(Shop):
    def __init__(self, kind: str, url: str, store: Any, rows: Callable[[], int]) -> None:
        self.rows = rows
        self.guard = Semel(store(), sweep_every=None)
        view, _, server = kind.partition("_")
        self.service = DjangoService(view, url, self.guard, self.work, in_loop=server == "asgi")
        self.service.leaves = lambda: self.heard.append(rows())
        self.heard: list[int] = []

    def work(self, conn: Any, op: Operation) -> Any:
        with conn.cursor() as cursor:
            cursor.execute("INSERT INTO payment VALUES (%s)", [op.key])
        if self.commits:
            conn.commit()
        return self.status, self.answer()

    def ask(self, key: str, path: str = "/pay") -> Any:
        return self.service.ask(key, path)

    def close(self) -> None:
        self.service.close()
        self.guard.close()


DJANGO = ["function", "class", "rest", "function_asgi", "class_asgi", "rest_asgi"]


@pytest.fixture(
    params=[
        *("fastapi-sqlite", "flask-sqlite", *(f"{kind}-sqlite" for kind in DJANGO)),
        *(
            pytest.param(f"{kind}-postgres", marks=[pytest.mark.postgres, pytest.mark.server])
            for kind in ("fastapi", "flask", "function_asgi")
        ),
    ]
)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    framework, database = request.param.split("-")
    kind: Any = {"fastapi": FastAPIShop, "flask": FlaskShop}.get(framework) or partial(DjangoShop, framework)
    django = framework in DJANGO
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
        made = kind(path if django else f"sqlite+{driver}:///{path}", lambda: store(path), count)
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
        spoken = url if django else url.replace("postgresql:", f"postgresql+{driver}:")
        made = kind(spoken, lambda: store(url, connections=1), count)
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


def test_a_commit_of_the_handlers_own_is_refused_before_a_row_is_durable(shop: Any) -> None:
    shop.commits = True
    assert [shop.ask("k1").status_code for _ in range(2)] == [500, 500]
    assert shop.rows() == 0
    shop.commits = False
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


@pytest.mark.slow
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
    if isinstance(shop, DjangoShop):
        shop.ask("k1")
        found = shop.heard
    elif isinstance(shop, FlaskShop):
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

    with pytest.raises(PolicyError, match="it must be an async def"):
        async_glue.idempotent(connection=plain)(plain)
    with pytest.raises(PolicyError, match="connection_parameter='session' names no parameter"):
        async_glue.idempotent(connection=plain, connection_parameter="session")(awaited)
    with pytest.raises(PolicyError, match="connection_parameter= needs connection="):
        async_glue.idempotent(connection_parameter="session")
    with pytest.raises(PolicyError, match="needs a key on every request"):
        async_glue.idempotent(connection=plain, required=False)
    with pytest.raises(PolicyError, match="needs a key on every request"):
        async_glue.conditional(connection=plain)
    with pytest.raises(
        PolicyError, match=r"connection= and external_effects=True exclude each other.*Leave connection="
    ):
        async_glue.idempotent(connection=plain, external_effects=True)
    with pytest.raises(PolicyError, match='connection= and guarantee="at_most_once" exclude each other'):
        sync_glue.idempotent(connection=plain, guarantee="at_most_once")
    with pytest.raises(PolicyError, match="exclude each other"):
        django_glue.idempotent(connection="default", external_effects=True)


def test_a_guard_whose_policy_a_transaction_cannot_keep_is_refused_when_the_service_starts() -> None:
    rule = idempotent(connection=lambda: None)
    guard = Semel(MemoryStore(), policy=Policy(guarantee="at_most_once"))
    shop = wsgi.WSGIMiddleware(lambda environ, start: [], guard=guard, tenant=str, routes={"POST /pay": rule})
    with pytest.raises(PolicyError, match='connection= and guarantee="at_most_once" exclude each other'):
        shop.report()
    own = idempotent(connection=lambda: None, guarantee="effectively_once")
    wsgi.WSGIMiddleware(lambda environ, start: [], guard=guard, tenant=str, routes={"POST /pay": own}).report()


def test_mistakes_in_django_are_named_when_the_view_is_declared_or_asked(tmp_path: Path) -> None:
    def plain(request: Any) -> None: ...

    async def awaited(request: Any) -> None: ...

    with pytest.raises(PolicyError, match="Django has no async transactions, so with connection= it is a plain def"):
        django_glue.idempotent(connection="default")(awaited)
    with pytest.raises(PolicyError, match="connection= is the name of one of DATABASES"):
        django_glue.idempotent(connection=plain)(plain)
    with pytest.raises(PolicyError, match="connection_parameter='conn' names no parameter"):
        django_glue.idempotent(connection="default", connection_parameter="conn")(plain)
    with pytest.raises(PolicyError, match=r"opens a connection or session, such as engine\.connect, not 'default'"):
        async_glue.idempotent(connection="default")(awaited)
    assert django_glue.idempotent(connection=transaction.atomic)(plain).__semel_rule__.connection.alias == "default"


def test_a_view_has_its_own_transaction_and_not_that_of_atomic_requests(tmp_path: Path) -> None:
    url = str(tmp_path / "shop.db")
    opened: list[int] = []

    def work(conn: Any, op: Operation) -> Any:
        opened.append(len(conn.atomic_blocks))
        return 201, {}

    with Semel(SQLiteStore(url)) as guard:
        for kind, status in (("function", 201), ("class", 500)):  # Django asks the view, and that is the whole class
            service = DjangoService(kind, url, guard, work, in_loop=False, ATOMIC_REQUESTS=True)
            assert service.ask(kind).status_code == status
            service.close()
    assert opened == [1]


def test_in_a_test_case_of_djangos_the_view_works_within_its_transaction(tmp_path: Path) -> None:
    url = str(tmp_path / "shop.db")

    def work(conn: Any, op: Operation) -> Any:
        with conn.cursor() as cursor:
            cursor.execute("INSERT INTO payment VALUES (%s)", [op.key])
        return 201, {}

    with Semel(SQLiteStore(str(tmp_path / "elsewhere.db"))) as guard:
        service = DjangoService("function", url, guard, work, in_loop=False)
        conn = connections[service.alias]
        with conn.cursor() as cursor:
            cursor.execute(TABLE)
        SQLiteStore(url).close()  # for its tables
        of_the_test = transaction.atomic(using=service.alias)
        of_the_test._from_testcase = True
        with of_the_test:
            answers = [service.ask("k1") for _ in range(2)]
            with conn.cursor() as cursor:
                rows = cursor.execute("SELECT count(*) FROM payment").fetchone()[0]
            transaction.set_rollback(True, using=service.alias)
        service.close()
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert rows == 1


def test_under_asgi_a_guard_that_is_async_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path / "shop.db")
    service = DjangoService("function", url, AsyncSemel(AsyncMemoryStore()), lambda conn, op: None, in_loop=True)
    try:
        with pytest.raises(ConfigurationError, match="SEMEL's GUARD must be a Semel"):
            service.loop.run(service.asked("k1", raises=True))
    finally:
        service.close()


def test_an_example_of_the_route_is_made_without_its_database() -> None:
    route = Endpoint(
        "POST", "/pay", async_glue.idempotent(connection=lambda: pytest.fail("opened"), connection_parameter="session")
    )
    steps = example_exchange(route)
    assert [step.answer.split()[1] for step in steps] == ["201", "409", "201", "422"]


@pytest.mark.slow
@pytest.mark.parametrize("pay", [scenario.pay, in_django.pay], ids=["fastapi", "django"])
def test_killed_at_any_point_it_happens_once(pay: Any) -> None:
    report = crash_everywhere(scenario.world, pay, scenario.one_payment, teardown=scenario.remove)
    assert len(report.points) > 10
