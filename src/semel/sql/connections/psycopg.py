"""psycopg 3, sync and async: one statement on one connection, its errors in our words."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import psycopg
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format

from semel.errors import SemelError
from semel.sql.connections.postgres_errors import Refused, from_sqlstate
from semel.sql.program import Rows, Statement

__all__ = ["DRIVER_ERRORS", "AsyncPsycopgConnection", "PsycopgConnection", "named_error", "prepared", "register_arrays"]


class PsycopgConnection:
    """Wraps a psycopg.Connection, ours or the caller's."""

    __slots__ = ("raw",)

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        register_arrays(raw.adapters)

    def execute(self, statement: Statement) -> Rows:
        try:
            text, values = prepared(statement)
            cursor = self.raw.execute(text, values or None, binary=True)
            # Not by `description`: that makes an object per column, at half the price of the whole statement.
            return cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error


class AsyncPsycopgConnection:
    """Wraps a psycopg.AsyncConnection, ours or the caller's."""

    __slots__ = ("raw",)

    def __init__(self, raw: psycopg.AsyncConnection[Any]) -> None:
        self.raw = raw
        register_arrays(raw.adapters)

    async def execute(self, statement: Statement) -> Rows:
        try:
            text, values = prepared(statement)
            cursor = await self.raw.execute(text, values or None, binary=True)
            return await cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error


class _Array:
    """An array parameter of a known element type, in PostgreSQL's binary form.

    psycopg looks at every element of a list to find out its type, each time; we know it, from the statement's casts.
    """

    __slots__ = ("data", "oid")

    def __init__(self, kind: str, elements: Sequence[Any]) -> None:
        oid, self.oid, pack = _KINDS[kind]
        parts = [_HEADER(1, 0 if None not in elements else 1, oid, len(elements), 1)]
        for element in elements:
            if element is None:
                parts.append(_NULL)
            else:
                data = pack(element)
                parts.append(_LENGTH(len(data)))
                parts.append(data)
        self.data = b"".join(parts)


_HEADER: Final = struct.Struct("!iiIii").pack
_LENGTH: Final = struct.Struct("!i").pack
_NULL: Final = b"\xff\xff\xff\xff"
_KINDS: Final[dict[str, tuple[int, int, Any]]] = {  # element's oid, array's oid, how an element is packed
    "bytea": (17, 1001, bytes),
    "bigint": (20, 1016, struct.Struct("!q").pack),
    "smallint": (21, 1005, struct.Struct("!h").pack),
    "float8": (701, 1022, struct.Struct("!d").pack),
    "text": (25, 1009, str.encode),
}


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def get_key(self, obj: Any, format: Any) -> Any:
        return (self.cls, obj.oid)

    def upgrade(self, obj: Any, format: Any) -> _ArrayDumper:
        dumper = _ArrayDumper(self.cls)
        dumper.oid = obj.oid
        return dumper

    def dump(self, obj: Any) -> bytes:
        data: bytes = obj.data
        return data


def register_arrays(adapters: AdaptersMap) -> None:
    """Let a connection, or a cursor, take the arrays of our statements."""
    adapters.register_dumper(_Array, _ArrayDumper)


def prepared(statement: Statement) -> tuple[Any, list[Any]]:
    """Text and values for the driver."""
    arrays = statement.query.arrays
    text, names = statement.query.rendered("format")
    params = statement.params
    return text, [_Array(arrays[name], params[name]) if name in arrays else params[name] for name in names]


DRIVER_ERRORS: Final = (psycopg.Error, UnicodeError, OverflowError, ValueError, struct.error)
"""What the driver raises, and what cannot even be put into its words: a lone surrogate, a NUL, a number too large."""


def named_error(error: Exception) -> SemelError:
    if not isinstance(error, psycopg.Error) or (isinstance(error, psycopg.DataError) and error.sqlstate is None):
        return Refused(f"the driver cannot send this: {error}")
    return from_sqlstate(error.sqlstate, error.diag.message_primary or str(error))
