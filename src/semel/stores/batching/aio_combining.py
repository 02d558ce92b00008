"""Concurrent Ops of one event loop share round trips: the twin of ``combining.py``, which tells the idea.

Each trip is a task of its own, which no caller's cancellation can interrupt.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

from semel.core.ops import Op
from semel.errors import ConfigurationError, StoreUnavailable, StoreUncertain
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

__all__ = ["AsyncCombiner", "AsyncLane"]


class AsyncLane(Protocol):
    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    async def close(self) -> None: ...


class AsyncCombiner:
    """For one event loop: Ops that come in the same turn of the loop leave together."""

    def __init__(
        self,
        lanes: Sequence[AsyncLane],
        max_batch: int = MAX_BATCH,
        *,
        max_bytes: int = MAX_BATCH_BYTES,
        max_queue: int = MAX_QUEUE,
        queue_patience: float = QUEUE_PATIENCE,
    ) -> None:
        self._lanes = list(lanes)
        self._idle = list(lanes)
        self._queue: deque[Op[Any]] = deque()
        self._outside: dict[asyncio.Future[None], None] = {}
        """Those who wait for a place in the queue, first come first."""
        self._awaited: dict[int, list[asyncio.Future[Any]]] = {}
        """Who waits for each Op that is queued or on a trip. A cancelled caller that asks again joins the first send:
        a second one could overtake it, and the first would land when all is over."""
        self._trips: set[asyncio.Task[None]] = set()
        self._max_batch, self._max_bytes = max_batch, max_bytes
        self._max_queue, self._queue_patience = max_queue, queue_patience
        self._loop: asyncio.AbstractEventLoop | None = None
        self._departing = False
        self._closed = False

    def submit(self, op: Op[Any]) -> asyncio.Future[Any]:
        """The answer to come: the Op's result, or an error as a value."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise ConfigurationError("this store belongs to another event loop: make one per loop")
            # What a dead loop left behind is nobody's: futures that nobody awaits, a departure that never comes.
            self._queue.clear()
            self._outside.clear()
            self._awaited.clear()
            self._loop, self._departing, self._idle = loop, False, list(self._lanes)
        if self._closed:
            raise StoreUnavailable("the store is closed")
        future: asyncio.Future[Any] = loop.create_future()
        waiting = self._awaited.get(id(op))
        if waiting is not None:
            waiting.append(future)
            return future
        self._awaited[id(op)] = [future]
        self._queue.append(op)
        if self._idle and not self._departing:
            self._departing = True
            loop.call_soon(self._depart)
        return future

    async def execute(self, op: Op[Any]) -> Any:
        if len(self._queue) >= self._max_queue:
            await self._enter([op])
        return given(await self.submit(op))

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        if len(self._queue) + len(ops) > self._max_queue:
            await self._enter(ops)
        futures = [self.submit(op) for op in ops]
        return [await future for future in futures]

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._let_in()
        while self._trips or (self._queue and self._departing):
            if self._trips:
                await asyncio.gather(*self._trips, return_exceptions=True)
            await asyncio.sleep(0)  # those who depart behind a Sweep do so in the next turn
        for lane in self._lanes:
            await lane.close()

    async def _enter(self, ops: Sequence[Op[Any]]) -> None:
        """Wait for a place in the queue."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._queue_patience
        while not self._has_room(ops) and self._loop is loop and not self._closed:
            if loop.time() >= until:
                raise crowded(self._max_queue, self._queue_patience)
            gate = loop.create_future()
            self._outside[gate] = None
            try:
                await asyncio.wait([gate], timeout=until - loop.time())
            except asyncio.CancelledError:
                if gate.done():
                    self._let_in()  # the place that was ours is another's
                raise
            finally:
                self._outside.pop(gate, None)

    def _has_room(self, ops: Sequence[Op[Any]]) -> bool:
        if not self._queue or len(self._queue) + len(ops) <= self._max_queue:
            return True
        return all(is_owners(op) or id(op) in self._awaited for op in ops)

    def _let_in(self) -> None:
        for gate in list(islice(self._outside, max(0, self._max_queue - len(self._queue)))):
            del self._outside[gate]
            if not gate.done():
                gate.set_result(None)

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
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch: list[Op[Any]] = []
                board(self._queue, batch, weight, self._max_batch, self._max_bytes)
                if self._outside:
                    self._let_in()
                if self._queue and self._idle and not self._departing:  # those behind a Sweep do not wait for it
                    self._departing = True
                    loop.call_soon(self._depart)
                answers: Sequence[Any] = ()
                try:
                    answers = await lane.run(batch)
                finally:
                    if len(answers) != len(batch):  # cancelled with its loop
                        answers = [StoreUncertain("the trip to the store was interrupted") for _ in batch]
                    for op, answer in zip(batch, answers, strict=True):
                        for future in self._awaited.pop(id(op), ()):
                            if not future.done():
                                future.set_result(answer)
        finally:
            self._idle.append(lane)
            if self._queue and not self._departing and self._loop is not None and not self._loop.is_closed():
                self._departing = True  # the trip broke off, and those behind it wait
                self._loop.call_soon(self._depart)
