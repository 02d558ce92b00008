"""Shells for the flows of ``semel.http.contract.endpoint``, shared by the responders and the frameworks' glue.

``drive`` and ``drive_async`` do what a flow asks for. ``run_handler`` runs the handler of a decorated endpoint in a
thread: under WSGI, or for a plain function under ASGI. Its counterpart for ``async def`` is
``ASGIResponder.run``, written apart because a task can be cancelled and a thread cannot.

``with_connection`` is for the transactional mode: the handler's rows and its answer are committed together, and then
the answer is sent::

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
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeVar, cast

from semel.engine.declare.declaration import handle_parameter
from semel.engine.operation import AsyncOperation, Operation, current_operation, running
from semel.errors import PolicyError, SemelError, StoreUnavailable
from semel.http.contract.conditional import bind_preconditions, unbind_preconditions
from semel.http.contract.endpoint import EndpointFlow, Framework, Lifecycle, Request
from semel.http.contract.rules import Idempotent, Rule

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

MISTAKES: Final = (SemelError, TypeError, AttributeError)
"""Errors of opening a connection that are mistakes of the service, not of the database: they are raised as they are."""


def drive(flow: EndpointFlow[T], perform: Callable[[Request], Any]) -> T:
    """Perform each request of the flow and send it the result, until the flow returns."""
    try:
        request = next(flow)
        while True:
            try:
                result = perform(request)
            except BaseException as error:
                request = flow.throw(error)
            else:
                request = flow.send(result)
    except StopIteration as end:
        returned: T = end.value
        return returned


async def drive_async(flow: EndpointFlow[T], perform: Callable[[Request], Awaitable[Any]]) -> T:
    """Like ``drive``, awaiting each result."""
    try:
        request = next(flow)
        while True:
            try:
                result = await perform(request)
            except BaseException as error:
                request = flow.throw(error)
            else:
                request = flow.send(result)
    except StopIteration as end:
        returned: T = end.value
        return returned


class SyncResponder(Protocol):
    """A responder as an endpoint in a thread sees it."""

    @property
    def life(self) -> Lifecycle[Any]: ...

    @property
    def operation(self) -> Operation | None:
        """The handle of the running attempt."""
        ...

    def claim(self, declared: Rule) -> bool:
        """Claim the request's key. Returns whether the handler is to run; if not, the answer is known."""
        ...

    def perform(self, request: Request) -> Any:
        """Do what a flow asks for."""
        ...


def run_handler(
    responder: SyncResponder,
    handler: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handle: str | None,
    framework: Framework,
) -> Any:
    """Run the handler of a decorated endpoint, after the claim, and end the attempt if it raises.

    :param handle: the parameter that is given the operation's handle.
    """
    life, operation = responder.life, responder.operation
    if handle is not None:
        kwargs[handle] = operation
    bound = None if life.preconditions is None else bind_preconditions(life.preconditions)
    token = running.set(operation)
    try:
        result = handler(*args, **kwargs)
        if operation is not None:
            operation.leave()
        return result
    except Exception as error:
        left = drive(life.handler_raised(error, framework), responder.perform)
        if left is error:
            raise
        assert left is not None  # a thread is not cancelled
        raise left from error
    finally:
        running.reset(token)
        if bound is not None:
            unbind_preconditions(bound)


def sync_endpoint(
    function: Callable[..., Any],
    rule: Rule,
    handle: str | None,
    framework: Framework,
    find_responder: Callable[[], SyncResponder | None],
) -> Callable[..., Any]:
    """An endpoint that claims and runs ``function`` in the thread that it is called in.

    :param handle: the parameter that is given the operation's handle.
    :param find_responder: returns the responder of the current request; None if it is not to be claimed.
    """

    def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = find_responder()
        if responder is None:
            return function(*args, **with_handle(kwargs, handle, None))
        if not responder.claim(rule):
            return framework.blank()
        return run_handler(responder, function, args, kwargs, handle, framework)

    return endpoint


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
