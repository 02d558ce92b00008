"""PyMySQL connections that belong to the caller.

Statements are sent as text whose values are written in digits, on a cursor of the plain class: the connection's
character set, sql_mode, converters and cursor class are the caller's, and nothing hangs on them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from pymysql.constants.SERVER_STATUS import SERVER_STATUS_IN_TRANS
from pymysql.cursors import Cursor

from semel.sql.connections.mysql_text import inlined, kept
from semel.sql.connections.pymysql import DRIVER_ERRORS, named_error
from semel.sql.connections.refusals import Refused
from semel.sql.program import Rows, Statement

__all__ = ["LentPyMySQL"]

_REFUSED: Final = (UnicodeError, TypeError, ValueError, KeyError)
"""What the driver raises about a value that it cannot write."""


class LentPyMySQL:
    """A pymysql.Connection."""

    dialect: Final = "mysql"
    awaited: Literal[False] = False
    opening: ClassVar[str] = "conn.begin(), or a connection without autocommit"
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def execute(self, statement: Statement) -> Rows:
        text, values = inlined(statement)
        try:
            with self.raw.cursor(Cursor) as cursor:
                cursor.execute(text, values)
                return cursor.fetchall() if cursor.description is not None else ((cursor.rowcount,),)
        except DRIVER_ERRORS as error:
            raise named_error(error) from error
        except _REFUSED as error:
            raise Refused(f"the driver cannot send this: {error}") from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun() or not self.raw.get_autocommit()

    def begun(self) -> bool:
        # As of the last statement that was no SELECT: PyMySQL does not read what the server says with one.
        return bool(self.raw.server_status & SERVER_STATUS_IN_TRANS)

    def holds(self) -> bool:
        return self.in_transaction()

    def begin_with(self, statement: Statement) -> Rows:
        if self.raw.get_autocommit():
            self._say(self.raw.begin)
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        kept(self.execute(statement))
        self._say(self.raw.commit)

    def rollback(self) -> None:
        if self.raw.open:
            self._say(self.raw.rollback)

    def _say(self, word: Any) -> None:
        try:
            word()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error
