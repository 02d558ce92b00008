"""asyncmy: one statement on one connection, its errors in our words."""

from __future__ import annotations

import contextlib
from typing import Any, Final

from asyncmy.cursors import Cursor
from asyncmy.errors import MySQLError

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.mysql_errors import from_number
from semel.sql.connections.mysql_text import Answer, texts
from semel.sql.packets import Packet
from semel.sql.program import Rows, Statement

__all__ = ["DRIVER_ERRORS", "AsyncmyConnection", "named_error"]

DRIVER_ERRORS: Final = (MySQLError, OSError)


class AsyncmyConnection:
    """Wraps an asyncmy.Connection, ours or the caller's."""

    __slots__ = ("max_packet", "own", "raw", "returning")

    def __init__(self, raw: Any, *, own: bool = False, max_packet: int | None = None) -> None:
        """As of ``PyMySQLConnection``."""
        self.raw = raw
        self.own = own
        self.max_packet = max_packet
        self.returning = "mariadb" in raw.get_server_info().lower()

    async def execute(self, statement: Statement) -> Rows:
        answer = Answer(statement, self.own)
        try:
            for text in texts(statement, self.own, self.max_packet):
                async with self.raw.cursor(Cursor) as cursor:
                    await cursor.execute(text)
                    more = True
                    while more:
                        rows = await cursor.fetchall() if cursor.description is not None else None
                        answer.add(rows, cursor.rowcount)
                        more = await cursor.nextset()
        except DRIVER_ERRORS as error:
            named = answer.error(named_error(error))
            await self._tidy(statement, named)
            raise named from error
        except SemelError as error:
            await self._tidy(statement, error)
            raise
        return answer.rows()

    async def _tidy(self, statement: Statement, error: SemelError) -> None:
        """Leave no transaction of ours open behind an error, and no connection that the server has given up."""
        with contextlib.suppress(*DRIVER_ERRORS):
            if self.own and isinstance(error, StoreUncertain):
                self.raw.close()
            elif self.own and isinstance(statement, Packet):
                await self.raw.rollback()


def named_error(error: Exception) -> SemelError:
    if isinstance(error, MySQLError) and error.args and isinstance(error.args[0], int):
        return from_number(error.args[0], str(error.args[-1]))
    return from_number(None, str(error) or type(error).__name__)
