"""Decorators for views: functions, methods of class-based views and of REST framework's, plain and ``async def``.

Whether a view is served by WSGI or ASGI is known when it is called, so each has a wrapper for both.

In the transactional mode a view runs in ``atomic()`` on Django's own connection, and its record with it::

    @require_POST
    @idempotent(connection="default")             # one of DATABASES; the guard's store is in the same database
    def pay(request, op: Operation):
        Payment.objects.create(key=op.key)     # committed together with the answer, before that is sent
        return JsonResponse({"paid": True}, status=201)

Django's connections belong to a thread and are sync. Under ASGI a plain view has a thread for all of its request: there
the transaction is begun, and there it is ended, when the answer is whole.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.http import Http404, HttpResponse

from semel.core.call import Call, Outcome
from semel.core.ops import Op
from semel.engine.declare.declaration import refuse_generators
from semel.engine.drive.attempts import AsyncAttempt, Attempt
from semel.engine.operation import AsyncOperation
from semel.errors import ConfigurationError, PolicyError
from semel.http.asgi.endpoints import ThreadedResponder, task_endpoint, threaded_responder
from semel.http.asgi.middleware import current_responder as responder_in_loop
from semel.http.contract.endpoint import Compensate, Framework, Request, RunAgain
from semel.http.contract.routes import check_declarable, mark_exempt
from semel.http.contract.rules import Conditional, Decorators, Exempt, Idempotent, Rule
from semel.http.django.handling import require_handling
from semel.http.drive.aio import make_endpoint_async
from semel.http.drive.sync import make_endpoint
from semel.http.handlers import find_handle, type_hints, with_connection
from semel.http.wsgi.middleware import WSGIResponder, current_responder
from semel.http.wsgi.transaction import open_transaction
from semel.stores.guard import Semel

T = TypeVar("T")
RuleT = TypeVar("RuleT", bound=Rule)
_ADVICE: Final = 'connection= is the name of one of DATABASES, such as "default": Semel opens atomic() on it'
F = TypeVar("F", bound=Callable[..., Any])
_AUTHORISES: Final = ("perform_authentication", "handle_no_permission")
"""Methods of REST framework's views, and of Django's LoginRequiredMixin and its like."""


def _protect(view: F, declared: Rule) -> F:
    if isinstance(declared, Exempt):
        return mark_exempt(view, declared)
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
    view = with_connection(view, rule, awaited=False)
    function = inspect.unwrap(view)  # method_decorator() decorates a partial
    handle = find_handle(function, type_hints(function), awaits=awaits)
    if awaits:
        in_loop = task_endpoint(view, rule, handle, _FRAMEWORK)
        in_thread = make_endpoint_async(view, rule, handle, _FRAMEWORK, awaited_responder)
    else:
        in_loop = make_endpoint(
            view, rule, handle, _FRAMEWORK, transactional_responder if transactional else threaded_responder
        )
        in_thread = make_endpoint(view, rule, handle, _FRAMEWORK, current_responder)
    endpoint: Callable[..., Any]
    if awaits:

        @functools.wraps(view)
        async def endpoint(*args: Any, **kwargs: Any) -> Any:
            handling = require_handling()
            await handling.aprepare(rule)
            return await (in_loop if handling.in_loop else in_thread)(*args, **kwargs)

    else:

        @functools.wraps(view)
        def endpoint(*args: Any, **kwargs: Any) -> Any:
            handling = require_handling()
            handling.prepare(rule)
            return (in_loop if handling.in_loop else in_thread)(*args, **kwargs)

    endpoint.__semel_rule__ = rule  # type: ignore[attr-defined]
    leave_transactions_to_us(endpoint, rule)
    return cast(F, endpoint)


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


def _check_place(view: Any) -> None:
    """Raise PolicyError for a class that authorises its callers itself: the claim would come first, and anyone could
    get a replay.
    """
    made_of = getattr(view, "cls", None) or getattr(view, "view_class", None)
    bound = getattr(getattr(view, "func", None), "__self__", None)  # by method_decorator(…, name="dispatch")
    if bound is not None and getattr(view, "__name__", "") == "dispatch":
        made_of = type(bound)
    if made_of is not None and any(hasattr(made_of, name) for name in _AUTHORISES):
        raise PolicyError(
            f"{made_of.__qualname__} authorises its callers itself, when it is called: decorate its methods, such as "
            "post, or the function below @api_view, so that a replay is authorised as well"
        )


def _abort(status: int) -> Exception:
    """Return an exception that rolls transactions back, and that nobody reports as a fault of the service."""
    error: Exception = Http404(f"refused with {status}; the middleware says so")
    return error


_FRAMEWORK: Final = Framework(
    blank=lambda: HttpResponse(status=204),
    abort=_abort,
    run_again=RunAgain,  # no Exception: Django makes no answer of it
)


class AwaitedResponder:
    """The responder of WSGI, for an ``async def`` view. It may block: the event loop is this request's own."""

    def __init__(self, responder: WSGIResponder) -> None:
        self.life = responder.life
        self._responder = responder
        self.operation: AsyncOperation | None = None

    async def claim(self, declared: Rule) -> bool:
        claimed = self._responder.claim(declared)
        attempt = self.life.attempt
        if attempt is not None:
            self.operation = AsyncOperation(
                attempt.call, attempt.lease, attempt.claimed, functools.partial(_execute, attempt)
            )
        return claimed

    async def perform(self, request: Request) -> Any:
        if isinstance(request, Compensate) and self.operation is not None:
            return await self.operation.compensate(request.error)
        return self._responder.perform(request)


async def _execute(attempt: Attempt, op: Op[bool]) -> bool:
    return attempt.execute(op)


def awaited_responder() -> AwaitedResponder | None:
    responder = current_responder()
    return None if responder is None else AwaitedResponder(responder)


# -- the transactional mode


def on_django(rule: RuleT) -> RuleT:
    """Return the rule with its transaction on Django's own connection."""
    connection = rule.connection if isinstance(rule, Idempotent) else None
    if connection is None or isinstance(connection, OnConnection):
        return rule
    name: object = connection
    if name is transaction.atomic:
        name = DEFAULT_DB_ALIAS
    if not isinstance(name, str):
        raise PolicyError(f"{_ADVICE}. It is not {connection!r}")
    return cast(RuleT, replace(cast("Idempotent | Conditional", rule), connection=OnConnection(name)))


class OnConnection:
    """A ``connection=`` that opens nothing: Django opens and closes its own connections."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def __call__(self) -> AbstractContextManager[Any]:
        if self.alias not in connections:
            raise ConfigurationError(f"{_ADVICE}. There is no {self.alias!r}; there are: {', '.join(connections)}")
        connection = connections[self.alias]
        blocks = connection.atomic_blocks
        if connection.in_atomic_block and not (blocks and blocks[-1]._from_testcase):
            raise ConfigurationError(
                f"a transaction is open on {self.alias!r} before the view that is declared connection={self.alias!r}: "
                "take atomic() away, or, where ATOMIC_REQUESTS has opened it, put @transaction.non_atomic_requests "
                "around the view; of a class, around its dispatch"
            )
        return nullcontext(connection)

    async def open_in_loop(self, call: Call) -> AsyncAttempt | Outcome[Any]:
        """Begin under ASGI, in the thread that the view runs in and that waits for this."""
        guard = require_handling().guard
        if not isinstance(guard, Semel):
            raise ConfigurationError(
                "connection= is on Django's own connection, which is sync: SEMEL's GUARD must be a Semel, with a sync "
                "store of the same database. A Semel serves ASGI as well"
            )
        begun = await sync_to_async(open_transaction, thread_sensitive=True)(guard, self, call)
        return begun if isinstance(begun, Outcome) else InThread(begun)


class InThread:
    """An attempt that is ended from an event loop, in the thread that it was begun in."""

    lease = None

    def __init__(self, attempt: Attempt) -> None:
        self.call = attempt.call
        self.claimed = attempt.claimed
        self.operation = attempt.operation
        self.conflicts = attempt.conflicts
        self.execute = sync_to_async(attempt.execute, thread_sensitive=True)
        self.compensate = sync_to_async(attempt.compensate, thread_sensitive=True)
        self.complete = sync_to_async(attempt.complete, thread_sensitive=True)
        self.decline = sync_to_async(attempt.decline, thread_sensitive=True)
        self.fail = sync_to_async(attempt.fail, thread_sensitive=True)
        self.lost = sync_to_async(attempt.lost, thread_sensitive=True)


def transactional_responder() -> ThreadedResponder | None:
    """Return the responder of the current request, for a view whose transaction begins and ends in its own thread.

    ``async_to_sync`` runs what comes back to this thread while it waits; waiting for a future would never end.
    """
    responder = responder_in_loop()
    return None if responder is None else ThreadedResponder(responder, async_to_sync(_awaited))


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def leave_transactions_to_us(view: Callable[..., Any], rule: Rule) -> None:
    """Keep ATOMIC_REQUESTS from opening a transaction around a view that has its own."""
    if isinstance(rule, Idempotent) and isinstance(rule.connection, OnConnection):
        known: set[str] = getattr(view, "_non_atomic_requests", set())
        view._non_atomic_requests = {*known, rule.connection.alias}  # type: ignore[attr-defined]
