"""An attempt in the hands of an adapter: for callers that cannot hand over a function, because others run the handler.

``guard.begin(call)`` claims. What it gives back is either an outcome (a replay) or an attempt, whose lease is kept
alive until the adapter says how it ended: ``complete``, ``decline`` (nothing happened) or ``fail``; one of them, once.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from semel.core.call import Declined, Outcome, Raised, Returned, Stopped

if TYPE_CHECKING:
    from semel.core.call import Call
    from semel.core.ops import Claimed, Op
    from semel.engine.aio import AsyncSemel
    from semel.engine.drive.drive import Drive
    from semel.engine.drive.leases import Lease
    from semel.engine.operation.operation import AsyncOperation, Operation
    from semel.engine.sync import Semel

__all__ = ["AsyncAttempt", "Attempt"]


class Attempt:
    """Under ``Semel``."""

    __slots__ = ("_drive", "_guard", "call", "claimed", "lease", "operation")

    def __init__(self, guard: Semel, drive: Drive, claimed: Claimed | None, operation: Operation) -> None:
        self._guard = guard
        self._drive = drive
        self.call: Call = drive.call
        self.lease: Lease | None = drive.lease
        self.claimed = claimed
        self.operation = operation

    def __del__(self) -> None:
        # An adapter that lost it: the lease ends by itself, as if the process had died.
        if not self._drive.finished:
            self._guard._finish(self._drive)

    def execute(self, op: Op[Any]) -> Any:
        """An Op of the handler's own, such as a captured value."""
        return self._guard.store.execute(op)

    def complete(self, value: Any) -> Outcome[Any]:
        """It is done, with this. The outcome is another's when this attempt had been replaced meanwhile."""
        return self._guard._end(self._drive, Returned(value))

    def decline(self, value: Any) -> Outcome[Any]:
        """It was answered, and nothing happened: the key is free again."""
        return self._guard._end(self._drive, Declined(value))

    def lost(self) -> Outcome[Any]:
        """The lease was lost and the handler stopped: the new owner's outcome, or LeaseLost."""
        return self._guard._end(self._drive, Stopped())

    def fail(self, error: BaseException) -> None:
        """The handler raised. Kept or released, as the policy says; raising it is the adapter's business."""
        try:
            self._guard._end(self._drive, Raised(error))
        except BaseException as raised:
            if raised is not error:
                raise


class AsyncAttempt:
    """Under ``AsyncSemel``: the same names."""

    __slots__ = ("_drive", "_guard", "call", "claimed", "lease", "operation")

    def __init__(self, guard: AsyncSemel, drive: Drive, claimed: Claimed | None, operation: AsyncOperation) -> None:
        self._guard = guard
        self._drive = drive
        self.call: Call = drive.call
        self.lease: Lease | None = drive.lease
        self.claimed = claimed
        self.operation = operation

    def __del__(self) -> None:
        # An adapter that lost it: the lease ends by itself, as if the process had died.
        if not self._drive.finished:
            self._guard._finish(self._drive)

    async def execute(self, op: Op[Any]) -> Any:
        """An Op of the handler's own, such as a captured value."""
        return await self._guard.store.execute(op)

    def complete(self, value: Any) -> Awaitable[Outcome[Any]]:
        """It is done, with this. The outcome is another's when this attempt had been replaced meanwhile."""
        return self._guard._end(self._drive, Returned(value))

    def decline(self, value: Any) -> Awaitable[Outcome[Any]]:
        """It was answered, and nothing happened: the key is free again."""
        return self._guard._end(self._drive, Declined(value))

    def lost(self) -> Awaitable[Outcome[Any]]:
        """The lease was lost and the handler stopped: the new owner's outcome, or LeaseLost."""
        return self._guard._end(self._drive, Stopped())

    async def fail(self, error: BaseException) -> None:
        """The handler raised. Kept or released, as the policy says; raising it is the adapter's business."""
        try:
            await self._guard._end(self._drive, Raised(error))
        except BaseException as raised:
            if raised is not error:
                raise
