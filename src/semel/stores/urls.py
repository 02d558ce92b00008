"""Stores by URL, for the command line and for configuration: ``sqlite:///app.db``, ``postgresql://…``, ``memory:``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote, urlsplit

from semel.engine.ports import AsyncStore, Store
from semel.errors import StoreURLError

__all__ = ["KINDS", "has_tables", "migrate_store", "open_async_store", "open_store"]


def open_store(url: str) -> Store:
    """A sync store; ``migrate_store`` makes its tables."""
    return _kind(url)[0](url)


def open_async_store(url: str) -> AsyncStore:
    """An async store."""
    return _kind(url)[1](url)


def migrate_store(url: str) -> list[str]:
    """Make or update the store's tables; answers what was applied."""
    migrate = _kind(url)[2]
    return [] if migrate is None else migrate(url)


def has_tables(url: str) -> bool:
    """Whether there is anything to make or to check: Redis and a process's memory need nothing."""
    return has_tables(tiers(url)[0]) if url.startswith("tiered:") else _kind(url)[2] is not None


def sqlite_path(url: str) -> str:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/") or path in ("", "/") or parts.query:
        raise StoreURLError(f"{url!r} is no SQLite URL: write sqlite:///file.db, or sqlite:////absolute/file.db")
    return path[1:]


def _memory(url: str) -> Store:
    from semel.stores.memory import MemoryStore

    return MemoryStore()


def _memory_async(url: str) -> AsyncStore:
    from semel.stores.memory import AsyncMemoryStore

    return AsyncMemoryStore()


def _sqlite(url: str) -> Store:
    from semel.stores.sqlite import SQLiteStore

    return SQLiteStore(sqlite_path(url))


def _sqlite_async(url: str) -> AsyncStore:
    from semel.stores.sqlite import AsyncSQLiteStore

    return AsyncSQLiteStore(sqlite_path(url))


def _sqlite_migrate(url: str) -> list[str]:
    from semel.stores.sqlite import migrate

    return migrate(sqlite_path(url))


def _postgres(url: str) -> Store:
    from semel.stores.postgres import PostgresStore

    return PostgresStore(url)


def _postgres_async(url: str) -> AsyncStore:
    from semel.stores.postgres import AsyncPostgresStore

    return AsyncPostgresStore(url)


def _postgres_migrate(url: str) -> list[str]:
    from semel.stores.postgres import migrate

    return migrate(url)


def _redis(url: str) -> Store:
    from semel.stores.redis import RedisStore

    return RedisStore(url)


def _redis_async(url: str) -> AsyncStore:
    from semel.stores.redis import AsyncRedisStore

    return AsyncRedisStore(url)


def _mysql(url: str) -> Store:
    from semel.stores.mysql import MySQLStore

    return MySQLStore(url)


def _mysql_async(url: str) -> AsyncStore:
    from semel.stores.mysql import AsyncMySQLStore

    return AsyncMySQLStore(url)


def _mysql_migrate(url: str) -> list[str]:
    from semel.stores.mysql import migrate

    return migrate(url)


def tiers(url: str) -> tuple[str, str]:
    """``tiered:postgresql://…,redis://…``: the URLs of the store that decides and of the cache in front of it.

    They are parted by the last comma before a Redis scheme, for a comma parts the hosts of Redis, too. It needs no
    quotes in a shell, and in a password it is written %2C.
    """
    found = re.fullmatch(r"tiered:(.+),((?:rediss?(?:\+sentinel|\+cluster)?|unix)://.*)", url, re.DOTALL)
    if found is None or found[1].startswith("tiered:"):
        raise StoreURLError(
            "a tiered store is the one that decides, a comma, and the Redis in front of it: "
            "write tiered:postgresql://user@host/database,redis://host:6379"
        )
    return found[1], found[2]


def _tiered(url: str) -> Store:
    from semel.stores.tiered import RedisCache, TieredStore

    primary, cache = tiers(url)
    return TieredStore(open_store(primary), RedisCache(cache))


def _tiered_async(url: str) -> AsyncStore:
    from semel.stores.tiered import AsyncRedisCache, AsyncTieredStore

    primary, cache = tiers(url)
    return AsyncTieredStore(open_async_store(primary), AsyncRedisCache(cache))


def _dynamodb(url: str) -> Store:
    from semel.stores.dynamodb import DynamoDBStore

    return DynamoDBStore(url)


def _dynamodb_async(url: str) -> AsyncStore:
    from semel.stores.dynamodb import AsyncDynamoDBStore

    return AsyncDynamoDBStore(url)


def _dynamodb_migrate(url: str) -> list[str]:
    from semel.stores.dynamodb import migrate

    return migrate(url)


_Kind = tuple[Callable[[str], Store], Callable[[str], AsyncStore], Callable[[str], list[str]] | None]
_POSTGRES: Final[_Kind] = (_postgres, _postgres_async, _postgres_migrate)
_MYSQL: Final[_Kind] = (_mysql, _mysql_async, _mysql_migrate)
_REDIS: Final[_Kind] = (_redis, _redis_async, None)

KINDS: Final[dict[str, _Kind]] = {
    "memory": (_memory, _memory_async, None),
    "sqlite": (_sqlite, _sqlite_async, _sqlite_migrate),
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "dynamodb": (_dynamodb, _dynamodb_async, _dynamodb_migrate),
    "redis": _REDIS,
    "rediss": _REDIS,
    "redis+sentinel": _REDIS,
    "rediss+sentinel": _REDIS,
    "redis+cluster": _REDIS,
    "rediss+cluster": _REDIS,
    "unix": _REDIS,
    "tiered": (_tiered, _tiered_async, lambda url: migrate_store(tiers(url)[0])),
}
"""What each URL scheme opens: sync, async, and what makes its tables, if it has any."""


def _kind(url: str) -> _Kind:
    scheme, colon, _ = url.partition(":")
    if not colon:
        kinds = ", ".join(KINDS)
        raise StoreURLError(f"{url[:40]!r} is no URL: write sqlite:///app.db for a file; there are also: {kinds}")
    if scheme not in KINDS:
        raise StoreURLError(f"no store is called {scheme[:40]!r}; there are: {', '.join(KINDS)}")
    return KINDS[scheme]
