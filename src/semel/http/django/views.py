"""Decorators for views: functions, methods of class-based views and of REST framework's, plain and ``async def``.

Whether a view is served by WSGI or ASGI is known when it is called, so each has a wrapper for both.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from asgiref.sync import iscoroutinefunction
from django.http import Http404, HttpResponse

from semel.core.ops import Op
from semel.engine.declare.declaration import handle_parameter, refuse_generators
from semel.engine.operation.operation import AsyncOperation, Operation, OperationHandle, running
from semel.errors import NotUndone, PolicyError, PreconditionError, TransactionConflict
from semel.http.asgi import endpoints as under_asgi
from semel.http.asgi.middleware import current_responder as current_in_loop
from semel.http.contract.conditional import hold, let_go
from semel.http.contract.inventory import check_declarable, exempted
from semel.http.contract.rerun import RunAgain
from semel.http.contract.rules import Decorators, Exempt, Idempotent, Rule
from semel.http.django.handling import current
from semel.http.django.in_transaction import Bridged, leave_transactions_to_us, on_django
from semel.http.in_transaction import connected
from semel.http.wsgi.middleware import Responder, current_responder

__all__ = ["conditional", "exempt", "idempotent", "natural"]

F = TypeVar("F", bound=Callable[..., Any])
_AUTHORISES: Final = ("perform_authentication", "handle_no_permission")
"""Methods of REST framework's views, and of Django's LoginRequiredMixin and its like."""


def _protect(view: F, declared: Rule) -> F:
    if isinstance(declared, Exempt):
        return exempted(view, declared)
    rule = on_django(declared)
    transactional = isinstance(rule, Idempotent) and rule.connection is not None
    check_declarable(view)
    _check_place(view)
    refuse_generators(view)
    awaits = iscoroutinefunction(view)
    if awaits and transactional:
        raise PolicyError(
            f"{view.__qualname__}: Django has no async transactions, so with connection= it is a plain def, which "
            "ASGI serves as well, in a thread. What it must await can be called with async_to_sync()"
        )
    view = connected(view, rule)
    handle = _handle(view, awaits)
    if transactional:
        in_loop = _sync(view, rule, handle, _bridged_responder)
    else:
        in_loop = (under_asgi._async if awaits else under_asgi._sync)(view, rule, _blank, _abort, handle)
    in_thread = _async(view, rule, handle) if awaits else _sync(view, rule, handle, current_responder)
    endpoint: Callable[..., Any]
    if awaits:

        @functools.wraps(view)
        async def endpoint(*args: Any, **kwargs: Any) -> Any:
            handling = current()
            await handling.aprepare(rule)
            return await (in_loop if handling.in_loop else in_thread)(*args, **kwargs)

    else:

        @functools.wraps(view)
        def endpoint(*args: Any, **kwargs: Any) -> Any:
            handling = current()
            handling.prepare(rule)
            return (in_loop if handling.in_loop else in_thread)(*args, **kwargs)

    endpoint.__semel_rule__ = rule  # type: ignore[attr-defined]
    leave_transactions_to_us(endpoint, rule)
    return cast(F, endpoint)


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


def _check_place(view: Any) -> None:
    """Around a whole class the claim would come before what the class refuses, and a replay be given to anyone."""
    made_of = getattr(view, "cls", None) or getattr(view, "view_class", None)
    bound = getattr(getattr(view, "func", None), "__self__", None)  # by method_decorator(…, name="dispatch")
    if bound is not None and getattr(view, "__name__", "") == "dispatch":
        made_of = type(bound)
    if made_of is not None and any(hasattr(made_of, name) for name in _AUTHORISES):
        raise PolicyError(
            f"{made_of.__qualname__} authorises its callers itself, when it is called: decorate its methods, such as "
            "post, or the function below @api_view, so that a replay is authorised as well"
        )


def _handle(view: Callable[..., Any], awaits: bool) -> str | None:
    """The parameter that is given the handle."""
    hints = under_asgi._hints(inspect.unwrap(view))  # method_decorator() decorates a partial
    name = handle_parameter(hints)
    if name is not None and (Operation if awaits else AsyncOperation) in (
        typing.get_args(hints[name]) or (hints[name],)
    ):
        raise PolicyError(f"{view.__qualname__}: annotate {name} with {'AsyncOperation' if awaits else 'Operation'}")
    return name


def _blank() -> HttpResponse:
    """It takes the place of the view's answer; the middleware sends the real one."""
    return HttpResponse(status=204)


def _abort(status: int) -> Exception:
    """For a refusal out of a view: transactions are rolled back, and nobody reports it as a fault of the service."""
    error: Exception = Http404(f"refused with {status}; the middleware says so")
    return error


def _bridged_responder() -> Bridged | None:
    responder = current_in_loop()
    return None if responder is None else Bridged(responder)


# -- under WSGI; and in a thread of an event loop's, where that has a transaction


def _async(view: Callable[..., Any], rule: Rule, handle: str | None) -> Callable[..., Any]:
    async def endpoint(*args: Any, **kwargs: Any) -> Any:
        # The loop is this request's alone, so it may block.
        responder = current_responder()
        if responder is not None and not responder.claim(rule):
            return _blank()
        operation = _awaited(responder)
        with _held(responder, operation):
            try:
                result = await view(*args, **_given(kwargs, handle, operation))
                if operation is not None:
                    operation.leave()
                return result
            except PreconditionError:
                raise
            except Exception as error:
                raised = error if operation is None else await operation.compensate(error)
                if raised is error:
                    raise
                raise raised from error

    return endpoint


def _sync(
    view: Callable[..., Any], rule: Rule, handle: str | None, found: Callable[[], Responder | Bridged | None]
) -> Callable[..., Any]:
    def endpoint(*args: Any, **kwargs: Any) -> Any:
        responder = found()
        if responder is not None and not responder.claim(rule):
            return _blank()
        attempt = None if responder is None else responder.attempt
        operation = None if attempt is None else attempt.operation
        with _held(responder, operation):
            try:
                result = view(*args, **_given(kwargs, handle, operation))
                if operation is not None:
                    operation.leave()
                return result
            except PreconditionError:
                raise
            except Exception as error:
                if responder is not None and responder.conflicts(error):
                    raise RunAgain if responder.give_way(error) else _abort(TransactionConflict.status) from error
                raised = error if operation is None else operation.compensate(error)
                if raised is error:
                    raise
                raise raised from error

    return endpoint


def _given(kwargs: dict[str, Any], handle: str | None, operation: OperationHandle | None) -> dict[str, Any]:
    return kwargs if handle is None else {**kwargs, handle: operation}


def _awaited(responder: Responder | None) -> AsyncOperation | None:
    """The handle of an ``async def``: what it stores goes to a sync store."""
    attempt = None if responder is None else responder.attempt
    if attempt is None:
        return None

    async def execute(op: Op[bool]) -> bool:
        held: bool = attempt.execute(op)
        return held

    return AsyncOperation(attempt.call, attempt.lease, attempt.claimed, execute)


@contextmanager
def _held(responder: Responder | Bridged | None, operation: OperationHandle | None) -> Iterator[None]:
    """What the view may ask for while it runs; and its refusals."""
    if responder is None:
        yield
        return
    token, held = running.set(operation), hold(responder.preconditions)
    try:
        yield
    except (PreconditionError, NotUndone) as error:
        responder.refuse(error)
        raise _abort(error.status) from error
    finally:
        running.reset(token)
        let_go(held)
