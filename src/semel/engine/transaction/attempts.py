"""An attempt in a transaction that Semel opens and ends, in the hands of an adapter: see ``engine/drive/attempts.py``.

``begin(guard, conn, call)`` opens the transaction on a connection and takes the key in it; the adapter has its handler
work on that connection, and says how it ended: ``complete`` commits the handler's rows and the answer together,
``refuse`` rolls the rows back and keeps the answer, ``decline`` and ``fail`` roll back. There is no lease to be lost.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from semel.core.call import Call, Outcome, Raised, Recover, Returned, Run
from semel.core.ops import Claimed, Op
from semel.core.transactional import Flow, HandlerConflict, Rejected, transact
from semel.engine.drive.drive import ignoring
from semel.engine.operation.operation import AsyncOperation, Operation
from semel.engine.ports import unit_of
from semel.engine.transaction.aio import AsyncTransactions
from semel.engine.transaction.sync import Transactions, outcome_of

__all__ = ["AsyncTransactionAttempt", "TransactionAttempt", "begin", "begin_async"]

R = TypeVar("R")

TRIES: Final = 1
"""The handler is others' to run, so it cannot be run again here: a conflict is the adapter's to deal with."""


class Declined(BaseException):
    """The handler's answer says that nothing happened. No Exception: it is never an answer to be remembered."""


class TransactionAttempt:
    """Under ``Semel``."""

    lease = None
    __slots__ = ("_flow", "_guard", "_unit", "call", "claimed", "operation")

    def __init__(self, guard: Transactions, unit: Any, flow: Flow, call: Call) -> None:
        self._guard = guard
        self._unit = unit
        self._flow = flow
        self.call = call

    def _advance(self, answer: Any) -> Run | Recover | Outcome[Any]:
        """Send the answer into the flow and do what it asks, until it asks for the handler or has an outcome."""
        try:
            step = self._guard._proceed(self._unit, self.call, self._flow, answer)
        except BaseException:
            self._guard._undo(self._unit, self.call)
            raise
        return outcome_of(step)  # type: ignore[no-any-return]

    def begin(self) -> Outcome[Any] | None:
        """Open and lock; an outcome where there is nothing to run."""
        hook = ignoring(self.call.policy.recover)
        step = self._advance(None)
        while isinstance(step, Recover):
            step = self._advance(self._guard._work(self._unit, self.call, step.claimed, hook))
        if isinstance(step, Outcome):
            return step
        assert step.claimed is not None
        self.claimed: Claimed = step.claimed
        self.operation = Operation(self.call, None, step.claimed, self._guard.store.execute)
        return None

    def execute(self, op: Op[R]) -> R:
        """Execute an Op of the handler on the guard's store."""
        result: R = self._guard.store.execute(op)
        return result

    def compensate(self, error: BaseException) -> BaseException:
        """Undo the handler's steps after it raised ``error``. Returns the error to report."""
        return self.operation.compensate(error)

    def complete(self, value: Any) -> Outcome[Any]:
        """It is done, with this: the handler's rows and the answer are committed together."""
        try:
            self._unit.finish()
        except Exception as error:
            return self._outcome(HandlerConflict(error) if self._unit.conflicts(error) else Raised(error))
        return self._outcome(Returned(value))

    def refuse(self, value: Any) -> Outcome[Any]:
        """It was refused, with this answer, which is remembered; the handler's rows are not."""
        return self._outcome(Rejected(value))

    def decline(self, value: Any) -> Outcome[Any]:
        """It was answered, and nothing happened: rolled back, and the key is free again."""
        self._rolled_back(Raised(Declined()))
        return Outcome(value, False, self.claimed.attempt)

    def lost(self) -> Outcome[Any]:
        """Roll back. A transaction has no lease, so this ends an attempt as ``decline`` does."""
        return self.decline(None)

    def conflicts(self, error: BaseException) -> bool:
        """Whether ``error`` means that the handler's transaction conflicted with another one."""
        return bool(self._unit.conflicts(error))

    def fail(self, error: BaseException) -> None:
        """Roll back; the policy decides if the error is stored. Raises TransactionConflict if ``conflicts(error)``."""
        self._rolled_back(HandlerConflict(error) if self.conflicts(error) else Raised(error))

    def _rolled_back(self, ending: Raised | HandlerConflict) -> None:
        try:
            self._advance(ending)
        except BaseException as raised:
            if raised is not ending.error:
                raise

    def _outcome(self, answer: Any) -> Outcome[Any]:
        step = self._advance(answer)
        assert isinstance(step, Outcome)
        return step


class AsyncTransactionAttempt:
    """Under ``AsyncSemel``: the same names."""

    lease = None
    __slots__ = ("_flow", "_guard", "_unit", "call", "claimed", "operation")

    def __init__(self, guard: AsyncTransactions, unit: Any, flow: Flow, call: Call) -> None:
        self._guard = guard
        self._unit = unit
        self._flow = flow
        self.call = call

    async def _advance(self, answer: Any) -> Run | Recover | Outcome[Any]:
        """Send the answer into the flow and do what it asks, until it asks for the handler or has an outcome."""
        try:
            step = await self._guard._proceed(self._unit, self.call, self._flow, answer)
        except BaseException:
            await self._guard._undo(self._unit, self.call)
            raise
        return outcome_of(step)  # type: ignore[no-any-return]

    async def begin(self) -> Outcome[Any] | None:
        """Open and lock; an outcome where there is nothing to run."""
        hook = ignoring(self.call.policy.recover)
        step = await self._advance(None)
        while isinstance(step, Recover):
            step = await self._advance(await self._guard._work(self._unit, self.call, step.claimed, hook))
        if isinstance(step, Outcome):
            return step
        assert step.claimed is not None
        self.claimed: Claimed = step.claimed
        self.operation = AsyncOperation(self.call, None, step.claimed, self._guard.store.execute)
        return None

    async def execute(self, op: Op[R]) -> R:
        """Execute an Op of the handler on the guard's store."""
        result: R = await self._guard.store.execute(op)
        return result

    async def compensate(self, error: BaseException) -> BaseException:
        """Undo the handler's steps after it raised ``error``. Returns the error to report."""
        return await self.operation.compensate(error)

    async def complete(self, value: Any) -> Outcome[Any]:
        """It is done, with this: the handler's rows and the answer are committed together."""
        try:
            await self._unit.finish()
        except Exception as error:
            return await self._outcome(HandlerConflict(error) if self._unit.conflicts(error) else Raised(error))
        return await self._outcome(Returned(value))

    async def refuse(self, value: Any) -> Outcome[Any]:
        """It was refused, with this answer, which is remembered; the handler's rows are not."""
        return await self._outcome(Rejected(value))

    async def decline(self, value: Any) -> Outcome[Any]:
        """It was answered, and nothing happened: rolled back, and the key is free again."""
        await self._rolled_back(Raised(Declined()))
        return Outcome(value, False, self.claimed.attempt)

    async def lost(self) -> Outcome[Any]:
        """Roll back. A transaction has no lease, so this ends an attempt as ``decline`` does."""
        return await self.decline(None)

    def conflicts(self, error: BaseException) -> bool:
        """Whether ``error`` means that the handler's transaction conflicted with another one."""
        return bool(self._unit.conflicts(error))

    async def fail(self, error: BaseException) -> None:
        """Roll back; the policy decides if the error is stored. Raises TransactionConflict if ``conflicts(error)``."""
        await self._rolled_back(HandlerConflict(error) if self.conflicts(error) else Raised(error))

    async def _rolled_back(self, ending: Raised | HandlerConflict) -> None:
        try:
            await self._advance(ending)
        except BaseException as raised:
            if raised is not ending.error:
                raise

    async def _outcome(self, answer: Any) -> Outcome[Any]:
        step = await self._advance(answer)
        assert isinstance(step, Outcome)
        return step


def begin(guard: Transactions, connection: object, call: Call) -> TransactionAttempt | Outcome[Any]:
    """Open a transaction on ``connection`` and take the key in it: an attempt, or an outcome that is known."""
    unit = unit_of(guard.store, connection)
    unit.require(True)
    attempt = TransactionAttempt(guard, unit, transact(call, True, TRIES), call)
    return attempt.begin() or attempt


async def begin_async(
    guard: AsyncTransactions, connection: object, call: Call
) -> AsyncTransactionAttempt | Outcome[Any]:
    """The same, awaited."""
    unit = unit_of(guard.store, connection)
    unit.require(True)
    attempt = AsyncTransactionAttempt(guard, unit, transact(call, True, TRIES), call)
    return await attempt.begin() or attempt
