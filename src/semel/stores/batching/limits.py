"""How large a batch and a queue may be: the rules that both combiners follow.

::

    queue:   [Claim] [Complete 3 MB] [Complete 6 MB] [Sweep] [Claim]
    batches: [Claim   Complete 3 MB] [Complete 6 MB] [Sweep] [Claim]      at most 128 Ops and 8 MB each

A batch has a maximum number of Ops and of bytes. An Op that is larger than the limit by itself is sent alone. So is a
Sweep: it takes as long as many other Ops together, and every Op in its batch would wait for it.

The queue has a maximum length. When it is full, Ops that would start something new wait for a while and are then
refused. Ops that belong to a running attempt (complete, renew, release, save a step) are always accepted: there are
never more of them than running handlers, and refusing one would lose the result of work that was already done.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from semel.core.ops import Complete, Op, Release, Renew, Resolve, SaveStep, Sweep
from semel.errors import SemelError, StoreUnavailable

MAX_BATCH: Final = 128
"""Maximum number of Ops in one batch."""
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
"""Maximum number of bytes that one batch stores: snapshots and values of steps."""
MAX_QUEUE: Final = 10_000
"""Maximum number of Ops that wait for a connection."""
QUEUE_TIMEOUT: Final = 5.0
"""Seconds that a new Op waits for a place in a full queue."""

T = TypeVar("T")
_OF_AN_ATTEMPT: Final = frozenset({Renew, Complete, Release, SaveStep})


def belongs_to_attempt(op: Op[Any]) -> bool:
    """Whether the Op belongs to an attempt that is already running."""
    return type(op) in _OF_AN_ATTEMPT


def stored_bytes(op: Op[Any]) -> int:
    """Return how many bytes of payload the Op stores. A Sweep counts as more than any batch can hold."""
    if isinstance(op, (Complete, Resolve)):
        return len(op.snapshot or b"")
    if isinstance(op, SaveStep):
        return len(op.value)
    return sys.maxsize if type(op) is Sweep else 0


def take_batch(
    queue: deque[T], batch: list[T], size_of: Callable[[T], int], max_batch: int, max_bytes: int = MAX_BATCH_BYTES
) -> None:
    """Move Ops from the head of the queue into ``batch`` until it is full.

    Each item is in the batch before it leaves the queue, so an interruption between two lines cannot lose one.
    """
    if not batch and len(queue) == 1:  # the usual case
        batch.append(queue[0])
        queue.popleft()
        return
    size = sum(map(size_of, batch))
    while queue and len(batch) < max_batch:
        size += size_of(queue[0])
        if size > max_bytes and batch:
            return
        batch.append(queue[0])
        queue.popleft()


def queue_full(max_queue: int, timeout: float) -> StoreUnavailable:
    """Return the error for an Op that found no place in the queue in time."""
    return StoreUnavailable(
        f"the queue for the store is full: {max_queue} Ops were still waiting after {timeout:g} s; nothing was sent"
    )


def result_of(answer: Any) -> Any:
    """Return the result of one Op of a batch, or raise it if it is an error."""
    if isinstance(answer, SemelError):
        raise answer
    return answer
