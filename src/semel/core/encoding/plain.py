"""Plain data ↔ bytes: JSON, and tagged JSON for what JSON has no word for.

Every value comes back exactly as it was, with its type: ``1``, ``True`` and ``1.0`` stay apart, a tuple is no list.
What is only JSON (None, bool, int, float, str, list, dict with str keys; exact types) is written as JSON. Anything
else plain is written as ``+`` and JSON in which an object with the single key ``$name`` is a tag: ``{"$tuple": [1]}``.
In that form a dict of the user's with a key that starts with ``$`` is written as tagged pairs, so no value can be
taken for a tag.

A subclass (an IntEnum, a named tuple, a defaultdict) or any other object is refused: it would come back as something
else. ``structural.py`` builds on the rules here for values whose annotation says what they are.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from types import NoneType
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from semel.core.encoding.snapshot import NotSerializable, SnapshotUnreadable

__all__ = [
    "MAX_DEPTH",
    "PLAIN",
    "Lift",
    "Lower",
    "PlainSerializer",
    "decode_tree",
    "encode_tree",
    "lift",
    "lift_pairs",
    "lower",
    "lower_dict",
    "tag_of",
]

MAX_DEPTH = 100
"""Levels of nesting that are stored. A recursive structure runs into it, long before Python's own recursion limit."""

Lower = Callable[[Any, int], Any]
"""(value, levels left) → a tree that JSON can write; raises :class:`NotSerializable`."""
Lift = Callable[[Any], Any]
"""The tree → the value; any exception means that the tree was not written by the matching :data:`Lower`."""


# Beyond this, int ↔ decimal text may be refused (sys.set_int_max_str_digits goes down to 640 digits): hex is not.
_BIG: Final = 10**600

# Circles are caught by the walk, which also bounds the depth.
_encoder: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))


def _make_encode() -> Callable[[Any], str]:
    """JSONEncoder makes its C encoder anew for every value, at half the price of a small one: make it once."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # another Python than CPython
        return _encoder.encode
    chunks = make(None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    return lambda value: "".join(chunks(value, 0))


_encode: Final = _make_encode()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode: Final = json.JSONDecoder(parse_constant=_no_constant).raw_decode


class PlainSerializer:
    """The serializer of functions whose return annotation names no class to rebuild."""

    name = "json"

    def encode(self, value: Any) -> bytes:
        if value is None:
            return b"null"
        try:
            if _only_json((value,), MAX_DEPTH):
                return _encode(value).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            pass  # a NaN or an infinity, which get a tag; or little stack left, which is refused below
        return encode_tree(lower, value)

    def decode(self, payload: bytes) -> Any:
        return decode_tree(lift, payload)


def encode_tree(lowered: Lower, value: Any) -> bytes:
    """The tagged form of a value, by the rule given."""
    try:
        return b"+" + _encode(lowered(value, MAX_DEPTH)).encode("utf-8", "surrogatepass")
    except RecursionError as exc:
        raise NotSerializable("the result is nested too deeply for the stack that is left here") from exc


def decode_tree(lifted: Lift, payload: bytes) -> Any:
    """The value that was written: as JSON, or in tagged form by the rule that ``lifted`` undoes."""
    try:
        text = str(payload, "utf-8", "surrogatepass")
        tagged = text[:1] == "+"
        tree, end = _decode(text, 1 if tagged else 0)
        if end != len(text):
            raise ValueError("there is text after the value")
        return lifted(tree) if tagged else tree
    except SnapshotUnreadable:
        raise
    except Exception as exc:  # whatever the bytes are, the reader gets one kind of error
        raise SnapshotUnreadable(f"the stored result is corrupt ({type(exc).__name__} while decoding it)") from exc


PLAIN: Final = PlainSerializer()

_ATOMS: Final = frozenset((NoneType, bool, str, float))


def _only_json(values: Iterable[Any], depth: int) -> bool:
    """Whether JSON alone brings these back. Exact types; NaN and infinities are left to the encoder to find."""
    for value in values:
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind is int:
            if not -_BIG < value < _BIG:
                return False
        elif kind is dict:
            if not depth:
                return False
            for key in value:
                if type(key) is not str:
                    return False
            if not _only_json(value.values(), depth - 1):
                return False
        elif kind is not list or not depth or not _only_json(value, depth - 1):
            return False
    return True


def lower(value: Any, depth: int) -> Any:
    """The tagged tree of a plain value."""
    rule = _LOWER.get(type(value))
    if rule is None:
        raise NotSerializable(
            f"a {type(value).__module__}.{type(value).__qualname__} would not come back as it is: return plain data, "
            "or a dataclass, pydantic or msgspec model whose class the function's return type names (a subclass counts "
            "as another class: use a union), or pass serializer="
        )
    if depth < 0:
        raise NotSerializable(f"the result is nested more than {MAX_DEPTH} levels deep, or contains itself")
    return rule(value, depth - 1)


def lift(tree: Any) -> Any:
    """The value of a tagged tree."""
    if type(tree) is list:
        return [lift(item) for item in tree]
    if type(tree) is not dict:
        return tree
    tag, body = tag_of(tree)
    if not tag:
        return {key: lift(item) for key, item in tree.items()}
    rule = _LIFT.get(tag)
    if rule is None:
        raise SnapshotUnreadable(
            f"the stored result has a {tag[1:]!r} in it that the function's return annotation does not name: "
            "it was written under another annotation (put that back until its record expires), or by a newer Semel"
        )
    return rule(body)


def tag_of(tree: Any) -> tuple[str, Any]:
    """The tag of a tree and its body; ``("", None)`` where it has none."""
    if type(tree) is dict and len(tree) == 1:
        ((tag, body),) = tree.items()
        if tag[:1] == "$":
            return tag, body
    return "", None


def lower_dict(value: dict[Any, Any], depth: int, key: Lower = lower, item: Lower = lower) -> Any:
    if all(type(name) is str and name[:1] != "$" for name in value):
        return {name: item(each, depth) for name, each in value.items()}
    return {"$dict": [[key(name, depth), item(each, depth)] for name, each in value.items()]}


def lift_pairs(body: Any, key: Lift = lift, item: Lift = lift) -> dict[Any, Any]:
    return {key(name): item(each) for name, each in body}


def _items(tag: str) -> Lower:
    return lambda value, depth: {tag: [lower(item, depth) for item in value]}


def _text(tag: str, text: Callable[[Any], str]) -> Lower:
    return lambda value, depth: {tag: text(value)}


def _lower_int(value: int, depth: int) -> Any:
    return value if -_BIG < value < _BIG else {"$int": hex(value)}


def _lower_float(value: float, depth: int) -> Any:
    return value if value - value == 0.0 else {"$float": repr(value)}


def _lower_clock(tag: str) -> Lower:
    def rule(value: datetime | time, depth: int) -> Any:
        return {tag: [value.replace(tzinfo=None).isoformat(), value.fold, _lower_zone(value.tzinfo)]}

    return rule


def _lower_zone(zone: tzinfo | None) -> Any:
    if zone is None or zone is UTC:
        return None if zone is None else "UTC"
    if type(zone) is timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        return [_lower_delta(offset), None if name == timezone(offset).tzname(None) else name]
    if type(zone) is ZoneInfo and zone.key:
        return {"key": zone.key}
    raise NotSerializable(f"a time zone of type {type(zone).__qualname__} would not come back: use a ZoneInfo or UTC")


def _lift_zone(tree: Any) -> tzinfo | None:
    if tree is None or tree == "UTC":
        return None if tree is None else UTC
    if type(tree) is dict:
        return ZoneInfo(tree["key"])
    delta, name = tree
    return timezone(timedelta(*delta)) if name is None else timezone(timedelta(*delta), name)


def _lower_delta(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _lift_datetime(body: Any) -> datetime:
    text, fold, zone = body
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=_lift_zone(zone))


def _lift_time(body: Any) -> time:
    text, fold, zone = body
    return time.fromisoformat(text).replace(fold=fold, tzinfo=_lift_zone(zone))


def _base64(value: bytes | bytearray) -> str:
    return b64encode(value).decode("ascii")


def _lift_bytes(body: Any) -> bytes:
    return b64decode(body, validate=True)


_LOWER: Final[dict[type, Lower]] = {
    NoneType: lambda value, depth: value,
    bool: lambda value, depth: value,
    str: lambda value, depth: value,
    int: _lower_int,
    float: _lower_float,
    list: lambda value, depth: [lower(item, depth) for item in value],
    dict: lower_dict,
    tuple: _items("$tuple"),
    set: _items("$set"),
    frozenset: _items("$frozenset"),
    bytes: _text("$bytes", _base64),
    bytearray: _text("$bytearray", _base64),
    complex: lambda value, depth: {"$complex": [_lower_float(value.real, 0), _lower_float(value.imag, 0)]},
    datetime: _lower_clock("$datetime"),
    time: _lower_clock("$time"),
    date: _text("$date", date.isoformat),
    timedelta: lambda value, depth: {"$timedelta": _lower_delta(value)},
    Decimal: _text("$decimal", str),
    UUID: _text("$uuid", str),
}

_LIFT: Final[dict[str, Lift]] = {
    "$int": lambda body: int(body, 16),
    "$float": float,
    "$dict": lift_pairs,
    "$tuple": lambda body: tuple([lift(item) for item in body]),
    "$set": lambda body: {lift(item) for item in body},
    "$frozenset": lambda body: frozenset([lift(item) for item in body]),
    "$bytes": _lift_bytes,
    "$bytearray": lambda body: bytearray(_lift_bytes(body)),
    "$complex": lambda body: complex(lift(body[0]), lift(body[1])),
    "$datetime": _lift_datetime,
    "$time": _lift_time,
    "$date": date.fromisoformat,
    "$timedelta": lambda body: timedelta(*body),
    "$decimal": Decimal,
    "$uuid": UUID,
}
