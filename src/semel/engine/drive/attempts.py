"""Attempts that an adapter ends, for callers that cannot pass the handler as a function because a framework calls it.

``guard.begin(call)`` claims the key. It returns an ``Outcome`` if there is nothing to run, or an attempt. The adapter
runs the handler and then ends the attempt by calling exactly one of ``complete``, ``decline``, ``lost`` and ``fail``.

This is the interface that adapters use. ``driver.py`` and ``aio_driver.py`` implement it for handlers that run under a
lease, ``semel.engine.transaction`` for handlers that run in a transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from semel.core.call import Call, Outcome
    from semel.core.ops import Claimed, Op
    from semel.engine.drive.leases import Lease
    from semel.engine.operation import Operation, OperationHandle

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
