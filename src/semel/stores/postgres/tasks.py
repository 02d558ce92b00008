"""The PostgreSQL store's connections and listening task for an event loop, by asyncpg or psycopg 3.

Written by hand beside ``threads.py``: here a timeout cancels the statement, a task listens for notifications, a
connection belongs to one event loop, and there are two drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from semel.core.ops import Op
from semel.errors import ConfigurationError, MissingDependency, StoreUncertain
from semel.sql.aio import AsyncConnection, run_async
from semel.sql.connections.errors import connect_error
from semel.sql.dialects import postgres as dialect
from semel.stores.listening import AsyncListener
from semel.stores.postgres.settings import PostgresSettings, unreadable_url

__all__ = ["AsyncDriver", "AsyncPostgresSender", "DriverName", "driver_named", "open_listener"]

DriverName: TypeAlias = Literal["asyncpg", "psycopg"]


class AsyncDriver(Protocol):
    """Opens and closes connections of one library."""

    async def connect(self, settings: PostgresSettings) -> AsyncConnection: ...

    def is_closed(self, connection: Any) -> bool: ...

    def abort(self, connection: Any) -> None:
        """Break the connection without telling the server."""
        ...

    async def close(self, connection: Any) -> None: ...

    async def listen(self, connection: Any, ready: Callable[[], object], notify: Callable[[str], object]) -> None:
        """Call ``ready``, then ``notify`` with the payload of every notification, until the connection is lost."""
        ...


class Asyncpg:
    """Connections of asyncpg."""

    async def connect(self, settings: PostgresSettings) -> AsyncConnection:
        import asyncpg

        from semel.sql.connections.asyncpg import AsyncpgConnection

        try:
            raw = await asyncpg.connect(
                settings.url, timeout=settings.connect_timeout, server_settings=settings.session(), command_timeout=None
            )
        except ValueError:
            raise unreadable_url() from None
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise connect_error("PostgreSQL", error) from error
        return AsyncpgConnection(raw)

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.raw.is_closed())

    def abort(self, connection: Any) -> None:
        connection.raw.terminate()

    async def close(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            await connection.raw.close(timeout=2)

    async def listen(self, connection: Any, ready: Callable[[], object], notify: Callable[[str], object]) -> None:
        lost = asyncio.Event()
        connection.raw.add_termination_listener(lambda raw: lost.set())
        await connection.raw.add_listener(dialect.CHANNEL, lambda raw, pid, channel, payload: notify(payload))
        ready()
        await lost.wait()


class AsyncPsycopg:
    """Async connections of psycopg 3."""

    async def connect(self, settings: PostgresSettings) -> AsyncConnection:
        import psycopg

        from semel.sql.connections.aio_psycopg import AsyncPsycopgConnection

        arguments = settings.for_psycopg()
        try:
            raw = await psycopg.AsyncConnection.connect(**arguments)
        except psycopg.Error as error:
            raise connect_error("PostgreSQL", error) from error
        return AsyncPsycopgConnection(raw)

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.raw.closed)

    def abort(self, connection: Any) -> None:
        connection.raw.pgconn.finish()

    async def close(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            await connection.raw.close()

    async def listen(self, connection: Any, ready: Callable[[], object], notify: Callable[[str], object]) -> None:
        await connection.raw.execute(f"LISTEN {dialect.CHANNEL}")
        ready()
        async for notification in connection.raw.notifies():
            notify(notification.payload)


def driver_named(name: DriverName | None) -> AsyncDriver:
    """The driver of this name; by default asyncpg where it is installed, and otherwise psycopg."""
    if name not in (None, "asyncpg", "psycopg"):
        raise ConfigurationError(f'driver is "asyncpg" or "psycopg", not {name!r}')
    if name in (None, "asyncpg"):
        try:
            import asyncpg  # noqa: F401

            return Asyncpg()
        except ImportError as error:
            if name == "asyncpg":
                raise MissingDependency("asyncpg", "asyncpg") from error
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingDependency("asyncpg or psycopg", "postgres") from error
    return AsyncPsycopg()


class AsyncPostgresSender:
    """Sends batches over one connection. It opens it when needed, again when it was lost, and for a new event loop."""

    def __init__(self, settings: PostgresSettings, driver: AsyncDriver) -> None:
        self._settings = settings
        self._driver = driver
        self._connection: AsyncConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_open(self) -> bool:
        return self._connection is not None

    async def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._loop is not loop:
            self._connection, self._loop = await self._driver.connect(self._settings), loop
        connection = self._connection
        try:
            async with asyncio.timeout(self._settings.timeout + 1.0):
                await run_async(dialect.program(ops, answers), connection)
        except TimeoutError as error:
            self._driver.abort(connection)
            raise StoreUncertain(f"PostgreSQL did not answer within {self._settings.timeout:g} s") from error
        finally:
            if self._driver.is_closed(connection):
                self._connection = None

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self._driver.close(connection)


def open_listener(settings: PostgresSettings, driver: AsyncDriver) -> AsyncListener:
    """A listener to the channel of all records, over a connection of its own."""

    async def receive(ready: Callable[[], None], wake: Callable[[Any], None]) -> None:
        connection = await driver.connect(settings)
        try:
            await driver.listen(connection, ready, wake)
        finally:
            await driver.close(connection)

    return AsyncListener(receive)
