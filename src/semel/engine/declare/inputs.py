"""What a resumable function was called with, as bytes: kept with the operation, so that it can be run without a caller.

Arguments are plain data, or what their annotations name (a dataclass, an Enum, a model), as with results. Nothing is
unpickled. The handle is no argument: each attempt gets its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import BoundArguments, Parameter, Signature
from typing import Any, Final

from semel.core.encoding.serializers import PLAIN, NotSerializable, Serializer, decode_result, serializer_for
from semel.errors import PolicyError, SnapshotUnreadable

__all__ = ["Inputs"]

_VARIABLE: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class Inputs:
    """The parameters of one function."""

    __slots__ = ("_operation", "_serializers", "_signature")

    def __init__(self, operation: str, signature: Signature, hints: Mapping[str, Any]) -> None:
        self._operation = operation
        self._signature = signature
        self._serializers: dict[str, Serializer] = {
            name: PLAIN if p.kind in _VARIABLE else serializer_for(hints.get(name, Signature.empty))
            for name, p in signature.parameters.items()
        }

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """Raises PolicyError for an argument that cannot be kept; nothing is claimed yet."""
        bound = self._signature.bind(*args, **kwargs)
        return PLAIN.encode({name: self._text(name, value) for name, value in bound.arguments.items()})

    def _text(self, name: str, value: Any) -> str:
        try:
            return self._serializers[name].encode(value).decode()
        except NotSerializable as error:
            raise PolicyError(
                f"{self._operation} is resumable, so its arguments are stored, and {name} "
                f"({type(value).__name__}) cannot be: {error}"
            ) from error

    def decode(self, payload: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; raises SnapshotUnreadable where the function takes others now."""
        stored: dict[str, str] = PLAIN.decode(payload)
        unknown = [name for name in stored if name not in self._serializers]
        if unknown:
            raise SnapshotUnreadable(f"{self._operation} was called with {', '.join(unknown)}, which it takes no more")
        values = {
            name: decode_result(serializer, serializer.name, stored[name].encode())
            for name, serializer in self._serializers.items()
            if name in stored
        }
        bound = BoundArguments(self._signature, values)
        try:
            self._signature.bind(*bound.args, **bound.kwargs)
        except TypeError as error:
            raise SnapshotUnreadable(f"{self._operation} takes other arguments now than it was called with") from error
        return bound.args, bound.kwargs
