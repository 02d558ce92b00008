"""sqlite3 and aiosqlite: our own connection to a file, and connections that belong to the caller.

The two lent connections are written by hand. aiosqlite runs sqlite3 in a thread: each cursor must be closed there, and
it has no ``autocommit`` attribute.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from typing import Any, ClassVar, Final, Literal

from semel.errors import ConfigurationError, StoreUnavailable
from semel.sql.connections.errors import sqlite_error
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Rows, Statement

_REJECTED: Final = (UnicodeError, OverflowError, ValueError)
"""What the driver raises about a value that it cannot write."""
_creating: Final = threading.Lock()


def _rejected(error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the driver cannot store this: {error}")


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
        except sqlite3.Error as error:
            raise sqlite_error(error, self.file) from error
        except _REJECTED as error:
            raise _rejected(error) from error


class LentSQLite:
    """A sqlite3.Connection of the caller's."""

    dialect: Final = "sqlite"
    awaited: Literal[False] = False
    opening: ClassVar[str] = 'conn.execute("BEGIN IMMEDIATE"), or `with conn:` where autocommit is off'
    style: ClassVar[EffectStyle] = "native"
    __slots__ = ("raw",)

    def __init__(self, raw: sqlite3.Connection) -> None:
        self.raw = raw

    def address(self) -> None:
        return None

    def execute(self, statement: Statement) -> Rows:
        try:
            cursor = self.raw.cursor()
            cursor.row_factory = None  # the caller's row factory is for the caller's rows
            return cursor.execute(statement.query.sql, statement.params).fetchall()
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
        except _REJECTED as error:
            raise _rejected(error) from error

    def query(self, text: str, parameters: Any) -> QueryResult:
        try:
            cursor = self.raw.cursor()
            cursor.row_factory = None
            cursor.execute(text, parameters)
            if cursor.description is None:
                return QueryResult(None, (), cursor.rowcount)
            return QueryResult([column[0] for column in cursor.description], cursor.fetchall(), 0)
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
        except _REJECTED as error:
            raise _rejected(error) from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        if self.raw.in_transaction:
            return True
        # By default the next statement that writes opens a transaction. Since Python 3.12 `autocommit` may decide
        # instead; -1 means that `isolation_level` does.
        autocommit = getattr(self.raw, "autocommit", -1)
        return autocommit is False or (autocommit is not True and self.raw.isolation_level is not None)

    def begun(self) -> bool:
        return self.raw.in_transaction

    def committers(self) -> tuple[Any, ...]:
        return ()  # sqlite3's class takes no attributes

    def holds(self) -> bool:
        return self.begun()

    def begin_with(self, statement: Statement) -> Rows:
        # Take the write lock now. The guard needs it anyway, and a later request could find its snapshot stale.
        self._send("BEGIN IMMEDIATE")
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        self.execute(statement)
        self._send("COMMIT")  # not commit(), which does nothing on a connection in autocommit

    def rollback(self) -> None:
        try:
            if self.raw.in_transaction:
                self.raw.execute("ROLLBACK")
        except sqlite3.Error as error:  # raised by the attribute, too, if the caller has closed the connection
            raise sqlite_error(error) from error

    def _send(self, text: str) -> None:
        try:
            self.raw.execute(text)
        except sqlite3.Error as error:
            raise sqlite_error(error) from error


class LentAiosqlite:
    """An aiosqlite.Connection of the caller's."""

    dialect: Final = "sqlite"
    awaited: Literal[True] = True
    opening: ClassVar[str] = 'await conn.execute("BEGIN IMMEDIATE")'
    style: ClassVar[EffectStyle] = "native"
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def address(self) -> None:
        return None

    async def execute(self, statement: Statement) -> Rows:
        try:
            cursor = await self.raw.cursor()
            try:
                cursor.row_factory = None  # the caller's row factory is for the caller's rows
                await cursor.execute(statement.query.sql, statement.params)
                rows: Rows = await cursor.fetchall()
                return rows
            finally:
                await cursor.close()
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
        except _REJECTED as error:
            raise _rejected(error) from error

    async def query(self, text: str, parameters: Any) -> QueryResult:
        try:
            cursor = await self.raw.cursor()
            try:
                cursor.row_factory = None
                await cursor.execute(text, parameters)
                if cursor.description is None:
                    return QueryResult(None, (), cursor.rowcount)
                return QueryResult([column[0] for column in cursor.description], await cursor.fetchall(), 0)
            finally:
                await cursor.close()
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
        except _REJECTED as error:
            raise _rejected(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun() or self.raw.isolation_level is not None

    def begun(self) -> bool:
        try:
            return bool(self.raw.in_transaction)
        except ValueError as error:  # raised by aiosqlite when there is no connection
            raise ConfigurationError("the aiosqlite connection is not open") from error

    def committers(self) -> tuple[Any, ...]:
        return (self.raw,)

    def holds(self) -> bool:
        return self.begun()

    async def begin_with(self, statement: Statement) -> Rows:
        # Take the write lock now. The guard needs it anyway, and a later request could find its snapshot stale.
        await self._send("BEGIN IMMEDIATE")
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        await self.execute(statement)
        await self._send("COMMIT")  # not commit(), which does nothing on a connection in autocommit

    async def rollback(self) -> None:
        if self.raw.in_transaction:
            await self._send("ROLLBACK")

    async def _send(self, text: str) -> None:
        try:
            await self.raw.execute(text)
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
