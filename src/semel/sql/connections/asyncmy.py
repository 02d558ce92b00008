# Twin: pymysql.py is generated from this file by make twins.
# Twin: asyncmy: our own -> PyMySQL: our own
# Twin: an asyncmy.Connection -> a pymysql.Connection
# Twin: An asyncmy.Connection -> A pymysql.Connection
# Twin: asyncmy.errors -> pymysql.err
# Twin: asyncmy -> pymysql
# Twin: AsyncmyConnection -> PyMySQLConnection
# Twin: LentAsyncmy -> LentPyMySQL
# Twin: Literal[True] = True -> Literal[False] = False
# Twin: await conn.begin() -> conn.begin()
# Twin: self.raw.connected -> self.raw.open
"""asyncmy: our own connection, and connections that belong to the caller.

Statements are sent as text whose values are written in digits, on a cursor of the plain class. So nothing depends on
the caller's character set, sql_mode, converters and cursor class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Final, Literal

# sync only: from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS
from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.adopt import DatabaseAddress
from semel.sql.connections.errors import mysql_error, mysql_number, rejected
from semel.sql.connections.literals import PacketAnswer, mysql_text, mysql_texts, require_change
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Packet, Rows, Statement

DRIVER_ERRORS: Final = (MySQLError, OSError)
_REJECTED: Final = (UnicodeError, TypeError, ValueError, KeyError)
"""What the driver raises about a value that it cannot write."""


class AsyncmyConnection:
    """Wraps an asyncmy.Connection for the batches of a store."""

    __slots__ = ("max_packet", "own", "raw", "returning")

    def __init__(self, raw: Any, *, own: bool = False, max_packet: int | None = None) -> None:
        """
        :param own: our own connection, which sends a packet in one message. Without, no transaction is begun or ended.
        :param max_packet: bytes that the server accepts in one message, where that is known.
        """
        self.raw = raw
        self.own = own
        self.max_packet = max_packet
        self.returning = "mariadb" in raw.get_server_info().lower()

    async def execute(self, statement: Statement) -> Rows:
        answer = PacketAnswer(statement, self.own)
        try:
            for text in mysql_texts(statement, self.own, self.max_packet):
                async with self.raw.cursor(Cursor) as cursor:
                    await cursor.execute(text)
                    more = True
                    while more:
                        rows = await cursor.fetchall() if cursor.description is not None else None
                        answer.add(rows, cursor.rowcount)
                        more = await cursor.nextset()
        except DRIVER_ERRORS as error:
            failure = answer.error(_semel_error(error))
            await self._tidy(statement, failure)
            raise failure from error
        except SemelError as error:
            await self._tidy(statement, error)
            raise
        return answer.rows()

    async def _tidy(self, statement: Statement, error: SemelError) -> None:
        """After an error: leave no transaction of ours open, and close a connection that is lost."""
        with contextlib.suppress(*DRIVER_ERRORS):
            if self.own and isinstance(error, StoreUncertain):
                self.raw.close()
            elif self.own and isinstance(statement, Packet):
                await self.raw.rollback()


class LentAsyncmy:
    """An asyncmy.Connection of the caller's."""

    dialect: Final = "mysql"
    awaited: Literal[True] = True
    opening: ClassVar[str] = "await conn.begin(), or a connection without autocommit"
    style: ClassVar[EffectStyle] = "format"
    prepares: ClassVar[bool] = False
    nests: ClassVar[bool] = False
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def address(self) -> DatabaseAddress:
        # sync: return DatabaseAddress(self.raw.user, self.raw.host, self.raw.port, self.raw.db)
        return DatabaseAddress(*(getattr(self.raw, name, "") for name in ("_user", "_host", "_port", "_db")))

    async def execute(self, statement: Statement) -> Rows:
        text, values = mysql_text(statement)
        try:
            async with self.raw.cursor(Cursor) as cursor:
                await cursor.execute(text, values)
                rows: Rows = await cursor.fetchall() if cursor.description is not None else ((cursor.rowcount,),)
                return rows
        except DRIVER_ERRORS as error:
            raise _semel_error(error) from error
        except _REJECTED as error:
            raise rejected(error) from error

    async def query(self, text: str, parameters: Any) -> QueryResult:
        try:
            async with self.raw.cursor(Cursor) as cursor:
                await cursor.execute(text, parameters or None)
                if cursor.description is None:
                    return QueryResult(None, (), cursor.rowcount)
                return QueryResult([column[0] for column in cursor.description], await cursor.fetchall(), 0)
        except DRIVER_ERRORS as error:
            raise _semel_error(error) from error
        except _REJECTED as error:
            raise rejected(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun() or not self.raw.get_autocommit()

    def begun(self) -> bool:
        # sync: # PyMySQL does not read the status that the server sends with the rows of a SELECT, so this is the
        # sync: # status after the last other statement.
        # sync: return bool(self.raw.server_status & SERVER_STATUS_IN_TRANS)
        return bool(self.raw.get_transaction_status())

    def committers(self) -> tuple[Any, ...]:
        return (self.raw,)

    def holds(self) -> bool:
        return self.in_transaction()

    async def begin_with(self, statement: Statement) -> Rows:
        if self.raw.get_autocommit():
            await self._call(self.raw.begin)
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        require_change(await self.execute(statement))
        await self._call(self.raw.commit)

    async def rollback(self) -> None:
        if self.raw.connected:
            await self._call(self.raw.rollback)

    async def _call(self, method: Callable[[], Awaitable[object]]) -> None:
        try:
            await method()
        except DRIVER_ERRORS as error:
            raise _semel_error(error) from error


def _semel_error(error: Exception) -> SemelError:
    number = mysql_number(error)
    return mysql_error(number, (str(error) if number is None else str(error.args[-1])) or type(error).__name__)
