# Twin: ../wsgi/transaction.py is generated from this file by make twins.
# Twin: AsyncGuard -> SyncGuard
"""Attempts of ``connection=`` routes: the connection is opened for the request, and closed when the attempt ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from semel.core.call import Call, Outcome
from semel.engine.drive.attempts import AsyncAttempt
from semel.engine.transaction.aio import AsyncTransactionAttempt, begin_attempt
from semel.http.handlers import MISTAKES, not_opened

if TYPE_CHECKING:
    from semel.engine.aio import AsyncGuard

_log = logging.getLogger("semel.http")


class AsyncInTransaction:
    """An attempt on a connection that was opened for it. Ending it closes the connection."""

    lease = None

    def __init__(self, attempt: AsyncTransactionAttempt, stack: AsyncExitStack) -> None:
        self._attempt = attempt
        self._stack = stack
        self.call = attempt.call
        self.claimed = attempt.claimed
        self.operation = attempt.operation
        self.execute = attempt.execute
        self.compensate = attempt.compensate
        self.conflicts = attempt.conflicts

    async def complete(self, answer: Any) -> Outcome[Any]:
        """Commit the handler's rows with the answer; an error answer is stored without them."""
        end = self._attempt.reject if answer.status >= 400 else self._attempt.complete
        try:
            return await end(answer)
        finally:
            await self._close()

    async def decline(self, answer: Any) -> Outcome[Any]:
        try:
            return await self._attempt.decline(answer)
        finally:
            await self._close()

    async def lost(self) -> Outcome[Any]:
        return await self.decline(None)

    async def fail(self, error: BaseException) -> None:
        try:
            await self._attempt.fail(error)
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            await self._stack.aclose()
        except Exception:  # the outcome stands, whatever happens to the connection
            _log.exception("the connection of a finished request could not be closed")


# async only
@runtime_checkable
class OpensInLoop(Protocol):
    """A ``connection=`` on a sync connection that is to be opened from an event loop."""

    async def open_in_loop(self, call: Call) -> AsyncAttempt | Outcome[Any]: ...


async def open_transaction_async(
    guard: AsyncGuard, connect: Callable[[], Any], call: Call
) -> AsyncAttempt | Outcome[Any]:
    """Open a connection, begin a transaction and lock the key in it.

    Returns an attempt, or an Outcome if there is nothing to run. Raises TransactionConflict, StoreUnavailable.
    """
    in_loop: object = connect  # async only
    # async only
    if isinstance(in_loop, OpensInLoop):
        return await in_loop.open_in_loop(call)
    async with AsyncExitStack() as stack:
        try:
            connection = await stack.enter_async_context(connect())
        except MISTAKES:
            raise
        except Exception as error:
            raise not_opened(error) from error
        begun = await begin_attempt(guard.store, connection, call)
        if isinstance(begun, Outcome):
            return begun
        begun.operation.connection = connection
        return AsyncInTransaction(begun, stack.pop_all())
