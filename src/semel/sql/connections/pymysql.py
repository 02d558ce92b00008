"""PyMySQL: one statement on one connection, its errors in our words."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import pymysql
from pymysql.cursors import Cursor

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.mysql_errors import from_number
from semel.sql.connections.mysql_text import Answer, texts
from semel.sql.packets import Packet
from semel.sql.program import Rows, Statement

__all__ = ["DRIVER_ERRORS", "PyMySQLConnection", "named_error"]

DRIVER_ERRORS: Final = (pymysql.MySQLError, OSError)


class PyMySQLConnection:
    """Wraps a pymysql.Connection, ours or the caller's."""

    __slots__ = ("max_packet", "own", "raw", "returning")

    def __init__(self, raw: Any, *, own: bool = False, max_packet: int | None = None) -> None:
        """
        :param own: one of ours, which takes a packet in one go; in the caller's no transaction is begun or ended.
        :param max_packet: bytes that the server takes at once, where that is known.
        """
        self.raw = raw
        self.own = own
        self.max_packet = max_packet
        self.returning = "mariadb" in raw.get_server_info().lower()

    def execute(self, statement: Statement) -> Rows:
        answer = Answer(statement, self.own)
        try:
            for text in texts(statement, self.own, self.max_packet):
                with self.raw.cursor(Cursor) as cursor:
                    cursor.execute(text)
                    more = True
                    while more:
                        answer.add(cursor.fetchall() if cursor.description is not None else None, cursor.rowcount)
                        more = cursor.nextset()
        except DRIVER_ERRORS as error:
            named = answer.error(named_error(error))
            self._tidy(statement, named)
            raise named from error
        except SemelError as error:
            self._tidy(statement, error)
            raise
        return answer.rows()

    def _tidy(self, statement: Statement, error: SemelError) -> None:
        """Leave no transaction of ours open behind an error, and no connection that the server has given up."""
        with contextlib.suppress(*DRIVER_ERRORS):
            if self.own and isinstance(error, StoreUncertain):
                self.raw.close()
            elif self.own and isinstance(statement, Packet):
                self.raw.rollback()


def named_error(error: Exception) -> SemelError:
    if isinstance(error, pymysql.MySQLError) and error.args and isinstance(error.args[0], int):
        return from_number(error.args[0], str(error.args[-1]))
    return from_number(None, str(error) or type(error).__name__)
