"""Transactional routes whose transactions meet: the database undoes one of them, and the request is run again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.http.apps_till import TABLES, TILLS, FastAPITill, Till  # first: it sets Django up

import flask  # isort: skip
import httpx  # isort: skip
import psycopg  # isort: skip
import pytest  # isort: skip
import sqlalchemy as sa  # isort: skip
from asgiref.sync import sync_to_async  # isort: skip
from django.core.files.uploadedfile import SimpleUploadedFile  # isort: skip
from django.db import connections  # isort: skip
from django.http import HttpResponse  # isort: skip
from django.test import AsyncClient, Client  # isort: skip
from django.urls import path as route  # isort: skip
from fastapi import BackgroundTasks, FastAPI, Request, Response  # isort: skip
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine  # isort: skip

from semel import AsyncSemel, AsyncSQLiteStore, Operation, Semel, SQLiteStore, TransactionConflict
from semel.engine.transaction.rules import TRIES
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.exchange import DOCUMENT_LIMIT
from semel.http.django import idempotent as django_idempotent
from semel.http.fastapi import idempotent, install
from semel.http.flask import idempotent as flask_idempotent
from semel.http.flask import install as flask_install
from tests.http.apps_django_shop import DjangoService, database, forget
from tests.http.asking import scope_of, whose
from tests.http.django_project import Project


@pytest.fixture(params=TILLS)
def till(request: pytest.FixtureRequest, url: str) -> Iterator[Till]:
    made: Any = TILLS[request.param]
    till = made(url)
    yield till
    till.close()


@pytest.fixture
def url(postgres_url: str) -> str:
    from semel.stores.postgres import migrate

    migrate(postgres_url)
    with psycopg.connect(postgres_url) as conn:
        for statement in TABLES:
            conn.execute(statement.encode())
    return postgres_url


def found(url: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as conn:
        return conn.execute(sql.encode()).fetchall()


def test_of_two_that_meet_at_the_commit_both_are_done(till: Till, url: str) -> None:
    answers = till.ask("/skew", ("k1", 5), ("k2", 7))
    assert [status for status, _ in answers] == [201, 201]
    assert not any("idempotent-replayed" in lines for _, lines in answers)
    entries = found(url, "SELECT number, amount FROM entry ORDER BY number")
    assert [number for number, _ in entries] == [1, 2], "each has counted the other"
    assert sorted(amount for _, amount in entries) == [5, 7]
    assert till.runs >= 3, "they have met"
    if isinstance(till, FastAPITill):
        assert sorted(till.after) == [5, 7], "what follows an answer follows those that were sent"
    runs = till.runs
    ((status, lines),) = till.ask("/skew", ("k2", 7))
    assert (status, lines["idempotent-replayed"]) == (201, "true")
    assert till.runs == runs


def test_of_two_that_meet_in_the_handler_both_are_done(till: Till, url: str) -> None:
    answers = till.ask("/update", ("k1", 5), ("k2", 7))
    assert [status for status, _ in answers] == [201, 201]
    assert found(url, "SELECT amount FROM balance") == [(12,)]
    assert till.runs >= 3, "they have met"


class Stubborn:
    """A handler that always meets another transaction; or so often, and then no more."""

    def __init__(self, times: int = 1000) -> None:
        self.times = times
        self.runs = 0
        self.seen: list[Any] = []

    def run(self, seen: Any = None) -> None:
        self.runs += 1
        self.seen.append(seen)
        if self.runs <= self.times:
            raise TransactionConflict("it met another one")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses: how long they are is shown where they are made."""
    monkeypatch.setattr("semel.http.contract.endpoint.pause_after", lambda call, tried: 0.0)


def fastapi_with(handler: Stubborn, path: str, **settings: Any) -> Any:
    """A FastAPI service on SQLite; asked with (body, headers)."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=sa.NullPool)
    guard = AsyncSemel(AsyncSQLiteStore(path), sweep_every=None)
    app = FastAPI()
    install(app, guard=guard, tenant=lambda request: "alice")
    after: list[str] = []

    async def work(request: Request, session: AsyncSession, tasks: BackgroundTasks) -> Response:
        tasks.add_task(after.append, "after")
        body = b"".join([chunk async for chunk in request.stream()])
        handler.run(len(body))
        return Response(status_code=201)

    app.post("/pay")(idempotent(connection=async_sessionmaker(engine), connection_parameter="session")(work))

    @app.middleware("http")
    async def limited(request: Request, call_next: Any) -> Response:
        if handler.runs and settings.get("turned_away"):
            return Response(status_code=429)
        return await call_next(request)  # type: ignore[no-any-return]

    app.user_middleware.reverse()  # inside of ours

    async def main(*bodies: bytes) -> list[httpx.Response]:
        try:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://till") as client:
                lines = {"Idempotency-Key": "k1"}
                return [await client.post("/pay", content=body, headers=lines) for body in bodies]
        finally:
            await guard.close()
            await engine.dispose()

    return lambda *bodies: (asyncio.run(main(*bodies)), after)


@pytest.mark.usefixtures("at_once")
def test_it_is_run_as_often_as_guard_transaction_would_and_then_the_client_is_told(tmp_path: Path) -> None:
    handler = Stubborn()
    (answer,), after = fastapi_with(handler, str(tmp_path / "shop.db"))(b"")
    assert handler.runs == TRIES
    assert (answer.status_code, answer.json()["code"]) == (503, "idempotency_transaction_conflict")
    assert answer.json()["retryable"] is True
    assert after == []


@pytest.mark.usefixtures("at_once")
def test_the_body_is_read_again_even_where_the_handler_has_streamed_it(tmp_path: Path) -> None:
    handler = Stubborn(3)
    (answer,), after = fastapi_with(handler, str(tmp_path / "shop.db"))(b"x" * 3_000_000)
    assert answer.status_code == 201
    assert handler.seen == [3_000_000] * 4
    assert after == ["after"], "of the run that was answered, and of no other"


@pytest.mark.usefixtures("at_once")
def test_a_body_that_is_not_kept_is_not_run_again(tmp_path: Path) -> None:
    handler = Stubborn(1)
    (refused, answer), _ = fastapi_with(handler, str(tmp_path / "shop.db"))(*[b"x" * (DOCUMENT_LIMIT + 1)] * 2)
    assert (refused.status_code, answer.status_code) == (503, 201)
    assert handler.runs == 2


@pytest.mark.usefixtures("at_once")
def test_a_run_that_is_turned_away_is_answered_so_and_the_key_is_free(tmp_path: Path) -> None:
    handler = Stubborn(1)
    settings = {"turned_away": True}
    serve = fastapi_with(handler, str(tmp_path / "shop.db"), **settings)
    (answer,), _ = serve(b"")
    assert answer.status_code == 429
    assert "idempotency-key" not in answer.headers
    assert handler.runs == 1
    (answer,), _ = fastapi_with(handler, str(tmp_path / "shop.db"))(b"")
    assert answer.status_code == 201


class AtTheEnd(AsyncSession):
    """A session whose transaction meets another one when it is about to be committed."""

    async def flush(self, objects: Any = None) -> None:
        raise TransactionConflict("it met another one")


@pytest.mark.parametrize(("limit", "runs"), [(1000, TRIES), (5, 1)], ids=["held back", "let through"])
@pytest.mark.usefixtures("at_once")
def test_an_answer_of_which_a_part_was_sent_is_not_made_again(tmp_path: Path, limit: int, runs: int) -> None:
    path, ran = str(tmp_path / "shop.db"), []
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=sa.NullPool)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"0123456789", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def main() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        rule = idempotent(connection=async_sessionmaker(engine, class_=AtTheEnd), max_stored_body=limit)
        async with AsyncSemel(AsyncSQLiteStore(path), sweep_every=None) as guard:
            guarded = ASGIMiddleware(app, guard=guard, tenant=whose, routes={"POST /pay": rule})
            try:
                await guarded(scope_of(), receive, send)
            except ConnectionError as error:
                sent.append({"error": str(error)})
        await engine.dispose()
        return sent

    sent = asyncio.run(main())
    assert len(ran) == runs
    if limit == 5:
        assert [message.get("body") for message in sent] == [None, b"0123456789", None]
        assert sent[-1] == {"error": "the answer was let through, and could not be stored"}
    else:
        assert sent[0]["status"] == 503


@pytest.mark.usefixtures("at_once")
def test_in_flask_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "shop.db")
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    app = flask.Flask("till")
    torn: list[Any] = []
    handlers = {"k1": Stubborn(), "k2": Stubborn(3), "k3": Stubborn(1)}
    app.teardown_request(lambda error: torn.append(type(error).__name__))
    with Semel(SQLiteStore(path), sweep_every=None) as guard:
        flask_install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @flask_idempotent(connection=engine.connect)
        def pay(op: Operation) -> Any:
            handlers[op.key].run(len(b"".join(iter(lambda: flask.request.stream.read(9999), b""))))
            return "", 201

        def ask(key: str, size: int = 100_000) -> Any:
            return app.test_client().post("/pay", data=b"x" * size, headers={"Idempotency-Key": key})

        assert ask("k1").json["code"] == "idempotency_transaction_conflict"
        assert handlers["k1"].runs == TRIES
        torn.clear()
        assert ask("k2").status_code == 201
        assert handlers["k2"].seen == [100_000] * 4
        assert torn == ["RunAgain"] * 3 + ["NoneType"], "what cleans up hears of each run"
        assert [ask("k3", DOCUMENT_LIMIT + 1).status_code for _ in range(2)] == [503, 201]


@pytest.mark.parametrize("in_loop", [False, True], ids=["wsgi", "asgi"])
@pytest.mark.usefixtures("at_once")
def test_in_django_the_same(tmp_path: Path, in_loop: bool) -> None:
    path = str(tmp_path / "shop.db")
    handlers = {"k1": Stubborn(), "k2": Stubborn(3)}

    def work(conn: Any, op: Operation) -> Any:
        handlers[op.key].run()
        return 201, {}

    with Semel(SQLiteStore(path), sweep_every=None) as guard:
        service = DjangoService("rest", path, guard, work, in_loop=in_loop)
        refused, answer = service.ask("k1"), service.ask("k2", body=b'{"amount": 5}')
        service.close()
    assert (refused.status_code, refused.json()["code"]) == (503, "idempotency_transaction_conflict")
    assert handlers["k1"].runs == TRIES
    assert (answer.status_code, handlers["k2"].runs) == (201, 4)


READS: dict[str, Any] = {
    "body": lambda request: request.body,
    "read": lambda request: request.read(),
    "POST": lambda request: request.POST["amount"],
    "FILES": lambda request: request.FILES["receipt"].read(),
}


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("in_loop", [False, True], ids=["wsgi", "asgi"])
@pytest.mark.parametrize("read", READS)
def test_in_django_the_body_is_read_again_however_the_view_reads_it(tmp_path: Path, in_loop: bool, read: str) -> None:
    url, handler = str(tmp_path / "shop.db"), Stubborn(2)
    alias = database(url)

    @django_idempotent(connection=alias)
    def pay(request: Any) -> HttpResponse:
        handler.run(READS[read](request))
        return HttpResponse(status=201)

    def send(client: Any) -> Any:
        sent = {"amount": "5", "receipt": SimpleUploadedFile("receipt", b"paid")}
        return client.post("/pay", sent, headers={"Idempotency-Key": "k1"})

    async def send_soon() -> Any:
        answer = await send(AsyncClient())
        await sync_to_async(close)()
        return answer

    def close() -> None:
        connections[alias].close()

    with Semel(SQLiteStore(url), sweep_every=None) as guard, Project(guard) as project:
        project.serve(route("pay", pay))
        answer = asyncio.run(send_soon()) if in_loop else send(Client())
    forget(alias)
    assert answer.status_code == 201
    assert len(handler.seen) == 3
    assert handler.seen[0]
    assert handler.seen == handler.seen[:1] * 3
