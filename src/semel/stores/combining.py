"""Concurrent Ops of one process share round trips: whoever waits while a lane is busy goes out together in its next
trip.

A *lane* is one connection that runs a batch of Ops at a time. With a lane free, an Op leaves at once, alone; with all
busy, it queues, and the next free lane takes all that wait. So batches grow with the load by themselves, without
timers.

In the sync combiner no thread is added: the caller that finds a lane free runs the batch for all, then hands the lane
to one that waits. Those who were answered together mostly come back together, but one by one, for only one thread of
Python runs at a time: so whoever is about to lead after a shared trip first lets the others catch up. In the async one
each trip is a task of its own, which no caller's cancellation can interrupt.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.errors import ConfigurationError, SemelError, StoreUnavailable, StoreUncertain

__all__ = ["MAX_BATCH", "AsyncCombiner", "AsyncLane", "Combiner", "Lane"]

MAX_BATCH: Final = 128
"""Ops in one trip."""
GATHERINGS: Final = 4
"""How often, at most, one that is about to lead lets others catch up."""


class Lane(Protocol):
    """Runs a batch; each Op is answered by its result or its error. Never raises but for a bug."""

    gathers: bool
    """Whether its last trip had a price that is worth sharing: a round trip, a commit."""

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    def close(self) -> None: ...


class AsyncLane(Protocol):
    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    async def close(self) -> None: ...


class _Slot:
    """One Op that waits for its answer, and the caller that waits for it. Guarded by the combiner's lock."""

    __slots__ = ("answer", "answered", "gate", "lane", "op", "woken")

    def __init__(self, op: Op[Any]) -> None:
        self.op = op
        self.answer: Any = None
        self.answered = False
        self.lane: Lane | None = None
        self.woken = False
        self.gate = threading.Lock()
        self.gate.acquire()

    def wake(self) -> None:
        # A caller may be given a lane and, before it wakes up, its answer by another's trip: one wake-up is enough.
        if not self.woken:
            self.woken = True
            self.gate.release()


class Combiner:
    """For threads."""

    def __init__(self, lanes: Sequence[Lane], max_batch: int = MAX_BATCH) -> None:
        self._lanes = list(lanes)
        self._idle = list(lanes)
        self._queue: deque[_Slot] = deque()
        self._lock = threading.Lock()
        self._max_batch = max_batch
        self._last_batch = 1
        self._gathering = False
        self._closed = False
        survive_forks(self._forked)

    def _forked(self) -> None:
        """A forked child has none of its parent's trips; the lanes open connections of their own."""
        self._lock = threading.Lock()
        self._gathering = False
        self._queue.clear()
        self._idle = list(self._lanes)

    def execute(self, op: Op[Any]) -> Any:
        slot = _Slot(op)
        self._enter([slot])
        return _given(self._wait(slot))

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        slots = [_Slot(op) for op in ops]
        self._enter(slots)
        return [self._wait(slot) for slot in slots]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()  # one that is on a trip is closed when it comes back

    def _enter(self, slots: list[_Slot]) -> None:
        if not slots:
            return
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            self._queue.extend(slots)
            if self._idle and not self._gathering:
                slots[0].lane = self._idle.pop()
                slots[0].wake()

    def _wait(self, slot: _Slot) -> Any:
        while True:
            try:
                slot.gate.acquire()
            except BaseException:  # interrupted (Ctrl-C) in the queue
                self._leave(slot)
                raise
            if slot.answered and slot.lane is None:  # final: a slot that was answered is given no lane
                return slot.answer
            with self._lock:
                slot.woken = False
                lane, slot.lane = slot.lane, None
            if lane is not None:
                self._lead(lane)
            if slot.answered:
                return slot.answer

    def _lead(self, lane: Lane) -> None:
        """Run one trip for those who wait, then hand the lane on."""
        with self._lock:
            batch = self._board([])
        answers: Sequence[Any] = ()
        try:
            if lane.gathers and 0 < len(batch) < self._last_batch:
                self._gather(batch)
            self._last_batch = len(batch)
            if batch:
                answers = lane.run([slot.op for slot in batch])
        finally:
            if len(answers) != len(batch):  # interrupted (Ctrl-C): the others must not wait for ever
                answers = [StoreUncertain("the trip to the store was interrupted") for _ in batch]
            with self._lock:
                self._hand_on(lane)
                for slot, answer in zip(batch, answers, strict=True):
                    slot.answer = answer
                    slot.answered = True
                    slot.wake()

    def _hand_on(self, lane: Lane) -> None:
        """Give the lane to one that waits; with nobody there it rests, or is closed with the store."""
        heir = next((slot for slot in self._queue if slot.lane is None), None)
        if heir is not None:
            heir.lane = lane
            heir.wake()
        elif self._closed:
            lane.close()
        else:
            self._idle.append(lane)

    def _leave(self, slot: _Slot) -> None:
        """A caller goes away unanswered: what it was given must not go with it. Its Op may still be on a trip."""
        with self._lock:
            if slot in self._queue:
                self._queue.remove(slot)
            lane, slot.lane = slot.lane, None
            if lane is not None:
                self._hand_on(lane)

    def _board(self, batch: list[_Slot]) -> list[_Slot]:
        while self._queue and len(batch) < self._max_batch:
            batch.append(self._queue.popleft())
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
                    self._queue[0].lane = self._idle.pop()
                    self._queue[0].wake()


class AsyncCombiner:
    """For one event loop: Ops that come in the same turn of the loop leave together."""

    def __init__(self, lanes: Sequence[AsyncLane], max_batch: int = MAX_BATCH) -> None:
        self._lanes = list(lanes)
        self._idle = list(lanes)
        self._queue: deque[tuple[Op[Any], asyncio.Future[Any]]] = deque()
        self._trips: set[asyncio.Task[None]] = set()
        self._max_batch = max_batch
        self._loop: asyncio.AbstractEventLoop | None = None
        self._departing = False
        self._closed = False

    def submit(self, op: Op[Any]) -> asyncio.Future[Any]:
        """The answer to come: the Op's result, or an error as a value."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise ConfigurationError("this store belongs to another event loop: make one per loop")
            self._loop = loop
        if self._closed:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[Any] = loop.create_future()
        self._queue.append((op, future))
        if self._idle and not self._departing:
            self._departing = True
            loop.call_soon(self._depart)
        return future

    async def execute(self, op: Op[Any]) -> Any:
        return _given(await self.submit(op))

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        futures = [self.submit(op) for op in ops]
        return [await future for future in futures]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._trips:
            await asyncio.gather(*self._trips, return_exceptions=True)
        for lane in self._lanes:
            await lane.close()

    def _depart(self) -> None:
        self._departing = False
        assert self._loop is not None
        while self._queue and self._idle:
            trip = self._loop.create_task(self._trip(self._idle.pop()), name="semel-trip")
            self._trips.add(trip)
            trip.add_done_callback(self._trips.discard)
            if len(self._queue) <= self._max_batch:
                return

    async def _trip(self, lane: AsyncLane) -> None:
        try:
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch))]
                answers: Sequence[Any] = ()
                try:
                    answers = await lane.run([op for op, _ in batch])
                finally:
                    if len(answers) != len(batch):  # cancelled with its loop
                        answers = [StoreUncertain("the trip to the store was interrupted") for _ in batch]
                    for (_, future), answer in zip(batch, answers, strict=True):
                        if not future.done():
                            future.set_result(answer)
        finally:
            self._idle.append(lane)
            if self._queue and not self._departing and self._loop is not None and not self._loop.is_closed():
                self._departing = True  # the trip broke off, and those behind it wait
                self._loop.call_soon(self._depart)


def _given(answer: Any) -> Any:
    if isinstance(answer, SemelError):
        raise answer
    return answer
