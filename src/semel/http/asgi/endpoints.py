"""Endpoints of ASGI frameworks, wrapped so that the claim is made just before the handler, sync or async."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

from semel.core.ops import Op
from semel.engine.declare.declaration import refuse_generators
from semel.engine.operation import Operation
from semel.errors import ConfigurationError, PolicyError
from semel.http.asgi.middleware import ASGIResponder, current, current_responder
from semel.http.contract.endpoint import Compensate, Framework, Request
from semel.http.contract.routes import check_declarable, mark_exempt, mark_replaced
from semel.http.contract.rules import Exempt, Idempotent, Rule
from semel.http.drive.sync import make_endpoint, run_handler
from semel.http.handlers import find_handle, type_hints, with_connection, with_handle

F = TypeVar("F", bound=Callable[..., Any])


def protect(
    function: F,
    rule: Rule,
    framework: Framework,
    run_in_thread: Callable[..., Awaitable[Any]] | None = None,
) -> F:
    """Return the endpoint under ``rule``.

    :param run_in_thread: runs a plain function in a thread of the framework's; None if the framework does so itself.
    """
    if isinstance(rule, Exempt):
        return mark_exempt(function, rule)
    check_declarable(function)
    refuse_generators(function)
    declared, function = function, with_connection(function, rule, awaited=True)
    hints = type_hints(function)
    awaits = inspect.iscoroutinefunction(function)
    handle = find_handle(function, hints, awaits=awaits)
    if not awaits and isinstance(rule, Idempotent) and rule.connection is not None:
        raise PolicyError(
            f"{function.__qualname__}: with connection= it must be an async def, because the connection is async"
        )
    if awaits:
        wrapper = task_endpoint(function, rule, handle, framework)
    elif run_in_thread is None:
        wrapper = make_endpoint(function, rule, handle, framework, threaded_responder)
    else:
        wrapper = _pooled_endpoint(function, rule, handle, framework, run_in_thread)
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
    mark_replaced(declared)
    return cast(F, wrapper)


def task_endpoint(
    function: Callable[..., Awaitable[Any]], rule: Rule, handle: str | None, framework: Framework
) -> Callable[..., Any]:
    """Return an endpoint that claims the request and runs an ``async def`` in its task, which may be cancelled.

    :param handle: the parameter that receives the handle of the operation.
    """

    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = current.get()
        if not isinstance(responder, ASGIResponder):
            current_responder()  # raises if the middleware is not installed
            return await function(*args, **with_handle(kwargs, handle, None))
        if not await responder.drive(responder.life.claim(rule)):
            return framework.blank()
        if handle is not None:
            kwargs[handle] = None if (attempt := responder.life.attempt) is None else attempt.operation
        return await responder.run(function, args, kwargs, framework)

    return endpoint


def _pooled_endpoint(
    function: Callable[..., Any],
    rule: Rule,
    handle: str | None,
    framework: Framework,
    run_in_thread: Callable[..., Awaitable[Any]],
) -> Callable[..., Any]:
    """Return an endpoint that claims the request in the event loop and runs ``function`` in a thread.

    A claim that waits for another request's answer must hold no thread. Otherwise a storm of equal requests takes all
    of them, and the winner has none to finish its own answer with.
    """

    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = current_responder()
        if responder is None:
            return await run_in_thread(function, *args, **with_handle(kwargs, handle, None))
        if not await responder.claim(rule):
            return framework.blank()
        return await run_in_thread(run_handler, ThreadedResponder(responder), function, args, kwargs, handle, framework)

    return endpoint


def threaded_responder() -> ThreadedResponder | None:
    """Return the responder of the current request, for a plain function that the framework calls in a thread."""
    responder = current_responder()
    return None if responder is None else ThreadedResponder(responder)


class ThreadedResponder:
    """The responder of an event loop, for a handler in a thread. What the handler needs is done in the loop."""

    def __init__(
        self, responder: ASGIResponder, run_in_loop: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    ) -> None:
        """
        :param run_in_loop: runs a coroutine in the event loop, and waits for its result in the calling thread.
        """
        self.life = responder.life
        self._responder = responder
        self._run_in_loop = run_in_loop or self._wait_for
        self._operation: Operation | None = None

    @property
    def operation(self) -> Operation | None:
        attempt = self.life.attempt
        if self._operation is None and attempt is not None:
            if isinstance(attempt.operation, Operation):
                self._operation = attempt.operation
            else:
                self._operation = Operation(attempt.call, attempt.lease, attempt.claimed, self._execute)
        return self._operation

    def claim(self, declared: Rule) -> bool:
        claimed: bool = self._run_in_loop(self._responder.claim(declared))
        return claimed

    def perform(self, request: Request) -> Any:
        if isinstance(request, Compensate):  # the steps are undone where they were done
            assert self.operation is not None
            return self.operation.compensate(request.error)
        return self._run_in_loop(self._responder.perform(request))

    def _execute(self, op: Op[bool]) -> bool:
        attempt = self.life.attempt
        assert attempt is not None
        owned: bool = self._run_in_loop(attempt.execute(op))
        return owned

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(work, self._responder.loop).result()
        work.close()
        raise ConfigurationError("a plain def endpoint was called in the event loop, which it would block for ever")
