"""The payload of an ``ERROR`` snapshot: the exception that the first run ended with.

Kept are the type's qualified name, the message, and what the exception rebuilds itself from (the arguments and
attributes it would pickle, where they are plain data). It is rebuilt only as a class that the policy allows, or one of
its subclasses that the program has already loaded: the name is compared, never imported. Where a rebuilt exception
would not say what the first one said, :class:`semel.errors.RememberedFailure` says it instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from semel.core.encoding.plain import PLAIN
from semel.core.encoding.snapshot import NotSerializable, SnapshotUnreadable
from semel.errors import RememberedFailure

__all__ = ["ERROR_LIMIT", "decode_error", "encode_error"]

ERROR_LIMIT = 64 * 1024
"""Bytes kept of a failure. Of a larger one only the type and the beginning of the message are."""


def encode_error(exc: BaseException) -> bytes:
    """Never fails: what cannot be kept is left out."""
    name, message = _name(type(exc)), _message(exc)
    args, state = _parts(exc)
    try:
        payload = PLAIN.encode([name, message, args, state])
    except NotSerializable:
        payload = PLAIN.encode([name, message, None, None])
    if len(payload) > ERROR_LIMIT:
        return PLAIN.encode([name, message[: ERROR_LIMIT // 8], None, None])
    return payload


def decode_error(payload: bytes, allowed: tuple[type[BaseException], ...]) -> BaseException:
    """The exception to raise again: of its own class where that is allowed and it can be rebuilt."""
    try:
        name, message, args, state = PLAIN.decode(payload)
    except (TypeError, ValueError) as exc:
        raise SnapshotUnreadable("the stored failure is corrupt") from exc
    if type(name) is not str or type(message) is not str:
        raise SnapshotUnreadable("the stored failure is corrupt")
    cls = _find(name, allowed)
    if cls is not None and type(args) is tuple:
        for build in (_called, _restored):
            try:
                made = build(cls, args, state)
                if type(made) is cls and _message(made) == message:
                    return made
            except Exception:  # a constructor may raise anything: then the next way, or the remembered failure
                continue
    return RememberedFailure(name, message)


def _called(cls: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    made = cls(*args)
    if state:
        made.__setstate__(state)
    return made


def _restored(cls: type[BaseException], args: tuple[Any, ...], state: Any) -> BaseException:
    """For a class whose ``__init__`` takes other arguments than it hands to its base."""
    if any("__slots__" in vars(base) for base in cls.__mro__):
        raise TypeError("what is in slots would be missing")
    made: BaseException = cls.__new__(cls, *args)
    made.args = args
    if state:
        made.__setstate__(state)
    return made


def _parts(exc: BaseException) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
    """The arguments and attributes that an exception rebuilds itself from; its own word is better than ``args``:
    an OSError's file name is only there."""
    try:
        parts: Any = exc.__reduce__()
        made_by, args, state = parts if len(parts) == 3 else (*parts, None)
    except Exception:
        return None, None
    if made_by is not type(exc) or type(args) is not tuple or not (state is None or type(state) is dict):
        return None, None
    return args, state


def _find(name: str, allowed: tuple[type[BaseException], ...]) -> type[BaseException] | None:
    """The allowed class of that name, or their one loaded subclass of that name."""
    for cls in allowed:
        if _name(cls) == name:
            return cls
    found = {cls for root in allowed for cls in _subclasses(root) if _name(cls) == name}
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


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _message(exc: BaseException) -> str:
    try:
        return str.__str__(str(exc))
    except Exception:
        return ""
