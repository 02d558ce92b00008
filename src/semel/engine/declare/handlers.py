"""What a program gives as ``call=``: a function of the operation's handle, or of nothing.

Which of them is found out before it is called, never by catching TypeError, which the function's own mistakes would set
off as well. A function is judged by its code object, each time and quickly, for most are lambdas made on the spot; what
only a signature or annotations can tell is looked at once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection
from functools import partial
from types import CodeType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from semel.engine.declare.declaration import handle_of
from semel.errors import PolicyError

__all__ = ["with_handle"]

_UNRUN: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_UNPLAIN: Final = _UNRUN | inspect.CO_VARARGS
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_seen: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What was found out by looking closely; it goes with the function."""


def with_handle(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """``call`` as a function of the handle: it may take it, or nothing. Others are refused, and nothing is claimed."""
    code: CodeType | None = getattr(call, "__code__", None)
    if code is not None and not (code.co_argcount or code.co_kwonlyargcount or code.co_flags & _UNPLAIN):
        return lambda op: call()  # most are so
    handler = _no_function(call) if code is None else _function(call, call, code, 0, ())
    return (lambda op: call()) if handler is None else handler


def _no_function(call: Callable[..., Any]) -> Callable[[Any], Any] | None:
    """A partial, an object with ``__call__``, a class, something built in. None: it takes nothing."""
    if type(call) is partial:
        code = getattr(call.func, "__code__", None)
        if code is not None:
            return _function(call, call.func, code, len(call.args), call.keywords)
    if not callable(call):
        raise PolicyError(
            f"call= is a function of nothing or of the operation's handle, such as lambda: ship(order), not {call!r}"
        )
    function = type(call).__call__
    code = getattr(function, "__code__", None)
    return _by_signature(call) if code is None else _function(call, function, code, 1, ())


def _function(
    call: Callable[..., Any], function: Any, code: CodeType, given: int, keywords: Collection[str]
) -> Callable[[Any], Any] | None:
    """A function or method, of whose parameters so many are given, and those by name."""
    if code.co_flags & _UNRUN:
        raise PolicyError("call= is a generator: its body runs after the call has returned. Return a list instead")
    if code.co_flags & _UNPLAIN or code.co_kwonlyargcount:
        return _by_signature(call, function if code.co_kwonlyargcount else None)
    if type(function) is MethodType:
        given += 1
    if given == code.co_argcount:
        return None
    defaults = function.__defaults__ or ()
    if given < code.co_argcount - len(defaults):
        names = code.co_varnames[given : code.co_argcount - len(defaults)]
        left = [name for name in names if name not in keywords]
        if left:
            return call if len(left) == 1 and left[0] == names[0] else _refused(left)
    # One with a default is the handle's if its annotation says so: op: Operation = INJECTED, which is None.
    for default in defaults:
        if default is None and function.__annotations__:
            name = _once(getattr(function, "__func__", function), handle_of)
            if name is not None and name not in keywords and name not in code.co_varnames[:given]:
                return partial(_by_name, call, name)
    return None


def _by_name(call: Callable[..., Any], name: str, op: Any) -> Any:
    return call(**{name: op})


def _by_signature(call: Callable[..., Any], function: Any = None) -> Callable[[Any], Any] | None:
    """What takes anything, is wrapped, or is no function; or a ``function`` that takes something by name only."""
    left, handle = _once(call, partial(_asked, function))
    if handle is not None:
        others = [p.name for p in left if p.name != handle]
        return _refused(others) if others else partial(_by_name, call, handle)
    if not left:
        return None
    return call if len(left) == 1 and left[0].kind in _POSITIONAL else _refused([p.name for p in left])


def _asked(function: Any, call: Callable[..., Any]) -> tuple[list[inspect.Parameter], str | None]:
    """The parameters that must be given; and the name of the handle's, where an annotation says so."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # built in, and does not say
        return [], None
    left = [p for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    handle = parameters.get(handle_of(function) or "") if function is not None else None
    if handle is None or handle.kind is handle.POSITIONAL_ONLY or handle.name in getattr(call, "keywords", ()):
        return left, None
    return left, handle.name if handle.default is None or handle.default is handle.empty else None


def _once(key: Any, look: Callable[[Any], Any]) -> Any:
    """What ``look`` says of a function, asked once where it can be kept."""
    try:
        return _seen[key]
    except (KeyError, TypeError):  # it has no hash, or cannot be referred to weakly: asked each time
        found = look(key)
    with contextlib.suppress(TypeError):
        _seen[key] = found
    return found


def _refused(left: list[str]) -> Any:
    raise PolicyError(
        f"call= is a function of nothing or of the operation's handle, and this one asks for {', '.join(left)}: "
        "write lambda: ship(order), or lambda op: ship(order, op)"
    )
