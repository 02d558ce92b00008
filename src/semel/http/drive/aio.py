# Twin: sync.py is generated from this file by make twins.
"""Drive the flow of a request, and run the handler of a decorated endpoint between its claim and its answer.

The sync module is for handlers in a thread: under WSGI, or a plain function under ASGI. The async one is for an ``async
def`` view that Django serves under WSGI. ``ASGIResponder`` drives its flows itself, because a task can be cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from semel.engine.operation import AsyncOperation, running
from semel.http.contract.conditional import bind_preconditions, unbind_preconditions
from semel.http.contract.endpoint import EndpointFlow, Framework, Lifecycle, Request
from semel.http.contract.rules import Rule
from semel.http.handlers import with_handle

T = TypeVar("T")


class AsyncResponder(Protocol):
    """A responder as an endpoint sees it."""

    @property
    def life(self) -> Lifecycle[Any]: ...

    @property
    def operation(self) -> AsyncOperation | None:
        """The handle of the running attempt."""
        ...

    async def claim(self, declared: Rule) -> bool:
        """Claim the request's key. Returns whether the handler is to run; if not, the answer is known."""
        ...

    async def perform(self, request: Request) -> Any:
        """Carry out one request of a flow."""
        ...


async def drive_async(flow: EndpointFlow[T], perform: Callable[[Request], Awaitable[Any]]) -> T:
    """Perform each request of the flow and send it the result, until the flow returns."""
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


async def run_handler_async(
    responder: AsyncResponder,
    handler: Callable[..., Awaitable[Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    handle: str | None,
    framework: Framework,
) -> Any:
    """Run the handler of a decorated endpoint, after the claim, and end the attempt if it raises.

    :param handle: the parameter that receives the handle of the operation.
    """
    life, operation = responder.life, responder.operation
    bound = None if life.preconditions is None else bind_preconditions(life.preconditions)
    token = running.set(operation)
    try:
        result = await handler(*args, **with_handle(kwargs, handle, operation))
        if operation is not None:
            operation.leave()
        return result
    except Exception as error:
        left = await drive_async(life.handler_raised(error, framework), responder.perform)
        if left is error:
            raise
        assert left is not None  # nothing is cancelled here
        raise left from error
    finally:
        running.reset(token)
        if bound is not None:
            unbind_preconditions(bound)


def make_endpoint_async(
    function: Callable[..., Awaitable[Any]],
    rule: Rule,
    handle: str | None,
    framework: Framework,
    find_responder: Callable[[], AsyncResponder | None],
) -> Callable[..., Awaitable[Any]]:
    """Return an endpoint that claims the request and runs ``function`` where the endpoint is called.

    :param handle: the parameter that receives the handle of the operation.
    :param find_responder: returns the responder of the current request; None if it is not to be claimed.
    """

    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = find_responder()
        if responder is None:
            return await function(*args, **with_handle(kwargs, handle, None))
        if not await responder.claim(rule):
            return framework.blank()
        return await run_handler_async(responder, function, args, kwargs, handle, framework)

    return endpoint
