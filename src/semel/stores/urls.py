"""Stores by URL, for the command line and for configuration: ``sqlite:///app.db``, ``postgresql://…``, ``memory:``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import unquote, urlsplit

from semel.engine.ports import AsyncStore, Store
from semel.errors import StoreURLError

__all__ = ["KINDS", "migrate_store", "open_async_store", "open_store"]


def open_store(url: str) -> Store:
    """A sync store; ``migrate_store`` makes its tables."""
    return _kind(url)[0](url)


def open_async_store(url: str) -> AsyncStore:
    """An async store."""
    return _kind(url)[1](url)


def migrate_store(url: str) -> list[str]:
    """Make or update the store's tables; answers what was applied."""
    return _kind(url)[2](url)


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


_Kind = tuple[Callable[[str], Store], Callable[[str], AsyncStore], Callable[[str], list[str]]]
_POSTGRES: Final[_Kind] = (_postgres, _postgres_async, _postgres_migrate)

KINDS: Final[dict[str, _Kind]] = {
    "memory": (_memory, _memory_async, lambda url: []),
    "sqlite": (_sqlite, _sqlite_async, _sqlite_migrate),
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
}
"""What each URL scheme opens."""


def _kind(url: str) -> _Kind:
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in KINDS:
        raise StoreURLError(f"no store is called {scheme[:40]!r}; there are: {', '.join(KINDS)}")
    return KINDS[scheme]
