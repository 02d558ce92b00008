"""``guard.transaction`` for an event loop: the same names in the same order as ``engine/transactions.py``."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar, Unpack

from semel.core.flows import Pause, Raised, Recover, Returned, Run
from semel.core.keys import KeyFormat
from semel.core.ops import Claimed
from semel.core.outcomes import Call, Failed, Outcome
from semel.core.serializers import Serializer
from semel.core.transactional import Conflicted, Keep, Lock, Rollback, transact
from semel.engine.declare import Selector
from semel.engine.guard import Guard, PolicyChanges
from semel.engine.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore, AsyncUnit
from semel.engine.transactions import (
    bounded,
    connection_parameter,
    not_within_itself,
    pick_connection,
    unit_of,
    with_handle,
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

    async def transaction(
        self,
        conn: object,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]] | Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        begin: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """Run ``call`` once, its record written in the transaction of ``conn``: both commit, or neither.

        Parameters as of ``Semel.transaction``; the connection is an async one, and ``call`` an ``async def``.
        """
        outcome = await self.transaction_outcome(
            conn, operation, key=key, call=call, tenant=tenant, fingerprint=fingerprint, returns=returns,
            begin=begin, tries=tries, **changes,
        )  # fmt: skip
        return outcome.value

    async def transaction_outcome(
        self,
        conn: object,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]] | Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        begin: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``transaction``, and tells whether the answer is a replay."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        recover = what.policy.recover
        return await self._transact(conn, what, with_handle(call), lambda op: recover and recover(), begin, tries)

    def once_in_transaction(
        self,
        *,
        conn: Selector,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        without: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        begin: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
        """Decorate an ``async def`` that is handed its connection or session. Parameters as of
        ``Semel.once_in_transaction``.
        """

        def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
            if not inspect.iscoroutinefunction(function):
                raise PolicyError(f"{getattr(function, '__qualname__', function)} is sync: decorate it with a Semel")
            bounded(begin, tries)
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint,
                without=(*without, *connection_parameter(conn)), key_format=key_format, serializer=serializer,
                changes=changes,
            )  # fmt: skip
            pick = pick_connection(declared, conn)

            @functools.wraps(function)
            async def once(*args: P.args, **kwargs: P.kwargs) -> T:
                recover = declared.recover
                outcome: Outcome[T] = await self._transact(
                    pick(args, kwargs), self._declared_call(declared, args, kwargs),
                    lambda op: declared.invoke(op, args, kwargs),
                    lambda op: recover and recover(args, kwargs), begin, tries,
                )  # fmt: skip
                return outcome.value

            return once

        return decorate

    async def _transact(
        self,
        conn: object,
        call: Call,
        handler: Callable[[AsyncOperation], Any],
        recover: Callable[[AsyncOperation], Any],
        begin: bool,
        tries: int | None,
    ) -> Outcome[Any]:
        unit: AsyncUnit = unit_of(self.store, conn)
        unit.require(begin)
        not_within_itself(call)
        flow = transact(call, begin, bounded(begin, tries))
        answer: Any = None
        error: StoreError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                answer = error = None
                try:
                    if isinstance(request, Lock):
                        answer = await unit.lock(request)
                    elif isinstance(request, (Run, Recover)):
                        answer = await self._work(
                            unit, call, request.claimed, handler if type(request) is Run else recover
                        )
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
            outcome = stop.value
        except BaseException:
            if begin:
                await self._undo(unit, call)
            raise
        if type(outcome) is Failed:
            raise outcome.error
        return outcome  # type: ignore[no-any-return]

    async def _work(
        self, unit: AsyncUnit, call: Call, claimed: Claimed | None, work: Callable[[AsyncOperation], Any]
    ) -> Returned | Raised | Conflicted:
        op = AsyncOperation(call, None, claimed, self.store.execute)
        outer = running.get()
        try:
            running.set(op)
            result = work(op)
            if inspect.isawaitable(result):
                result = await result
            await unit.finish()
        except Exception as error:
            return Conflicted(error) if unit.conflicts(error) else Raised(error)
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
