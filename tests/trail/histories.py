"""Stores that keep a history, behind one small face: sync or async, they are called in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncMySQLStore,
    AsyncPostgresStore,
    AsyncRedisStore,
    AsyncSQLiteStore,
    MemoryStore,
    MySQLStore,
    PostgresStore,
    RedisStore,
    SQLiteStore,
)
from semel.core.ops import Op
from semel.trail import AsyncTrailReader, TrailReader

STORES: dict[str, Callable[[str], Any]] = {
    "memory": lambda url: MemoryStore(),
    "async-memory": lambda url: AsyncMemoryStore(),
    "sqlite": SQLiteStore,
    "async-sqlite": AsyncSQLiteStore,
    "postgres": lambda url: PostgresStore(url, connections=1, listen=False),
    "asyncpg": lambda url: AsyncPostgresStore(url, driver="asyncpg", connections=1, listen=False),
    "async-psycopg": lambda url: AsyncPostgresStore(url, driver="psycopg", connections=1, listen=False),
    "mysql": lambda url: MySQLStore(url, connections=1),
    "asyncmy": lambda url: AsyncMySQLStore(url, connections=1),
    "redis": RedisStore,
    "async-redis": AsyncRedisStore,
    "redis-cluster": RedisStore,
    "async-redis-cluster": AsyncRedisStore,
}
SERVERS = {"asyncpg": "postgres", "async-psycopg": "postgres", "asyncmy": "mysql"}
MARKS: dict[str, Any] = {
    "postgres": (pytest.mark.postgres, pytest.mark.server),
    "mysql": (pytest.mark.mariadb, pytest.mark.server),
    "redis": (pytest.mark.redis, pytest.mark.server),
    "redis-cluster": (pytest.mark.redis_cluster, pytest.mark.server),
}


def server_of(kind: str) -> str:
    return SERVERS.get(kind, kind.removeprefix("async-"))


def marked(*kinds: str) -> list[Any]:
    """The kinds as parameters of a test, marked with the server that they need."""
    return [pytest.param(kind, marks=MARKS.get(server_of(kind), ())) for kind in kinds]


class History:
    """A store and its reader. The methods of the reader are methods of this."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.url = kind, url
        self._runner = asyncio.Runner()
        self.store = self._runner.run(self._open(STORES[kind], url))
        self._awaited = asyncio.iscoroutinefunction(self.store.execute)
        self._reader: Any = AsyncTrailReader(self.store) if self._awaited else TrailReader(self.store)

    async def _open(self, store: Callable[[str], Any], url: str) -> Any:
        return store(url)

    def execute(self, op: Op[Any]) -> Any:
        return self._run(self.store.execute(op))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._reader, name)
        return lambda *values, **settings: self._run(method(*values, **settings))

    def close(self) -> None:
        self._run(self.store.close())
        self._runner.close()

    def _run(self, answer: Any) -> Any:
        return self._runner.run(answer) if asyncio.iscoroutine(answer) else answer
