"""Results ↔ bytes: which serializer a function gets, and which one reads a stored result.

``json``
    plain data, as it was, with its types (``plain.py``); what a function without a telling annotation gets.
``typed``
    the same, and the classes that the return annotation names: dataclasses, Enums, NamedTuples, pydantic models,
    msgspec Structs, at any depth, in containers and unions (``structural.py``, ``records.py``).

Both write the same kind of payload, so an annotation may be added while records live. Nothing is unpickled, and no
type is looked up by a name from the store.
"""

from __future__ import annotations

from inspect import Signature
from typing import Any, Protocol, runtime_checkable

from semel.core.encoding.nodes import PLAIN_NODE
from semel.core.encoding.plain import MAX_DEPTH, PLAIN, PlainSerializer
from semel.core.encoding.snapshot import NotSerializable, SnapshotUnreadable
from semel.core.encoding.structural import TypedSerializer, compile_node
from semel.errors import PolicyError

__all__ = [
    "MAX_DEPTH",
    "PLAIN",
    "NotSerializable",
    "PlainSerializer",
    "Serializer",
    "TypedSerializer",
    "decode_result",
    "serializer_for",
]


@runtime_checkable
class Serializer(Protocol):
    """Turns results into bytes and back. A user may pass their own; its name is stored beside what it wrote."""

    @property
    def name(self) -> str:
        """1 to 32 ascii characters; not ``json`` or ``typed``, which are Semel's own."""
        ...

    def encode(self, value: Any) -> bytes:
        """Raises :class:`NotSerializable` for a value that would not come back as it is."""
        ...

    def decode(self, payload: bytes) -> Any:
        """The value; never by running or importing what the payload names."""
        ...


_OWN = frozenset((PlainSerializer.name, TypedSerializer.name))


def serializer_for(annotation: Any = Signature.empty, serializer: Serializer | None = None) -> Serializer:
    """The serializer of a function with this return annotation, or the user's own, checked.

    ``annotation`` is resolved (``typing.get_type_hints``); what is left out, Any, or names no class is plain.
    """
    if serializer is not None:
        if not isinstance(serializer, Serializer):
            raise PolicyError(f"a serializer has a name, encode and decode; {serializer!r} does not")
        name: Any = serializer.name
        if not isinstance(name, str) or not name.isascii() or not 1 <= len(name) <= 32:
            raise PolicyError(f"a serializer's name is 1 to 32 ascii characters, not {name!r}")
        if name in _OWN and not isinstance(serializer, (PlainSerializer, TypedSerializer)):
            raise PolicyError(f"the serializer name {name!r} is Semel's own: choose another")
        return serializer
    node = compile_node(annotation)
    return PLAIN if node is PLAIN_NODE else TypedSerializer(node)


def decode_result(own: Serializer, name: str, payload: bytes) -> Any:
    """A stored result that the serializer called ``name`` wrote, read for a function whose serializer is ``own``.

    They differ where the function was annotated, or given a serializer, after the result was stored.
    """
    if name == own.name or (name in _OWN and own.name in _OWN):
        reader = own
    elif name in _OWN:
        reader = PLAIN
    else:
        raise SnapshotUnreadable(
            f"the stored result was written by the serializer {name!r} and the function now has {own.name!r}: "
            "pass the former as serializer= until the record expires"
        )
    try:
        return reader.decode(payload)
    except SnapshotUnreadable:
        raise
    except Exception as exc:
        raise SnapshotUnreadable(
            f"the serializer {own.name!r} cannot decode the stored result ({type(exc).__name__})"
        ) from exc
