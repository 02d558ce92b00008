# Twin: sync.py is generated from this file by make twins.
# Twin: Asyncmy -> PyMySQL
# Twin: for one event loop, by asyncmy -> for threads, by PyMySQL
# Twin: for one event loop -> for threads
"""The MySQL store for one event loop, by asyncmy.

A few connections serve all callers. Ops that arrive while these are busy are sent together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.sql import aio as sql
from semel.sql.migrations import MYSQL
from semel.stores.batching.aio_combiner import AsyncCombiner
from semel.stores.batching.aio_connection import AsyncRetryingConnection
from semel.stores.mysql.connections import Asyncmy, MySQLSettings
from semel.stores.risks import Risk, mysql_risks
from semel.stores.settings import CONNECT_TIMEOUT, CONNECTIONS, RETRY_FOR, TIMEOUT

R = TypeVar("R")


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[sql.AsyncConnection]:
    driver = Asyncmy()
    connection = await driver.connect(MySQLSettings.for_migration(url))
    try:
        yield connection
    finally:
        await driver.close(connection)


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


class AsyncMySQLStore:
    """A store in MySQL 8 or MariaDB 10.6+, for one event loop. Connections are opened when first needed."""

    wakes = False
    counts = True
    resumes = True
    lists = True
    trails = True
    accept = None

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
        self._combiner = AsyncCombiner([AsyncRetryingConnection(driver, settings) for _ in range(connections)])

    async def execute(self, op: Op[R]) -> R:
        return await self._combiner.execute(op)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._combiner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        """The engine polls and never calls this."""
        await asyncio.sleep(min(seconds, 0.05))

    def adopt(self, connection: object) -> sql.AsyncSQLUnit:
        """The caller's connection as a unit of work: it writes records in the caller's transaction."""
        return sql.adopt_unit_async(connection, "mysql")

    def open(self) -> None:
        self._combiner.open()

    async def close(self) -> None:
        await self._combiner.close()
