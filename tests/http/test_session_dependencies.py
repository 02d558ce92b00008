"""Generators that yield a session: as ``connection=`` of a route, and as dependencies that commit too late."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import flask
import httpx
import pytest
import sqlalchemy as sa
from fastapi import APIRouter, Depends, FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from semel import AsyncMemoryStore, AsyncSemel, AsyncSQLiteStore, PolicyError, Semel, SQLiteStore
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import idempotent
from tests.http.asking import Counting, ask, whose

KEY = {"Idempotency-Key": "k"}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE payment (key text NOT NULL)")
    return path


def rows(file: str) -> int:
    with closing(sqlite3.connect(file)) as conn:
        return int(conn.execute("SELECT count(*) FROM payment").fetchone()[0])


INSERT = sa.text("INSERT INTO payment VALUES ('k')")


@pytest.mark.parametrize("ends", ["closes", "commits"])
def test_fastapis_usual_dependency_opens_the_session_of_a_route(file: str, ends: str) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{file}", poolclass=sa.NullPool)
    sessions = async_sessionmaker(engine)
    ended: list[str] = []

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session
            if ends == "commits":
                await session.commit()
        ended.append(ends)

    app = FastAPI()

    @app.post("/pay")
    @for_fastapi.idempotent(connection=get_session, connection_parameter="session")
    async def pay(session: AsyncSession, fail: bool = False) -> str:
        await session.execute(INSERT)
        if fail:
            raise RuntimeError("broke")
        return "paid"

    async def main() -> list[int]:
        async with AsyncSemel(AsyncSQLiteStore(file)) as guard:
            for_fastapi.install(app, guard=guard, tenant=whose)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                asked = ["/pay?fail=1", "/pay", "/pay"]
                answers = [(await client.post(path, headers={"Idempotency-Key": path})).status_code for path in asked]
        await engine.dispose()
        return answers

    assert asyncio.run(main()) == [500, 200, 200]
    assert rows(file) == 1
    assert ended == [ends, ends, ends]


def test_a_plain_generator_opens_the_session_of_a_flask_view(file: str) -> None:
    engine = sa.create_engine(f"sqlite:///{file}", poolclass=sa.NullPool)
    sessions = sessionmaker(engine)

    def get_session() -> Iterator[Session]:
        with sessions() as session:
            yield session

    app = flask.Flask("shop")
    guard = Semel(SQLiteStore(file))
    for_flask.install(app, guard=guard, tenant=whose)

    @app.post("/pay")
    @for_flask.idempotent(connection=get_session, connection_parameter="session")
    def pay(session: Session) -> str:
        session.execute(INSERT)
        return "paid"

    answers = [app.test_client().post("/pay", headers=KEY) for _ in range(2)]
    assert [answer.text for answer in answers] == ["paid", "paid"]
    assert rows(file) == 1
    guard.close()
    engine.dispose()


def plain() -> Iterator[None]:
    yield


async def awaited() -> AsyncIterator[None]:
    yield


async def coroutine() -> None: ...


@pytest.mark.parametrize(
    ("glue", "connection", "words"),
    [
        (for_fastapi, plain, "connection=plain is a plain generator.*async_sessionmaker"),
        (for_flask, awaited, "connection=awaited is async, and this service is not"),
        (for_fastapi, coroutine, "connection=coroutine returns a coroutine: let it yield"),
        (for_flask, coroutine, "connection=coroutine returns a coroutine: let it yield"),
    ],
)
def test_a_generator_of_the_other_kind_is_refused_when_it_is_declared(glue: Any, connection: Any, words: str) -> None:
    async def in_loop() -> None: ...

    def in_thread() -> None: ...

    with pytest.raises(PolicyError, match=words):
        glue.idempotent(connection=connection)(in_loop if glue is for_fastapi else in_thread)


def test_in_a_table_of_routes_it_is_refused_when_the_service_starts() -> None:
    routes = {"POST /pay": idempotent(connection=plain)}
    app = ASGIMiddleware(Counting(), guard=AsyncSemel(AsyncMemoryStore()), tenant=whose, routes=routes)
    with pytest.raises(PolicyError, match="connection=plain is a plain generator"):
        asyncio.run(ask(app))


# -- dependencies that commit when the answer is stored already


async def session_that_commits() -> AsyncIterator[str]:
    session: Any = None
    yield "session"
    await session.commit()


def session_that_begins() -> Iterator[str]:
    sessions: Any = None
    with sessions.begin() as session:
        yield session


async def session_that_closes() -> AsyncIterator[str]:
    session: Any = None
    yield "session"
    await session.close()


async def repository(session: Annotated[str, Depends(session_that_commits)]) -> str:
    return session


def started(dependency: Any, caplog: pytest.LogCaptureFixture, *, declared: bool = True, included: bool = False) -> str:
    app = FastAPI()
    router: Any = APIRouter() if included else app

    async def pay(session: Any = dependency) -> str:
        return str(session)

    rule: Callable[[Any], Any] = for_fastapi.idempotent() if declared else for_fastapi.natural()
    router.post("/pay")(rule(pay))
    if included:
        app.include_router(router, prefix="/api")
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    caplog.set_level(logging.WARNING, "semel.http")

    async def main() -> None:
        async with app.router.lifespan_context(app):
            await ask(app, {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []})

    asyncio.run(main())
    return caplog.text


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("dependency", "name"),
    [
        (Depends(session_that_commits), "session_that_commits"),
        (Depends(session_that_begins), "session_that_begins"),
        (Depends(partial(session_that_commits)), "session_that_commits"),
        (Depends(repository), "session_that_commits"),
    ],
)
def test_a_dependency_that_commits_after_the_answer_is_warned_of_at_start_up(
    dependency: Any, name: str, included: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text = started(dependency, caplog, included=included)
    assert f"{'/api' if included else ''}/pay (pay): the dependency {name} commits after the answer" in text
    assert f'Depends({name}, scope="function")' in text


@pytest.mark.parametrize(
    "dependency", [Depends(session_that_closes), Depends(session_that_commits, scope="function"), Depends(whose)]
)
def test_others_are_not(dependency: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert "commits after the answer" not in started(dependency, caplog)


def test_an_endpoint_whose_answer_is_not_stored_may_commit_late(caplog: pytest.LogCaptureFixture) -> None:
    assert "commits after" not in started(Depends(session_that_commits), caplog, declared=False)
