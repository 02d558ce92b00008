"""Canonical forms: equal data gives equal text, so that data can be compared by its bytes.

There are two forms. JSON documents get the canonical form of RFC 8785 (JCS), in which the order of members, blanks and
the spelling of a number do not matter. Python values are richer and get ``encode_value``, a form of our own that keeps
types apart. Both are the same in every process, on every version of Python and with every hash seed, because records
outlive all three.

This module must not know what the bytes are used for: no hashing, no requests, no functions.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from functools import lru_cache
from json.encoder import encode_basestring
from numbers import Integral
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from semel.errors import DocumentError, PolicyError

MAX_DEPTH = 128
"""How deep a document may nest: far less than the interpreter's stack allows, far more than people write."""


# JSON


def parse_json(document: bytes) -> Any:
    """Return the value of a JSON text.

    Raises DocumentError for a text that is not JSON or not UTF-8, that has a name twice in one object, or that nests
    deeper than MAX_DEPTH.
    """
    try:
        return _DECODER.decode(document.decode())
    except DocumentError:
        raise
    except RecursionError as exc:
        raise _too_deep() from exc
    except ValueError as exc:  # includes UnicodeDecodeError
        raise DocumentError(f"not a JSON document: {exc}") from exc


def canonical_json(value: Any) -> bytes:
    """Return the value as RFC 8785 writes it: members sorted by the UTF-16 units of their names, numbers as in
    ECMAScript.

    One exception: whole numbers beyond 2**53 keep all their digits. The RFC would round them to the nearest double, so
    that two 64-bit ids that differ in the last digit become equal. A fingerprint that confuses two orders is worse than
    a form that no other implementation writes, and refusing such numbers would exclude every client that has such ids.
    """
    out: list[str] = []
    _write(value, out.append, MAX_DEPTH)
    try:
        return "".join(out).encode()
    except UnicodeEncodeError as exc:
        raise DocumentError("the document holds a lone surrogate") from exc


def _write(value: Any, put: Callable[[str], None], depth: int) -> None:
    if isinstance(value, str):
        put(encode_basestring(value))
    elif value is None or isinstance(value, bool):
        put("null" if value is None else "true" if value else "false")
    elif isinstance(value, int):
        if value.bit_length() > 1024:  # greater than every double, so it is not allowed in I-JSON (RFC 7493)
            raise DocumentError("the document holds a number out of range")
        put(int.__repr__(value))
    elif isinstance(value, float):
        put(_number(value))
    elif depth == 0:
        raise _too_deep()
    elif isinstance(value, dict):
        before = "{"
        for name in _in_order(value):
            put(before)
            put(encode_basestring(name))
            put(":")
            _write(value[name], put, depth - 1)
            before = ","
        put("}" if value else "{}")
    elif isinstance(value, (list, tuple)):
        before = "["
        for element in value:
            put(before)
            _write(element, put, depth - 1)
            before = ","
        put("]" if value else "[]")
    else:
        raise DocumentError(f"JSON has no {type(value).__name__}")


def _in_order(members: dict[Any, Any]) -> list[str]:
    try:
        if "".join(members).isascii():
            return sorted(members)
        return sorted(members, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
    except TypeError as exc:
        raise DocumentError("the names in a JSON object must be text") from exc


def _number(value: float) -> str:
    """Return a number as ECMAScript's Number::toString. Python finds the same shortest digits, but places the decimal
    point by other rules.
    """
    if value - value != 0:
        raise DocumentError("JSON has no NaN and no Infinity, and the document holds one or a number out of range")
    if value == 0:
        return "0"
    mantissa, _, exponent = float.__repr__(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # The value is 0.DIGITS * 10**point. Leading zeros of a fraction move the point to the left.
    point = len(whole) + int(exponent or 0) - (len(whole) + len(fraction) - len(digits))
    digits = digits.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        text = digits + "0" * (point - count)
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        text = f"{digits[0]}{'.' if count > 1 else ''}{digits[1:]}e{point - 1:+d}"
    return f"-{text}" if value < 0 else text


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        # Parsers disagree on which of the two counts, so the fingerprint and the handler could see different documents.
        raise DocumentError("a name occurs twice in an object of the document")
    return members


def _whole_number(digits: str) -> int:
    if len(digits) > 310:  # before the conversion, which takes quadratic time
        raise DocumentError("the document holds a number out of range")
    return int(digits)


def _no_constant(word: str) -> Any:
    raise DocumentError(f"not a JSON document: {word} is not a JSON value")


def _too_deep() -> DocumentError:
    return DocumentError(f"the document nests deeper than {MAX_DEPTH} levels")


_DECODER = json.JSONDecoder(object_pairs_hook=_members, parse_int=_whole_number, parse_constant=_no_constant)


# Chosen fields


class _Absent(Enum):
    ABSENT = "absent"


ABSENT: Final = _Absent.ABSENT
"""Stands for a missing field."""

_SEGMENT: Final = re.compile(r"[^.\[\]]+(?:\[-?[0-9]{1,9}\])*")
_Tree = dict[str, Any]  # segment -> the tree below it, or None: everything below


def select_fields(document: Any, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None) -> Any:
    """Return a copy of the parsed document with only the named fields, or without them, or both in turn.

    A field is named by its path: ``amount``, ``card.number``, ``items.*.sku``, where ``*`` stands for every element of
    a list or every member of an object. A missing field stays missing, which is not the same as null. Lists keep
    their length, so that two items without a chosen field still differ from three. A document that has none of the
    fields is returned whole: otherwise all such documents would be equal.
    """
    if include is not None:
        chosen: set[str] = set()
        selected = _keep(document, [_tree(_paths("include", include))], chosen)
        document = selected if chosen else document
    if exclude is not None:
        document = _drop(document, [_tree(_paths("exclude", exclude))])
    return document


def split_path(path: object) -> list[str | int]:
    """Return the segments of a path to a field, names and indexes: ``order.items[0].sku``. Raises PolicyError."""
    segments: list[str | int] = []
    for part in path.split(".") if isinstance(path, str) else [""]:
        if _SEGMENT.fullmatch(part) is None:
            raise PolicyError(
                f"{path!r} is not a path to a field: write it like 'amount', 'card.number', 'items[0].sku' or "
                "'items.*.sku'"
            )
        name, *indexes = part.replace("]", "").split("[")
        segments += [name, *map(int, indexes)]
    return segments


def _paths(option: str, paths: Iterable[str]) -> tuple[str, ...]:
    if isinstance(paths, str):
        raise PolicyError(f"{option} takes a list of fields: write ({paths!r},)")
    if not (chosen := tuple(paths)):
        raise PolicyError(f"{option} names no field")
    return chosen


@lru_cache(maxsize=256)
def _tree(paths: tuple[str, ...]) -> _Tree:
    tree: _Tree = {}
    for path in paths:
        segments = [segment for segment in split_path(path) if isinstance(segment, str)]
        if "[" in path:
            raise PolicyError(f"{path!r} names one element of a list, and here all are compared: write 'items.*.sku'")
        *stem, leaf = segments
        branch = tree
        for segment in stem:
            below = branch.setdefault(segment, {})
            if below is None:  # a shorter path covers this one
                break
            branch = below
        else:
            branch[leaf] = None
    return tree


def _below(trees: list[_Tree], name: str) -> list[_Tree] | None:
    found = [tree[segment] for tree in trees for segment in (name, "*") if segment in tree]
    return None if None in found else found


def _keep(value: Any, trees: list[_Tree], chosen: set[str]) -> Any:
    """Return what the paths choose, and add the last segments of those that exist to ``chosen``.

    It goes no deeper than the paths do, however deep a hostile document nests.
    """
    if isinstance(value, dict):
        parts = {}
        for name, member in value.items():
            below = _below(trees, name)
            if below is None:
                chosen.add(name)
                parts[name] = member
            elif below and (part := _keep(member, below, chosen)) is not ABSENT:
                parts[name] = part
        return parts or ABSENT
    if isinstance(value, (list, tuple)):
        below = _below(trees, "*")
        if below is None:
            chosen.add("*")
            return value
        if below:
            return [{} if (part := _keep(element, below, chosen)) is ABSENT else part for element in value]
    return ABSENT


def _drop(value: Any, trees: list[_Tree]) -> Any:
    if isinstance(value, dict):
        found = [(name, member, _below(trees, name)) for name, member in value.items()]
        return {name: _drop(member, below) if below else member for name, member, below in found if below is not None}
    if isinstance(value, (list, tuple)):
        below = _below(trees, "*")
        return [] if below is None else [_drop(element, below) for element in value] if below else value
    return value


# Python values


class LiveObject(Exception):
    """``encode_value`` met an object that is not plain data: a session, a client, a file, a function. Users never get
    this error.
    """


LIVE: Final = "o"
"""How ``encode_value`` writes a live object unless it is strict."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, Integral: int, float: float.__pos__, bytearray: bytes}


def encode_value(value: Any, strict: bool = True) -> str:
    """Return plain data as text: equal texts for equal values of a type, different texts for all others.

    Every text shows where it ends, so texts can be concatenated. ``1``, ``True``, ``1.0``, ``"1"`` and ``b"1"`` are
    five different values. These pairs are equal: a list and a tuple of the same elements (JSON does not distinguish
    them either), a set and its frozenset, mappings in another order, a ``Decimal`` with more or fewer trailing zeros,
    0.0 and -0.0, and an aware datetime in another time zone.

    Enum members are compared by class and name; dataclasses, attrs classes, pydantic models and msgspec structs by
    class and fields. A live object raises LiveObject, or is written as LIVE unless ``strict``.
    """
    kind = type(value)
    encoder = _ENCODERS.get(kind)
    return encoder(value, strict) if encoder is not None else _encode_other(value, kind, strict)


def _encode_other(value: Any, kind: Any, strict: bool) -> str:
    if issubclass(kind, Enum):  # before int and str: an IntEnum's member is not its number
        name = value.value if issubclass(kind, Flag) else value.name
        return f"e{_text(kind.__qualname__)}{encode_value(name, strict)}"
    if (fields := _fields_of(kind)) is not None:
        members = {name: getattr(value, name, ABSENT) for name in fields}
        if hasattr(kind, "__pydantic_extra__") and value.__pydantic_extra__:
            members |= value.__pydantic_extra__
        return f"c{_text(kind.__qualname__)}{_mapping(members, strict)}"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return f"c{_text(kind.__qualname__)}{_sequence(value, strict)}"
    # The value that a subclass holds, whatever its __str__ says. Integral includes the numbers of numpy.
    for base, plain in _PLAIN.items():
        if issubclass(kind, base):
            return encode_value(plain(value))
    for base, encoder in _ENCODERS.items():
        if issubclass(kind, base):
            return encoder(value, strict)
    if strict:
        raise LiveObject(kind.__qualname__)
    return LIVE


@lru_cache(maxsize=1024)
def _fields_of(kind: type[Any]) -> tuple[str, ...] | None:
    """Return the names of the fields that a class of plain data declares; None for any other class."""
    if hasattr(kind, "_sa_class_manager"):
        return None  # a mapped row: reading its attributes may query the database
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.compare)
    if (names := getattr(kind, "__struct_fields__", None)) is not None:  # msgspec
        return tuple(names)
    if (attributes := getattr(kind, "__attrs_attrs__", None)) is not None:
        return tuple(attribute.name for attribute in attributes if attribute.eq)
    if hasattr(kind, "model_dump"):  # pydantic; the second name is the one before 2.10
        names = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", None)
        return tuple(names) if isinstance(names, Mapping) else None
    return None


def _text(value: str) -> str:
    return f"s{len(value)}:{value}"


def _sequence(value: Any, strict: bool) -> str:
    return f"l{len(value)}:" + "".join([encode_value(element, strict) for element in value])


def _mapping(value: Any, strict: bool) -> str:
    members = [encode_value(name, strict) + encode_value(member, strict) for name, member in value.items()]
    members.sort()
    return f"d{len(members)}:" + "".join(members)


def _set(value: Any, strict: bool) -> str:
    return f"m{len(value)}:" + "".join(sorted([encode_value(member, strict) for member in value]))


def _decimal(value: Decimal, strict: bool) -> str:
    sign, numerals, exponent = value.as_tuple()
    if not isinstance(exponent, int):  # NaN and Infinity
        return f"x{value};"
    digits = "".join(map(str, numerals)).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return "x0;"
    return f"x{'-' if sign else ''}{significant}e{exponent + len(digits) - len(significant)};"


def _datetime(value: datetime, strict: bool) -> str:
    if value.utcoffset() is None:
        return f"w{value.isoformat()};"
    return f"z{_duration(value - _EPOCH, strict)}"


def _duration(value: timedelta, strict: bool) -> str:
    return f"p{value.days},{value.seconds},{value.microseconds};"


# The order matters: a subclass is encoded as the first of these that it is, and a datetime is also a date.
_ENCODERS: dict[type, Callable[[Any, bool], str]] = {
    str: lambda value, strict: f"s{len(value)}:{value}",
    int: lambda value, strict: f"i{value:x};",  # not decimal, which takes quadratic time and has a limit
    bool: lambda value, strict: "t" if value else "f",
    type(None): lambda value, strict: "n",
    float: lambda value, strict: f"r{value + 0.0!r};",
    bytes: lambda value, strict: f"b{value.hex()};",
    list: _sequence,
    tuple: _sequence,
    dict: _mapping,
    set: _set,
    frozenset: _set,
    Decimal: _decimal,
    UUID: lambda value, strict: f"u{value.hex};",
    datetime: _datetime,
    date: lambda value, strict: f"y{value.isoformat()};",
    time: lambda value, strict: f"h{value.isoformat()};",
    timedelta: _duration,
    PurePath: lambda value, strict: f"q{_text(value.as_posix())}",
    _Absent: lambda value, strict: "a",
}
