"""The PostgreSQL store for one event loop, by asyncpg or psycopg 3."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.errors import StoreUncertain
from semel.sql import migrations
from semel.sql.dialects import postgres as dialect
from semel.sql.program import run_async
from semel.sql.units import AsyncUnit, adopt_unit
from semel.stores.batching.aio_combiner import AsyncCombiner
from semel.stores.batching.aio_connection import AsyncRetryingConnection
from semel.stores.postgres.drivers import Driver, DriverName, driver_named
from semel.stores.postgres.settings import (
    CONNECT_TIMEOUT,
    CONNECTIONS,
    LISTEN_AGAIN,
    RETRY_FOR,
    TIMEOUT,
    Settings,
)

__all__ = ["AsyncPostgresStore", "check_async", "migrate_async"]

R = TypeVar("R")


async def migrate_async(url: str, *, driver: DriverName | None = None) -> list[str]:
    """Make or update the tables; answers what was applied. Safe to run in many processes at once."""
    chosen = driver_named(driver)
    connection = await chosen.connect(Settings.for_migration(url))
    try:
        return await migrations.migrate_async(connection, migrations.POSTGRES)
    finally:
        await chosen.close(connection)


async def check_async(url: str, *, driver: DriverName | None = None) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly the ones the migrations make."""
    chosen = driver_named(driver)
    connection = await chosen.connect(Settings.for_migration(url))
    try:
        await migrations.check_async(connection, migrations.POSTGRES)
    finally:
        await chosen.close(connection)


class _AsyncPostgresSender:
    """One connection, opened when first needed and opened again when lost."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self._settings = settings
        self._driver = driver
        self._connection: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_open(self) -> bool:
        return self._connection is not None

    async def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._loop is not loop:
            self._connection, self._loop = await self._driver.connect(self._settings), loop
        try:
            async with asyncio.timeout(self._settings.timeout + 1.0):
                await run_async(dialect.program(ops, answers), self._connection)
        except TimeoutError as error:
            self._driver.abort(self._connection)
            raise StoreUncertain(f"PostgreSQL did not answer within {self._settings.timeout:g} s") from error
        finally:
            if self._driver.is_closed(self._connection):
                self._connection = None

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self._driver.close(connection)


class _Listener:
    """One connection and task that hear which records are done, and wake who waits for them."""

    def __init__(self, settings: Settings, driver: Driver) -> None:
        self._settings = settings
        self._driver = driver
        self._gates: dict[str, list[asyncio.Future[None]]] = {}
        self._hears = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def listen(self, seconds: float) -> bool:
        """Start if need be; whether notifications are heard."""
        if self._task is None or self._task.done():
            self._hears = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._hear(), name="semel-listener")
        try:
            async with asyncio.timeout(min(seconds, self._settings.connect_timeout)):
                await self._hears.wait()
        except TimeoutError:
            return False
        return True

    def enter(self, id: bytes) -> asyncio.Future[None]:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gates.setdefault(id.hex(), []).append(gate)
        return gate

    def leave(self, id: bytes, gate: asyncio.Future[None]) -> None:
        gates = self._gates.get(id.hex())
        if gates is not None and gate in gates:
            gates.remove(gate)
            if not gates:
                del self._gates[id.hex()]

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _hear(self) -> None:
        while True:
            connection: Any = None
            try:
                connection = await self._driver.connect(self._settings)
                await self._driver.listen(connection, self._ready, self._wake)
            except asyncio.CancelledError:
                raise
            except Exception:  # whatever broke: open it again; waiters look for themselves meanwhile
                await asyncio.sleep(0.25)
            finally:
                self._hears.clear()
                self._wake_all()
                if connection is not None:
                    with contextlib.suppress(Exception):
                        await self._driver.close(connection)

    def _ready(self) -> None:
        self._hears.set()
        self._wake_all()  # whatever was said while nobody listened

    def _wake_all(self) -> None:
        for id in list(self._gates):
            self._wake(id)

    def _wake(self, id: str) -> None:
        for gate in self._gates.pop(id, ()):
            if not gate.done():
                gate.set_result(None)


class AsyncPostgresStore:
    """A store in PostgreSQL, for one event loop. Connections are opened when first needed."""

    counts = True
    resumes = True
    accept = None

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
        """As of ``PostgresStore``, and:

        :param driver: ``"asyncpg"`` or ``"psycopg"``; by default the former where it is installed.
        """
        settings = Settings(url, connections, timeout, connect_timeout, retry_for)
        chosen = driver_named(driver)
        self.wakes = listen
        self._listener = _Listener(settings, chosen)
        self._combiner = AsyncCombiner(
            [
                AsyncRetryingConnection(_AsyncPostgresSender(settings, chosen), settings.retry_for)
                for _ in range(connections)
            ]
        )

    async def execute(self, op: Op[R]) -> R:
        return cast(R, await self._combiner.execute(op))

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._combiner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        if not await self._listener.listen(seconds):
            await asyncio.sleep(min(seconds, LISTEN_AGAIN / 4))
            return
        gate = self._listener.enter(id)  # before we ask to be told, so that no answer can slip in between
        try:
            lease_left = await self.execute(dialect.Watch(id))
            if lease_left is not None:
                await asyncio.wait([gate], timeout=max(0.0, min(seconds, lease_left, LISTEN_AGAIN)))
        finally:
            self._listener.leave(id, gate)

    def adopt(self, connection: object) -> AsyncUnit:
        """The caller's connection as a unit of work: its records are written in the caller's transaction."""
        return adopt_unit(connection, "postgresql", awaited=True)  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._listener.stop()
        await self._combiner.close()
