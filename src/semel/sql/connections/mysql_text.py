"""Statements as the text that MySQL reads, and what comes back, for every driver.

The drivers of MySQL put values into the text themselves, and how they quote them hangs on the connection's settings.
Here every value is written in digits: no setting, no character set and no value can make it anything but a value.
"""

from __future__ import annotations

from typing import Any

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.refusals import Refused
from semel.sql.packets import Packet
from semel.sql.program import Rows, Statement

__all__ = ["Answer", "texts"]


def texts(statement: Statement, together: bool, limit: int | None) -> list[str]:
    """What to send. ``together``: a packet in one go, with its transaction; otherwise its statements one by one."""
    if not isinstance(statement, Packet):
        parts = [_filled(*statement.values("format"))]
    else:
        parts = [_filled(*piece.filled()) for piece in statement.pieces]
        if together:
            began = ["START TRANSACTION"] if statement.begins else []
            parts = ["; ".join(began + parts + (["COMMIT"] if statement.ends else []))]
    for text in parts:
        if limit is not None and len(text) >= limit:
            # Said before it is sent: the server would break the connection in the middle of it.
            raise Refused(
                f"too large for MySQL: {len(text)} bytes, and max_allowed_packet is {limit}; store less, or raise it"
            )
    return parts


class Answer:
    """What a packet was answered: the rows of the last statement that has some, or how many the first one touched."""

    __slots__ = ("_given", "_pieces", "_rows", "_touched")

    def __init__(self, statement: Statement, own: bool) -> None:
        apart = own and isinstance(statement, Packet) and not statement.begins
        self._pieces = statement.pieces if apart and isinstance(statement, Packet) else ()
        """Those that are each committed by themselves."""
        self._given = 0
        self._rows: Rows | None = None
        self._touched = 0

    def add(self, rows: Rows | None, touched: int) -> None:
        self._given += 1
        if rows is not None:
            self._rows = rows
        elif self._given == 1:
            self._touched = touched

    def rows(self) -> Rows:
        return ((self._touched,),) if self._rows is None else self._rows

    def error(self, error: SemelError) -> SemelError:
        """ "Not stored" would be a lie where statements before the one that failed are committed."""
        stored = any(piece.query.writes for piece in self._pieces[: self._given])
        return StoreUncertain(str(error)) if stored else error


def _filled(text: str, values: list[Any]) -> str:
    try:
        return text % tuple(map(_literal, values))
    except UnicodeError as error:
        raise Refused(f"this text cannot be stored: {error}") from error


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return format(int(value))
    if isinstance(value, str):
        return f"_utf8mb4 x'{value.encode().hex()}'"
    return f"x'{bytes(value).hex()}'"
