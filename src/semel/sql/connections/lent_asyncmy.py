"""asyncmy connections that belong to the caller: what ``lent_mysql.py`` is for PyMySQL, awaited."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from asyncmy.cursors import Cursor

from semel.sql.connections.asyncmy import DRIVER_ERRORS, named_error
from semel.sql.connections.mysql_text import inlined, kept
from semel.sql.connections.refusals import Refused
from semel.sql.program import Rows, Statement

__all__ = ["LentAsyncmy"]

_REFUSED: Final = (UnicodeError, TypeError, ValueError, KeyError)
"""What the driver raises about a value that it cannot write."""


class LentAsyncmy:
    """An asyncmy.Connection, also of a pool."""

    dialect: Final = "mysql"
    awaited: Literal[True] = True
    opening: ClassVar[str] = "await conn.begin(), or a connection without autocommit"
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    async def execute(self, statement: Statement) -> Rows:
        text, values = inlined(statement)
        try:
            async with self.raw.cursor(Cursor) as cursor:
                await cursor.execute(text, values)
                rows: Rows = await cursor.fetchall() if cursor.description is not None else ((cursor.rowcount,),)
                return rows
        except DRIVER_ERRORS as error:
            raise named_error(error) from error
        except _REFUSED as error:
            raise Refused(f"the driver cannot send this: {error}") from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun() or not self.raw.get_autocommit()

    def begun(self) -> bool:
        return bool(self.raw.get_transaction_status())

    def holds(self) -> bool:
        return self.in_transaction()

    async def begin_with(self, statement: Statement) -> Rows:
        if self.raw.get_autocommit():
            await self._say(self.raw.begin)
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        kept(await self.execute(statement))
        await self._say(self.raw.commit)

    async def rollback(self) -> None:
        if self.raw.connected:
            await self._say(self.raw.rollback)

    async def _say(self, word: Any) -> None:
        try:
            await word()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error
