"""Records in PostgreSQL, by psycopg 3 (sync, async) or asyncpg. Make the tables first: ``semel migrate postgresql://…``."""

from semel.stores.postgres.aio import AsyncPostgresStore, check_async, migrate_async, partition_inbox_async, risks_async
from semel.stores.postgres.sync import PostgresStore, check, migrate, partition_inbox, risks

__all__ = [
    "AsyncPostgresStore",
    "PostgresStore",
    "check",
    "check_async",
    "migrate",
    "migrate_async",
    "partition_inbox",
    "partition_inbox_async",
    "risks",
    "risks_async",
]
