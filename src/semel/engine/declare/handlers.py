"""The function that a program passes as ``call=``: it takes the operation's handle, or nothing.

Which of the two is decided before it is called, not by catching TypeError, which a mistake inside the function raises
too. Most functions are lambdas, new in each call, so the code object decides, which is fast. Signatures and annotations
are only read if they must be, and once per function.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection
from functools import partial
from types import CodeType, MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

from semel.engine.declare.declaration import POSITIONAL, VARIABLE, handle_of
from semel.errors import PolicyError

_UNRUN: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_UNPLAIN: Final = _UNRUN | inspect.CO_VARARGS
_seen: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What a signature or annotations have shown, for as long as the function lives."""


def with_handle(call: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return ``call`` as a function of the handle. Raises PolicyError if it takes other arguments."""
    code: CodeType | None = getattr(call, "__code__", None)
    if code is not None and not (code.co_argcount or code.co_kwonlyargcount or code.co_flags & _UNPLAIN):
        return lambda op: call()  # the usual case
    handler = _callable_object(call) if code is None else _function(call, call, code, 0, ())
    return (lambda op: call()) if handler is None else handler


def _callable_object(call: Callable[..., Any]) -> Callable[[Any], Any] | None:
    """For a partial, an object with ``__call__``, a class or a builtin. Returns None if it takes nothing."""
    if type(call) is partial:
        code = getattr(call.func, "__code__", None)
        if code is not None:
            return _function(call, call.func, code, len(call.args), call.keywords)
    if not callable(call):
        raise PolicyError(
            f"call= takes a function without arguments or of the operation's handle, such as lambda: ship(order), "
            f"not {call!r}"
        )
    function = type(call).__call__
    code = getattr(function, "__code__", None)
    return _by_signature(call) if code is None else _function(call, function, code, 1, ())


def _function(
    call: Callable[..., Any], function: Any, code: CodeType, bound: int, keywords: Collection[str]
) -> Callable[[Any], Any] | None:
    """For a function or method, whose first ``bound`` parameters and ``keywords`` are set. None if it takes nothing."""
    if code.co_flags & _UNRUN:
        raise PolicyError("call= is a generator: its body runs after the call has returned. Return a list instead")
    if code.co_flags & _UNPLAIN or code.co_kwonlyargcount:
        return _by_signature(call, function if code.co_kwonlyargcount else None)
    if type(function) is MethodType:
        bound += 1
    if bound == code.co_argcount:
        return None
    defaults = function.__defaults__ or ()
    if bound < code.co_argcount - len(defaults):
        names = code.co_varnames[bound : code.co_argcount - len(defaults)]
        left = [name for name in names if name not in keywords]
        if left:
            return call if len(left) == 1 and left[0] == names[0] else _refuse(left)
    # A parameter with the default None is the handle if its annotation says so: op: Operation = INJECTED.
    for default in defaults:
        if default is None and function.__annotations__:
            name = _once(getattr(function, "__func__", function), handle_of)
            if name is not None and name not in keywords and name not in code.co_varnames[:bound]:
                return partial(_by_name, call, name)
    return None


def _by_name(call: Callable[..., Any], name: str, op: Any) -> Any:
    return call(**{name: op})


def _by_signature(call: Callable[..., Any], function: Any = None) -> Callable[[Any], Any] | None:
    """For what takes any arguments, is wrapped or no function, or for a ``function`` with keyword-only parameters."""
    left, handle = _once(call, partial(_required, function))
    if handle is not None:
        others = [p.name for p in left if p.name != handle]
        return _refuse(others) if others else partial(_by_name, call, handle)
    if not left:
        return None
    return call if len(left) == 1 and left[0].kind in POSITIONAL else _refuse([p.name for p in left])


def _required(function: Any, call: Callable[..., Any]) -> tuple[list[inspect.Parameter], str | None]:
    """The parameters without a default, and the name of the handle if an annotation says which it is."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return [], None
    left = [p for p in parameters.values() if p.default is p.empty and p.kind not in VARIABLE]
    handle = parameters.get(handle_of(function) or "") if function is not None else None
    if handle is None or handle.kind is handle.POSITIONAL_ONLY or handle.name in getattr(call, "keywords", ()):
        return left, None
    return left, handle.name if handle.default is None or handle.default is handle.empty else None


def _once(key: Any, look: Callable[[Any], Any]) -> Any:
    """Return ``look(key)``, computed once for each function where possible."""
    try:
        return _seen[key]
    except (KeyError, TypeError):  # not hashable, or no weak references: computed each time
        found = look(key)
    with contextlib.suppress(TypeError):
        _seen[key] = found
    return found


def _refuse(left: list[str]) -> Any:
    raise PolicyError(
        f"call= takes a function without arguments or of the operation's handle, and this one needs {', '.join(left)}: "
        "write lambda: ship(order), or lambda op: ship(order, op)"
    )
