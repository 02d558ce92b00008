"""The PostgreSQL store's connections and background threads, by psycopg 3.

Written by hand beside ``tasks.py``: here a thread listens for notifications, another breaks connections whose server
does not answer, connections must not cross a fork, and Ctrl-C may interrupt a statement anywhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.errors import MissingDependency, SemelError
from semel.sql.connections.errors import connect_error
from semel.sql.dialects import postgres as dialect
from semel.sql.sync import run
from semel.stores.listening import LISTEN_AGAIN, Listener
from semel.stores.postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from semel.sql.connections.psycopg import PsycopgConnection

__all__ = ["PostgresSender", "Psycopg", "Watchdog", "open_listener"]


class Psycopg:
    """Opens and closes connections."""

    def __init__(self) -> None:
        try:
            import psycopg  # noqa: F401
        except ImportError as error:
            raise MissingDependency("psycopg", "postgres") from error

    def connect(self, settings: PostgresSettings) -> PsycopgConnection:
        import psycopg

        from semel.sql.connections.psycopg import PsycopgConnection

        arguments = settings.for_psycopg()
        try:
            raw = psycopg.connect(**arguments)
        except psycopg.Error as error:
            raise connect_error("PostgreSQL", error) from error
        return PsycopgConnection(raw)

    def close(self, connection: PsycopgConnection) -> None:
        connection.raw.close()


class Breakable(Protocol):
    """What the watchdog watches."""

    overdue_at: float
    """The monotonic time at which it is to be broken."""

    def abort(self) -> None: ...


class Watchdog:
    """A thread that breaks connections whose server does not answer. The server's own timeout needs a live server."""

    def __init__(self) -> None:
        self._watched: set[Breakable] = set()
        self._started = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        survive_forks(self._forked)

    def _forked(self) -> None:
        # A thread of the parent may hold the lock of the event, and never releases it here.
        stopped, self._stop = self._stop.is_set(), threading.Event()
        if stopped:
            self._stop.set()
        self._started = False
        self._lock = threading.Lock()

    def watch(self, connection: Breakable) -> None:
        self._watched.add(connection)
        if not self._started:
            self._start()

    def stop(self) -> None:
        self._stop.set()

    def resume(self) -> None:
        """After ``stop``: start again when first needed. The thread of before has an event of its own."""
        if self._stop.is_set():
            self._stop, self._started = threading.Event(), False

    def _start(self) -> None:
        with self._lock:
            if not self._started and not self._stop.is_set():
                self._started = True
                threading.Thread(target=self._look, args=(self._stop,), name="semel-watchdog", daemon=True).start()

    def _look(self, stop: threading.Event) -> None:
        while not stop.wait(1.0):
            now = time.monotonic()
            for connection in list(self._watched):
                if connection.overdue_at < now:
                    connection.abort()


class PostgresSender:
    """Sends batches over one connection. It opens it when needed, again when it was lost, and in a forked child."""

    def __init__(self, settings: PostgresSettings, driver: Psycopg, watchdog: Watchdog) -> None:
        self._settings = settings
        self._driver = driver
        self._watchdog = watchdog
        self._connection: PsycopgConnection | None = None
        self._parents: list[PsycopgConnection | None] = []
        self.overdue_at = float("inf")
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Keep a reference to the parent's connection: if it were closed here, the parent's session would end.
        self._parents.append(self._connection)
        self._connection = None
        self.overdue_at = float("inf")  # the batch that is under way is the parent's

    def is_open(self) -> bool:
        return self._connection is not None

    def send(self, ops: Sequence[Op[Any]], answers: list[Any]) -> None:
        connection = self._connection
        if connection is None or connection.raw.closed:
            connection = self._connection = self._driver.connect(self._settings)
        self.overdue_at = time.monotonic() + self._settings.timeout + 1.0
        self._watchdog.watch(self)
        try:
            run(dialect.program(ops, answers), connection)
        except SemelError:
            raise
        except BaseException:  # interrupted in a statement, whose answer would be read by the next one
            self.close()
            raise
        finally:
            self.overdue_at = float("inf")
            if connection.raw.closed:
                self._connection = None

    def abort(self) -> None:
        """Break the connection, so that the thread that waits for the server gets an error."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.raw.fileno())) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._driver.close(self._connection)
        self._connection = None


def open_listener(settings: PostgresSettings, driver: Psycopg) -> Listener:
    """A listener to the channel of all records, over a connection of its own."""

    def receive(stop: threading.Event, ready: Callable[[], None], wake: Callable[[Any], None]) -> None:
        with driver.connect(settings).raw as raw:
            raw.execute(f"LISTEN {dialect.CHANNEL}")
            ready()
            while not stop.is_set():
                for notification in raw.notifies(timeout=LISTEN_AGAIN):
                    wake(notification.payload)

    return Listener(receive)
