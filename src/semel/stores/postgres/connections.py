"""The PostgreSQL store's settings, and its connections: by psycopg 3, and for an event loop also by asyncpg.

The connections are written by hand. With threads, a thread breaks connections whose server does not answer, connections
must not cross a fork, and Ctrl-C may interrupt a statement anywhere. In an event loop a timeout cancels the statement,
a connection belongs to one loop, and there are two drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from semel.core.ops import Op
from semel.engine.forking import renewed, survive_forks
from semel.errors import ConfigurationError, MissingDependency, StoreUncertain, StoreURLError
from semel.sql.aio import AsyncConnection, run_async
from semel.sql.connections.errors import connect_error
from semel.sql.dialects import postgres as dialect
from semel.sql.sync import run
from semel.stores.batching.aio_connection import AsyncBatchDriver
from semel.stores.listening import LISTEN_AGAIN, AsyncListener, Listener
from semel.stores.settings import ServerSettings, require

if TYPE_CHECKING:
    from semel.sql.connections.psycopg import PsycopgConnection


class PostgresSettings(ServerSettings):
    """The settings of one store. Its URL may also be a libpq connection string."""

    def session(self) -> dict[str, str]:
        """Server settings of our own connections. They are sent when a connection is opened."""
        return {
            "application_name": "semel",
            "default_transaction_isolation": "read committed",
            "statement_timeout": str(int(self.timeout * 1000)),
            "jit": "off",
            # Our few statements are prepared once. Planning one again would cost more than running it.
            "plan_cache_mode": "force_generic_plan",
            # A plan made while the table is small would read all of it for every Op, and stay while the table grows.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    def for_psycopg(self) -> dict[str, Any]:
        """The arguments of psycopg's ``connect()``, sync and async."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        try:
            users = conninfo_to_dict(self.url).get("options") or ""
        except psycopg.Error:
            raise unreadable_url() from None
        ours = " ".join(
            f"-c {name}={value}".replace("read committed", r"read\ committed") for name, value in self.session().items()
        )
        return {
            "conninfo": self.url,
            "autocommit": True,
            "prepare_threshold": 1,
            "connect_timeout": max(2, int(self.connect_timeout)),
            "options": f"{ours} {users}".strip(),  # the user's come last, and win
        }


def unreadable_url() -> StoreURLError:
    """The drivers' own errors show the part that they cannot read. That may be the password, so it is not quoted."""
    return StoreURLError(
        "the PostgreSQL URL cannot be read: write postgresql://user:password@host:5432/database, percent-encode what "
        "is special in its user and password, and leave out options that PostgreSQL does not have"
    )


# Threads


class Psycopg:
    """Connections of psycopg 3."""

    def __init__(self) -> None:
        require("psycopg", "postgres")
        self.watchdog = Watchdog()

    def connect(self, settings: PostgresSettings) -> PsycopgConnection:
        import psycopg

        from semel.sql.connections.psycopg import PsycopgConnection

        arguments = settings.for_psycopg()
        try:
            raw = psycopg.connect(**arguments)
        except psycopg.Error as error:
            raise connect_error("PostgreSQL", error) from error
        return PsycopgConnection(raw)

    def send(
        self, connection: PsycopgConnection, settings: PostgresSettings, ops: Sequence[Op[Any]], answers: list[Any]
    ) -> None:
        self.watchdog.watch(connection, settings.timeout + 1.0)
        try:
            run(dialect.program(ops, answers), connection)
        finally:
            self.watchdog.deadlines[connection] = float("inf")

    def is_open(self, connection: PsycopgConnection) -> bool:
        return not connection.raw.closed

    def close(self, connection: PsycopgConnection) -> None:
        connection.raw.close()

    interrupt = close


class Watchdog:
    """A thread that breaks connections whose server does not answer. The server's own timeout needs a live server."""

    def __init__(self) -> None:
        self.deadlines: dict[PsycopgConnection, float] = {}
        """When each open connection is to be broken, by ``time.monotonic``; infinity while it is not in use."""
        self._started = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._stop = renewed(self._stop)
        self.deadlines = {}  # the batches that are under way are the parent's
        self._started = False
        self._lock = threading.Lock()

    def watch(self, connection: PsycopgConnection, seconds: float) -> None:
        self.deadlines[connection] = time.monotonic() + seconds
        if not self._started:
            self._start()

    def stop(self) -> None:
        self._stop.set()

    def resume(self) -> None:
        """After ``stop``: start again when first needed. The previous thread has an event of its own."""
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
            for connection, deadline in list(self.deadlines.items()):
                if connection.raw.closed:
                    self.deadlines.pop(connection, None)
                elif deadline < now:
                    # The thread that waits for the server gets an error.
                    raw = connection.raw
                    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(raw.fileno())) as duplicate:
                        duplicate.shutdown(socket.SHUT_RDWR)


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


# An event loop

DriverName: TypeAlias = Literal["asyncpg", "psycopg"]


class AsyncDriver(AsyncBatchDriver, Protocol):
    """Connections of one library."""

    async def send(
        self, connection: Any, settings: PostgresSettings, ops: Sequence[Op[Any]], answers: list[Any]
    ) -> None:
        try:
            async with asyncio.timeout(settings.timeout + 1.0):
                await run_async(dialect.program(ops, answers), connection)
        except TimeoutError as error:
            self.abort(connection)
            raise StoreUncertain(f"PostgreSQL did not answer within {settings.timeout:g} s") from error

    def interrupt(self, connection: Any) -> None:
        return  # the driver has cancelled the statement

    def abort(self, connection: Any) -> None:
        """Break the connection without telling the server."""
        ...

    async def listen(self, connection: Any, ready: Callable[[], object], notify: Callable[[str], object]) -> None:
        """Call ``ready``, then ``notify`` with the payload of every notification, until the connection is lost."""
        ...


class Asyncpg(AsyncDriver):
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

    def abort(self, connection: Any) -> None:
        connection.raw.terminate()

    def is_open(self, connection: Any) -> bool:
        return not connection.raw.is_closed()

    async def close(self, connection: Any) -> None:
        with contextlib.suppress(Exception):
            await connection.raw.close(timeout=2)

    async def listen(self, connection: Any, ready: Callable[[], object], notify: Callable[[str], object]) -> None:
        lost = asyncio.Event()
        connection.raw.add_termination_listener(lambda raw: lost.set())
        await connection.raw.add_listener(dialect.CHANNEL, lambda raw, pid, channel, payload: notify(payload))
        ready()
        await lost.wait()


class AsyncPsycopg(AsyncDriver):
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

    def abort(self, connection: Any) -> None:
        connection.raw.pgconn.finish()

    def is_open(self, connection: Any) -> bool:
        return not connection.raw.closed

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
            require("asyncpg", "asyncpg")
            return Asyncpg()
        except MissingDependency:
            if name == "asyncpg":
                raise
    require("psycopg", "postgres", "asyncpg or psycopg")
    return AsyncPsycopg()


def open_listener_async(settings: PostgresSettings, driver: AsyncDriver) -> AsyncListener:
    """A listener to the channel of all records, over a connection of its own."""

    async def receive(ready: Callable[[], None], wake: Callable[[Any], None]) -> None:
        connection = await driver.connect(settings)
        try:
            await driver.listen(connection, ready, wake)
        finally:
            await driver.close(connection)

    return AsyncListener(receive)
