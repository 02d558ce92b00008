"""Outgoing keys: the key that the running operation sends with a call or a message, also from other threads.

``with op.propagate("charge"):`` opens a scope, and ``outgoing_headers()`` anywhere below it returns the header to send.
A scope with a name has one key for everything that is sent in it, so a retry inside it is the same call. A scope
without a name has one key per target, whatever the order of the calls. Two different calls to one target need names.

This module knows no HTTP client and no broker. It returns plain dicts of strings.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from semel.core.keys import check_name, derive, header_value
from semel.engine.operation.handle import outgoing_scope, running
from semel.errors import PolicyError

P = ParamSpec("P")
T = TypeVar("T")

HEADER: Final = "Idempotency-Key"
METADATA: Final = "idempotency-key"
"""In lower case, as most clients write it: the headers of most brokers are case-sensitive."""
_TO: Final = "~to:"
"""The prefix of targets, so that a target is never equal to the name of a step."""


def derive_key(step: str) -> str | None:
    """Return the key for a step of the running operation, like ``op.derive(step)``, or None outside an operation."""
    op = running.get()
    return None if op is None else op.derive(check_name("a step", step))


def outgoing_key(target: str = "") -> str | None:
    """Return the key for a call that is about to be made, or None if no scope of ``op.propagate`` is open.

    :param target: which call it is, such as ``"POST https://pay.example/charges"``; required if the scope has no name.
    """
    scope = outgoing_scope.get()
    if scope is None:
        return None
    op = running.get()
    if op is not None and op.id != scope.operation.id:
        return None  # another operation started inside the scope: its calls are not part of this one
    if scope.step is not None:
        return scope.operation.derive(scope.step)
    if not target:
        raise PolicyError(
            f"{scope.operation!r}: which call is this? Name the step, op.propagate('charge'), "
            "or the target, outgoing_headers('POST https://…')"
        )
    return derive(scope.operation.id, _TO + target)


def outgoing_headers(target: str = "", *, header: str = HEADER, quote: bool = False) -> dict[str, str]:
    """Return the header to send with an HTTP request, ``{"Idempotency-Key": …}``, or an empty dict outside a scope.

    :param target: as for ``outgoing_key``.
    :param header: the name that the receiver knows, such as ``"PayPal-Request-Id"``.
    :param quote: send the key as a quoted string, as in the draft standard.
    """
    key = outgoing_key(target)
    return {} if key is None else {header: header_value(key, quote)}


def outgoing_metadata(target: str = "") -> dict[str, str]:
    """Return the same for a message: ``{"idempotency-key": …}`` for its headers or attributes."""
    key = outgoing_key(target)
    return {} if key is None else {METADATA: key}


def in_context(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it runs in the current context. For threads and executors, which do not copy it.

    ``pool.submit(in_context(send), parcel)``. Tasks and ``asyncio.to_thread`` need no help: they copy the context.
    """
    if inspect.iscoroutinefunction(function):
        raise PolicyError("in_context() is for plain functions: a task has the context of where it is created already")
    context = contextvars.copy_context()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)  # a copy: one context cannot be in two threads at once

    return run
