# Twin: sync.py is generated from this file by make twins.
# Twin: , *, driver: DriverName | None = None ->
# Twin: url: str, driver: DriverName | None -> url: str
# Twin: (url, driver) -> (url)
# Twin: driver: DriverName | None = None, ->
# Twin: :param driver: ``"asyncpg"`` or ``"psycopg"``; by default asyncpg, where it is installed. ->
# Twin: for one event loop, by asyncpg or psycopg 3 -> for threads, by psycopg 3
# Twin: for one event loop -> for threads
"""The PostgreSQL store for one event loop, by asyncpg or psycopg 3."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager

from semel.core.messaging.messages import OUTBOX
from semel.core.ops import WatchRecord
from semel.core.policy import Duration
from semel.sql import aio as sql
from semel.sql.migrations import POSTGRES, statement
from semel.stores.batching.aio_connection import AsyncRetryingConnection, connected_async
from semel.stores.batching.aio_store import AsyncSQLStore

# sync: from semel.stores.postgres.connections import PostgresSettings, Psycopg, open_listener
from semel.stores.postgres.connections import DriverName, PostgresSettings, driver_named, open_listener_async
from semel.stores.risks import Risk, postgres_risks
from semel.stores.settings import CONNECT_TIMEOUT, CONNECTIONS, RETRY_FOR, TIMEOUT


def _connected(url: str, driver: DriverName | None) -> AbstractAsyncContextManager[sql.AsyncConnection]:
    # sync: return connected(Psycopg(), PostgresSettings.for_migration(url))
    return connected_async(driver_named(driver), PostgresSettings.for_migration(url))


async def migrate_async(url: str, *, driver: DriverName | None = None) -> list[str]:
    """Make or update the tables; return the names of the migrations that were applied.

    It may run in many processes at once.
    """
    async with _connected(url, driver) as connection:
        return await sql.migrate_async(connection, POSTGRES)


async def partition_inbox_async(url: str, *, driver: DriverName | None = None) -> bool:
    """Divide the inbox by the time in its ids, if they are UUIDs of version 7. Returns whether it was not divided yet.

    Old messages are then forgotten by dropping a table, and not by deleting rows. Consumers wait meanwhile.
    """
    async with _connected(url, driver) as connection:
        return bool((await connection.execute(statement("SELECT semel_partition_inbox()")))[0][0])


async def check_async(url: str, *, driver: DriverName | None = None) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly what the migrations make."""
    async with _connected(url, driver) as connection:
        await sql.check_async(connection, POSTGRES)


async def risks_async(url: str, *, driver: DriverName | None = None) -> list[Risk]:
    """Return the ways in which the server's settings can lose records."""
    async with _connected(url, driver) as connection:
        return await sql.run_async(postgres_risks(time.time), connection)


class AsyncPostgresStore(AsyncSQLStore):
    """A store in PostgreSQL, for one event loop. Connections are opened when first needed."""

    def __init__(
        self,
        url: str,
        *,
        driver: DriverName | None = None,
        connections: int = CONNECTIONS,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
        listen: bool = True,
    ) -> None:
        """
        :param url: ``postgresql://user:password@host/database``, or a libpq connection string.
        :param connections: how many connections to open. Further Ops are sent together.
        :param timeout: how long the server may take for one statement.
        :param connect_timeout: how long opening a connection may take.
        :param retry_for: how long to retry when the connection is lost, before an Op fails.
        :param listen: be woken by LISTEN/NOTIFY (one more connection); False: poll, as behind PgBouncer.
        :param driver: ``"asyncpg"`` or ``"psycopg"``; by default asyncpg, where it is installed.
        """
        settings = PostgresSettings(url, connections, timeout, connect_timeout, retry_for)
        chosen = driver_named(driver)  # sync: chosen = Psycopg()
        self.wakes = listen
        # sync only: self._watchdog = chosen.watchdog
        self._listener = open_listener_async(settings, chosen)
        super().__init__("postgresql", [AsyncRetryingConnection(chosen, settings) for _ in range(connections)])

    async def wait(self, id: bytes, seconds: float) -> None:
        async def lease_left() -> float | None:
            # Who adds a message to the outbox always notifies, so a relay does not ask for it.
            return seconds if id == OUTBOX else await self.execute(WatchRecord(id))

        await self._listener.wait(id.hex(), seconds, lease_left)

    # sync only: def open(self) -> None:
    # sync only:     self._listener.resume()
    # sync only:     self._watchdog.resume()
    # sync only:     super().open()
    # sync only:
    async def close(self) -> None:
        await self._listener.stop()
        # sync only: self._watchdog.stop()
        await super().close()
