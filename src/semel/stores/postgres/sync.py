"""The PostgreSQL store for threads, by psycopg 3.

A few connections (lanes) serve all threads of the process; Ops that wait while the lanes are busy travel together.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration
from semel.engine.forking import survive_forks
from semel.errors import MissingDependency, SemelError
from semel.sql import migrations
from semel.sql.dialects import postgres as dialect
from semel.sql.program import run
from semel.sql.units import Unit, adopt_unit
from semel.stores.batching.combiner import Combiner
from semel.stores.batching.connection import RetryingConnection
from semel.stores.postgres.settings import (
    CONNECT_TIMEOUT,
    CONNECTIONS,
    LISTEN_AGAIN,
    RETRY_FOR,
    TIMEOUT,
    Settings,
    unreachable,
)
from semel.stores.postgres.threads import Listener, Watchdog

if TYPE_CHECKING:
    from semel.sql.connections.psycopg import PsycopgConnection

__all__ = ["PostgresStore", "check", "migrate"]

R = TypeVar("R")


def connect(settings: Settings) -> PsycopgConnection:
    try:
        import psycopg

        from semel.sql.connections.psycopg import PsycopgConnection
    except ImportError as error:
        raise MissingDependency("psycopg", "postgres") from error
    wanted = settings.for_psycopg()
    try:
        raw = psycopg.connect(**wanted)
    except psycopg.Error as error:
        raise unreachable(error) from error
    return PsycopgConnection(raw)


def migrate(url: str) -> list[str]:
    """Make or update the tables; answers what was applied. Safe to run in many processes at once."""
    connection = connect(Settings.for_migration(url))
    try:
        return migrations.migrate(connection, migrations.POSTGRES)
    finally:
        connection.raw.close()


def check(url: str) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly the ones the migrations make."""
    connection = connect(Settings.for_migration(url))
    try:
        migrations.check(connection, migrations.POSTGRES)
    finally:
        connection.raw.close()


class _PostgresSender:
    """One connection, opened when first needed, opened again when lost, and by a forked child."""

    def __init__(self, settings: Settings, watchdog: Watchdog) -> None:
        self._settings = settings
        self._watchdog = watchdog
        self._connection: PsycopgConnection | None = None
        self._left_behind: list[Any] = []
        self.overdue_at = float("inf")
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Kept and never closed here: closing it would end the parent's session.
        self._left_behind.append(self._connection)
        self._connection = None
        self.overdue_at = float("inf")  # the trip in hand is the parent's

    def is_open(self) -> bool:
        return self._connection is not None

    def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        connection = self._open()
        self.overdue_at = time.monotonic() + self._settings.timeout + 1.0
        self._watchdog.watch(self)
        try:
            run(dialect.program(ops, answers), connection)
        except SemelError:
            raise
        except BaseException:  # interrupted in mid-statement: the connection still waits for that answer
            self.close()
            raise
        finally:
            self.overdue_at = float("inf")
            if connection.raw.closed:
                self._connection = None

    def _open(self) -> PsycopgConnection:
        if self._connection is None or self._connection.raw.closed:
            self._connection = connect(self._settings)
        return self._connection

    def abort(self) -> None:
        """The server has not answered in time: break the connection, so that whoever waits on it is told."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.raw.fileno())) as twin:
                twin.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.raw.close()
        self._connection = None


class PostgresStore:
    """A store in PostgreSQL, for threads. Connections are opened when first needed."""

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
        listen: bool = True,
    ) -> None:
        """
        :param url: ``postgresql://user:password@host/database``, or a libpq connection string.
        :param connections: connections; Ops beyond them travel together.
        :param timeout: how long the server may take for one statement.
        :param retry_for: how long a lost connection is sought again before an Op fails.
        :param listen: be woken by LISTEN/NOTIFY when waiting (one more connection); False polls, as behind PgBouncer.
        """
        settings = Settings(url, connections, timeout, connect_timeout, retry_for)
        _require_psycopg()
        self.wakes = listen
        self._watchdog = Watchdog()
        self._listener = Listener(settings, lambda: connect(settings).raw)
        self._combiner = Combiner(
            [
                RetryingConnection(_PostgresSender(settings, self._watchdog), settings.retry_for)
                for _ in range(connections)
            ]
        )

    def execute(self, op: Op[R]) -> R:
        return cast(R, self._combiner.execute(op))

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return self._combiner.execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        if not self._listener.listen(seconds):
            time.sleep(min(seconds, LISTEN_AGAIN / 4))
            return
        gate = self._listener.enter(id)  # before we ask to be told, so that no answer can slip in between
        try:
            lease_left = self.execute(dialect.Watch(id))
            if lease_left is not None:
                gate.acquire(timeout=max(0.0, min(seconds, lease_left, LISTEN_AGAIN)))
        finally:
            self._listener.leave(id, gate)

    def adopt(self, connection: object) -> Unit:
        """The caller's connection as a unit of work: its records are written in the caller's transaction."""
        return adopt_unit(connection, "postgresql", awaited=False)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._listener.stop()
        self._watchdog.stop()
        self._combiner.close()


def _require_psycopg() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingDependency("psycopg", "postgres") from error
