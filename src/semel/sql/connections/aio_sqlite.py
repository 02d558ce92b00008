# Twin: sqlite.py is generated from this file by make twins.
# Twin: An aiosqlite.Connection -> A sqlite3.Connection
# Twin: aiosqlite: connections -> sqlite3: connections
# Twin: Literal[True] = True -> Literal[False] = False
"""aiosqlite: connections that belong to the caller."""

from __future__ import annotations

import sqlite3
from typing import Any, ClassVar, Final, Literal

from semel.errors import ConfigurationError
from semel.sql.connections.errors import SQLITE_ERRORS, sqlite_error
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Rows, Statement


class AsyncLentSQLite:
    """An aiosqlite.Connection of the caller's."""

    dialect: Final = "sqlite"
    awaited: Literal[True] = True
    # sync: opening: ClassVar[str] = 'conn.execute("BEGIN IMMEDIATE"), or `with conn:` where autocommit is off'
    opening: ClassVar[str] = 'await conn.execute("BEGIN IMMEDIATE")'
    style: ClassVar[EffectStyle] = "native"
    prepares: ClassVar[bool] = False
    nests: ClassVar[bool] = False
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
        except SQLITE_ERRORS as error:
            raise sqlite_error(error) from error

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
        except SQLITE_ERRORS as error:
            raise sqlite_error(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        # sync: if self.raw.in_transaction:
        # sync:     return True
        # sync: # By default the next statement that writes opens a transaction. Since Python 3.12 `autocommit` may
        # sync: # decide instead; -1 means that `isolation_level` does.
        # sync: autocommit = getattr(self.raw, "autocommit", -1)
        # sync: return autocommit is False or (autocommit is not True and self.raw.isolation_level is not None)
        return self.begun() or self.raw.isolation_level is not None

    def begun(self) -> bool:
        # sync: return bool(self.raw.in_transaction)
        try:
            return bool(self.raw.in_transaction)
        except ValueError as error:  # raised by aiosqlite when there is no connection
            raise ConfigurationError("the aiosqlite connection is not open") from error

    def committers(self) -> tuple[Any, ...]:
        return (self.raw,)  # sync: return ()  # sqlite3's class takes no attributes

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
        try:
            if self.raw.in_transaction:
                await self.raw.execute("ROLLBACK")
        except sqlite3.Error as error:  # raised by the attribute, too, if the caller has closed the connection
            raise sqlite_error(error) from error

    async def _send(self, text: str) -> None:
        try:
            await self.raw.execute(text)
        except sqlite3.Error as error:
            raise sqlite_error(error) from error
