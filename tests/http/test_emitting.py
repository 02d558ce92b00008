"""``op.emit`` in routes whose rows and answer commit together: the message commits with them, and knows its lineage."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import flask
import httpx
import sqlalchemy as sa
from fastapi import FastAPI, HTTPException
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from semel import AsyncOperation, AsyncSemel, AsyncSQLiteStore, Operation, Semel, SQLiteStore
from semel.http import fastapi as async_glue
from semel.http import flask as sync_glue
from semel.observe import events
from semel.observe.events import Event

TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
HEADERS = {"Idempotency-Key": "k1", "Idempotency-Root": "first", "Idempotency-Parent": "before", "traceparent": TRACE}


def check(path: Path, statuses: list[int], told: list[Event]) -> None:
    assert statuses == [201, 201, 409]
    emitted = [event for event in told if isinstance(event, events.Emitted)]
    assert [(event.operation, event.tenant, event.key) for event in emitted] == [
        ("POST /pay", "alice", "k1"),
        ("POST /pay", "alice", "k2"),  # rolled back later on
    ]
    with closing(sqlite3.connect(path)) as conn:
        ((id, data, headers),) = conn.execute("SELECT id, data, headers FROM semel_outbox").fetchall()
    assert data == b'{"n":1}'
    assert (emitted[0].message, emitted[0].type) == (id, "paid")
    assert json.loads(headers) == {
        "idempotency-key": id,
        "idempotency-root": "first",
        "idempotency-parent": "k1",
        "traceparent": TRACE,
        "causation-id": "k1",
    }


def test_fastapi(tmp_path: Path) -> None:
    path, told = tmp_path / "shop.db", list[Event]()

    async def main() -> list[int]:
        engine = create_async_engine(f"sqlite+aiosqlite:///{path}", poolclass=sa.NullPool)
        sessions = async_sessionmaker(engine)
        app = FastAPI()
        guard = AsyncSemel(AsyncSQLiteStore(path), sweep_every=None, on_event=told.append)
        async_glue.install(app, guard=guard, tenant=lambda request: "alice")

        @app.post("/pay", status_code=201)
        @async_glue.idempotent(connection=sessions, connection_parameter="session")
        async def pay(session: AsyncSession, op: AsyncOperation) -> None:
            await op.emit("paid", {"n": 1})
            if op.key == "k2":
                raise HTTPException(409)

        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")
        keys = ("k1", "k1", "k2")
        found = [(await client.post("/pay", headers={**HEADERS, "Idempotency-Key": key})).status_code for key in keys]
        await client.aclose()
        await guard.close()
        await engine.dispose()
        return found

    check(path, asyncio.run(main()), told)


def test_flask(tmp_path: Path) -> None:
    path, told = tmp_path / "shop.db", list[Event]()
    engine = sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)
    app = flask.Flask("shop")
    guard = Semel(SQLiteStore(path), sweep_every=None, on_event=told.append)
    sync_glue.install(app, guard=guard, tenant=lambda request: "alice")

    @app.post("/pay")
    @sync_glue.idempotent(connection=engine.connect, connection_parameter="conn")
    def pay(conn: sa.Connection, op: Operation) -> Any:
        op.emit("paid", {"n": 1})
        if op.key == "k2":
            flask.abort(409)
        return {}, 201

    client = app.test_client()
    keys = ("k1", "k1", "k2")
    statuses = [client.post("/pay", headers={**HEADERS, "Idempotency-Key": key}).status_code for key in keys]
    guard.close()
    engine.dispose()
    check(path, statuses, told)
