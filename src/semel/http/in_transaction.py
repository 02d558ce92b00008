"""The transactional mode over HTTP: the handler's rows and its answer are committed together, then the answer is sent.

::

    @app.post("/payments", status_code=201)
    @idempotent(connection=sessions, connection_parameter="session")   # sessions = async_sessionmaker(engine)
    async def pay(payment: Payment, session: AsyncSession):
        session.add(Row(...))                              # no commit: Semel commits, before the answer is sent
        return {...}

The connection is opened for the request, a transaction begun on it and the key locked in it, just before the handler.
A stored answer that is no error commits. A stored error (4xx) rolls the handler's rows back and keeps the answer.
Whatever frees the key rolls back. A crash at any moment leaves nothing. There is no lease. A conflict with another
transaction runs the request again: see ``semel.http.contract.rerun``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from semel.engine.operation import current_operation
from semel.errors import PolicyError, SemelError, StoreUnavailable
from semel.http.contract.rules import Idempotent, Rule

__all__ = ["MISTAKES", "not_opened", "with_connection"]

F = TypeVar("F", bound=Callable[..., Any])

MISTAKES: Final = (SemelError, TypeError, AttributeError)
"""Errors of opening a connection that are mistakes of the service, not of the database: they are raised as they are."""


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
