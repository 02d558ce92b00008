"""Batches: how large they and their queue may be, and how they are retried. The rules for sync and async; no I/O.

::

    queue:   [Claim] [Complete 3 MB] [Complete 6 MB] [Sweep] [Claim]
    batches: [Claim   Complete 3 MB] [Complete 6 MB] [Sweep] [Claim]      at most 128 Ops and 8 MB each

A batch has a maximum number of Ops and of bytes. An Op that is larger than the limit by itself is sent alone. So is a
Sweep, what lists or measures records, and an Op of a trail: it takes as long as many other Ops together, and every Op
in its batch would wait for it.

The queue has a maximum length. When it is full, Ops that would start something new wait for a while and are then
refused. Ops that belong to a running attempt (complete, renew, release, save a step) are always accepted: there are
never more of them than running handlers, and refusing one would lose the result of work that was already done.

A batch that fails is retried: which of its Ops are sent again, when, and which error the others get::

    first try    [A B C]   A answered, then the connection is lost
    20 ms later    [B C]   refused: one of them is bad
    one by one     [B]     answered
                     [C]   refused: only C gets the error

This module knows the errors of our own tree and what they mean for another try, but no server and no driver.
``connection.py`` and ``aio_connection.py`` do the sending and the waiting.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from semel.core.ops import Complete, ListRecords, Measure, Op, Release, Renew, Resolve, SaveStep, Sweep
from semel.core.trail.moments import TRAIL_OPS
from semel.errors import SemelError, StoreUnavailable, StoreUncertain
from semel.sql.connections.errors import Contention, NoConnection, StatementRejected
from semel.sql.program import PENDING
from semel.stores.retries import Backoff, public_error

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
_SENT_ALONE: Final = frozenset({Sweep, ListRecords, Measure, *TRAIL_OPS})


def belongs_to_attempt(op: Op[Any]) -> bool:
    """Whether the Op belongs to an attempt that is already running."""
    return type(op) in _OF_AN_ATTEMPT


def stored_bytes(op: Op[Any]) -> int:
    """Return how many bytes of payload the Op stores. One that is sent alone counts as more than a batch can hold."""
    if isinstance(op, (Complete, Resolve)):
        return len(op.snapshot or b"")
    if isinstance(op, SaveStep):
        return len(op.value)
    return sys.maxsize if type(op) in _SENT_ALONE else 0


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


CONTENTION_TRIES: Final = 5
"""How often a batch is sent that fails because of other transactions: a deadlock, a lock timeout."""


class BatchRetry:
    """The state of one batch: the answers so far, and what is left to send.

    A batch is several statements, each committed by itself. So answers count as soon as they arrive, and only the rest
    is sent again. After a lost connection the rest is sent again until ``retry_for`` seconds are over; Ops may be sent
    twice. Contention, such as a deadlock, is retried immediately, a few times. If a batch of several Ops is refused,
    each is sent alone, so that one bad Op does not fail the others.
    """

    __slots__ = ("_backoff", "_contention", "_left", "_ops", "_sent", "answers", "try_answers")

    def __init__(self, ops: Sequence[Op[Any]], retry_for: float) -> None:
        self._ops = ops
        self._backoff = Backoff(retry_for)
        self._contention = 0
        self._sent = False
        self._left: list[int] = []
        self.answers: list[Any] = [PENDING] * len(ops)
        self.try_answers: list[Any] = []
        """The answers to the current try; the sender fills them in as they arrive."""

    def next_try(self) -> list[Op[Any]]:
        """Return the Ops to send now: those without an answer. Empty when the batch is finished."""
        for i, answer in zip(self._left, self.try_answers, strict=True):
            self.answers[i] = answer
        self._left = [i for i, answer in enumerate(self.answers) if answer is PENDING]
        self.try_answers = [PENDING] * len(self._left)
        return [self._ops[i] for i in self._left]

    def unanswered(self) -> list[tuple[int, Op[Any]]]:
        """Return the Ops of the current try that have no answer, with their positions in ``try_answers``."""
        return [(at, self._ops[i]) for at, i in enumerate(self._left) if self.try_answers[at] is PENDING]

    def send_one_by_one(self, error: SemelError) -> bool:
        """Whether to send each Op alone, to find the one that is refused."""
        return isinstance(error, StatementRejected) and len(self._ops) > 1

    def pause_after(self, error: SemelError) -> float | None:
        """Return the seconds to wait before the next try, or None to give up.

        In that case every Op that is left has been answered with the error.
        """
        pause = self._next_pause(error)
        if isinstance(error, StoreUncertain) and any(type(op) is Resolve for _, op in self.unanswered()):
            pause = None  # a Resolve must not be sent twice: by then the record may belong to another owner
        if pause is None:
            for at, _ in self.unanswered():
                self.try_answers[at] = public_error(error, self._sent)
        return pause

    def _next_pause(self, error: SemelError) -> float | None:
        if isinstance(error, Contention):
            self._contention += 1
            return 0.0 if self._contention < CONTENTION_TRIES else None
        if isinstance(error, StoreUncertain):
            self._sent = True
        elif not isinstance(error, NoConnection):
            return None
        return self._backoff.next_pause()
