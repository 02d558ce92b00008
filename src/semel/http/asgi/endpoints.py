"""Endpoints of ASGI frameworks, wrapped so that the claim is made just before the handler, sync handlers included."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar, cast

from semel.core.ops import Op
from semel.engine.declare.declaration import handle_parameter, refuse_generators
from semel.engine.operation.operation import AsyncOperation, Operation, running
from semel.errors import ConfigurationError, NotUndone, PolicyError, PreconditionError
from semel.http.asgi.middleware import Responder, current_responder
from semel.http.contract.conditional import hold, let_go
from semel.http.contract.inventory import check_declarable, exempted, replaced
from semel.http.contract.rules import Exempt, Idempotent, Rule
from semel.http.in_transaction import connected

__all__ = ["protect"]

Endpoint: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def protect(
    function: F,
    rule: Rule,
    blank: Callable[[], Any],
    abort: Callable[[int], Exception],
    threads: Callable[..., Awaitable[Any]] | None = None,
) -> F:
    """The endpoint under ``rule``.

    :param blank: makes an answer of the framework's own, which takes the place of the handler's when it does not run;
        the middleware sends the real one.
    :param abort: makes the framework's own exception for a refusal of this status, so that whatever cleans up after a
        handler, such as a database session, sees that it failed; here too the middleware sends the real answer.
    :param threads: runs a plain function in a thread of the framework's; left out: the framework does so itself.
    """
    if isinstance(rule, Exempt):
        return exempted(function, rule)
    check_declarable(function)
    refuse_generators(function)
    declared, function = function, connected(function, rule)
    hints = _hints(function)
    handle = handle_parameter(hints)
    awaits = inspect.iscoroutinefunction(function)
    if handle is not None and (Operation if awaits else AsyncOperation) in (
        typing.get_args(hints[handle]) or (hints[handle],)
    ):
        wanted = "AsyncOperation" if awaits else "Operation"
        raise PolicyError(f"{function.__qualname__}: annotate {handle} with {wanted}")
    if not awaits and isinstance(rule, Idempotent) and rule.connection is not None:
        raise PolicyError(f"{function.__qualname__}: with connection= it is an async def, as its connection is async")
    if awaits or threads is None:
        wrapper = (_async if awaits else _sync)(function, rule, blank, abort, handle)
    else:
        wrapper = _threaded(function, rule, blank, abort, handle, threads)
    functools.update_wrapper(wrapper, function)
    # Frameworks read the signature to know what to inject: with real types, and without what is injected here.
    signature = inspect.signature(function)
    returns = hints.get("return", signature.return_annotation)
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(annotation=hints.get(p.name, p.annotation))
            for p in signature.parameters.values()
            if p.name != handle
        ],
        # None is kept as it was written: frameworks tell "no body" (204) from a body of the type NoneType.
        return_annotation=None if returns is type(None) else returns,
    )
    wrapper.__annotations__ = {name: hint for name, hint in hints.items() if name != handle}
    wrapper.__semel_rule__ = rule  # type: ignore[attr-defined]
    replaced(declared)
    return cast(F, wrapper)


def _async(
    function: Endpoint, rule: Rule, blank: Callable[[], Any], abort: Callable[[int], Exception], handle: str | None
) -> Endpoint:
    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = current_responder()
        if responder is not None and not await responder.claim(rule):
            return blank()
        if responder is None:
            return await function(*args, **_given(kwargs, handle, None))
        attempt = responder.attempt
        operation = None if attempt is None else attempt.operation
        task = asyncio.current_task()
        responder.watch(task)
        token, held = running.set(operation), hold(responder.preconditions)
        try:
            result = await function(*args, **_given(kwargs, handle, operation))
            if operation is not None:
                operation.leave()
            return result
        except PreconditionError as error:
            await responder.refuse(error)
            raise abort(error.status) from error
        except Exception as error:
            if responder.conflicts(error):
                raise await responder.give_way(error, abort) from error
            raised = error if attempt is None else await attempt.compensate(error)
            if isinstance(raised, NotUndone):
                await responder.refuse(raised)
                raise abort(raised.status) from raised
            if raised is error:
                raise
            raise raised from error
        except asyncio.CancelledError:
            # Dealt with here, where it arrives: a framework's task group would make another error of it.
            if not await responder.superseded(task):
                raise
            return blank()
        finally:
            running.reset(token)
            let_go(held)
            responder.unwatch()

    return endpoint


def _sync(
    function: Endpoint, rule: Rule, blank: Callable[[], Any], abort: Callable[[int], Exception], handle: str | None
) -> Endpoint:
    """For a framework that calls it in a thread."""
    handled = _handled(function, abort, handle)

    def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = current_responder()
        if responder is not None and not _through(responder, responder.claim(rule)):
            return blank()
        return handled(responder, args, kwargs)

    return endpoint


def _threaded(
    function: Endpoint,
    rule: Rule,
    blank: Callable[[], Any],
    abort: Callable[[int], Exception],
    handle: str | None,
    threads: Callable[..., Awaitable[Any]],
) -> Endpoint:
    """For a framework whose threads are few: a claim that waits for another's answer must hold none of them.

    Else a storm of equal requests takes all threads, and the winner has none to finish its own answer with.
    """
    handled = _handled(function, abort, handle)

    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = current_responder()
        if responder is not None and not await responder.claim(rule):
            return blank()
        return await threads(handled, responder, args, kwargs)

    return endpoint


def _handled(
    function: Endpoint, abort: Callable[[int], Exception], handle: str | None
) -> Callable[[Responder | None, tuple[Any, ...], dict[str, Any]], Any]:
    """A plain function once its claim is made, in a thread."""

    def handled(responder: Responder | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if responder is None:
            return function(*args, **_given(kwargs, handle, None))
        operation = _bridged(responder)
        token, held = running.set(operation), hold(responder.preconditions)
        try:
            result = function(*args, **_given(kwargs, handle, operation))
            if operation is not None:
                operation.leave()
            return result
        except PreconditionError as error:
            _through(responder, responder.refuse(error))
            raise abort(error.status) from error
        except Exception as error:
            raised = error if operation is None else operation.compensate(error)
            if isinstance(raised, NotUndone):
                _through(responder, responder.refuse(raised))
                raise abort(raised.status) from raised
            if raised is error:
                raise
            raise raised from error
        finally:
            running.reset(token)
            let_go(held)

    return handled


def _through(responder: Responder, work: Coroutine[Any, Any, T]) -> T:
    """Do it in the event loop, and wait for it in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run_coroutine_threadsafe(work, responder.loop).result()
    work.close()
    raise ConfigurationError("a plain def endpoint was called in the event loop, which it would block for ever")


def _bridged(responder: Responder) -> Operation | None:
    """The handle of a handler that runs in a thread: what it stores goes through the event loop."""
    attempt = responder.attempt
    if attempt is None:
        return None

    def execute(op: Op[bool]) -> bool:
        held: bool = _through(responder, attempt.execute(op))
        return held

    return Operation(attempt.call, attempt.lease, attempt.claimed, execute)


def _given(kwargs: dict[str, Any], handle: str | None, operation: Any) -> dict[str, Any]:
    return kwargs if handle is None else {**kwargs, handle: operation}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations as types; one that names something local stays text, for the framework to judge."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:
        found: dict[str, Any] = {}
        # A handle that is imported for the type checker only is one all the same, and no query parameter.
        names = {"AsyncOperation": AsyncOperation, "Operation": Operation, **inspect.unwrap(function).__globals__}
        for name, hint in function.__annotations__.items():
            alone = types.SimpleNamespace(__annotations__={name: hint})
            try:
                found |= typing.get_type_hints(alone, names, include_extras=True)
            except NameError:
                found[name] = hint
        return found
