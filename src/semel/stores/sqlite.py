"""Stores in a SQLite file, which many threads, tasks and processes may use at the same time.

There is one writer at a time. Concurrent Ops of a process are committed together, so 32 callers share one fsync.
Replays read without the write lock. Several processes may use one file (WAL); each waits for the others up to the busy
timeout.

The sync and the async store share the writer. The async one runs it in a thread, so that the event loop never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from semel.core.ops import Op
from semel.core.policy import Duration, seconds
from semel.engine.forking import survive_forks
from semel.engine.ports import execute_each
from semel.errors import ConfigurationError, SemelError, StoreUnavailable
from semel.sql import sync
from semel.sql.connections.errors import SQLITE_ERRORS, DatabaseBusy, sqlite_error
from semel.sql.dialects import sqlite as dialect
from semel.sql.migrations import SQLITE
from semel.sql.program import Program, Rows, Statement
from semel.stores.batching.aio_store import AsyncSQLStore
from semel.stores.batching.store import SQLStore

R = TypeVar("R")
BUSY_TIMEOUT: Final = 10.0
_creating: Final = threading.Lock()


def connect_file(path: str | os.PathLike[str], timeout: float) -> sqlite3.Connection:
    """Open the file, for any thread, one at a time. A new file is readable by its owner only: it holds stored results.

    SQLite gives the -wal and -shm files the permissions of the file itself.
    """
    name = os.fspath(path)
    if name and name != ":memory:":
        # Only a new file is opened here, and one thread at a time: closing a file drops every lock that this process
        # has on it, those of SQLite too. If it cannot be created, SQLite says why.
        with _creating, contextlib.suppress(OSError):
            os.close(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        return sqlite3.connect(name, timeout=timeout, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise sqlite_error(error, name) from error


class SQLiteConnection:
    """Our own sqlite3.Connection."""

    __slots__ = ("file", "raw")

    def __init__(self, raw: sqlite3.Connection, file: str = "") -> None:
        """
        :param file: the path, where it is known, for error messages.
        """
        self.raw = raw
        self.file = file

    def execute(self, statement: Statement) -> Rows:
        try:
            return self.raw.execute(statement.query.sql, statement.params).fetchall()
        except SQLITE_ERRORS as error:
            raise sqlite_error(error, self.file) from error


def migrate(path: str | os.PathLike[str]) -> list[str]:
    """Create or update the tables of a file. Returns the names of the migrations that were applied."""
    raw = connect_file(path, BUSY_TIMEOUT)
    try:
        return sync.migrate(SQLiteConnection(raw, os.fspath(path)), SQLITE)
    finally:
        raw.close()


def _connect_read_only(path: str) -> sqlite3.Connection:
    where = Path(path).resolve().as_uri()
    raw = sqlite3.connect(f"{where}?mode=ro", uri=True)
    try:
        raw.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    except sqlite3.Error as error:
        raw.close()
        if not isinstance(error, sqlite3.OperationalError):
            raise  # it is no database
        # In a folder that may not be written, SQLite cannot make the files that readers and writers share. Where there
        # are none, nobody has the file open, and it can be read without them.
        if os.path.exists(f"{path}-wal"):
            raise
        return sqlite3.connect(f"{where}?immutable=1", uri=True)
    return raw


@contextlib.contextmanager
def open_read_only(path: str | os.PathLike[str]) -> Iterator[SQLiteConnection]:
    """Open a file that exists, to read only."""
    name = os.fspath(path)
    if not os.path.exists(name):
        raise StoreUnavailable(f"there is no file {name!r}: `semel migrate URL` makes one")
    try:
        with contextlib.closing(_connect_read_only(name)) as raw:
            yield SQLiteConnection(raw, name)
    except sqlite3.Error as error:
        raise sqlite_error(error, name) from error


class ReadOnlySQLiteStore:
    """Answers ``Lookup``, ``ListRecords`` and ``Measure`` from a file, without write access to it."""

    wakes = counts = resumes = False
    lists = True
    trails = True
    adopt = accept = None

    def __init__(self, connection: SQLiteConnection) -> None:
        """:param connection: of ``open_read_only``, which also closes it."""
        self._connection = connection

    def execute(self, op: Op[R]) -> R:
        answer: R = sync.run(dialect.PROGRAMS[type(op)](op, _now), self._connection)
        return answer

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return execute_each(self.execute, ops)

    def wait(self, id: bytes, seconds: float) -> None:
        """The engine polls and never calls this."""

    def open(self) -> None:
        """The connection belongs to the caller."""

    def close(self) -> None:
        """The connection belongs to the caller."""


def check(path: str | os.PathLike[str]) -> None:
    """Raise NotMigrated or SchemaDrift unless the file's tables are exactly what the migrations make."""
    with open_read_only(path) as connection:
        sync.check(connection, SQLITE)


def _now() -> int:
    return time.time_ns() // 1000


class _Writer:
    """One connection to the file. Runs batches of Ops, one caller at a time."""

    def __init__(self, path: str | os.PathLike[str], synchronous: str, busy_timeout: float, migrate: bool) -> None:
        if synchronous not in ("full", "normal"):
            raise ConfigurationError(f'synchronous is "full" or "normal", not {synchronous!r}')
        self.path = os.fspath(path)
        self.synchronous = synchronous
        self.busy_timeout = busy_timeout
        self._connection: SQLiteConnection | None = None
        self._parents: list[SQLiteConnection | None] = []
        self._migrate = migrate
        self.gathers = False
        self.open()
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Keep a reference, never close it: a connection of SQLite must not be used after a fork, not even to close it.
        self._parents.append(self._connection)
        self._connection = None

    def open(self) -> SQLiteConnection:
        if self._connection is None:
            raw = connect_file(self.path, self.busy_timeout)
            try:
                raw.execute("PRAGMA journal_mode = WAL").fetchall()
                raw.execute(f"PRAGMA synchronous = {self.synchronous}")
                if self._migrate:
                    sync.migrate(SQLiteConnection(raw, self.path), SQLITE)
            except sqlite3.Error as error:
                raw.close()
                raise sqlite_error(error, self.path) from error
            except BaseException:
                raw.close()
                raise
            self._connection = SQLiteConnection(raw, self.path)
        return self._connection

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(ops)
        writing: list[tuple[int, Program[Any], Statement]] = []
        changing: set[bytes] = set()
        programs = dialect.PROGRAMS
        try:
            connection = self._connection or self.open()
            for i, op in enumerate(ops):
                program = programs[type(op)](op, _now)
                # A read that follows a write of the same record in the batch must see it, so it waits for the
                # transaction. So does a read of all records (it has no id), and any read that follows a sweep.
                waits = bool(changing) and (not op.id or op.id in changing or b"" in changing)
                try:
                    statement = next(program)
                    while not statement.query.writes and not waits:
                        statement = program.send(connection.execute(statement))
                    writing.append((i, program, statement))
                    changing.add(op.id)
                except StopIteration as stop:
                    answers[i] = stop.value
            self.gathers = bool(writing)  # sharing pays off for commits only
            if writing:
                self._write(connection, writing, answers)
            return answers
        except SemelError as error:
            if len(ops) == 1:
                return [error]
            if isinstance(error, DatabaseBusy):
                return [type(error)(str(error)) for _ in ops]  # all of them have waited for the whole timeout
            # One of them failed, or the disk is full. Run each alone, so that the others succeed if possible.
            return [self.run([op])[0] for op in ops]

    def _write(
        self, connection: SQLiteConnection, writing: list[tuple[int, Program[Any], Statement]], answers: list[Any]
    ) -> None:
        raw = connection.raw
        try:
            raw.execute("BEGIN IMMEDIATE")
            try:
                now = _now()
                for i, program, first in writing:
                    statement = first
                    # Made before we held the lock, but a lease counts from the write.
                    statement.params["now"] = now
                    try:
                        while True:
                            statement = program.send(connection.execute(statement))
                    except StopIteration as stop:
                        answers[i] = stop.value
                raw.execute("COMMIT")
            except BaseException:
                if raw.in_transaction:
                    raw.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.raw.close()
        self._connection = None


class SQLiteStore(SQLStore):
    """A store in a SQLite file, for threads."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        busy_timeout: Duration = BUSY_TIMEOUT,
        migrate: bool = True,
    ) -> None:
        """
        :param path: the file. If it does not exist, it is created, and only its owner may read it.
        :param synchronous: with ``"full"`` every answered write survives a power cut; with ``"normal"`` only a crash.
        :param busy_timeout: how long another process may hold the file before an Op fails.
        :param migrate: create or update the tables when the store is opened.
        """
        super().__init__("sqlite", [_Writer(path, synchronous, seconds(busy_timeout, "busy_timeout"), migrate)])


class _SQLiteThread:
    """Runs the writer in a thread of its own, for an event loop."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._forget_thread()
        survive_forks(self._forget_thread)

    def _forget_thread(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-sqlite")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.run, ops)

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            self._writer.close()
        else:
            await asyncio.get_running_loop().run_in_executor(thread, self._writer.close)
            thread.shutdown()


class AsyncSQLiteStore(AsyncSQLStore):
    """A store in a SQLite file, for one event loop."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        busy_timeout: Duration = BUSY_TIMEOUT,
        migrate: bool = True,
    ) -> None:
        """Same parameters as ``SQLiteStore``."""
        writer = _Writer(path, synchronous, seconds(busy_timeout, "busy_timeout"), migrate)
        super().__init__("sqlite", [_SQLiteThread(writer)])
