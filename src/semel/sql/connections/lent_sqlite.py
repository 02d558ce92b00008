"""sqlite3 and aiosqlite connections that belong to the caller."""

from __future__ import annotations

import sqlite3
from typing import Any, ClassVar, Final, Literal

from semel.errors import ConfigurationError, StoreUnavailable
from semel.sql.connections.sqlite import named_error
from semel.sql.program import Rows, Statement

__all__ = ["LentAiosqlite", "LentSQLite"]

_REFUSED: Final = (UnicodeError, OverflowError, ValueError)


def _opens_by_itself(raw: sqlite3.Connection) -> bool:
    """Whether the next statement that writes opens a transaction: sqlite3's default, and PEP 249's way since 3.12."""
    autocommit = getattr(raw, "autocommit", -1)  # -1: as isolation_level says
    return autocommit is False or (autocommit is not True and raw.isolation_level is not None)


class LentSQLite:
    """A sqlite3.Connection."""

    dialect: Final = "sqlite"
    awaited: Literal[False] = False
    opening: ClassVar[str] = 'conn.execute("BEGIN IMMEDIATE"), or `with conn:` where autocommit is off'
    __slots__ = ("raw",)

    def __init__(self, raw: sqlite3.Connection) -> None:
        self.raw = raw

    def execute(self, statement: Statement) -> Rows:
        try:
            cursor = self.raw.cursor()
            cursor.row_factory = None  # the caller's is for the caller's rows
            return cursor.execute(statement.query.sql, statement.params).fetchall()
        except sqlite3.Error as error:
            raise named_error(error) from error
        except _REFUSED as error:
            raise StoreUnavailable(f"the driver cannot store this: {error}") from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.raw.in_transaction or _opens_by_itself(self.raw)

    def begun(self) -> bool:
        return self.raw.in_transaction

    def holds(self) -> bool:
        return self.begun()

    def begin_with(self, statement: Statement) -> Rows:
        try:
            # The write lock at once: the guard asks for it anyway, and a later request could find its snapshot stale.
            self.raw.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise named_error(error) from error
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        self.execute(statement)
        try:
            self.raw.execute("COMMIT")  # not commit(), which does nothing on a connection in autocommit
        except sqlite3.Error as error:
            raise named_error(error) from error

    def rollback(self) -> None:
        try:
            if self.raw.in_transaction:
                self.raw.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise named_error(error) from error


class LentAiosqlite:
    """An aiosqlite.Connection: the same, in its thread."""

    dialect: Final = "sqlite"
    awaited: Literal[True] = True
    opening: ClassVar[str] = 'await conn.execute("BEGIN IMMEDIATE")'
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    async def execute(self, statement: Statement) -> Rows:
        try:
            cursor = await self.raw.cursor()
            try:
                cursor.row_factory = None
                await cursor.execute(statement.query.sql, statement.params)
                rows: Rows = await cursor.fetchall()
                return rows
            finally:
                await cursor.close()
        except sqlite3.Error as error:
            raise named_error(error) from error
        except _REFUSED as error:
            raise StoreUnavailable(f"the driver cannot store this: {error}") from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun() or self.raw.isolation_level is not None

    def begun(self) -> bool:
        try:
            return bool(self.raw.in_transaction)
        except ValueError as error:  # aiosqlite's word for it
            raise ConfigurationError("the aiosqlite connection is not open") from error

    def holds(self) -> bool:
        return self.begun()

    async def begin_with(self, statement: Statement) -> Rows:
        try:
            await self.raw.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise named_error(error) from error
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        await self.execute(statement)
        try:
            await self.raw.execute("COMMIT")
        except sqlite3.Error as error:
            raise named_error(error) from error

    async def rollback(self) -> None:
        try:
            if self.raw.in_transaction:
                await self.raw.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise named_error(error) from error
