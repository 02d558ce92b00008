"""``guard.transaction`` for an event loop: the same names in the same order as ``engine/transaction/sync.py``."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar, Unpack

from semel.core.call import Call, Failed, Outcome, Pause, Raised, Recover, Returned, Run
from semel.core.encoding.serializers import Serializer
from semel.core.keys import KeyFormat
from semel.core.ops import Claimed
from semel.core.transactional import Flow, HandlerConflict, Keep, Lock, Rollback, transact
from semel.engine.declare.brackets import with_brackets
from semel.engine.declare.declaration import Selector
from semel.engine.declare.handlers import with_handle
from semel.engine.drive.drive import ignoring
from semel.engine.guard import Guard, PolicyChanges
from semel.engine.operation.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore, AsyncUnit, unit_of
from semel.engine.transaction.sync import (
    bounded,
    connection_parameter,
    not_within_itself,
    outcome_of,
    pick_connection,
)
from semel.errors import PolicyError, StoreError
from semel.observe import events

__all__ = ["AsyncTransactions"]

P = ParamSpec("P")
T = TypeVar("T")

UNDO_TIMEOUT: Final = 10.0
"""How long a rollback may take before the connection is given up."""


class AsyncTransactions(Guard):
    """The transactional mode of ``AsyncSemel``."""

    store: AsyncStore

    async def run_in_transaction(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]] | Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """Run ``call`` once, its record written in the transaction of ``connection``: both commit, or neither.

        Parameters as of ``Semel.transaction``; the connection is an async one, and ``call`` an ``async def``.
        """
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = await self._transact(
            connection, what, with_handle(call), ignoring(what.policy.recover), own_transaction, tries
        )
        return outcome.value

    async def run_in_transaction_outcome(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]] | Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run_in_transaction``, and tells whether the answer is a replay."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return await self._transact(
            connection, what, with_handle(call), ignoring(what.policy.recover), own_transaction, tries
        )

    @with_brackets
    def once_in_transaction(
        self,
        *,
        connection: Selector,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        exclude: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Decorate an ``async def`` that is handed its connection or session. Parameters as of
        ``Semel.once_in_transaction``.
        """

        def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            if not inspect.iscoroutinefunction(function):
                raise PolicyError(f"{getattr(function, '__qualname__', function)} is sync: decorate it with a Semel")
            bounded(own_transaction, tries)
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint,
                exclude=(*exclude, *connection_parameter(connection)), key_format=key_format, serializer=serializer,
                changes=changes,
            )  # fmt: skip
            pick = pick_connection(declared, connection)

            @functools.wraps(function)
            async def once(*args: P.args, **kwargs: P.kwargs) -> T:
                recover = declared.recover
                outcome: Outcome[T] = await self._transact(
                    pick(args, kwargs), self._declared_call(declared, args, kwargs),
                    lambda op: declared.invoke(op, args, kwargs),
                    lambda op: recover and recover(args, kwargs), own_transaction, tries,
                )  # fmt: skip
                return outcome.value

            return once

        return decorate

    async def _transact(
        self,
        connection: object,
        call: Call,
        handler: Callable[[AsyncOperation], Any],
        recover: Callable[[AsyncOperation], Any],
        own_transaction: bool,
        tries: int | None,
    ) -> Outcome[Any]:
        unit: AsyncUnit = unit_of(self.store, connection)
        unit.require(own_transaction)
        not_within_itself(call)
        flow = transact(call, own_transaction, bounded(own_transaction, tries))
        try:
            step = await self._proceed(unit, call, flow, None)
            while isinstance(step, (Run, Recover)):
                work = handler if type(step) is Run else recover
                step = await self._proceed(unit, call, flow, await self._work(unit, call, step.claimed, work))
        except BaseException:
            if own_transaction:
                await self._undo(unit, call)
            raise
        return outcome_of(step)  # type: ignore[no-any-return]

    async def _proceed(
        self, unit: AsyncUnit, call: Call, flow: Flow, answer: Any
    ) -> Run | Recover | Outcome[Any] | Failed:
        """Send the answer into the flow and do what it asks, until it asks for work to be done or has an outcome."""
        error: StoreError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                answer = error = None
                if isinstance(request, (Run, Recover)):
                    return request
                try:
                    if isinstance(request, Lock):
                        answer = await unit.lock(request)
                    elif isinstance(request, Keep):
                        await unit.keep(request)
                    elif isinstance(request, Rollback):
                        await self._undo(unit, call)
                    elif isinstance(request, Pause):
                        await asyncio.sleep(request.seconds)
                    else:
                        answer = await self.store.execute(request)
                except StoreError as failure:
                    error = failure
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _work(
        self, unit: AsyncUnit, call: Call, claimed: Claimed | None, work: Callable[[AsyncOperation], Any]
    ) -> Returned | Raised | HandlerConflict:
        op = AsyncOperation(call, None, claimed, self.store.execute)
        outer = running.get()
        try:
            running.set(op)
            result = work(op)
            if inspect.isawaitable(result):
                result = await result
            await unit.finish()
        except Exception as error:
            return HandlerConflict(error) if unit.conflicts(error) else Raised(error)
        except BaseException as error:
            return Raised(error)
        finally:
            running.set(outer)
        return Returned(result)

    async def _undo(self, unit: AsyncUnit, call: Call) -> None:
        """To its end, whoever cancels us: a connection with an open transaction must not go back to its pool."""
        undoing = asyncio.ensure_future(asyncio.wait_for(unit.undo(), UNDO_TIMEOUT))
        cancelled: asyncio.CancelledError | None = None
        while not undoing.done():
            try:
                await asyncio.wait([undoing])
            except asyncio.CancelledError as error:
                cancelled = error
        failure = undoing.exception() if not undoing.cancelled() else None
        if failure is not None:  # the connection is gone, and the transaction with it
            call.tell(events.StoreFailed, "undo", str(failure) or type(failure).__name__)
        if cancelled is not None:
            raise cancelled
