"""The transactional mode in Django: a view runs in ``atomic()`` on Django's own connection, and its record with it.

::

    @require_POST
    @idempotent(connection="default")             # one of DATABASES; the guard's store is in the same database
    def pay(request, op: Operation):
        Payment.objects.create(key=op.key)     # committed together with the answer, before that is sent
        return JsonResponse({"paid": True}, status=201)

Django's connections belong to a thread and are sync. Under ASGI a plain view has a thread for all of its request: there
the transaction is begun, and there it is ended, when the answer is whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, TypeVar, cast

from asgiref.sync import async_to_sync, sync_to_async
from django.db import DEFAULT_DB_ALIAS, connections, transaction

from semel.core.call import Call, Outcome
from semel.core.ops import Op
from semel.engine.drive.attempts import AsyncAttempt, Attempt
from semel.errors import ConfigurationError, PolicyError
from semel.http.asgi.endpoints import ThreadedResponder
from semel.http.asgi.middleware import current_responder
from semel.http.contract.rules import Conditional, Idempotent, Rule
from semel.http.django.handling import require_handling
from semel.http.wsgi.transaction import open_transaction
from semel.stores.guard import Semel

__all__ = ["OnConnection", "leave_transactions_to_us", "on_django", "transactional_responder"]

R = TypeVar("R")
T = TypeVar("T")
RuleT = TypeVar("RuleT", bound=Rule)
_ADVICE: Final = 'connection= is the name of one of DATABASES, such as "default": Semel opens atomic() on it'


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
                "connection= is on Django's own connection, which is sync: SEMEL's GUARD is a Semel then, with a sync "
                "store of the same database. A Semel serves ASGI as well"
            )
        begun = await sync_to_async(open_transaction, thread_sensitive=True)(guard, self, call)
        return begun if isinstance(begun, Outcome) else InThread(begun)


class InThread:
    """An attempt that is ended from an event loop, in the thread that it was begun in."""

    lease = None

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.call = attempt.call
        self.claimed = attempt.claimed
        self.operation = attempt.operation
        self.conflicts = attempt.conflicts

    async def execute(self, op: Op[R]) -> R:
        return await sync_to_async(self._attempt.execute, thread_sensitive=True)(op)

    async def compensate(self, error: BaseException) -> BaseException:
        return await sync_to_async(self._attempt.compensate, thread_sensitive=True)(error)

    async def complete(self, answer: Any) -> Outcome[Any]:
        return await sync_to_async(self._attempt.complete, thread_sensitive=True)(answer)

    async def decline(self, answer: Any) -> Outcome[Any]:
        return await sync_to_async(self._attempt.decline, thread_sensitive=True)(answer)

    async def lost(self) -> Outcome[Any]:
        return await self.decline(None)

    async def fail(self, error: BaseException) -> None:
        await sync_to_async(self._attempt.fail, thread_sensitive=True)(error)


def transactional_responder() -> ThreadedResponder | None:
    """The responder of an event loop, for a view in a thread whose transaction is begun and ended in that same thread.

    ``async_to_sync`` runs what comes back to this thread while it waits; waiting for a future would never end.
    """
    responder = current_responder()
    return None if responder is None else ThreadedResponder(responder, async_to_sync(_awaited))


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def leave_transactions_to_us(view: Callable[..., Any], rule: Rule) -> None:
    """Keep ATOMIC_REQUESTS from opening a transaction around a view that has its own."""
    if isinstance(rule, Idempotent) and isinstance(rule.connection, OnConnection):
        known: set[str] = getattr(view, "_non_atomic_requests", set())
        view._non_atomic_requests = {*known, rule.connection.alias}  # type: ignore[attr-defined]
