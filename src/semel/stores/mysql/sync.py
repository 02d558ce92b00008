"""The MySQL store for threads, by PyMySQL.

A few connections (lanes) serve all threads of the process; Ops that wait while the lanes are busy travel together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.errors import MissingDependency, SemelError
from semel.sql import mysql_migrations as migrations
from semel.sql.connections.mysql_errors import unreachable
from semel.sql.dialects import mysql as dialect
from semel.sql.program import run
from semel.sql.units import Unit, adopt_unit
from semel.stores.batching.combiner import Combiner
from semel.stores.batching.connection import RetryingConnection
from semel.stores.mysql.settings import CONNECT_TIMEOUT, CONNECTIONS, RETRY_FOR, TIMEOUT, Settings

if TYPE_CHECKING:
    from semel.sql.connections.pymysql import PyMySQLConnection

__all__ = ["MySQLStore", "check", "migrate"]

R = TypeVar("R")


def connect(settings: Settings) -> PyMySQLConnection:
    """A connection of ours: READ COMMITTED, strict, bounded, and taking several statements in one packet."""
    _require_pymysql()
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
            _drop(raw)
        raise unreachable(error) from error
    raw._read_timeout = settings.timeout + 1.0  # the server's own limit comes first, if it is alive
    return PyMySQLConnection(raw, own=True, max_packet=max_packet)


def _drop(raw: Any) -> None:
    with contextlib.suppress(Exception):  # closed already, or broken: both are what is wanted
        raw.close()


def migrate(url: str) -> list[str]:
    """Make or update the tables; answers what was applied. Safe to run in many processes at once."""
    connection = connect(Settings.for_migration(url))
    try:
        return migrations.migrate(connection)
    finally:
        _drop(connection.raw)


def check(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly the ones the migrations make."""
    connection = connect(Settings.for_migration(url))
    try:
        migrations.check(connection)
    finally:
        _drop(connection.raw)


class _MySQLSender:
    """One connection, opened when first needed, opened again when lost, and by a forked child."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: PyMySQLConnection | None = None
        self._left_behind: list[Any] = []
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Kept and never closed here: closing it would end the parent's session.
        self._left_behind.append(self._connection)
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
        except BaseException:  # interrupted in mid-statement: the connection still waits for that answer
            self.close()
            raise
        finally:
            if not connection.raw.open:
                self._connection = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            _drop(connection.raw)


class MySQLStore:
    """A store in MySQL 8 or MariaDB 10.6+, for threads. Connections are opened when first needed."""

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
        """
        :param url: ``mysql://user:password@host:3306/database``, or ``mariadb://…``; with ``?ssl=true`` or
            ``?ssl_ca=file`` over TLS.
        :param connections: connections; Ops beyond them travel together.
        :param timeout: how long the server may take for one statement.
        :param retry_for: how long a lost connection is sought again before an Op fails.
        """
        settings = Settings(url, connections, timeout, connect_timeout, retry_for)
        _require_pymysql()
        self._combiner = Combiner(
            [RetryingConnection(_MySQLSender(settings), settings.retry_for) for _ in range(connections)]
        )

    def execute(self, op: Op[R]) -> R:
        return cast(R, self._combiner.execute(op))

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return self._combiner.execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        time.sleep(min(seconds, 0.05))

    def adopt(self, connection: object) -> Unit:
        """The caller's connection as a unit of work: its records are written in the caller's transaction."""
        return adopt_unit(connection, "mysql", awaited=False)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._combiner.close()


def _require_pymysql() -> None:
    try:
        import pymysql  # noqa: F401
    except ImportError as error:
        raise MissingDependency("PyMySQL", "mysql") from error
