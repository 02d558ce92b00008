"""The MySQL store's connections for threads, by PyMySQL.

Written by hand beside ``tasks.py``: here a timeout is the socket's, a connection must not cross a fork, and Ctrl-C may
interrupt a statement anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.errors import MissingDependency, SemelError
from semel.sql.connections.errors import connect_error
from semel.sql.dialects import mysql as dialect
from semel.sql.sync import run
from semel.stores.mysql.settings import MySQLSettings

if TYPE_CHECKING:
    from semel.sql.connections.pymysql import PyMySQLConnection

__all__ = ["MySQLSender", "connect", "disconnect", "require_driver"]


def require_driver() -> None:
    try:
        import pymysql  # noqa: F401
    except ImportError as error:
        raise MissingDependency("PyMySQL", "mysql") from error


def connect(settings: MySQLSettings) -> PyMySQLConnection:
    """Open a connection: READ COMMITTED, strict, with timeouts, and for several statements in one packet."""
    require_driver()
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
