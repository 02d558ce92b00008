"""What a driver does in a thread: run the handler in the caller's thread, and wait.

Written by hand beside ``aio_work.py``, which says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any, TypeAlias

from semel.core.call import NotRun, Pause, Raised, Returned
from semel.core.ops import Claimed
from semel.engine.drive.execution import Changed, Execution, Poll
from semel.engine.drive.flights import Flights
from semel.engine.drive.keeper import Keeper
from semel.engine.operation import Operation, running
from semel.engine.ports import Store
from semel.errors import PolicyError

Handler: TypeAlias = Callable[[Operation], Any]


def run_under_lease(
    store: Store, keeper: Keeper, execution: Execution, claimed: Claimed | None, handler: Handler
) -> Returned | Raised | NotRun:
    """Run the handler in this thread. The keeper renews its lease from now until the call is finished."""
    op = Operation(execution.call, execution.lease, claimed, store.execute, store)
    if execution.lease is not None:
        keeper.hold(execution.lease)
    outer = running.get()
    try:
        running.set(op)
        result = handler(op)
        op.leave()
    except BaseException as error:
        return Raised(op.compensate(error))
    finally:
        running.set(outer)  # not by the token of set(): a signal may come before we have it
    if type(result) is CoroutineType:
        result.close()
        return NotRun(PolicyError(f"{execution.call}: the handler is async; use AsyncSemel, or decorate the async def"))
    return Returned(result)


def wait_for_change(flights: Flights, change: Changed) -> None:
    """Wait until the flight has changed, or the time is over."""
    gate = threading.Lock()
    gate.acquire()
    if not flights.watch(change.flight, change.seen, gate.release):
        return
    if not gate.acquire(timeout=-1 if change.seconds is None else change.seconds):
        flights.unwatch(change.flight, gate.release)


def sleep(request: Pause | Poll, execution: Execution) -> None:
    """Sleep. A thread is not cancelled, so polls and pauses are alike."""
    time.sleep(request.seconds)
