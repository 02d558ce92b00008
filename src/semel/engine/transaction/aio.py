# Twin: sync.py is generated from this file by make twins.
"""One call in the transactional mode: its record commits with the handler's rows, in a transaction on one connection.

``run`` drives a call whose handler is a function. Adapters, whose handler is called by a framework, use ``begin`` and
then end the attempt: ``complete`` commits the handler's rows and the answer together, ``reject`` rolls the rows back
and stores the answer, ``decline`` and ``fail`` roll back. There is no lease.

The decisions are made by ``core/transactional.py``. The store knows how to talk to the connection (``store.adopt``).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from semel.core.call import Call, Failed, Outcome, Pause, Raised, Recover, Returned, Run
from semel.core.ops import Claimed, Op
from semel.core.transactional import (
    ExecuteOnce,
    HandlerConflict,
    Keep,
    Lock,
    Rejected,
    Rollback,
    SQLEffect,
    StatementResult,
    execute_once,
    transact,
)
from semel.engine.drive.execution import as_handler
from semel.engine.drive.waiting import outlast
from semel.engine.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore, AsyncUnit, unit_of

# sync only: from semel.errors import PolicyError
from semel.errors import ResultNotStored, StoreError
from semel.observe import events

R = TypeVar("R")
Handler: TypeAlias = Callable[[AsyncOperation], Any]

UNDO_TIMEOUT: Final = 10.0  # async only
"""How long a rollback may take before the connection is given up."""  # async only


class NothingHappened(BaseException):
    """The handler's answer says that nothing happened. Not an Exception, so that no policy stores it."""


class AsyncTransactionAttempt:
    """One call in a transaction. See ``AsyncAttempt`` for the methods that adapters use."""

    lease = None
    __slots__ = ("_flow", "_own", "_store", "_unit", "call", "claimed", "operation")

    def __init__(
        self, store: AsyncStore, connection: object, call: Call, own: bool, tries: int, effect: SQLEffect | None = None
    ) -> None:
        """
        :param own: open the transaction and end it, and run the handler again after a conflict.
        :param tries: how often the handler runs at most.
        :param effect: the SQL statement that is the whole handler; then ``own`` depends on the connection.
        """
        self._store = store
        adopt = store.adopt
        self._unit: AsyncUnit = unit_of(store, connection) if adopt is None else adopt(connection)
        if effect is None:
            self._unit.require(own)
            self._flow = transact(call, own, tries)
        else:
            own, together = self._unit.plan(effect.statement)
            header = call.codec.begin_clear(call.serializer.kind, call.serializer.name) if together else None
            self._flow = execute_once(call, own, tries, effect, header)
        self._own = own
        self.call = call
        self.claimed: Claimed | None = None

    async def run_statement(self, effect: SQLEffect) -> StatementResult:
        """Run the effect once, or return its stored result."""
        outcome = await self.run(lambda op: self._unit.perform(effect))
        result = outcome.value
        if type(result) is int:
            return StatementResult([], result, outcome.replayed)
        if type(result) is not list:
            raise ResultNotStored(f"{self.call} is done, and what is stored is not the result of a statement")
        return StatementResult(result, len(result), outcome.replayed)

    async def begin(self) -> Outcome[Any] | None:
        """Open the transaction and lock the key. Returns an outcome if there is nothing to run."""
        step = await self.run(None)
        if isinstance(step, Outcome):
            return step
        self.claimed = step.claimed
        self._unit.watch()
        self.operation = AsyncOperation(self.call, None, step.claimed, self._store.execute)
        self.operation._transaction = self._unit
        return None

    async def execute(self, op: Op[R]) -> R:
        """Execute an Op of the handler on the guard's store."""
        return await self._store.execute(op)

    async def compensate(self, error: BaseException) -> BaseException:
        """Undo the handler's steps after it raised ``error``. Returns the error to report."""
        return await self.operation.compensate(error)

    async def complete(self, value: Any) -> Outcome[Any]:
        """Commit the handler's rows and ``value``, its answer."""
        try:
            await self._unit.finish()
        except Exception as error:
            return await self._end(HandlerConflict(error) if self._unit.conflicts(error) else Raised(error))
        return await self._end(Returned(value))

    async def reject(self, value: Any) -> Outcome[Any]:
        """Roll back the handler's rows and store ``value``, its answer."""
        return await self._end(Rejected(value))

    async def decline(self, value: Any) -> Outcome[Any]:
        """Roll back. The handler answered that nothing happened: the key is free again."""
        await self._roll_back(Raised(NothingHappened()))
        assert self.claimed is not None
        return Outcome(value, False, self.claimed.attempt)

    async def lost(self) -> Outcome[Any]:
        """Roll back. A transaction has no lease, so this ends an attempt as ``decline`` does."""
        return await self.decline(None)

    def conflicts(self, error: BaseException) -> bool:
        """Whether ``error`` means that the handler's transaction conflicted with another one."""
        return self._unit.conflicts(error)

    async def fail(self, error: BaseException) -> None:
        """Roll back; the policy decides if the error is stored. Raises TransactionConflict if ``conflicts(error)``."""
        await self._roll_back(HandlerConflict(error) if self.conflicts(error) else Raised(error))

    async def _roll_back(self, ending: Raised | HandlerConflict) -> None:
        try:
            await self.run(None, answer=ending)
        except BaseException as raised:
            if raised is not ending.error:
                raise

    async def _end(self, ending: Returned | Rejected | Raised | HandlerConflict) -> Outcome[Any]:
        outcome = await self.run(None, answer=ending)
        assert isinstance(outcome, Outcome)
        return outcome

    async def run(self, handler: Handler | None, recover: Callable[[], Any] | None = None, answer: Any = None) -> Any:
        """Run ``handler`` once and return its Outcome, or the one that is known.

        :param handler: None if it is called elsewhere: then return a Run, and go on when it has ended.
        :param recover: calls the policy's hook; defaults to the hook itself.
        :param answer: how it has ended.
        """
        flow, unit = self._flow, self._unit
        if answer is not None:
            unit.unwatch()
        error: StoreError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                answer = error = None
                try:
                    if isinstance(request, Lock):
                        answer = await unit.lock(request)
                    elif isinstance(request, Keep):
                        await unit.keep(request)
                    elif isinstance(request, Run):
                        if handler is None:
                            return request
                        answer = await self._work(request.claimed, handler)
                    elif isinstance(request, Recover):
                        hook = as_handler(recover or self.call.policy.recover)
                        answer = await self._work(request.claimed, hook)
                    elif isinstance(request, ExecuteOnce):
                        answer = await unit.execute(request)
                    elif isinstance(request, Rollback):
                        await self._undo()
                    elif isinstance(request, Pause):
                        await asyncio.sleep(request.seconds)
                    else:
                        answer = await self._store.execute(request)
                except StoreError as failure:
                    error = failure
        except StopIteration as stop:
            outcome: Outcome[Any] | Failed = stop.value
        except BaseException:
            if self._own:
                await self._undo()
            raise
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    async def _work(self, claimed: Claimed | None, work: Handler) -> Returned | Raised | HandlerConflict:
        """Run the handler, and flush what it wrote."""
        op = AsyncOperation(self.call, None, claimed, self._store.execute)
        op._transaction = self._unit
        outer = running.get()
        self._unit.watch()
        try:
            running.set(op)
            result = work(op)
            # sync: if inspect.iscoroutine(result):
            # sync:     result.close()
            # sync:     raise PolicyError(f"{self.call}: the handler is async; use AsyncSemel")
            if inspect.isawaitable(result):
                result = await result
            await self._unit.finish()
        except Exception as error:
            return HandlerConflict(error) if self._unit.conflicts(error) else Raised(error)
        except BaseException as error:
            return Raised(error)
        finally:
            running.set(outer)
            self._unit.unwatch()
        return Returned(result)

    # sync: def _undo(self) -> None:
    # sync:     try:
    # sync:         self._unit.undo()
    # sync:     except Exception as error:  # the connection is gone, and the transaction with it
    # sync:         self.call.tell(events.StoreFailed, "undo", str(error))
    async def _undo(self) -> None:
        """Roll back, even if we are cancelled: a connection with an open transaction must not go back to its pool."""
        undoing = asyncio.ensure_future(self._unit.undo())
        # Not by wait_for(), which takes another task: a rollback is half of a replay.
        limit = asyncio.get_running_loop().call_later(UNDO_TIMEOUT, undoing.cancel)
        cancelled = await outlast(undoing)
        limit.cancel()
        failure = TimeoutError() if undoing.cancelled() else undoing.exception()
        if failure is not None:  # the connection is gone, and the transaction with it
            self.call.tell(events.StoreFailed, "undo", str(failure) or type(failure).__name__)
        if cancelled is not None:
            raise cancelled


async def begin_attempt(store: AsyncStore, connection: object, call: Call) -> AsyncTransactionAttempt | Outcome[Any]:
    """Open a transaction on ``connection`` and lock the key in it: return an attempt, or an outcome that is known.

    The handler runs once: a framework calls it, so after a conflict the adapter decides what to do.
    """
    attempt = AsyncTransactionAttempt(store, connection, call, own=True, tries=1)
    return await attempt.begin() or attempt
