"""Attempts that an adapter ends, for callers that cannot pass the handler as a function because a framework calls it.

``guard.begin(call)`` claims the key. It returns an ``Outcome`` if there is nothing to run, or an attempt. The adapter
runs the handler and then ends the attempt by calling exactly one of ``complete``, ``decline``, ``lost`` and ``fail``.

``Attempt`` and ``AsyncAttempt`` are the interface that adapters use. ``LeasedAttempt`` and ``AsyncLeasedAttempt``
implement it for handlers that run under a lease, ``semel.engine.transaction`` for handlers that run in a transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from semel.core.call import Declined, Outcome, Raised, Returned, Stopped

if TYPE_CHECKING:
    from semel.core.call import Call
    from semel.core.ops import Claimed, Op
    from semel.engine.aio import AsyncSemel
    from semel.engine.drive.drive import Drive
    from semel.engine.drive.leases import Lease
    from semel.engine.operation.operation import AsyncOperation, Operation, OperationHandle
    from semel.engine.sync import Semel

__all__ = ["AsyncAttempt", "AsyncLeasedAttempt", "Attempt", "LeasedAttempt"]

R = TypeVar("R")


class Attempt(Protocol):
    """One attempt of a sync guard, ended by an adapter."""

    @property
    def call(self) -> Call:
        """The call that this is an attempt of."""
        ...

    @property
    def claimed(self) -> Claimed | None:
        """The store's answer to the claim; None if the handler runs unprotected."""
        ...

    @property
    def lease(self) -> Lease | None:
        """The lease that is kept alive until the attempt ends; None in a transaction, or if run unprotected."""
        ...

    @property
    def operation(self) -> Operation:
        """The handle for the handler."""
        ...

    def execute(self, op: Op[R]) -> R:
        """Execute an Op of the handler, such as a captured value, on the guard's store."""
        ...

    def compensate(self, error: BaseException) -> BaseException:
        """Undo the handler's steps after it raised ``error``. Returns the error to report."""
        ...

    def complete(self, value: Any) -> Outcome[Any]:
        """Store ``value`` as the result. If another owner took over meanwhile, the outcome is theirs."""
        ...

    def decline(self, value: Any) -> Outcome[Any]:
        """End an attempt whose handler answered that nothing happened: the key is free again."""
        ...

    def lost(self) -> Outcome[Any]:
        """End an attempt whose lease was lost: return the new owner's outcome, or raise LeaseLost."""
        ...

    def conflicts(self, error: BaseException) -> bool:
        """Whether ``error`` means that the handler's transaction conflicted with another one."""
        ...

    def fail(self, error: BaseException) -> None:
        """End an attempt whose handler raised ``error``; the policy decides if the error is stored.

        Does not raise ``error`` itself. Raises TransactionConflict if ``conflicts(error)``: nothing is stored then.
        """
        ...


class AsyncAttempt(Protocol):
    """One attempt of an async guard, ended by an adapter. See ``Attempt`` for the methods."""

    @property
    def call(self) -> Call: ...

    @property
    def claimed(self) -> Claimed | None: ...

    @property
    def lease(self) -> Lease | None: ...

    @property
    def operation(self) -> OperationHandle:
        """The handle for the handler: an ``Operation`` if the handler runs in a thread."""
        ...

    async def execute(self, op: Op[R]) -> R: ...

    def compensate(self, error: BaseException) -> Awaitable[BaseException]: ...

    def complete(self, value: Any) -> Awaitable[Outcome[Any]]: ...

    def decline(self, value: Any) -> Awaitable[Outcome[Any]]: ...

    def lost(self) -> Awaitable[Outcome[Any]]: ...

    def conflicts(self, error: BaseException) -> bool: ...

    def fail(self, error: BaseException) -> Awaitable[None]: ...


class LeasedAttempt:
    """An attempt under a lease of ``Semel``."""

    __slots__ = ("_drive", "_guard", "call", "claimed", "lease", "operation")

    def __init__(self, guard: Semel, drive: Drive, claimed: Claimed | None, operation: Operation) -> None:
        self._guard = guard
        self._drive = drive
        self.call: Call = drive.call
        self.lease: Lease | None = drive.lease
        self.claimed = claimed
        self.operation = operation

    def __del__(self) -> None:
        # The adapter dropped the attempt without ending it: let the lease expire, as if the process had died.
        if not self._drive.finished:
            self._guard._finish(self._drive)

    def execute(self, op: Op[R]) -> R:
        result: R = self._guard.store.execute(op)
        return result

    def compensate(self, error: BaseException) -> BaseException:
        return self.operation.compensate(error)

    def complete(self, value: Any) -> Outcome[Any]:
        return self._guard._end(self._drive, Returned(value))

    def decline(self, value: Any) -> Outcome[Any]:
        return self._guard._end(self._drive, Declined(value))

    def lost(self) -> Outcome[Any]:
        return self._guard._end(self._drive, Stopped())

    def conflicts(self, error: BaseException) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        try:
            self._guard._end(self._drive, Raised(error))
        except BaseException as raised:
            if raised is not error:
                raise


class AsyncLeasedAttempt:
    """An attempt under a lease of ``AsyncSemel``."""

    __slots__ = ("_drive", "_guard", "call", "claimed", "lease", "operation")

    def __init__(self, guard: AsyncSemel, drive: Drive, claimed: Claimed | None, operation: AsyncOperation) -> None:
        self._guard = guard
        self._drive = drive
        self.call: Call = drive.call
        self.lease: Lease | None = drive.lease
        self.claimed = claimed
        self.operation = operation

    def __del__(self) -> None:
        # The adapter dropped the attempt without ending it: let the lease expire, as if the process had died.
        if not self._drive.finished:
            self._guard._finish(self._drive)

    async def execute(self, op: Op[R]) -> R:
        result: R = await self._guard.store.execute(op)
        return result

    def compensate(self, error: BaseException) -> Awaitable[BaseException]:
        return self.operation.compensate(error)

    def complete(self, value: Any) -> Awaitable[Outcome[Any]]:
        return self._guard._end(self._drive, Returned(value))

    def decline(self, value: Any) -> Awaitable[Outcome[Any]]:
        return self._guard._end(self._drive, Declined(value))

    def lost(self) -> Awaitable[Outcome[Any]]:
        return self._guard._end(self._drive, Stopped())

    def conflicts(self, error: BaseException) -> bool:
        return False

    async def fail(self, error: BaseException) -> None:
        try:
            await self._guard._end(self._drive, Raised(error))
        except BaseException as raised:
            if raised is not error:
                raise
