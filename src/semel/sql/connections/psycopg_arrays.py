"""Array parameters for psycopg, in PostgreSQL's binary form.

psycopg looks at every element of a list to find out its type, each time. We know the type from the statement's casts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format

from semel.sql.program import Statement

_HEADER: Final = struct.Struct("!iiIii").pack
_LENGTH: Final = struct.Struct("!i").pack
_NULL: Final = b"\xff\xff\xff\xff"
_TYPES: Final[dict[str, tuple[int, int, Any]]] = {  # oid of an element, oid of the array, how an element is packed
    "bytea": (17, 1001, bytes),
    "bigint": (20, 1016, struct.Struct("!q").pack),
    "smallint": (21, 1005, struct.Struct("!h").pack),
    "float8": (701, 1022, struct.Struct("!d").pack),
    "text": (25, 1009, str.encode),
}


class _Array:
    """An array parameter whose elements have a known type."""

    __slots__ = ("data", "oid")

    def __init__(self, element_type: str, elements: Sequence[Any]) -> None:
        oid, self.oid, pack = _TYPES[element_type]
        parts = [_HEADER(1, 0 if None not in elements else 1, oid, len(elements), 1)]
        for element in elements:
            if element is None:
                parts.append(_NULL)
            else:
                data = pack(element)
                parts.append(_LENGTH(len(data)))
                parts.append(data)
        self.data = b"".join(parts)


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
    """Let a connection or a cursor send the arrays of our statements."""
    adapters.register_dumper(_Array, _ArrayDumper)


def values_for_psycopg(statement: Statement) -> tuple[Any, list[Any]]:
    """Text and values as psycopg wants them."""
    arrays = statement.query.arrays
    text, names = statement.query.rendered("format")
    params = statement.params
    return text, [_Array(arrays[name], params[name]) if name in arrays else params[name] for name in names]
