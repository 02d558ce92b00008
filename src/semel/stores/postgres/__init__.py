"""Records in PostgreSQL, by psycopg 3 (sync, async) or asyncpg. Make the tables first: ``semel migrate postgresql://…``."""

from semel.stores.postgres.aio import AsyncPostgresStore, migrate_async
from semel.stores.postgres.sync import PostgresStore, migrate

__all__ = ["AsyncPostgresStore", "PostgresStore", "migrate", "migrate_async"]
