"""The MySQL store's connections: for threads, by PyMySQL, and for an event loop, by asyncmy.

Both are written by hand. A thread's timeout is the socket's, its connection must not cross a fork, and Ctrl-C may
interrupt a statement anywhere. In an event loop a timeout cancels the statement, and a connection belongs to one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.errors import MissingDependency, SemelError, StoreError, StoreUncertain
from semel.sql.aio import run_async
from semel.sql.connections.errors import connect_error
from semel.sql.dialects import mysql as dialect
from semel.sql.sync import run
from semel.stores.mysql.settings import MySQLSettings

if TYPE_CHECKING:
    from semel.sql.connections.asyncmy import AsyncmyConnection
    from semel.sql.connections.pymysql import PyMySQLConnection

# Threads


def require_pymysql() -> None:
    try:
        import pymysql  # noqa: F401
    except ImportError as error:
        raise MissingDependency("PyMySQL", "mysql") from error


def connect(settings: MySQLSettings) -> PyMySQLConnection:
    """Open a connection: READ COMMITTED, strict, with timeouts, and for several statements in one packet."""
    require_pymysql()
    import pymysql
    from pymysql.constants import CLIENT

    from semel.sql.connections.pymysql import DRIVER_ERRORS, PyMySQLConnection

    raw: Any = None
    try:
        raw = pymysql.connect(
            **settings.where,
            autocommit=True,
            charset="utf8mb4",
            client_flag=CLIENT.MULTI_STATEMENTS | CLIENT.FOUND_ROWS,
            program_name="semel",
            connect_timeout=settings.connect_timeout,
            read_timeout=settings.connect_timeout,
            write_timeout=settings.timeout + 1.0,
        )
        with raw.cursor() as cursor:
            for text in settings.session("mariadb" in raw.get_server_info().lower()):
                cursor.execute(text)
            max_packet = cursor.fetchone()[0]
    except (*DRIVER_ERRORS, RuntimeError, ValueError) as error:
        if raw is not None:
            disconnect(raw)
        raise connect_error("MySQL", error) from error
    # From here on the server's own limit comes first, if it is alive. PyMySQL has no public way to change it.
    raw._read_timeout = settings.timeout + 1.0
    return PyMySQLConnection(raw, own=True, max_packet=max_packet)


def disconnect(raw: Any) -> None:
    """Close a connection, which may be closed or broken already."""
    with contextlib.suppress(Exception):
        raw.close()


class MySQLSender:
    """Sends batches over one connection. It opens it when needed, again when it was lost, and in a forked child."""

    def __init__(self, settings: MySQLSettings) -> None:
        self._settings = settings
        self._connection: PyMySQLConnection | None = None
        self._parents: list[PyMySQLConnection | None] = []
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Keep a reference to the parent's connection: if it were closed here, the parent's session would end.
        self._parents.append(self._connection)
        self._connection = None

    def is_open(self) -> bool:
        return self._connection is not None

    def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        if self._connection is None:
            self._connection = connect(self._settings)
        connection = self._connection
        try:
            run(dialect.program(ops, answers, returning=connection.returning), connection)
        except SemelError:
            raise
        except BaseException:  # interrupted in a statement, whose answer would be read by the next one
            self.close()
            raise
        finally:
            if not connection.raw.open:
                self._connection = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            disconnect(connection.raw)


# An event loop


def require_asyncmy() -> None:
    try:
        import asyncmy  # noqa: F401
    except ImportError as error:
        raise MissingDependency("asyncmy", "asyncmy") from error


async def connect_async(settings: MySQLSettings) -> AsyncmyConnection:
    """Open a connection: READ COMMITTED, strict, with timeouts, and for several statements in one packet."""
    require_asyncmy()
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
        raise connect_error("MySQL", error) from error
    return AsyncmyConnection(raw, own=True, max_packet=max_packet)


async def disconnect_async(raw: Any) -> None:
    """Close a connection, which may be closed or broken already."""
    with contextlib.suppress(Exception):
        await raw.ensure_closed()


class AsyncMySQLSender:
    """Sends batches over one connection. It opens it when needed, again when it was lost, and for a new event loop."""

    def __init__(self, settings: MySQLSettings) -> None:
        self._settings = settings
        self._connection: AsyncmyConnection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def is_open(self) -> bool:
        return self._connection is not None

    async def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._loop is not loop:
            self._connection, self._loop = await connect_async(self._settings), loop
        connection = self._connection
        usable = False
        try:
            async with asyncio.timeout(self._settings.timeout + 1.0):
                await run_async(dialect.program(ops, answers, returning=connection.returning), connection)
            usable = True
        except TimeoutError as error:
            raise StoreUncertain(f"MySQL did not answer within {self._settings.timeout:g} s") from error
        except StoreUncertain:
            raise
        except StoreError:
            usable = True  # the server refused, and no transaction is left open
            raise
        finally:
            if not usable:
                connection.raw.close()
                self._connection = None

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await disconnect_async(connection.raw)
