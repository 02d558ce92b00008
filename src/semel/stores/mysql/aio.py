# Twin: sync.py is generated from this file by make twins.
# Twin: Asyncmy -> PyMySQL
# Twin: for one event loop, by asyncmy -> for threads, by PyMySQL
# Twin: for one event loop -> for threads
"""The MySQL store for one event loop, by asyncmy."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager

from semel.core.policy import Duration
from semel.sql import aio as sql
from semel.sql.migrations import MYSQL
from semel.stores.batching.aio_connection import AsyncRetryingConnection, connected_async
from semel.stores.batching.aio_store import AsyncSQLStore
from semel.stores.mysql.connections import Asyncmy, MySQLSettings
from semel.stores.risks import Risk, mysql_risks
from semel.stores.settings import CONNECT_TIMEOUT, CONNECTIONS, RETRY_FOR, TIMEOUT


def _connected(url: str) -> AbstractAsyncContextManager[sql.AsyncConnection]:
    return connected_async(Asyncmy(), MySQLSettings.for_migration(url))


async def migrate_async(url: str) -> list[str]:
    """Make or update the tables; return the names of the migrations that were applied.

    It may run in many processes at once.
    """
    async with _connected(url) as connection:
        return await sql.migrate_async(connection, MYSQL)


async def check_async(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly what the migrations make."""
    async with _connected(url) as connection:
        await sql.check_async(connection, MYSQL)


async def risks_async(url: str) -> list[Risk]:
    """Return the ways in which the server's settings can lose records."""
    async with _connected(url) as connection:
        return await sql.run_async(mysql_risks(time.time), connection)


class AsyncMySQLStore(AsyncSQLStore):
    """A store in MySQL 8 or MariaDB 10.6+, for one event loop. Connections are opened when first needed."""

    def __init__(
        self,
        url: str,
        *,
        connections: int = CONNECTIONS,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
    ) -> None:
        """
        :param url: ``mysql://user:password@host:3306/database``, or ``mariadb://…``; with ``?ssl=true`` or
            ``?ssl_ca=file`` over TLS.
        :param connections: how many connections to open. Further Ops are sent together.
        :param timeout: how long the server may take for one statement.
        :param connect_timeout: how long opening a connection may take.
        :param retry_for: how long to retry when the connection is lost, before an Op fails.
        """
        settings = MySQLSettings(url, connections, timeout, connect_timeout, retry_for)
        driver = Asyncmy()
        super().__init__("mysql", [AsyncRetryingConnection(driver, settings) for _ in range(connections)])
