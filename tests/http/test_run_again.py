"""A run that met another transaction leaves no trace in the next one: in the request, or in what is shared by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from tests.http.apps_django_shop import database, forget  # first: it sets Django up

import flask  # isort: skip
import httpx  # isort: skip
import pytest  # isort: skip
import sqlalchemy as sa  # isort: skip
from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async  # isort: skip
from django.db import connections  # isort: skip
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse  # isort: skip
from django.test import AsyncClient, Client, override_settings  # isort: skip
from django.urls import path as route  # isort: skip
from fastapi import FastAPI, Request  # isort: skip
from litestar import Litestar, post  # isort: skip
from litestar.datastructures import State, UploadFile  # isort: skip
from litestar.di import NamedDependency, Provide  # isort: skip
from litestar.exceptions import HTTPException  # isort: skip
from litestar.params import MultipartBody  # isort: skip
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine  # isort: skip
from starlette.middleware.sessions import SessionMiddleware  # isort: skip

from semel import AsyncSemel, AsyncSQLiteStore, Semel, SQLiteStore, TransactionConflict
from semel.core.transactional import Occupied
from semel.http.asgi import ASGIMiddleware
from semel.http.django import idempotent as django_idempotent
from semel.http.fastapi import idempotent as fastapi_idempotent
from semel.http.fastapi import install
from semel.http.flask import idempotent as flask_idempotent
from semel.http.flask import install as flask_install
from semel.http.litestar import SemelPlugin, idempotent
from semel.sql.aio import AsyncSQLUnit
from semel.sql.sync import SQLUnit
from tests.http.asking import ask, scope_of, whose
from tests.http.django_project import MIDDLEWARE, Project

KEY = {"Idempotency-Key": "k1"}
MET = TransactionConflict("it met another one")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses: how long they are is shown where they are made."""
    monkeypatch.setattr("semel.http.contract.endpoint.pause_after", lambda call, tried: 0.0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "shop.db")


class Served:
    """An application in ASGI, on SQLite, and asked in one event loop."""

    def __init__(self, path: str) -> None:
        self.loop = asyncio.Runner()
        self.guard = self.loop.run(self._guard(path))
        self.engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
        self.sessions = async_sessionmaker(self.engine)

    async def _guard(self, path: str) -> AsyncSemel:
        return AsyncSemel(AsyncSQLiteStore(path), sweep_every=None)

    def ask(self, app: Any, *, headers: dict[str, str] = KEY, **sent: Any) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                return await client.post("/pay", headers=headers, **sent)

        return self.loop.run(main())

    def close(self) -> None:
        self.loop.run(self.guard.close())
        self.loop.run(self.engine.dispose())
        self.loop.close()


@pytest.fixture
def served(path: str) -> Iterator[Served]:
    made = Served(path)
    yield made
    made.close()


class MeetsAtTheCommit(AsyncSession):
    """The first one's transaction meets another one when it is about to be committed."""

    met = False

    async def flush(self, objects: Any = None) -> None:
        if not self.__class__.met:
            self.__class__.met = True
            raise MET


def litestar(served: Served, *handlers: Any, **settings: Any) -> Litestar:
    plugin = SemelPlugin(guard=served.guard, tenant=lambda request: "alice")
    return Litestar(list(handlers), plugins=[plugin], openapi_config=None, **settings)


def test_in_litestar_a_run_may_be_refused_after_one_that_was_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MeetsAtTheCommit, "met", False)
    runs: list[State] = []

    @post("/pay")
    @idempotent(connection=async_sessionmaker(served.engine, class_=MeetsAtTheCommit))
    async def pay(state: State) -> str:
        runs.append(state)
        if len(runs) == 2:
            raise HTTPException(status_code=404, detail="gone meanwhile")
        return "paid"

    answer = served.ask(litestar(served, pay))
    assert (answer.status_code, answer.json()["detail"]) == (404, "gone meanwhile")
    assert len(runs) == 2


def test_in_litestar_an_upload_is_read_again(served: Served) -> None:
    seen: list[int] = []

    @post("/pay")
    @idempotent(connection=served.sessions)
    async def pay(data: MultipartBody[UploadFile]) -> str:
        seen.append(len(await data.read()))
        if len(seen) < 3:
            raise MET
        return "paid"

    answer = served.ask(litestar(served, pay), files={"data": ("receipt", b"x" * 3_000_000)})
    assert (answer.status_code, seen) == (201, [3_000_000] * 3)


def test_in_litestar_all_that_a_run_has_opened_is_closed(served: Served) -> None:
    left: list[str] = []

    async def first() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            left.append("first")

    async def second() -> AsyncIterator[int]:
        try:
            yield 2
        finally:
            left.append("second")

    runs: list[int] = []

    @post("/pay", dependencies={"first": Provide(first), "second": Provide(second)})
    @idempotent(connection=served.sessions)
    async def pay(first: NamedDependency[int], second: NamedDependency[int]) -> str:
        runs.append(first + second)
        if len(runs) == 1:
            raise MET
        assert sorted(left) == ["first", "second"], "those of the first run"
        return "paid"

    assert served.ask(litestar(served, pay)).status_code == 201
    assert sorted(left) == ["first", "first", "second", "second"]


def test_what_a_run_did_to_the_session_is_forgotten(served: Served) -> None:
    app, runs = FastAPI(), []
    install(app, guard=served.guard, tenant=whose)
    app.add_middleware(SessionMiddleware, secret_key="not a secret")
    seen: list[Any] = []

    @app.middleware("http")
    async def outside(request: Request, call_next: Any) -> Any:
        request.state.seen = "outside"
        answer = await call_next(request)
        seen.append(request.state.runs)
        return answer

    @app.post("/pay")
    @fastapi_idempotent(connection=served.sessions)
    async def pay(request: Request) -> dict[str, int]:
        runs.append(1)
        assert request.state.seen == "outside"
        request.state.runs = getattr(request.state, "runs", 0) + 1
        request.session["orders"] = request.session.get("orders", 0) + 1
        if len(runs) < 3:
            request.session["half"] = True
            raise MET
        assert "half" not in request.session
        return {"orders": request.session["orders"]}

    answer = served.ask(app)
    assert (answer.json(), len(runs)) == ({"orders": 1}, 3)
    assert "session=" in answer.headers["set-cookie"]
    assert seen == [1], "those outside see what the last run has noted"


def occupied_once(lock: Callable[..., Any], awaited: bool) -> Callable[..., Any]:
    """The second time it is asked for the key, which is when a refusal is to be kept, another call has it."""
    asked: list[int] = []

    def locked(self: Any, op: Any) -> Any:
        asked.append(1)
        return Occupied() if len(asked) == 2 else lock(self, op)

    async def locked_soon(self: Any, op: Any) -> Any:
        asked.append(1)
        return Occupied() if len(asked) == 2 else await lock(self, op)

    return locked_soon if awaited else locked


def test_in_flask_a_failure_that_cannot_be_kept_is_run_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SQLUnit, "lock", occupied_once(SQLUnit.lock, False))
    engine, app, runs = sa.create_engine(f"sqlite:///{path}"), flask.Flask("shop"), []
    with Semel(SQLiteStore(path), sweep_every=None) as guard:
        flask_install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @flask_idempotent(connection=engine.connect, remember_errors=LookupError)
        def pay() -> Any:
            runs.append(1)
            if len(runs) == 1:
                raise LookupError
            return "", 201

        app.config["PROPAGATE_EXCEPTIONS"] = True
        answer = app.test_client().post("/pay", headers=KEY)
        assert (answer.status_code, len(runs)) == (201, 2)
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        assert app.test_client().post("/pay", headers=KEY).headers["Idempotent-Replayed"] == "true"
    engine.dispose()


def test_in_asgi_a_failure_that_cannot_be_kept_is_run_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncSQLUnit, "lock", occupied_once(AsyncSQLUnit.lock, True))
    app, runs = FastAPI(), []
    install(app, guard=served.guard, tenant=whose)

    @app.post("/pay", status_code=201)
    @fastapi_idempotent(connection=served.sessions, remember_errors=LookupError)
    async def pay() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise LookupError

    assert (served.ask(app).status_code, len(runs)) == (201, 2)
    assert served.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert served.ask(app).headers["Idempotent-Replayed"] == "true"


def test_a_client_that_hangs_up_in_the_pause_stops_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise MET
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def main() -> None:
        routes = {"POST /pay": idempotent(connection=served.sessions)}
        guarded = ASGIMiddleware(app, guard=served.guard, tenant=whose, routes=routes)
        task = asyncio.ensure_future(ask(guarded, scope_of()))

        def hung_up(call: Any, tried: int) -> float:
            asyncio.get_running_loop().call_soon(task.cancel)
            return 0.01

        monkeypatch.setattr("semel.http.contract.endpoint.pause_after", hung_up)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(runs) == 1
        async with asyncio.timeout(10):
            await asyncio.wait(guarded._left)
        replay = await ask(guarded, scope_of())
        assert (b"idempotent-replayed", b"true") in replay[0]["headers"]

    served.loop.run(main())
    assert len(runs) == 2


class Django:
    """A project with one transactional view, asked through Django's own clients."""

    def __init__(self, path: str, in_loop: bool, view: Callable[[Any], Any], *middleware: Any) -> None:
        self.alias = database(path)
        self.in_loop = in_loop
        self.loop = asyncio.Runner()
        self.guard = Semel(SQLiteStore(path), sweep_every=None)
        self.project = Project(self.guard)
        declared = django_idempotent(connection=self.alias)(view)
        self.project.serve(route("pay", declared), middleware=(*middleware, MIDDLEWARE))

    def ask(self, **sent: Any) -> Any:
        if self.in_loop:
            client: Any = AsyncClient(raise_request_exception=False)
            return self.loop.run(self._asked(client, sent))
        return Client(raise_request_exception=False).post("/pay", **sent, headers=KEY)

    async def _asked(self, client: Any, sent: dict[str, Any]) -> Any:
        async with asyncio.timeout(20):
            answer = await client.post("/pay", **sent, headers=KEY)
            if answer.streaming:
                answer.read = b"".join([chunk async for chunk in answer])
            return answer

    def open(self) -> bool:
        """Whether the view's thread has a transaction open."""
        return bool(self.loop.run(sync_to_async(lambda: connections[self.alias].in_atomic_block)()))

    def _disconnect(self) -> None:
        connections[self.alias].close()

    def close(self) -> None:
        self.loop.run(sync_to_async(self._disconnect)())
        self.loop.close()
        self.project.__exit__(None, None, None)
        self.guard.close()
        forget(self.alias)


BOTH = pytest.mark.parametrize("in_loop", [False, True], ids=["wsgi", "asgi"])


@BOTH
def test_in_django_what_a_run_did_to_the_session_is_forgotten(path: str, in_loop: bool) -> None:
    runs: list[int] = []

    def pay(request: Any) -> HttpResponse:
        runs.append(1)
        request.session["orders"] = request.session.get("orders", 0) + 1
        request.session.setdefault("lines", []).append(len(runs))
        if len(runs) < 3:
            raise MET
        return JsonResponse(dict(request.session.items()))

    def visited(get_response: Any) -> Any:
        def seen(request: Any) -> Any:
            request.session["lines"] = [0]
            return get_response(request)

        async def seen_soon(request: Any) -> Any:
            await request.session.aset("lines", [0])
            return await get_response(request)

        return markcoroutinefunction(seen_soon) if iscoroutinefunction(get_response) else seen

    visited.async_capable = visited.sync_capable = True  # type: ignore[attr-defined]
    sessions = "django.contrib.sessions.middleware.SessionMiddleware"
    for middleware, lines in (((sessions,), [3]), ((sessions, visited), [0, 3])):
        runs.clear()
        service = Django(f"{path}{len(lines)}", in_loop, pay, *middleware)
        answer = service.ask()
        service.close()
        assert (answer.json(), len(runs)) == ({"orders": 1, "lines": lines}, 3)


@BOTH
@pytest.mark.parametrize("read", ["body", "read", "POST"])
def test_in_django_a_body_that_was_read_outside_can_be_read_there_afterwards(
    path: str, in_loop: bool, read: str
) -> None:
    seen: list[Any] = []
    after: list[bytes] = []

    def pay(request: Any) -> HttpResponse:
        reads: dict[str, Any] = {"read": request.read} if read == "read" else {}
        seen.append(reads[read]() if reads else getattr(request, read))
        if len(seen) < 3:
            raise MET
        return HttpResponse(status=201)

    def logged(get_response: Any) -> Any:
        def log(request: Any) -> Any:
            before = request.body
            answer = get_response(request)
            after.extend([before, request.body])
            return answer

        async def log_soon(request: Any) -> Any:
            before = request.body
            answer = await get_response(request)
            after.extend([before, request.body])
            return answer

        return markcoroutinefunction(log_soon) if iscoroutinefunction(get_response) else log

    logged.async_capable = logged.sync_capable = True  # type: ignore[attr-defined]
    service = Django(path, in_loop, pay, logged)
    answer = service.ask(data={"amount": "5"})
    service.close()
    assert (answer.status_code, len(seen)) == (201, 3)
    assert seen[0]
    assert seen == seen[:1] * 3
    assert after[0]
    assert after[0] == after[1]


@pytest.mark.parametrize("how", ["streamed", "propagated"])
def test_in_django_under_asgi_what_breaks_is_rolled_back(path: str, how: str) -> None:
    runs: list[int] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("of the other half")

    def pay(request: Any) -> Any:
        runs.append(1)
        if len(runs) > 1:
            return HttpResponse(status=201)
        if how == "streamed":
            return StreamingHttpResponse(chunks())
        raise RuntimeError("of the view")

    service = Django(path, True, pay)
    with override_settings(DEBUG_PROPAGATE_EXCEPTIONS=how == "propagated"):
        try:
            client = AsyncClient()
            with pytest.raises(RuntimeError, match="of the"):
                service.loop.run(service._asked(client, {}))
            assert not service.open()
            answer = service.ask()
            assert (answer.status_code, len(runs)) == (201, 2)
        finally:
            service.close()
