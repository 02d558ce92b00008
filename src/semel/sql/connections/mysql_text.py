"""Statements as the text that MySQL reads, and what comes back, for every driver.

The drivers of MySQL put values into the text themselves, and how they quote them hangs on the connection's settings.
Here every value is written in digits: no setting, no character set and no value can make it anything but a value.
"""

from __future__ import annotations

from typing import Any, Final

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.refusals import Contended, Refused, TooLarge
from semel.sql.packets import Packet
from semel.sql.program import Rows, Statement

__all__ = ["Answer", "inlined", "kept", "texts"]


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
            raise TooLarge(
                f"too large for MySQL: {len(text)} bytes, and max_allowed_packet is {limit}; store less, or raise it"
            )
    return parts


def inlined(statement: Statement) -> tuple[str, tuple[Any, ...]]:
    """For a connection that is not ours: text, and such values as only its driver knows how to write."""
    text, values = statement.values("format")
    rest = tuple(value for value in values if not isinstance(value, _PLAIN))
    try:
        written = [_literal(value) if isinstance(value, _PLAIN) else "%s" for value in values]
    except UnicodeError as error:
        raise Refused(f"this text cannot be stored: {error}") from error
    parts = text.split("%s")
    return "".join(a + b for a, b in zip(parts, [*written, ""], strict=True)), rest


def kept(rows: Rows) -> None:
    """Raise where a statement that was to change a row has found none: before it is committed."""
    if rows and tuple(rows[0]) == (0,):
        raise Contended("the record changed while the handler ran")


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


_PLAIN: Final = (type(None), int, str, bytes, bytearray, memoryview)


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return format(int(value))
    if isinstance(value, str):
        return f"_utf8mb4 x'{value.encode().hex()}'"
    return f"x'{bytes(value).hex()}'"
