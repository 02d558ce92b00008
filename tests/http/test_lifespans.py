"""What happens when an application starts, and starts again: the guard opens, and missing tables are reported."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar import post as litestar_post
from litestar.testing import TestClient as LitestarClient

from semel import AsyncPostgresStore, AsyncRedisStore, AsyncSemel, AsyncSQLiteStore, NotMigrated
from semel.http import fastapi, litestar
from semel.stores.urls import migrate_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Starlette 1.3 would like another client
    from starlette.testclient import TestClient

HEADERS = {"Idempotency-Key": "k-1"}


def service(guard: AsyncSemel) -> tuple[FastAPI, list[int]]:
    """The service of the guide: a guard at the top of a module, closed when the service ends."""
    ran: list[int] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await guard.close()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders")
    @fastapi.idempotent()
    async def order() -> dict[str, int]:
        ran.append(1)
        return {"order": len(ran)}

    fastapi.install(app, guard=guard, tenant=lambda request: "shop")
    return app, ran


def _on(kind: str, *servers: str) -> Any:
    marks = [getattr(pytest.mark, server) for server in (*servers, "server")]
    return pytest.param(kind, marks=marks)


@pytest.mark.parametrize("kind", ["url", "sqlite", _on("postgres", "postgres"), _on("redis", "redis")])
def test_a_service_starts_twice_with_one_guard(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if kind == "url":
        guard = AsyncSemel(f"sqlite:///{tmp_path / 'app.db'}")
    elif kind == "sqlite":
        guard = AsyncSemel(AsyncSQLiteStore(tmp_path / "app.db"))
    elif kind == "postgres":
        url = request.getfixturevalue("postgres_url")
        migrate_store(url)
        guard = AsyncSemel(AsyncPostgresStore(url, connections=1))
    else:
        guard = AsyncSemel(AsyncRedisStore(request.getfixturevalue("redis_url")))
    app, ran = service(guard)
    for _ in range(3):
        with TestClient(app) as client:
            answer = client.post("/orders", headers=HEADERS)
            assert (answer.status_code, answer.json()) == (200, {"order": 1})
    assert ran == [1]


def test_litestar_starts_twice_with_one_guard(tmp_path: Path) -> None:
    guard = AsyncSemel(f"sqlite:///{tmp_path / 'app.db'}")
    ran: list[int] = []

    @litestar_post("/orders")
    @litestar.idempotent()
    async def order() -> dict[str, int]:
        ran.append(1)
        return {"order": len(ran)}

    plugin = litestar.SemelPlugin(guard=guard, tenant=lambda request: "shop")
    app = Litestar([order], plugins=[plugin], on_shutdown=[guard.close])
    for _ in range(2):
        with LitestarClient(app) as client:
            assert client.post("/orders", headers=HEADERS).json() == {"order": 1}
    assert ran == [1]


@pytest.fixture(
    params=[
        "sqlite",
        *(_on(server, server) for server in ("postgres", "mariadb", "dynamodb")),
        _on("tiered", "postgres", "redis"),
    ]
)
def without_tables(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], AsyncSemel]:
    if request.param == "sqlite":
        return lambda: AsyncSemel(AsyncSQLiteStore(tmp_path / "empty.db", migrate=False))
    if request.param == "tiered":
        names = request.getfixturevalue("postgres_url"), request.getfixturevalue("redis_url")
        return lambda: AsyncSemel("tiered:{},{}".format(*names))
    if request.param == "dynamodb":
        url = request.getfixturevalue("dynamodb").table()
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    return lambda: AsyncSemel(url)


def test_a_service_without_its_tables_does_not_start(without_tables: Callable[[], AsyncSemel]) -> None:
    app, _ = service(without_tables())
    with pytest.raises(NotMigrated, match="semel migrate"), TestClient(app):
        pytest.fail("it started")


def test_a_server_that_is_asked_to_start_hears_why_it_cannot(tmp_path: Path) -> None:
    app, _ = service(AsyncSemel(AsyncSQLiteStore(tmp_path / "empty.db", migrate=False)))
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        with pytest.raises(NotMigrated):
            await app({"type": "lifespan", "asgi": {}, "state": {}}, receive, send)

    asyncio.run(main())
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "semel migrate" in sent[0]["message"]


def test_a_service_starts_while_its_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    store = AsyncRedisStore("redis://127.0.0.1:1", retry_for=0, connect_timeout=0.2)
    app, ran = service(AsyncSemel(store))
    with caplog.at_level(logging.WARNING, "semel"), TestClient(app) as client:
        assert client.post("/orders", headers=HEADERS).status_code == 503
    assert "its store cannot be used" in caplog.text
    assert ran == []
