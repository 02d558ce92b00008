"""The serializer of plain data: JSON, with tags for the types that JSON lacks.

Every value comes back exactly as it was, with its type: ``1``, ``True`` and ``1.0`` stay apart, and a tuple does not
become a list. A value that JSON can express (None, bool, int, float, str, list, dict with str keys; exact types) is
written as JSON. Other plain data is written as ``+`` followed by JSON in which an object with a single key ``$name`` is
a tag: ``{"$tuple": [1]}``. In that form a user's dict with a key that starts with ``$`` is written as tagged pairs, so
no value can be mistaken for a tag.

A subclass (an IntEnum, a named tuple, a defaultdict) or any other object is refused, because it would come back as
something else. ``typed.py`` builds on these rules for values whose class an annotation names.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from types import NoneType
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

from semel.core.encoding.snapshot import Kind, NotSerializable
from semel.errors import SnapshotUnreadable

MAX_DEPTH = 100
"""How many levels of nesting are stored. A structure that contains itself is refused here, long before Python's own
recursion limit.
"""

Lower = Callable[[Any, int], Any]
"""(value, levels left) → a tree that JSON can write. Raises :class:`NotSerializable`."""
Lift = Callable[[Any], Any]
"""tree → value. Any exception means that the tree was not written by the matching :data:`Lower`."""


# Beyond this, int ↔ decimal text may be refused (sys.set_int_max_str_digits goes down to 640 digits): hex is not.
_BIG: Final = 10**600

# No check for circular references: the walk over the value bounds the depth.
_encoder: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))


def _make_encode() -> Callable[[Any], str]:
    """Return a function that encodes JSON with one C encoder. JSONEncoder would create one for every value."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # not CPython
        return _encoder.encode
    chunks = make(None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    return lambda value: "".join(chunks(value, 0))


_encode: Final = _make_encode()


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode: Final = json.JSONDecoder(parse_constant=_no_constant).raw_decode


class ValueSerializer:
    """The part of ``ResultSerializer`` that is the same for all results of functions."""

    kind = Kind.VALUE

    def shorten(self, value: Any) -> None:
        """There is no smaller version of a function's result."""
        return

    def has_effect(self, value: Any) -> bool:
        return True

    def convert(self, value: Any) -> Any:
        return value


class PlainSerializer(ValueSerializer):
    """The serializer of functions whose return annotation names no class to rebuild."""

    name = "json"

    def __init__(self) -> None:
        self.decode: Callable[[bytes], Any] = partial(decode_tree, lift)

    def encode(self, value: Any) -> bytes:
        if value is None:
            return b"null"
        try:
            if _only_json((value,), MAX_DEPTH):
                return _encode(value).encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):
            pass  # a NaN or an infinity, which gets a tag; or too little stack is left, which is refused below
        return encode_tree(lower, value)


def encode_tree(lower_value: Lower, value: Any) -> bytes:
    """Return the tagged form of a value. ``lower_value`` turns the value into a tree."""
    try:
        return b"+" + _encode(lower_value(value, MAX_DEPTH)).encode("utf-8", "surrogatepass")
    except RecursionError as exc:
        raise NotSerializable("the result is nested too deeply for the stack that is left here") from exc


def decode_tree(lift_tree: Lift, payload: bytes) -> Any:
    """Return the value of a payload: plain JSON, or the tagged form, whose tree ``lift_tree`` turns into a value."""
    try:
        text = str(payload, "utf-8", "surrogatepass")
        tagged = text[:1] == "+"
        tree, end = _decode(text, 1 if tagged else 0)
        if end != len(text):
            raise ValueError("there is text after the value")
        return lift_tree(tree) if tagged else tree
    except SnapshotUnreadable:
        raise
    except Exception as exc:  # the reader gets one kind of error, whatever the bytes are
        raise SnapshotUnreadable(f"the stored result is corrupt ({type(exc).__name__} while decoding it)") from exc


_ATOMS: Final = frozenset((NoneType, bool, str, float))


def _only_json(values: Iterable[Any], depth: int) -> bool:
    """Whether JSON can express these values. Only exact types count. The encoder finds NaN and infinities."""
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
    """Return the tagged tree of a plain value."""
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
    """Return the value of a tagged tree."""
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
    """Return the tag of a tree and its body, or ``("", None)`` if it has no tag."""
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


def _lift_clock(kind: type[datetime] | type[time]) -> Lift:
    def rule(body: Any) -> datetime | time:
        text, fold, zone = body
        return kind.fromisoformat(text).replace(fold=fold, tzinfo=_lift_zone(zone))

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
    "$datetime": _lift_clock(datetime),
    "$time": _lift_clock(time),
    "$date": date.fromisoformat,
    "$timedelta": lambda body: timedelta(*body),
    "$decimal": Decimal,
    "$uuid": UUID,
}

PLAIN: Final = PlainSerializer()
