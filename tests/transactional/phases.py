"""An operation of two steps whose rows stand in the store's own database: in worlds that it is killed in."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import asyncpg
import psycopg

from semel import (
    AsyncPostgresStore,
    AsyncSemel,
    LeaseLost,
    Policy,
    PostgresStore,
    Semel,
    SQLiteStore,
    Wait,
    current_operation,
)
from tests.transactional.kinds import TABLE

# What a first payment imports, so that not each of many forks does.
for _each in ("semel.sql.connections.sqlite", "semel.sql.connections.asyncpg", "semel.sql.connections.literals"):
    importlib.import_module(_each)

LEASE = 0.2
"""Longer than an operation takes: each renewal would be one more point, and a slow run would have many."""
STEPS = {"sqlite3": ("reserve", "book"), "psycopg": ("reserve",), "asyncpg": ("reserve",)}
World = tuple[str, str, str]
"""The kind of connection, where its database is, and the key."""


def store(path: str) -> SQLiteStore:
    return SQLiteStore(path, synchronous="normal")


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Worlds:
    """One database for all worlds of a test; each has a key of its own."""

    def __init__(self, kind: str, where: str) -> None:
        self._kind = kind
        self._where = where
        self._made = 0
        if kind == "sqlite3":
            store(where).close()
            with sqlite3.connect(where) as conn:
                conn.execute(TABLE)
            conn.close()

    def make(self) -> World:
        self._made += 1
        return self._kind, self._where, f"k{self._made}"


def ship(world: World) -> Any:
    """A phase or two, each a row and its mark in one transaction: nothing else keeps a row from being written twice."""
    kind, where, key = world
    for _ in range(100):
        with contextlib.suppress(LeaseLost):  # a busy machine can outlast so short a lease: the caller calls again
            return asyncio.run(_awaited(where, key)) if kind == "asyncpg" else _sync(kind, where, key)
    raise AssertionError("the lease was lost each time")


# A retry waits for the lease of the one that was killed: to ask again and again would open connections each time.
POLICY = Policy(lease=LEASE, completion_timeout="50ms", on_duplicate=Wait("20s"))


def _sync(kind: str, where: str, key: str) -> Any:
    conn: Any = sqlite3.connect(where, timeout=20) if kind == "sqlite3" else psycopg.connect(where)
    kept = store(where) if kind == "sqlite3" else PostgresStore(where, connections=1, listen=False)

    def write(what: str) -> str:
        conn.execute(f"INSERT INTO payment (key) VALUES ('{key}-{what}')")
        return what

    def work() -> list[str]:
        op: Any = current_operation()
        done = []
        for what in STEPS[kind]:
            done.append(op.step(what, write, what, connection=conn))
            conn.commit()
        return done

    try:
        with Semel(kept, policy=POLICY, sweep_every=None) as guard:
            return guard.run("ship", key=key, call=work)
    finally:
        conn.close()


async def _awaited(where: str, key: str) -> Any:
    conn = await asyncpg.connect(where)

    async def write(what: str) -> str:
        await conn.execute(f"INSERT INTO payment (key) VALUES ('{key}-{what}')")
        return what

    async def work() -> list[str]:
        op: Any = current_operation()
        done = []
        for what in STEPS["asyncpg"]:
            async with conn.transaction():
                done.append(await op.step(what, write, what, connection=conn))
        return done

    guard = AsyncSemel(AsyncPostgresStore(where, connections=1, listen=False), policy=POLICY, sweep_every=None)
    try:
        return await guard.run("ship", key=key, call=work)
    finally:
        await guard.close()
        await conn.close()


def check(world: World) -> None:
    kind, where, key = world
    conn: Any = sqlite3.connect(where) if kind == "sqlite3" else psycopg.connect(where)
    try:
        found = conn.execute(f"SELECT key FROM payment WHERE key LIKE '{key}-%' ORDER BY key").fetchall()
        assert [row[0] for row in found] == sorted(f"{key}-{what}" for what in STEPS[kind]), found
    finally:
        conn.close()
