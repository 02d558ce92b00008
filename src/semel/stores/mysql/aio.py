"""The MySQL store for one event loop, by asyncmy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.errors import MissingDependency, StoreError, StoreUncertain
from semel.sql import mysql_migrations as migrations
from semel.sql.connections.mysql_errors import unreachable
from semel.sql.dialects import mysql as dialect
from semel.sql.program import run_async
from semel.sql.units import AsyncUnit, adopt_unit
from semel.stores.batching.aio_combiner import AsyncCombiner
from semel.stores.batching.aio_connection import AsyncRetryingConnection
from semel.stores.mysql.settings import CONNECT_TIMEOUT, CONNECTIONS, RETRY_FOR, TIMEOUT, Settings

if TYPE_CHECKING:
    from semel.sql.connections.asyncmy import AsyncmyConnection

__all__ = ["AsyncMySQLStore", "check_async", "migrate_async"]

R = TypeVar("R")


async def connect(settings: Settings) -> AsyncmyConnection:
    """A connection of ours: READ COMMITTED, strict, bounded, and taking several statements in one packet."""
    _require_asyncmy()
    from asyncmy.connection import Connection
    from asyncmy.constants import CLIENT

    from semel.sql.connections.asyncmy import DRIVER_ERRORS, AsyncmyConnection

    raw: Any = None
    try:
        async with asyncio.timeout(settings.connect_timeout):
            raw = Connection(  # type: ignore[no-untyped-call]
                **settings.where,
                autocommit=True,
                charset="utf8mb4",
                client_flag=CLIENT.FOUND_ROWS,
                program_name="semel",
                connect_timeout=settings.connect_timeout,
            )
            await raw.connect()
            async with raw.cursor() as cursor:
                for text in settings.session("mariadb" in raw.get_server_info().lower()):
                    await cursor.execute(text)
                max_packet = (await cursor.fetchone())[0]
    except (*DRIVER_ERRORS, TimeoutError, RuntimeError, ValueError) as error:
        if raw is not None:
            raw.close()
        raise unreachable(error) from error
    return AsyncmyConnection(raw, own=True, max_packet=max_packet)


async def _drop(raw: Any) -> None:
    with contextlib.suppress(Exception):  # closed already, or broken: both are what is wanted
        await raw.ensure_closed()


async def migrate_async(url: str) -> list[str]:
    """Make or update the tables; answers what was applied. Safe to run in many processes at once."""
    connection = await connect(Settings.for_migration(url))
    try:
        return await migrations.migrate_async(connection)
    finally:
        await _drop(connection.raw)


async def check_async(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly the ones the migrations make."""
    connection = await connect(Settings.for_migration(url))
    try:
        await migrations.check_async(connection)
    finally:
        await _drop(connection.raw)


class _AsyncMySQLSender:
    """One connection, opened when first needed and opened again when lost."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: AsyncmyConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_open(self) -> bool:
        return self._connection is not None

    async def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._loop is not loop:
            self._connection, self._loop = await connect(self._settings), loop
        connection = self._connection
        keep = False
        try:
            async with asyncio.timeout(self._settings.timeout + 1.0):
                await run_async(dialect.program(ops, answers, returning=connection.returning), connection)
            keep = True
        except TimeoutError as error:
            raise StoreUncertain(f"MySQL did not answer within {self._settings.timeout:g} s") from error
        except StoreUncertain:
            raise
        except StoreError:
            keep = True  # refused, and all is tidied up behind it
            raise
        finally:
            if not keep:
                connection.raw.close()
                self._connection = None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await _drop(connection.raw)


class AsyncMySQLStore:
    """A store in MySQL 8 or MariaDB 10.6+, for one event loop. Connections are opened when first needed."""

    wakes = False
    counts = True
    resumes = True
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
        """As of ``MySQLStore``."""
        settings = Settings(url, connections, timeout, connect_timeout, retry_for)
        _require_asyncmy()
        self._combiner = AsyncCombiner(
            [AsyncRetryingConnection(_AsyncMySQLSender(settings), settings.retry_for) for _ in range(connections)]
        )

    async def execute(self, op: Op[R]) -> R:
        return cast(R, await self._combiner.execute(op))

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._combiner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        await asyncio.sleep(min(seconds, 0.05))

    def adopt(self, connection: object) -> AsyncUnit:
        """The caller's connection as a unit of work: its records are written in the caller's transaction."""
        return adopt_unit(connection, "mysql", awaited=True)  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._combiner.close()


def _require_asyncmy() -> None:
    try:
        import asyncmy  # noqa: F401
    except ImportError as error:
        raise MissingDependency("asyncmy", "asyncmy") from error
