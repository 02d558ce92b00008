"""Records in PostgreSQL, by psycopg 3 (sync, async) or asyncpg. Make the tables first: ``semel migrate postgresql://…``."""

from semel.stores.postgres.aio import AsyncPostgresStore, check_async, migrate_async, risks_async
from semel.stores.postgres.sync import PostgresStore, check, migrate, risks

__all__ = [
    "AsyncPostgresStore",
    "PostgresStore",
    "check",
    "check_async",
    "migrate",
    "migrate_async",
    "risks",
    "risks_async",
]
