"""PostgreSQL statements with their values written in, to be sent as one message with BEGIN or COMMIT.

A statement with parameters travels alone; several travel together only as plain text. Values are written as quoted
numbers, as plain words, or as hex digits in an ``E''`` literal, so nothing in them can end a literal, whatever
``standard_conforming_strings`` and the encoding are.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from semel.sql.connections.postgres_errors import Refused
from semel.sql.program import Query, Statement

__all__ = ["written_out"]

_PLAIN: Final = re.compile(r"[A-Za-z0-9 _.:/@+-]*").fullmatch
_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)\b")


_pieces: Final[dict[Query, list[str]]] = {}
"""Texts cut at their parameters: words of SQL and names of values, in turn. There are few of them."""


def written_out(statement: Statement) -> str:
    """The statement's text with its values in place. Arrays are not written: such statements travel alone."""
    query, params = statement.query.as_text or statement.query, statement.params
    pieces = _pieces.get(query)
    if pieces is None:
        pieces = _pieces[query] = _PARAMETER.split(query.sql)
    text = pieces.copy()
    for at in range(1, len(text), 2):
        value = params[text[at]]
        kind = type(value)
        if kind is bytes:
            text[at] = f"E'\\\\x{value.hex()}'"
        elif kind is int or (kind is str and _PLAIN(value)):
            text[at] = f"'{value}'"
        else:
            text[at] = _rarer(value)
    return "".join(text)


def _rarer(value: Any) -> str:
    kind = type(value)
    if kind is float and math.isfinite(value):
        return f"'{value!r}'"
    if value is None:
        return "NULL"
    if kind is str:
        try:
            return f"convert_from(E'\\\\x{value.encode().hex()}', 'UTF8')"
        except UnicodeError as error:
            raise Refused(f"the driver cannot send this: {error}") from error
    raise Refused(f"the driver cannot send this: a {kind.__name__} has no literal here")
