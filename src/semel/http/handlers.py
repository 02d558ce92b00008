"""The parameters of a decorated handler that Semel fills in: the handle of its operation, and its connection.

A connection is for the transactional mode: the handler's rows and its answer are committed together, and then the
answer is sent::

    @app.post("/payments", status_code=201)
    @idempotent(connection=sessions, connection_parameter="session")   # sessions = async_sessionmaker(engine)
    async def pay(payment: Payment, session: AsyncSession):
        session.add(Row(...))                              # no commit: Semel commits, before the answer is sent
        return {...}

The connection is opened for the request, a transaction begun on it and the key locked in it, just before the handler.
A stored answer that is no error commits. A stored error (4xx) rolls the handler's rows back and keeps the answer.
Whatever frees the key rolls back. A crash at any moment leaves nothing. There is no lease. A conflict with another
transaction runs the request again: see ``semel.http.contract.endpoint``.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from semel.engine.declare.declaration import handle_parameter
from semel.engine.operation import AsyncOperation, Operation, current_operation
from semel.errors import PolicyError, SemelError, StoreUnavailable
from semel.http.contract.rules import Idempotent, Rule

F = TypeVar("F", bound=Callable[..., Any])

MISTAKES: Final = (SemelError, TypeError, AttributeError)
"""Errors of opening a connection that are mistakes of the service, not of the database: they are raised as they are."""


def with_handle(kwargs: dict[str, Any], name: str | None, operation: Any) -> dict[str, Any]:
    """The keyword arguments, with the handle for the parameter that asks for it."""
    if name is not None:
        kwargs[name] = operation
    return kwargs


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations as types. One that cannot be evaluated stays text, for the framework to judge."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError):
        found: dict[str, Any] = {}
        # A handle that is imported for the type checker only must not become a query parameter.
        known = getattr(inspect.unwrap(function), "__globals__", {})
        names = {"AsyncOperation": AsyncOperation, "Operation": Operation, **known}
        for name, hint in getattr(function, "__annotations__", {}).items():
            alone = types.SimpleNamespace(__annotations__={name: hint})
            try:
                found |= typing.get_type_hints(alone, names, include_extras=True)
            except (NameError, TypeError, AttributeError):
                found[name] = hint
        return found


def find_handle(function: Callable[..., Any], hints: Mapping[str, Any], *, awaits: bool) -> str | None:
    """Return the parameter that is annotated with the handle of the operation.

    :param awaits: whether the handle is an ``AsyncOperation``. Raises PolicyError if it is annotated with the other.
    """
    name = handle_parameter(dict(hints))
    if name is None:
        return None
    wanted, other = (AsyncOperation, Operation) if awaits else (Operation, AsyncOperation)
    if other in (typing.get_args(hints[name]) or (hints[name],)):
        raise PolicyError(f"{function.__qualname__}: annotate {name} with {wanted.__name__}")
    return name


# -- the transactional mode


def with_connection(function: F, rule: Rule, *, awaited: bool) -> F:
    """Return the handler with its connection filled in, if the rule names a parameter for it.

    :param awaited: whether the service is async.
    """
    if not isinstance(rule, Idempotent):
        return function
    rule.check_connection(awaited=awaited)
    parameter = rule.connection_parameter
    if parameter is None:
        return function
    signature = inspect.signature(function)
    if parameter not in signature.parameters:
        raise PolicyError(
            f"connection_parameter={parameter!r} names no parameter; there are: "
            f"{', '.join(signature.parameters) or 'none'}"
        )
    inner: Any
    if inspect.iscoroutinefunction(function):

        async def inner(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **{**kwargs, parameter: _connection()})

    else:

        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{**kwargs, parameter: _connection()})

    functools.update_wrapper(inner, function)
    inner.__signature__ = signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name != parameter]
    )
    inner.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name != parameter}
    return cast(F, inner)


def _connection() -> Any:
    operation = current_operation()
    return None if operation is None else operation.connection  # None: a GET of the same endpoint


def not_opened(error: Exception) -> StoreUnavailable:
    """Nothing was sent, so nothing is stored. The driver's own text may hold a URL, so it stays in the cause."""
    return StoreUnavailable(f"the connection of this route could not be opened ({type(error).__name__})")
