"""The two async drivers behind one small face: open, close, listen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

from semel.errors import ConfigurationError, MissingDependency
from semel.sql.dialects.postgres import CHANNEL
from semel.sql.program import AsyncConnection
from semel.stores.postgres.settings import Settings, unreachable, unreadable

__all__ = ["Driver", "DriverName", "driver_named"]

DriverName: TypeAlias = Literal["asyncpg", "psycopg"]


class Driver(Protocol):
    """Opens connections of one library."""

    async def connect(self, settings: Settings) -> AsyncConnection: ...

    def is_closed(self, connection: Any) -> bool: ...

    def abort(self, connection: Any) -> None:
        """Break the connection without a word to the server."""
        ...

    async def close(self, connection: Any) -> None: ...

    async def listen(self, connection: Any, ready: Callable[[], object], heard: Callable[[str], object]) -> None:
        """Hand every notification to ``heard`` until the connection is lost."""
        ...


class Asyncpg:
    async def connect(self, settings: Settings) -> AsyncConnection:
        import asyncpg

        from semel.sql.connections.asyncpg import AsyncpgConnection

        try:
            raw = await asyncpg.connect(
                settings.url, timeout=settings.connect_timeout, server_settings=settings.session(), command_timeout=None
            )
        except ValueError:
            raise unreadable() from None
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise unreachable(error) from error
        return AsyncpgConnection(raw)

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.raw.is_closed())

    def abort(self, connection: Any) -> None:
        connection.raw.terminate()

    async def close(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            await connection.raw.close(timeout=2)

    async def listen(self, connection: Any, ready: Callable[[], object], heard: Callable[[str], object]) -> None:
        lost = asyncio.Event()
        connection.raw.add_termination_listener(lambda raw: lost.set())
        await connection.raw.add_listener(CHANNEL, lambda raw, pid, channel, payload: heard(payload))
        ready()
        await lost.wait()


class AsyncPsycopg:
    async def connect(self, settings: Settings) -> AsyncConnection:
        import psycopg

        from semel.sql.connections.psycopg import AsyncPsycopgConnection

        wanted = settings.for_psycopg()
        try:
            raw = await psycopg.AsyncConnection.connect(**wanted)
        except psycopg.Error as error:
            raise unreachable(error) from error
        return AsyncPsycopgConnection(raw)

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.raw.closed)

    def abort(self, connection: Any) -> None:
        connection.raw.pgconn.finish()

    async def close(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            await connection.raw.close()

    async def listen(self, connection: Any, ready: Callable[[], object], heard: Callable[[str], object]) -> None:
        await connection.raw.execute(f"LISTEN {CHANNEL}")
        ready()
        async for notification in connection.raw.notifies():
            heard(notification.payload)


def driver_named(name: DriverName | None) -> Driver:
    """asyncpg where it is installed, psycopg otherwise, unless one is asked for."""
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
