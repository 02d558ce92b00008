"""Who goes with the next trip, and who may join the queue: the bounds of both combiners.

A trip takes so many Ops and so many bytes at most; one Op that is larger by itself travels alone. So does a Sweep: it
takes as long as all others together, and whoever shared its trip would wait for it. A queue takes so many
Ops at most: then those who would begin something wait outside for a while, and are turned away. Ops of an owner
(complete, renew, release, save a step) are always let in: there are no more of them than handlers that run, and what
they say must not be lost because others are many.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from semel.core.ops import Complete, Op, Release, Renew, Resolve, SaveStep, Sweep
from semel.errors import SemelError, StoreUnavailable

__all__ = [
    "MAX_BATCH",
    "MAX_BATCH_BYTES",
    "MAX_QUEUE",
    "QUEUE_PATIENCE",
    "board",
    "crowded",
    "given",
    "is_owners",
    "weight",
]

MAX_BATCH: Final = 128
"""Ops in one trip."""
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
"""Bytes of what is stored by one trip: snapshots and values of steps."""
MAX_QUEUE: Final = 10_000
"""Ops that wait for a lane."""
QUEUE_PATIENCE: Final = 5.0
"""Seconds that a new Op waits for its place in a full queue."""

T = TypeVar("T")
_OWNERS: Final = frozenset({Renew, Complete, Release, SaveStep})


def is_owners(op: Op[Any]) -> bool:
    """Whether the Op belongs to an attempt that is under way."""
    return type(op) in _OWNERS


def weight(op: Op[Any]) -> int:
    """Bytes that the Op has the store keep; what all Ops have, a key and a few numbers, is not counted. A Sweep weighs
    more than any trip takes."""
    if isinstance(op, (Complete, Resolve)):
        return len(op.snapshot or b"")
    if isinstance(op, SaveStep):
        return len(op.value)
    return sys.maxsize if type(op) is Sweep else 0


def board(
    queue: deque[T], batch: list[T], weigh: Callable[[T], int], max_batch: int, max_bytes: int = MAX_BATCH_BYTES
) -> None:
    """Move from the queue to the batch what one trip takes."""
    if not batch and len(queue) == 1:  # mostly
        batch.append(queue[0])  # written down before it is taken
        queue.popleft()
        return
    size = sum(map(weigh, batch))
    while queue and len(batch) < max_batch:
        size += weigh(queue[0])
        if size > max_bytes and batch:
            return
        batch.append(queue[0])
        queue.popleft()


def crowded(max_queue: int, patience: float) -> StoreUnavailable:
    return StoreUnavailable(
        f"{max_queue} Ops wait for the store already, and it was no better after {patience:g} s: nothing was sent"
    )


def given(answer: Any) -> Any:
    """The answer of a lane to one Op; an error is raised."""
    if isinstance(answer, SemelError):
        raise answer
    return answer
