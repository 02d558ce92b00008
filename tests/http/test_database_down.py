"""Transactional routes whose database cannot be reached: nothing was run, and the client is told to come again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import flask
import httpx
import psycopg
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from semel import AsyncPostgresStore, AsyncSemel, PostgresStore, Semel
from semel.http import fastapi as async_glue
from semel.http import flask as sync_glue

PASSWORD = "correct-horse"


@pytest.fixture
def dead() -> Iterator[str]:
    """The URL of a database where nobody listens: its port is taken, so that nobody else comes to do so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"postgresql://app:{PASSWORD}@127.0.0.1:{taken.getsockname()[1]}/shop"


def refused(answer: Any) -> None:
    body = answer.text if isinstance(answer.text, str) else answer.get_data(as_text=True)
    assert answer.status_code == 503, body
    assert "idempotency_store_unavailable" in body
    assert int(answer.headers["Retry-After"]) >= 1
    assert PASSWORD not in body


@contextmanager
def pooled(url: str) -> Iterator[Any]:
    with psycopg.connect(url) as conn:
        yield conn


@asynccontextmanager
async def awaited(url: str) -> Any:
    conn = await asyncpg.connect(url)
    yield conn


def engine_url(url: str, driver: str) -> str:
    return url.replace("postgresql:", f"postgresql+{driver}:")


SYNC: dict[str, Callable[[str], Callable[[], Any]]] = {
    "engine": lambda url: sa.create_engine(engine_url(url, "psycopg")).connect,
    "session": lambda url: sessionmaker(sa.create_engine(engine_url(url, "psycopg"))),
    "psycopg": lambda url: lambda: psycopg.connect(url),
    "manager": lambda url: lambda: pooled(url),
}
ASYNC: dict[str, Callable[[str], Callable[[], Any]]] = {
    "engine": lambda url: create_async_engine(engine_url(url, "asyncpg")).connect,
    "engine of psycopg": lambda url: create_async_engine(engine_url(url, "psycopg")).connect,
    "session": lambda url: async_sessionmaker(create_async_engine(engine_url(url, "asyncpg"))),
    "session of psycopg": lambda url: async_sessionmaker(create_async_engine(engine_url(url, "psycopg"))),
    "manager": lambda url: lambda: awaited(url),
}


@pytest.mark.parametrize("opened", SYNC.values(), ids=SYNC)
def test_flask_answers_503_and_runs_nothing(dead: str, opened: Callable[[str], Callable[[], Any]]) -> None:
    app = flask.Flask("shop")
    ran: list[int] = []
    with Semel(PostgresStore(dead, connections=1), sweep_every=None) as guard:
        sync_glue.install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @sync_glue.idempotent(connection=opened(dead))
        def pay() -> str:
            ran.append(1)
            return "paid"

        refused(app.test_client().post("/pay", headers={"Idempotency-Key": "k1"}))
    assert ran == []


@pytest.mark.parametrize("opened", ASYNC.values(), ids=ASYNC)
def test_fastapi_answers_503_and_runs_nothing(dead: str, opened: Callable[[str], Callable[[], Any]]) -> None:
    app = FastAPI()
    ran: list[int] = []

    async def main() -> httpx.Response:
        async with AsyncSemel(AsyncPostgresStore(dead, connections=1), sweep_every=None) as guard:
            async_glue.install(app, guard=guard, tenant=lambda request: "alice")

            @app.post("/pay")
            @async_glue.idempotent(connection=opened(dead))
            async def pay() -> str:
                ran.append(1)
                return "paid"

            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop", trust_env=False) as client:
                return await client.post("/pay", headers={"Idempotency-Key": "k1"})

    refused(asyncio.run(main()))
    assert ran == []


def test_what_opens_no_connection_at_all_is_a_mistake_and_no_outage(dead: str) -> None:
    app = flask.Flask("shop")
    with Semel(PostgresStore(dead, connections=1), sweep_every=None) as guard:
        sync_glue.install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/pay")
        @sync_glue.idempotent(connection=lambda: "no connection")
        def pay() -> str:
            return "paid"

        answer = app.test_client().post("/pay", headers={"Idempotency-Key": "k1"})
    assert answer.status_code == 500
    assert "Retry-After" not in answer.headers
