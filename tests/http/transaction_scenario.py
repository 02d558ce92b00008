"""A payment over HTTP in one transaction, to be killed at every point: see ``test_in_transaction.py``."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sqlite3
import tempfile
from contextlib import closing

import httpx
import sqlalchemy as sa
from fastapi import FastAPI
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from semel import AsyncOperation, AsyncSemel, AsyncSQLiteStore, InProgress, SQLiteStore
from semel.http.fastapi import idempotent, install

# What the first request of a process imports, so that not each of many forks does.
for _each in (
    *("sqlalchemy.dialects.sqlite.aiosqlite", "aiosqlite", "pydantic.v1", "semel.http.describe.openapi"),
    *("semel.sql.connections.aio_sqlalchemy", "semel.sql.connections.aio_sqlite"),
):
    importlib.import_module(_each)


def world() -> str:
    folder = tempfile.mkdtemp(prefix="semel-transaction-")
    with closing(sqlite3.connect(f"{folder}/shop.db")) as conn:
        conn.execute("CREATE TABLE payment (key text NOT NULL)")
    SQLiteStore(f"{folder}/shop.db").close()
    return folder


def remove(folder: str) -> None:
    shutil.rmtree(folder)


def one_payment(folder: str) -> None:
    with closing(sqlite3.connect(f"{folder}/shop.db")) as conn:
        rows = conn.execute("SELECT count(*) FROM payment").fetchone()[0]
    assert rows == 1, f"{rows} payments"


def pay(folder: str) -> None:
    """One request; a 409 or 503 is raised as what a client would take it for: try again."""
    answer = asyncio.run(_asked(folder))
    if answer.status_code in (409, 503):
        raise InProgress(answer.text)
    assert answer.status_code == 201, answer.text


async def _asked(folder: str) -> httpx.Response:
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/shop.db", poolclass=sa.NullPool)
    app = FastAPI()
    guard = AsyncSemel(AsyncSQLiteStore(f"{folder}/shop.db", migrate=False), sweep_every=None)
    install(app, guard=guard, tenant=lambda request: "alice")

    @app.post("/pay", status_code=201)
    @idempotent(connection=async_sessionmaker(engine), connection_parameter="session")
    async def handler(session: AsyncSession, op: AsyncOperation) -> str:
        await session.execute(sa.text("INSERT INTO payment VALUES (:key)"), {"key": op.key})
        return "paid"

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", trust_env=False) as client:
        answer = await client.post("/pay", headers={"Idempotency-Key": "k1"})
    await guard.close()
    await engine.dispose()
    return answer
