"""Results and errors ↔ bytes: which serializer a function gets, and how a stored result is read.

``json``
    plain data, with its types (``plain.py``). Functions whose return annotation names no class get this one.
``typed``
    the same, plus the classes that the return annotation names: dataclasses, Enums, NamedTuples, pydantic models and
    msgspec Structs, at any depth, in containers and unions (``typed.py``).

Both write the same kind of payload, so an annotation may be added while records live. Nothing is unpickled, and no
type is looked up by a name from the store.

A remembered exception is stored as its class's qualified name, its message, and the arguments and attributes that it
would pickle, where they are plain data. It is rebuilt only as a class that the operation declares, or as a loaded
subclass of one. ``Exception`` and other built-in classes declare no subclasses except built-in ones: otherwise a stored
name could choose among all that the program has loaded, and call it with stored arguments. Names are compared, never
imported. If an exception cannot be rebuilt with the same message, :class:`semel.errors.RememberedFailure` takes its
place, with the name as text.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from functools import lru_cache
from inspect import Signature
from typing import Any, Protocol, runtime_checkable

from semel.core.encoding.plain import PLAIN, PlainSerializer, ValueSerializer
from semel.core.encoding.snapshot import Kind, NotSerializable
from semel.core.encoding.typed import PLAIN_NODE, TypedSerializer, compile_node
from semel.errors import PolicyError, RememberedFailure, SnapshotUnreadable


@runtime_checkable
class Serializer(Protocol):
    """Turns results into bytes and back. Pass your own as ``serializer=``; its name is stored beside what it wrote."""

    @property
    def name(self) -> str:
        """1 to 32 ascii characters; not ``json`` or ``typed``, which are Semel's own."""
        ...

    def encode(self, value: Any) -> bytes:
        """Return the value as bytes. Raises :class:`NotSerializable` for a value that would not come back as it is."""
        ...

    def decode(self, payload: bytes) -> Any:
        """Return the value. It must not run or import what the payload names."""
        ...


class ResultSerializer(Serializer, Protocol):
    """What a call asks of its serializer. Results of functions and HTTP responses differ in these points."""

    @property
    def kind(self) -> Kind:
        """The kind of the snapshots it writes."""
        ...

    def shorten(self, value: Any) -> Any:
        """Return a smaller version of a result that is too large to store, or None if there is none."""
        ...

    def has_effect(self, value: Any) -> bool:
        """Whether this result means that the work was done, so that the handler's writes go with it."""
        ...

    def convert(self, value: Any) -> Any:
        """Return the result that stands for plain data which ``guard.resolve()`` stored."""
        ...


_OWN = frozenset((PlainSerializer.name, TypedSerializer.name))


class _UserSerializer(ValueSerializer):
    """A user's serializer, checked."""

    def __init__(self, serializer: Serializer) -> None:
        self.name = serializer.name
        self.encode = serializer.encode
        self.decode = serializer.decode


def serializer_for(annotation: Any = Signature.empty, serializer: Serializer | None = None) -> ResultSerializer:
    """Return the serializer of a function with this return annotation, or the user's own.

    ``annotation`` is resolved (``typing.get_type_hints``). A missing annotation, Any, or one that names no class means
    plain data. Raises PolicyError for an object that is no serializer.
    """
    if serializer is not None:
        if not isinstance(serializer, Serializer):
            raise PolicyError(f"a serializer has a name, encode and decode; {serializer!r} does not")
        name: Any = serializer.name
        if not isinstance(name, str) or not name.isascii() or not 1 <= len(name) <= 32:
            raise PolicyError(f"a serializer's name is 1 to 32 ascii characters, not {name!r}")
        if isinstance(serializer, (PlainSerializer, TypedSerializer)):
            return serializer
        if name in _OWN:
            raise PolicyError(f"the serializer name {name!r} is Semel's own: choose another")
        return _UserSerializer(serializer)
    node = compile_node(annotation)
    return PLAIN if node is PLAIN_NODE else TypedSerializer(node)


def cached_serializer(annotation: Any) -> ResultSerializer:
    """Same as ``serializer_for``, for annotations that are passed in each call.

    Raises TypeError for an annotation that has no hash.
    """
    # A | B equals B | A, but a union stores the index of an arm: the two must not share a serializer.
    return _serializer_of(annotation, repr(annotation))


@lru_cache(maxsize=256)
def _serializer_of(annotation: Any, form: str) -> ResultSerializer:
    return serializer_for(annotation)


def decode_result(own: Serializer, name: str, payload: bytes) -> Any:
    """Decode a stored result that the serializer called ``name`` wrote, for a function whose serializer is ``own``.

    They differ if the function was annotated, or got a serializer, after the result was stored. Raises
    SnapshotUnreadable.
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


# -- remembered exceptions

ERROR_LIMIT = 64 * 1024
"""How many bytes of an exception are stored. Of a larger one only the class and the start of the message are."""


def encode_error(exc: BaseException) -> bytes:
    """Return the payload of an ``ERROR`` snapshot. Never fails: parts that cannot be stored are left out."""
    name, message = _class_name(type(exc)), _message(exc)
    args, state = _parts(exc)
    try:
        payload = PLAIN.encode([name, message, args, state])
    except NotSerializable:
        payload = PLAIN.encode([name, message, None, None])
    if len(payload) > ERROR_LIMIT:
        return PLAIN.encode([name, message[: ERROR_LIMIT // 8], None, None])
    return payload


def decode_error(payload: bytes, allowed: tuple[type[BaseException], ...]) -> BaseException:
    """Return the exception to raise: of its own class if that is allowed and can be rebuilt, else RememberedFailure."""
    try:
        name, message, args, state = PLAIN.decode(payload)
    except (TypeError, ValueError) as exc:
        raise SnapshotUnreadable("the stored failure is corrupt") from exc
    if type(name) is not str or type(message) is not str:
        raise SnapshotUnreadable("the stored failure is corrupt")
    cls = _find_class(name, allowed)
    if cls is not None and type(args) is tuple:
        for build in (_call_class, _restore):
            try:
                error = build(cls, args, state)
                if type(error) is cls and _message(error) == message:
                    return error
            except Exception:  # a constructor may raise anything: try the other way, or use RememberedFailure
                continue
    return RememberedFailure(name, message)


def _call_class(cls: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    error = cls(*args)
    if state:
        error.__setstate__(state)
    return error


def _restore(cls: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    """Rebuild an exception whose ``__init__`` takes other arguments than it passes to its base class."""
    if any("__slots__" in vars(base) for base in cls.__mro__):
        raise TypeError("the values of its slots would be missing")
    error: BaseException = cls.__new__(cls, *args)
    error.args = args
    if state:
        error.__setstate__(state)
    return error


def _parts(exc: BaseException) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
    """Return the arguments and attributes that rebuild an exception. ``__reduce__`` knows more than ``args``: only
    there is the file name of an OSError.
    """
    try:
        parts: Any = exc.__reduce__()
        factory, args, state = parts if len(parts) == 3 else (*parts, None)
    except Exception:
        return None, None
    if factory is not type(exc) or type(args) is not tuple or not (state is None or type(state) is dict):
        return None, None
    return args, state


def _find_class(name: str, allowed: tuple[type[BaseException], ...]) -> type[BaseException] | None:
    """Return the declared class of that name, or the only loaded subclass of that name."""
    for cls in allowed:
        if _class_name(cls) == name:
            return cls
    builtin = vars(builtins).get(name)
    if isinstance(builtin, type) and issubclass(builtin, allowed):
        return builtin
    own = [cls for cls in allowed if vars(builtins).get(cls.__name__) is not cls]
    found = {cls for root in own for cls in _subclasses(root) if _class_name(cls) == name}
    return found.pop() if len(found) == 1 else None


def _subclasses(root: type[BaseException]) -> Iterator[type[BaseException]]:
    seen = {root}
    queue = [root]
    while queue:
        for cls in type.__subclasses__(queue.pop()):
            if cls not in seen:
                seen.add(cls)
                queue.append(cls)
                yield cls


def _class_name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _message(exc: BaseException) -> str:
    try:
        return str.__str__(str(exc))
    except Exception:
        return ""
