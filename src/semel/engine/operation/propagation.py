"""Keys on the way out: what the running operation sends along with a call or a message, and how it follows threads.

``with op.propagate("charge"):`` opens a scope, and ``outgoing_headers()`` anywhere below it answers the header to send.
A scope with a name has one key, whatever is sent in it and however often: a retry inside it is the same call. A scope
without a name has one key per target: the same for a retry, another for another target, and never dependent on the
order in which calls are made. Two different calls to one target must be told apart by names.

This module knows no HTTP client and no broker; they are handed plain dicts of texts.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple, ParamSpec, TypeVar

from semel.core.keys import derive, header_value
from semel.engine.declare.declaration import check_name
from semel.engine.operation.handle import OperationHandle, running
from semel.errors import PolicyError

__all__ = ["derive_key", "in_context", "outgoing_headers", "outgoing_key", "outgoing_metadata", "propagating"]

P = ParamSpec("P")
T = TypeVar("T")

HEADER: Final = "Idempotency-Key"
METADATA: Final = "idempotency-key"
"""In lower case: the headers of most brokers are told apart by case, and this is how clients write them."""
_TO: Final = "~to:"
"""Before a target, so that it is never the name of a step."""


class _Scope(NamedTuple):
    operation: OperationHandle
    step: str | None


_scope: ContextVar[_Scope | None] = ContextVar("semel_outgoing", default=None)


def derive_key(step: str) -> str | None:
    """The key to send on for a step of the operation that runs now, as ``op.derive(step)``; None outside of one."""
    op = running.get()
    return None if op is None else op.derive(check_name("a step", step))


def outgoing_key(target: str = "") -> str | None:
    """The key for a call that is about to be made, or None where no scope of ``op.propagate`` is open.

    :param target: which call it is, such as ``"POST https://pay.example/charges"``; asked for where the scope has no
        name.
    """
    scope = _scope.get()
    if scope is None:
        return None
    op = running.get()
    if op is not None and op.id != scope.operation.id:
        return None  # another operation began inside the scope: what it sends is its own affair
    if scope.step is not None:
        return scope.operation.derive(scope.step)
    if not target:
        raise PolicyError(
            f"{scope.operation!r}: which call is this? Name the step, op.propagate('charge'), "
            "or the target, outgoing_headers('POST https://…')"
        )
    return derive(scope.operation.id, _TO + target)


def outgoing_headers(target: str = "", *, header: str = HEADER, quote: bool = False) -> dict[str, str]:
    """The header to send with an HTTP request: ``{"Idempotency-Key": …}``, or nothing outside of a scope.

    :param target: as of ``outgoing_key``.
    :param header: the name that the receiver knows, such as ``"PayPal-Request-Id"``.
    :param quote: send the key as a quoted string, as the draft standard has it.
    """
    key = outgoing_key(target)
    return {} if key is None else {header: header_value(key, quote)}


def outgoing_metadata(target: str = "") -> dict[str, str]:
    """The same for a message: ``{"idempotency-key": …}`` for its headers or attributes."""
    key = outgoing_key(target)
    return {} if key is None else {METADATA: key}


def in_context(function: Callable[P, T]) -> Callable[P, T]:
    """The function, run as if it were called here: for threads and executors, which do not know what runs.

    ``pool.submit(in_context(send), parcel)``. Tasks and ``asyncio.to_thread`` need no help: they copy the context.
    """
    if inspect.iscoroutinefunction(function):
        raise PolicyError("in_context() is for plain functions: a task has the context of where it is created already")
    context = contextvars.copy_context()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)  # a copy: one context cannot be in two threads at once

    return run


@contextmanager
def propagating(operation: OperationHandle, step: str | None) -> Iterator[None]:
    """``op.propagate``."""
    if step is not None:
        check_name("a step", step)
    outer = _scope.get()
    _scope.set(_Scope(operation, step))
    try:
        yield
    finally:
        _scope.set(outer)
