"""The MySQL store's settings, and its connections: for threads, by PyMySQL, and for an event loop, by asyncmy.

The connections are written by hand. A thread's timeout is the socket's, its connection must not cross a fork, and
Ctrl-C may interrupt a statement anywhere. In an event loop a timeout cancels the statement, and a connection belongs to
one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.ops import Op
from semel.errors import StoreUncertain, StoreURLError
from semel.sql.aio import run_async
from semel.sql.connections.errors import connect_error
from semel.sql.dialects import mysql as dialect
from semel.sql.sync import run
from semel.stores.batching.batches import CONTENTION_TRIES
from semel.stores.settings import ServerSettings, require

if TYPE_CHECKING:
    from semel.sql.connections.asyncmy import AsyncmyConnection
    from semel.sql.connections.pymysql import PyMySQLConnection


PORT: Final = 3306
_OPTIONS: Final = ("ssl", "ssl_ca", "ssl_cert", "ssl_key", "unix_socket", "charset")


class MySQLSettings(ServerSettings):
    """The settings of one store."""

    where: dict[str, Any]
    """Arguments of the drivers' ``connect()``, by the names that both of them know."""

    def read_url(self) -> None:
        self.where = _parsed(self.url)

    def session(self, mariadb: bool) -> list[str]:
        """The statements that set up a session. The last one returns the largest packet that the server accepts."""
        # An Op that waited for a lock in vain is retried. All tries together stay within the timeout.
        lock_wait = max(1, int(self.timeout / CONTENTION_TRIES))
        slowest = (
            f"max_statement_time = {self.timeout:f}" if mariadb else f"max_execution_time = {int(self.timeout * 1000)}"
        )
        return [
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
            f"SET SESSION innodb_lock_wait_timeout = {lock_wait}, {slowest}",
            # Strict, so that nothing is ever cut to fit. Assignments run from left to right, as our statements expect.
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', sql_safe_updates = 0",
            "SELECT @@max_allowed_packet",
        ]


def _parsed(url: str) -> dict[str, Any]:
    """The parts of ``mysql://user:password@host:3306/database``. No error quotes it: it may contain the password."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise StoreURLError(
            "the MySQL URL cannot be read: percent-encode what is special in its user and password"
        ) from None
    database = unquote(parts.path[1:])
    if parts.scheme not in ("mysql", "mariadb") or not database or "/" in database or parts.fragment:
        raise StoreURLError("a MySQL URL is mysql://user:password@host:3306/database")
    if set(options) - set(_OPTIONS):  # not quoted: behind a ? in a password its rest looks like an option
        raise StoreURLError(f"a MySQL URL may have the options {', '.join(_OPTIONS)}, and this one has another")
    if options.get("charset", "utf8mb4") != "utf8mb4":
        raise StoreURLError("Semel always uses utf8mb4 on its own connections: leave charset out of the MySQL URL")
    where: dict[str, Any] = {
        "host": unquote(parts.hostname or "localhost"),
        "port": port,
        "user": unquote(parts.username or "") or None,
        # As bytes: the drivers encode text as Latin-1.
        "password": unquote(parts.password or "").encode(),
        "database": database,
    }
    if "unix_socket" in options:
        where["unix_socket"] = options["unix_socket"]
    if any(name.startswith("ssl") for name in options) and options.get("ssl", "true") != "false":
        where["ssl"] = _trusted(options)
    return where


def _trusted(options: dict[str, str]) -> ssl.SSLContext:
    """TLS that checks the server's certificate and name."""
    if options.get("ssl", "true") != "true":
        raise StoreURLError("ssl in a MySQL URL is true or false")
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca"))
        if "ssl_cert" in options:
            context.load_cert_chain(options["ssl_cert"], options.get("ssl_key"))
    except OSError as error:
        raise StoreURLError(f"a certificate or key that the MySQL URL names cannot be read: {error}") from error
    return context


# Threads


class PyMySQL:
    """Connections of PyMySQL."""

    def __init__(self) -> None:
        require("pymysql", "mysql", "PyMySQL")

    def connect(self, settings: MySQLSettings) -> PyMySQLConnection:
        """Open a connection: READ COMMITTED, strict, with timeouts, and for several statements in one packet."""
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
                _close(raw)
            raise connect_error("MySQL", error) from error
        # From here on the server's own limit comes first, if it is alive. PyMySQL has no public way to change it.
        raw._read_timeout = settings.timeout + 1.0
        return PyMySQLConnection(raw, own=True, max_packet=max_packet)

    def send(
        self, connection: PyMySQLConnection, settings: MySQLSettings, ops: Sequence[Op[Any]], answers: list[Any]
    ) -> None:
        run(dialect.program(ops, answers, returning=connection.returning), connection)

    def is_open(self, connection: PyMySQLConnection) -> bool:
        return bool(connection.raw.open)

    def close(self, connection: PyMySQLConnection) -> None:
        _close(connection.raw)

    interrupt = close


def _close(raw: Any) -> None:
    """Close a connection, which may be closed or broken already."""
    with contextlib.suppress(Exception):
        raw.close()


# An event loop


class Asyncmy:
    """Connections of asyncmy."""

    def __init__(self) -> None:
        require("asyncmy", "asyncmy")

    async def connect(self, settings: MySQLSettings) -> AsyncmyConnection:
        """Open a connection: READ COMMITTED, strict, with timeouts, and for several statements in one packet."""
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

    async def send(
        self, connection: AsyncmyConnection, settings: MySQLSettings, ops: Sequence[Op[Any]], answers: list[Any]
    ) -> None:
        try:
            async with asyncio.timeout(settings.timeout + 1.0):
                await run_async(dialect.program(ops, answers, returning=connection.returning), connection)
        except TimeoutError as error:
            self.interrupt(connection)
            raise StoreUncertain(f"MySQL did not answer within {settings.timeout:g} s") from error

    def is_open(self, connection: AsyncmyConnection) -> bool:
        return bool(connection.raw.connected)

    def interrupt(self, connection: AsyncmyConnection) -> None:
        connection.raw.close()

    async def close(self, connection: AsyncmyConnection) -> None:
        with contextlib.suppress(Exception):  # it may be closed or broken already
            await connection.raw.ensure_closed()
