"""Concurrent Ops of one process share round trips: whoever waits while a lane is busy goes out together in its next
trip.

A *lane* is one connection that runs a batch of Ops at a time. With a lane free, an Op leaves at once, alone; with all
busy, it queues, and the next free lane takes all that wait. So batches grow with the load by themselves, without
timers.

Here is the one for threads, and no thread is added: the caller that finds a lane free runs the batch for all, then
hands the lane to one that waits. Those who were answered together mostly come back together, but one by one, for only
one thread of Python runs at a time: so whoever is about to lead after a shared trip first lets the others catch up.
The one for an event loop is in ``aio_combining.py``; what bounds trips and queues, in ``boarding.py``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.errors import StoreUnavailable, StoreUncertain
from semel.stores.batching.aio_combining import AsyncCombiner, AsyncLane
from semel.stores.batching.boarding import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_QUEUE,
    QUEUE_PATIENCE,
    board,
    crowded,
    given,
    is_owners,
    weight,
)

__all__ = ["MAX_BATCH", "AsyncCombiner", "AsyncLane", "Combiner", "Lane"]

GATHERINGS: Final = 4
"""How often, at most, one that is about to lead lets others catch up."""


class Lane(Protocol):
    """Runs a batch; each Op is answered by its result or its error. Never raises but for a bug."""

    gathers: bool
    """Whether its last trip had a price that is worth sharing: a round trip, a commit."""

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    def close(self) -> None: ...


class _Slot:
    """One Op that waits for its answer, and the caller that waits for it. Guarded by the combiner's lock."""

    __slots__ = ("answer", "answered", "batch", "gate", "lane", "op")

    def __init__(self, op: Op[Any]) -> None:
        self.op = op
        self.answer: Any = None
        self.answered = False
        self.lane: Lane | None = None
        """The lane it was given, until it is handed on."""
        self.batch: list[_Slot] = []
        """Those it leads, until they are answered."""
        self.gate = threading.Lock()
        self.gate.acquire()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # awake already: it looks for itself
            self.gate.release()


class Combiner:
    """For threads. What a caller holds (a lane, a batch) is written on its slot, so that one who is interrupted
    (Ctrl-C, a task queue's time limit) between any two lines can give it back."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        max_batch: int = MAX_BATCH,
        *,
        max_bytes: int = MAX_BATCH_BYTES,
        max_queue: int = MAX_QUEUE,
        queue_patience: float = QUEUE_PATIENCE,
    ) -> None:
        self._lanes = list(lanes)
        self._idle = list(lanes)
        self._queue: deque[_Slot] = deque()
        self._outside: dict[threading.Lock, None] = {}
        """Gates of those who wait for a place in the queue."""
        self._lock = threading.Lock()
        self._max_batch, self._max_bytes = max_batch, max_bytes
        self._max_queue, self._queue_patience = max_queue, queue_patience
        self._last_batch = 1
        self._gathering = False
        self._closed = False
        survive_forks(self._forked)

    def _forked(self) -> None:
        """A forked child has none of its parent's trips; the lanes open connections of their own."""
        self._lock = threading.Lock()
        self._gathering = False
        self._queue.clear()
        self._outside.clear()
        self._idle = list(self._lanes)

    def execute(self, op: Op[Any]) -> Any:
        return given(self._travel([_Slot(op)])[0])

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return self._travel([_Slot(op) for op in ops])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._let_in()
        for lane in idle:
            lane.close()  # one that is on a trip is closed when it comes back

    def _travel(self, slots: list[_Slot]) -> list[Any]:
        try:
            self._enter(slots)
            return [self._wait(slot) for slot in slots]
        except BaseException:  # interrupted: what was given to us must not go with us
            self._leave(slots)
            raise

    def _enter(self, slots: list[_Slot]) -> None:
        if not slots:
            return
        until = 0.0
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable("the store is closed")
                if self._has_room(slots):
                    self._queue.extend(slots)
                    if self._idle and not self._gathering:
                        self._give_idle(slots[0])
                    return
                gate = threading.Lock()
                gate.acquire()
                self._outside[gate] = None
            until = until or time.monotonic() + self._queue_patience
            if not gate.acquire(timeout=max(0.0, until - time.monotonic())):
                with self._lock:
                    self._outside.pop(gate, None)
                    if not self._has_room(slots):
                        raise crowded(self._max_queue, self._queue_patience)

    def _has_room(self, slots: list[_Slot]) -> bool:
        if not self._queue or len(self._queue) + len(slots) <= self._max_queue:
            return True
        return all(is_owners(slot.op) for slot in slots)

    def _let_in(self) -> None:
        """All look again: how many find a place, they see for themselves."""
        while self._outside:
            gate, _ = self._outside.popitem()
            gate.release()

    def _give_idle(self, slot: _Slot) -> None:
        slot.lane = self._idle[-1]  # written down before it is taken
        self._idle.pop()
        slot.wake()

    def _wait(self, slot: _Slot) -> Any:
        while True:
            slot.gate.acquire()
            if slot.lane is not None:
                self._lead(slot, slot.lane)
            if slot.answered:
                return slot.answer

    def _lead(self, leader: _Slot, lane: Lane) -> None:
        """Run one trip for those who wait, then hand the lane on."""
        with self._lock:
            batch = self._board(leader.batch)
        if lane.gathers and 0 < len(batch) < self._last_batch:
            self._gather(batch)
        self._last_batch = len(batch)
        answers = lane.run([slot.op for slot in batch]) if batch else []
        with self._lock:
            self._arrive(leader, answers)

    def _arrive(self, leader: _Slot, answers: Sequence[Any]) -> None:
        """Hand the lane on (with nobody there it rests, or is closed with the store), then the answers."""
        lane, batch = leader.lane, leader.batch
        if lane is not None:
            heir = next((slot for slot in self._queue if slot.lane is None), None)
            if heir is not None:
                heir.lane, leader.lane = lane, None
                heir.wake()
            elif self._closed:
                leader.lane = None
                lane.close()
            else:
                if lane not in self._idle:
                    self._idle.append(lane)
                leader.lane = None
        for slot, answer in zip(batch, answers, strict=True):
            slot.answer, slot.answered = answer, True
            slot.wake()
        leader.batch = []

    def _leave(self, slots: list[_Slot]) -> None:
        """A caller goes away. Its own Ops may still be on a trip."""
        with self._lock:
            mine = set(map(id, slots))
            self._queue = deque(slot for slot in self._queue if id(slot) not in mine)
            for slot in slots:
                if slot.lane is not None or slot.batch:
                    self._arrive(slot, [StoreUncertain("the trip to the store was interrupted") for _ in slot.batch])
            self._gathering = False
            if self._queue and self._idle and all(slot.lane is None for slot in self._queue):
                self._give_idle(self._queue[0])
            for slot in self._queue:
                if slot.lane is not None:
                    slot.wake()  # it may have been given the lane, and not been woken

    def _board(self, batch: list[_Slot]) -> list[_Slot]:
        board(self._queue, batch, _weight, self._max_batch, self._max_bytes)
        if self._outside:
            self._let_in()
        return batch

    def _gather(self, batch: list[_Slot]) -> None:
        """Give way to callers on their way here, as long as each time some come. Meanwhile they take no other lane."""
        self._gathering = True
        try:
            for _ in range(GATHERINGS):
                waiting = len(self._queue)
                if len(batch) + waiting >= self._last_batch:
                    break
                time.sleep(0)
                if len(self._queue) == waiting:
                    break
        finally:
            with self._lock:
                self._gathering = False
                self._board(batch)
                if self._queue and self._idle and self._queue[0].lane is None:  # more came than one trip takes
                    self._give_idle(self._queue[0])


def _weight(slot: _Slot) -> int:
    return weight(slot.op)
