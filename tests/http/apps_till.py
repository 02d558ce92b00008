"""A till in each framework, on PostgreSQL in SERIALIZABLE: two customers at once stand in each other's way.

``/skew``: each counts the entries and adds the next one; found out when the second of them commits.
``/update``: each adds to the same balance; found out by the second one's UPDATE, in the handler.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.http.apps_django_shop import database, forget  # first: it sets Django up

import flask  # isort: skip
import httpx  # isort: skip
import sqlalchemy as sa  # isort: skip
from asgiref.sync import ThreadSensitiveContext, sync_to_async  # isort: skip
from django.db import connections  # isort: skip
from django.http import JsonResponse  # isort: skip
from django.test import AsyncClient, Client  # isort: skip
from django.urls import path as at  # isort: skip
from fastapi import BackgroundTasks, Body, FastAPI  # isort: skip
from litestar import Litestar, post  # isort: skip
from litestar.params import JSONBody  # isort: skip
from rest_framework.response import Response  # isort: skip
from rest_framework.views import APIView  # isort: skip
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine  # isort: skip
from starlette.applications import Starlette  # isort: skip
from starlette.routing import Mount  # isort: skip

from semel import AsyncPostgresStore, AsyncSemel, PostgresStore, Semel, current_operation
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import idempotent
from semel.http.wsgi import WSGIMiddleware
from tests.http.django_project import Project

TABLES = (
    "CREATE TABLE IF NOT EXISTS entry (number int NOT NULL, amount int NOT NULL)",
    "CREATE TABLE IF NOT EXISTS balance (amount int NOT NULL)",
    "INSERT INTO balance VALUES (0)",
)
COUNT, ADD = "SELECT count(*) FROM entry", "INSERT INTO entry VALUES ({}, {})"
READ, UPDATE = "SELECT amount FROM balance", "UPDATE balance SET amount = {} + {}"
PATHS = ("/skew", "/update")
Asked = list[tuple[int, dict[str, str]]]


def steps(path: str, amount: int) -> Iterable[str | None]:
    """A generator of statements, which is sent what they found; None: wait for the other one."""
    if path == "/skew":
        found = yield COUNT
        yield ADD.format(found + 1, amount)
        yield None
    else:
        found = yield READ
        yield None
        yield UPDATE.format(found, amount)


class Till:
    """A service, and how often its handlers ran. The first two runs wait for each other."""

    def __init__(self) -> None:
        self.runs = 0

    def ask(self, path: str, *asked: tuple[str, int]) -> Asked:
        """Ask for all at once: (key, amount)."""
        raise NotImplementedError

    def close(self) -> None: ...


class AsyncTill(Till):
    def __init__(self, url: str) -> None:
        super().__init__()
        self.loop = asyncio.Runner()
        spoken = url.replace("postgresql:", "postgresql+asyncpg:")
        self.engine = create_async_engine(spoken, isolation_level="SERIALIZABLE", poolclass=sa.NullPool)
        self.guard = self.loop.run(self._guarded(url))
        self.met = asyncio.Event()
        self.app: Any = self.made()
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://till")

    async def _guarded(self, url: str) -> AsyncSemel:
        return AsyncSemel(AsyncPostgresStore(url, connections=1), sweep_every=None)

    @property
    def sessions(self) -> Any:
        return async_sessionmaker(self.engine)

    def made(self) -> Any:
        raise NotImplementedError

    async def work(self, session: AsyncSession, path: str, amount: int) -> None:
        self.runs += 1
        run, statements, found = self.runs, steps(path, amount), None
        while True:
            try:
                statement = statements.send(found)  # type: ignore[attr-defined]
            except StopIteration:
                return
            if statement is not None:
                result = await session.execute(sa.text(statement))
                found = result.scalar() if result.returns_rows else None
            elif run <= 2:
                if run == 2:
                    self.met.set()
                await asyncio.wait_for(self.met.wait(), 20)

    def ask(self, path: str, *asked: tuple[str, int]) -> Asked:
        async def one(key: str, amount: int) -> tuple[int, dict[str, str]]:
            answer = await self.client.post(path, json={"amount": amount}, headers={"Idempotency-Key": key})
            return answer.status_code, dict(answer.headers)

        async def all() -> Asked:
            return await asyncio.gather(*(one(key, amount) for key, amount in asked))

        return self.loop.run(all())

    def close(self) -> None:
        self.loop.run(self.client.aclose())
        self.loop.run(self.guard.close())
        self.loop.run(self.engine.dispose())
        self.loop.close()


def whose(request: Any) -> str:
    return "alice"


class FastAPITill(AsyncTill):
    def __init__(self, url: str) -> None:
        self.after: list[int] = []
        super().__init__(url)

    def routed(self) -> FastAPI:
        app = FastAPI()
        for path in PATHS:

            async def pay(
                session: AsyncSession, tasks: BackgroundTasks, amount: int = Body(embed=True), path: str = path
            ) -> None:
                tasks.add_task(self.after.append, amount)
                await self.work(session, path, amount)

            app.post(path, status_code=201)(
                for_fastapi.idempotent(connection=self.sessions, connection_parameter="session")(pay)
            )
        return app

    def made(self) -> Any:
        app = self.routed()
        for_fastapi.install(app, guard=self.guard, tenant=whose)
        return app


class MountedTill(FastAPITill):
    """Routers change the scope on their way; here the outer one has cut a part off the path."""

    def made(self) -> Any:
        app = Starlette(routes=[Mount("/shop", self.routed())])
        for_fastapi.install(app, guard=self.guard, tenant=whose)
        return app

    def ask(self, path: str, *asked: tuple[str, int]) -> Asked:
        return super().ask(f"/shop{path}", *asked)


class LitestarTill(AsyncTill):
    def made(self) -> Any:
        def handler(path: str) -> Any:
            async def pay(data: JSONBody[dict[str, int]], session: Any) -> None:
                await self.work(session, path, data["amount"])

            return post(path)(for_litestar.idempotent(connection=self.sessions, connection_parameter="session")(pay))

        plugin = for_litestar.SemelPlugin(guard=self.guard, tenant=whose)
        return Litestar([handler(path) for path in PATHS], plugins=[plugin], openapi_config=None)


class EdgeTill(AsyncTill):
    def made(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            op: Any = current_operation()
            await self.work(op.connection, scope["path"], json.loads(message["body"])["amount"])
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        routes = {f"POST {path}": idempotent(connection=self.sessions) for path in PATHS}
        return ASGIMiddleware(app, guard=self.guard, tenant=whose, routes=routes)


class SyncTill(Till):
    def __init__(self, url: str) -> None:
        super().__init__()
        spoken = url.replace("postgresql:", "postgresql+psycopg:")
        self.engine = sa.create_engine(spoken, isolation_level="SERIALIZABLE", poolclass=sa.NullPool)
        self.guard = Semel(PostgresStore(url, connections=1), sweep_every=None)
        self.meeting = threading.Barrier(2, timeout=20)
        self._count = threading.Lock()
        self.app: Any = self.made()

    def made(self) -> Any:
        raise NotImplementedError

    def work(self, execute: Any, path: str, amount: int) -> None:
        with self._count:
            self.runs += 1
            run = self.runs
        statements, found = steps(path, amount), None
        while True:
            try:
                statement = statements.send(found)  # type: ignore[attr-defined]
            except StopIteration:
                return
            if statement is not None:
                found = execute(statement)
            elif run <= 2:
                self.meeting.wait()

    def one(self, path: str, key: str, amount: int) -> tuple[int, dict[str, str]]:
        transport = httpx.WSGITransport(self.app)
        with httpx.Client(transport=transport, base_url="http://till") as client:
            answer = client.post(path, json={"amount": amount}, headers={"Idempotency-Key": key})
        return answer.status_code, dict(answer.headers)

    def ask(self, path: str, *asked: tuple[str, int]) -> Asked:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda each: self.one(path, *each), asked))

    def close(self) -> None:
        self.guard.close()
        self.engine.dispose()


def on_connection(conn: sa.Connection) -> Any:
    def execute(statement: str) -> Any:
        result = conn.execute(sa.text(statement))
        return result.scalar() if result.returns_rows else None

    return execute


class FlaskTill(SyncTill):
    def made(self) -> Any:
        app = flask.Flask("till")
        for_flask.install(app, guard=self.guard, tenant=whose)
        for path in PATHS:

            def pay(conn: sa.Connection, path: str = path) -> Any:
                self.work(on_connection(conn), path, flask.request.get_json()["amount"])
                return "", 201

            view = for_flask.idempotent(connection=self.engine.connect, connection_parameter="conn")(pay)
            app.add_url_rule(path, path, view, methods=["POST"])
        return app


class WSGIEdgeTill(SyncTill):
    def made(self) -> Any:
        def app(environ: Any, start_response: Any) -> Any:
            op: Any = current_operation()
            amount = json.loads(environ["wsgi.input"].read())["amount"]
            self.work(on_connection(op.connection), environ["PATH_INFO"], amount)
            start_response("201 Created", [])
            return [b""]

        routes = {f"POST {path}": idempotent(connection=self.engine.connect) for path in PATHS}
        return WSGIMiddleware(app, guard=self.guard, tenant=whose, routes=routes)


class DjangoTill(SyncTill):
    rest = False

    def __init__(self, url: str) -> None:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        self.alias = database(url, options={"isolation_level": IsolationLevel.SERIALIZABLE})
        super().__init__(url)

    def execute(self, statement: str) -> Any:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None

    def made(self) -> Any:
        def by_function(path: str) -> Any:
            @for_django.idempotent(connection=self.alias)
            def pay(request: Any) -> JsonResponse:
                self.work(self.execute, path, json.loads(request.body)["amount"])
                return JsonResponse({}, status=201)

            return pay

        def by_rest(path: str) -> Any:
            class Pay(APIView):  # type: ignore[misc]
                @for_django.idempotent(connection=self.alias)
                def post(this, request: Any) -> Response:
                    self.work(self.execute, path, request.data["amount"])
                    return Response({}, status=201)

            return Pay.as_view()

        self.project = Project(self.guard)
        views = by_rest if self.rest else by_function
        self.project.serve(*(at(path[1:], views(path)) for path in PATHS))

    def one(self, path: str, key: str, amount: int) -> tuple[int, dict[str, str]]:
        try:
            answer = Client(raise_request_exception=False).post(
                path, {"amount": amount}, content_type="application/json", headers={"Idempotency-Key": key}
            )
            return answer.status_code, {name.lower(): value for name, value in answer.headers.items()}
        finally:
            connections[self.alias].close()

    def close(self) -> None:
        self.project.__exit__(None, None, None)
        forget(self.alias)
        super().close()


class RESTTill(DjangoTill):
    rest = True


class DjangoASGITill(DjangoTill):
    def ask(self, path: str, *asked: tuple[str, int]) -> Asked:
        async def one(key: str, amount: int) -> tuple[int, dict[str, str]]:
            async with ThreadSensitiveContext():  # as Django's handler does: a thread for each request
                answer = await AsyncClient(raise_request_exception=False).post(
                    path, {"amount": amount}, content_type="application/json", headers={"Idempotency-Key": key}
                )
                await sync_to_async(lambda: connections[self.alias].close())()  # noqa: PLW0108
            return answer.status_code, {name.lower(): value for name, value in answer.headers.items()}

        async def all() -> Asked:
            return await asyncio.gather(*(one(key, amount) for key, amount in asked))

        return asyncio.run(all())


class RESTASGITill(DjangoASGITill):
    rest = True


TILLS: dict[str, type[Till]] = {
    "asgi": EdgeTill,
    "fastapi": FastAPITill,
    "mounted": MountedTill,
    "litestar": LitestarTill,
    "wsgi": WSGIEdgeTill,
    "flask": FlaskTill,
    "django": DjangoTill,
    "rest": RESTTill,
    "django_asgi": DjangoASGITill,
    "rest_asgi": RESTASGITill,
}
