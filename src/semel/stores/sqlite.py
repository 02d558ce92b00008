"""Records in a SQLite file, safe with many threads, tasks and processes on it.

One writer at a time: concurrent Ops of a process are committed as a group, so 32 callers share one fsync. Replays read
without asking for the write lock. Several processes may use one file (WAL); each waits for the other up to the busy
timeout.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal, TypeVar, cast

from semel.core.ops import Op
from semel.core.policy import Duration, seconds
from semel.engine.forking import survive_forks
from semel.errors import ConfigurationError, SemelError
from semel.sql.connections.sqlite import Busy, SQLiteConnection, named_error
from semel.sql.dialects import sqlite as dialect
from semel.sql.migrations import migrate_sqlite
from semel.sql.program import Program, Statement
from semel.sql.units import AsyncUnit, Unit, adopt_unit
from semel.stores.batching.aio_combiner import AsyncCombiner
from semel.stores.batching.combiner import Combiner

__all__ = ["AsyncSQLiteStore", "SQLiteStore", "migrate"]

R = TypeVar("R")
BUSY_TIMEOUT: Final = 10.0


def migrate(path: str | os.PathLike[str]) -> list[str]:
    """Make or update the tables of a file; answers what was applied."""
    try:
        raw = sqlite3.connect(os.fspath(path), timeout=BUSY_TIMEOUT, isolation_level=None)
    except sqlite3.Error as error:
        raise named_error(error, os.fspath(path)) from error
    try:
        return migrate_sqlite(raw, os.fspath(path))
    finally:
        raw.close()


def _now() -> int:
    return time.time_ns() // 1000


def _as_of(now: int, statement: Statement) -> Statement:
    """A statement made before the lock was ours, perhaps long before: a lease counts from when it is written."""
    if "now" not in statement.params:
        return statement
    return Statement(statement.query, {**statement.params, "now": now})


class _Writer:
    """One connection to the file. Runs batches of Ops, one caller at a time."""

    def __init__(self, path: str | os.PathLike[str], synchronous: str, busy_timeout: float, migrate: bool) -> None:
        if synchronous not in ("full", "normal"):
            raise ConfigurationError(f'synchronous is "full" or "normal", not {synchronous!r}')
        self.path = os.fspath(path)
        self.synchronous = synchronous
        self.busy_timeout = busy_timeout
        self._raw: sqlite3.Connection | None = None
        self._left_behind: list[sqlite3.Connection | None] = []
        self._migrate = migrate
        self.gathers = False
        self.open()
        survive_forks(self._forked)

    def _forked(self) -> None:
        # Kept and never closed: SQLite's connections may not cross a fork, not even to be closed.
        self._left_behind.append(self._raw)
        self._raw = None

    def open(self) -> SQLiteConnection:
        if self._raw is None:
            try:
                raw = sqlite3.connect(
                    self.path, timeout=self.busy_timeout, isolation_level=None, check_same_thread=False
                )
                try:
                    raw.execute("PRAGMA journal_mode = WAL").fetchall()
                    raw.execute(f"PRAGMA synchronous = {self.synchronous}")
                    if self._migrate:
                        migrate_sqlite(raw, self.path)
                except BaseException:
                    raw.close()
                    raise
            except sqlite3.Error as error:
                raise named_error(error, self.path) from error
            self._raw = raw
        return SQLiteConnection(self._raw, self.path)

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        try:
            connection = self.open()
            return self._run(connection, ops)
        except SemelError as error:
            if len(ops) == 1:
                return [error]
            if isinstance(error, Busy):
                return [type(error)(str(error)) for _ in ops]  # all alike, and all have waited long enough
            # One of them, or the disk: let each stand for itself.
            return [self.run([op])[0] for op in ops]

    def _run(self, connection: SQLiteConnection, ops: Sequence[Op[Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(ops)
        writing: list[tuple[int, Program[Any], Statement]] = []
        changing: set[bytes] = set()
        for i, op in enumerate(ops):
            program = dialect.program(op, _now)
            # A read that follows a write of the same record in the batch must see it: it waits for the transaction. So
            # does one over all records (those have no id), and any that follows a sweep.
            waits = bool(changing) and (not op.id or op.id in changing or b"" in changing)
            try:
                statement = next(program)
                while not statement.query.writes and not waits:
                    statement = program.send(connection.execute(statement))
                writing.append((i, program, statement))
                changing.add(op.id)
            except StopIteration as stop:
                answers[i] = stop.value
        self.gathers = bool(writing)  # a commit is worth sharing; reads are quicker alone
        if writing:
            self._write(connection, writing, answers)
        return answers

    def _write(
        self, connection: SQLiteConnection, writing: list[tuple[int, Program[Any], Statement]], answers: list[Any]
    ) -> None:
        raw = connection.raw
        try:
            raw.execute("BEGIN IMMEDIATE")
            try:
                now = _now()
                for i, program, first in writing:
                    statement = _as_of(now, first)
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
            raise named_error(error, self.path) from error

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        self._raw = None


class SQLiteStore:
    """A store in a SQLite file, for threads."""

    wakes = False
    counts = True
    resumes = True
    accept = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        busy_timeout: Duration = BUSY_TIMEOUT,
        migrate: bool = True,
    ) -> None:
        """
        :param path: the file; made if it is not there.
        :param synchronous: ``"full"`` keeps every answered write over a power cut; ``"normal"`` only over a crash.
        :param busy_timeout: how long another process may hold the file before an Op fails.
        :param migrate: make or update the tables when opening.
        """
        self._combiner = Combiner([_Writer(path, synchronous, seconds(busy_timeout, "busy_timeout"), migrate)])

    def execute(self, op: Op[R]) -> R:
        return cast(R, self._combiner.execute(op))

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return self._combiner.execute_many(ops)

    def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        time.sleep(min(seconds, 0.05))

    def adopt(self, connection: object) -> Unit:
        """The caller's connection as a unit of work: its records are written in the caller's transaction."""
        return adopt_unit(connection, "sqlite", awaited=False)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._combiner.close()


class _ThreadLane:
    """The writer, in a thread of its own, for an event loop."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self._start()
        survive_forks(self._start)

    def _start(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-sqlite")

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.run, ops)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._writer.close)
        self._thread.shutdown()


class AsyncSQLiteStore:
    """A store in a SQLite file, for one event loop, which it never blocks."""

    wakes = False
    counts = True
    resumes = True
    accept = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["full", "normal"] = "full",
        busy_timeout: Duration = BUSY_TIMEOUT,
        migrate: bool = True,
    ) -> None:
        """As of ``SQLiteStore``."""
        writer = _Writer(path, synchronous, seconds(busy_timeout, "busy_timeout"), migrate)
        self._combiner = AsyncCombiner([_ThreadLane(writer)])

    async def execute(self, op: Op[R]) -> R:
        return cast(R, await self._combiner.execute(op))

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._combiner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        """Never called: the engine polls."""
        await asyncio.sleep(min(seconds, 0.05))

    def adopt(self, connection: object) -> AsyncUnit:
        """The caller's connection as a unit of work: its records are written in the caller's transaction."""
        return adopt_unit(connection, "sqlite", awaited=True)  # type: ignore[no-any-return]

    async def close(self) -> None:
        await self._combiner.close()
