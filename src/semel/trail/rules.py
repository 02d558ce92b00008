"""Which stores can keep a trail."""

from __future__ import annotations

from semel.engine.ports import AsyncStore, Store
from semel.errors import ConfigurationError


def check_trails(store: Store | AsyncStore) -> None:
    """Raise ConfigurationError if the store cannot keep a trail."""
    if not store.trails:
        raise ConfigurationError(
            f"{type(store).__name__} keeps no history of events: use a MemoryStore, SQLiteStore, PostgresStore, "
            "MySQLStore or RedisStore. It may be another store than that of the records"
        )
