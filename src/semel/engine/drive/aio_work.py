"""What a driver does in an event loop: run the handler in the caller's task, wait, and settle what was cancelled.

Written by hand beside ``work.py``: tasks are cancelled, and a call that is cancelled still settles its record before
it ends. Threads wait on locks, and are interrupted by signals.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from semel.core.call import Pause, Raised, Returned, Stopped
from semel.core.ops import Claimed, Count, Lookup, Op, Release
from semel.engine.drive.aio_keeper import AsyncKeeper
from semel.engine.drive.execution import Changed, Execution, Poll
from semel.engine.drive.flights import Flights
from semel.engine.drive.waiting import LateResult, shielded
from semel.engine.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore

Handler: TypeAlias = Callable[[AsyncOperation], Any]


async def run_under_lease_async(
    store: AsyncStore, keeper: AsyncKeeper, execution: Execution, claimed: Claimed | None, handler: Handler
) -> Returned | Raised | Stopped:
    """Run the handler in this task. Its lease is renewed until the call is finished; losing it cancels the task."""
    lease = execution.lease
    op = AsyncOperation(execution.call, lease, claimed, store.execute, store)
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    outer = running.get()
    try:
        running.set(op)
        if lease is not None:
            lease.on_lost = task.cancel if task is not None else None
            keeper.hold(lease)
        result = handler(op)
        # A plain function passed as call= has had its effect by now: what it returned is the result.
        returned = await result if inspect.isawaitable(result) else result
        op.leave()
        return Returned(returned)
    except LateResult as late:
        ours = 1 if lease is not None and lease.lost else 0
        if task is None or task.cancelling() > cancels + ours:
            execution.cancelled = late.cancelled
        return late.ending
    except asyncio.CancelledError as error:
        if lease is not None and lease.lost and task is not None and task.cancelling() == cancels + 1:
            return Stopped()  # cancelled by the keeper, and by nobody else
        return Raised(error)
    except BaseException as error:
        return Raised(await op.compensate(error))
    finally:
        running.set(outer)  # not by the token of set(): a signal may come before we have it
        if lease is not None:
            lease.on_lost = None  # from here on only the record is settled, which must not be cancelled
            if lease.lost and task is not None:
                task.uncancel()


async def send_again(store: AsyncStore, execution: Execution, op: Op[Any], cancelled: asyncio.CancelledError) -> Any:
    """Execute an Op whose execution was cancelled, and hold the cancellation back until the record is settled.

    The Op may have reached the store or not. It may be sent twice, so send it again, shielded. A cancelled read is
    simply cancelled.
    """
    if isinstance(op, (Lookup, Count)):
        raise cancelled
    execution.cancelled = cancelled
    answer = await shielded(store.execute(op), execution)
    return True if isinstance(op, Release) else answer  # a record that is gone was released by the first one


async def wait_for_change_async(flights: Flights, change: Changed) -> None:
    """Wait until the flight has changed, or the time is over."""
    changed = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not changed.done():
            changed.set_result(None)

    if flights.watch(change.flight, change.seen, wake):
        try:
            await asyncio.wait([changed], timeout=change.seconds)
        finally:
            flights.unwatch(change.flight, wake)


async def sleep_async(request: Pause | Poll, execution: Execution) -> None:
    """Sleep. A poll may be cancelled. A pause may not: it comes between two tries to settle the record."""
    if isinstance(request, Pause):
        await shielded(asyncio.sleep(request.seconds), execution)
    else:
        await asyncio.sleep(request.seconds)
