"""Statements as text with their values in place, for PostgreSQL and for MySQL, safe whatever the session's settings.

PostgreSQL: a statement with parameters travels alone. Several travel in one message, such as with BEGIN or COMMIT, only
as plain text. Values are written as quoted numbers, plain words, or hex digits in an ``E''`` literal. Nothing in them
can end a literal, whatever ``standard_conforming_strings`` and the encoding are.

MySQL: the drivers put values into the text themselves, and the connection's settings decide how they quote them. Here
every value is written in digits, so that no setting, no character set and no value can turn it into something else.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any, Final

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.errors import Contention, StatementRejected, StatementTooLarge, rejected
from semel.sql.program import Packet, Rows, Statement

# PostgreSQL

_PLAIN_WORDS: Final = re.compile(r"""[A-Za-z0-9 _.:/@+{}",-]*""").fullmatch


def postgres_text(statement: Statement) -> str:
    """The statement's text with its values in place. Arrays are not supported: such statements travel alone."""
    query, params = statement.query.as_text or statement.query, statement.params
    text = list(query.fragments)
    for at in range(1, len(text), 2):
        value = params[text[at]]
        kind = type(value)
        if kind is bytes:
            text[at] = f"E'\\\\x{value.hex()}'"
        elif (
            kind is int or kind is bool or (kind is float and isfinite(value)) or (kind is str and _PLAIN_WORDS(value))
        ):
            text[at] = f"'{value}'"
        else:
            text[at] = _postgres_literal(value)
    return "".join(text)


def _postgres_literal(value: Any) -> str:
    """For the rarer kinds of values."""
    kind = type(value)
    if value is None:
        return "NULL"
    if kind is str:
        try:
            return f"convert_from(E'\\\\x{value.encode().hex()}', 'UTF8')"
        except UnicodeError as error:
            raise rejected(error) from error
    raise StatementRejected(f"the driver cannot send this: a {kind.__name__} has no literal here")


# MySQL

_PLAIN_TYPES: Final = (type(None), int, str, bytes, bytearray, memoryview)


def mysql_texts(statement: Statement, together: bool, limit: int | None) -> list[str]:
    """What to send on one of our own connections.

    :param together: send a packet in one message, with BEGIN and COMMIT; otherwise its statements one by one.
    :param limit: the server's ``max_allowed_packet``, where it is known.
    """
    if not isinstance(statement, Packet):
        parts = [_filled(*statement.values("format"))]
    else:
        parts = [_filled(*piece.values()) for piece in statement.pieces]
        if together:
            begin = ["START TRANSACTION"] if statement.begins else []
            parts = ["; ".join(begin + parts + (["COMMIT"] if statement.ends else []))]
    for text in parts:
        if limit is not None and len(text) >= limit:
            # Checked before sending: the server would break the connection in the middle of the packet.
            raise StatementTooLarge(
                f"too large for MySQL: {len(text)} bytes, and max_allowed_packet is {limit}; store less, or raise it"
            )
    return parts


def mysql_text(statement: Statement) -> tuple[str, tuple[Any, ...]]:
    """For the caller's connection: the text, and the values that only its driver knows how to write."""
    text, values = statement.values("format")
    others = tuple(value for value in values if not isinstance(value, _PLAIN_TYPES))
    try:
        literals = [_mysql_literal(value) if isinstance(value, _PLAIN_TYPES) else "%s" for value in values]
    except UnicodeError as error:
        raise StatementRejected(f"this text cannot be stored: {error}") from error
    parts = text.split("%s")
    return "".join(a + b for a, b in zip(parts, [*literals, ""], strict=True)), others


def require_change(rows: Rows) -> None:
    """Raise if a statement that should change a row found none. Call it before the commit."""
    if rows and tuple(rows[0]) == (0,):
        raise Contention("the record changed while the handler ran")


class PacketAnswer:
    """Collects the results of a packet: the rows of the last statement that has rows, or how many the first touched."""

    __slots__ = ("_pieces", "_results", "_rows", "_touched")

    def __init__(self, statement: Statement, own: bool) -> None:
        self._pieces = statement.pieces if own and isinstance(statement, Packet) and not statement.begins else ()
        """The pieces that are each committed by themselves."""
        self._results = 0
        self._rows: Rows | None = None
        self._touched = 0

    def add(self, rows: Rows | None, touched: int) -> None:
        """Add the result of the next statement."""
        self._results += 1
        if rows is not None:
            self._rows = rows
        elif self._results == 1:
            self._touched = touched

    def rows(self) -> Rows:
        return ((self._touched,),) if self._rows is None else self._rows

    def error(self, error: SemelError) -> SemelError:
        """The error of a packet that failed. "Not stored" would be wrong if an earlier statement is committed."""
        stored = any(piece.query.writes for piece in self._pieces[: self._results])
        return StoreUncertain(str(error)) if stored else error


def _filled(text: str, values: list[Any]) -> str:
    try:
        return text % tuple(map(_mysql_literal, values))
    except UnicodeError as error:
        raise StatementRejected(f"this text cannot be stored: {error}") from error


def _mysql_literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, int):
        return format(int(value))
    if isinstance(value, str):
        return f"_utf8mb4 x'{value.encode().hex()}'"
    return f"x'{bytes(value).hex()}'"
