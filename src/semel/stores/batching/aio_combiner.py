"""Concurrent Ops of one event loop share round trips to the store. ``combiner.py`` explains the idea, with a drawing.

::

    turn of the loop   task A: execute ─┐
                       task B: execute ─┼▶ queue [A B C]
                       task C: execute ─┘
    end of the turn    a batch task takes the queue, awaits connection.run([A B C]), and resolves the three futures

Ops that are submitted in the same turn of the loop are sent together. Each batch runs in a task of its own, which the
cancellation of a caller cannot interrupt. With threads the callers lead by themselves; hence the two hand-written
combiners.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

from semel.core.ops import Op
from semel.engine.ports import STORE_CLOSED
from semel.errors import ConfigurationError, SemelError, StoreUnavailable, StoreUncertain
from semel.stores.batching.batches import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_QUEUE,
    QUEUE_TIMEOUT,
    belongs_to_attempt,
    queue_full,
    result_of,
    stored_bytes,
    take_batch,
)

R = TypeVar("R")


class AsyncBatchConnection(Protocol):
    """Runs one batch at a time. Every Op is answered with its result or its error; ``run`` raises only for a bug."""

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    async def close(self) -> None: ...


class AsyncCombiner:
    """Runs the Ops of one event loop in batches, over a few connections."""

    def __init__(
        self,
        connections: Sequence[AsyncBatchConnection],
        max_batch: int = MAX_BATCH,
        *,
        max_bytes: int = MAX_BATCH_BYTES,
        max_queue: int = MAX_QUEUE,
        queue_timeout: float = QUEUE_TIMEOUT,
    ) -> None:
        self._connections = list(connections)
        self._idle = list(connections)
        self._queue: deque[Op[Any]] = deque()
        self._outside: dict[asyncio.Future[None], None] = {}
        """Futures of the callers that wait for a place in the queue, in order of arrival."""
        self._futures: dict[int, list[asyncio.Future[Any]]] = {}
        """By the id of each Op that is queued or sent: who waits for it. A cancelled caller that submits the same Op
        again joins the first send. A second send could overtake the first, which would then take effect after the
        attempt is over."""
        self._batches: set[asyncio.Task[None]] = set()
        self._max_batch, self._max_bytes = max_batch, max_bytes
        self._max_queue, self._queue_timeout = max_queue, queue_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        """Whether ``_start_batches`` runs at the end of this turn of the loop."""
        self._closed = False

    def submit(self, op: Op[Any]) -> asyncio.Future[Any]:
        """Queue an Op. The future resolves to its result, or to its error as a value."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise ConfigurationError("this store belongs to another event loop: make one per loop")
            # The previous loop is closed: nobody awaits its futures, and its scheduled callbacks never run.
            self._queue.clear()
            self._outside.clear()
            self._futures.clear()
            self._loop, self._scheduled, self._idle = loop, False, list(self._connections)
        if self._closed:
            raise StoreUnavailable(STORE_CLOSED)
        future: asyncio.Future[Any] = loop.create_future()
        waiting = self._futures.get(id(op))
        if waiting is not None:
            waiting.append(future)
            return future
        self._futures[id(op)] = [future]
        self._queue.append(op)
        if self._idle and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._start_batches)
        return future

    async def execute(self, op: Op[R]) -> R:
        """Run one Op; return its result or raise its error."""
        if len(self._queue) >= self._max_queue:
            await self._wait_for_room([op])
        result: R = result_of(await self.submit(op))
        return result

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run several Ops; an Op that failed is answered with its error."""
        try:
            if len(self._queue) + len(ops) > self._max_queue:
                await self._wait_for_room(ops)
            futures = [self.submit(op) for op in ops]
        except SemelError as error:  # none was queued
            return [error] * len(ops)
        return [await future for future in futures]

    async def close(self) -> None:
        """Refuse new Ops, wait for the batches, and close the connections."""
        if self._closed:
            return
        self._closed = True
        self._wake_outside()
        while self._batches or (self._queue and self._scheduled):
            if self._batches:
                await asyncio.gather(*self._batches, return_exceptions=True)
            await asyncio.sleep(0)  # Ops that queue behind a Sweep start in the next turn
        for connection in self._connections:
            await connection.close()

    def open(self) -> None:
        """Accept Ops again after ``close``. Connections open when first used."""
        self._closed = False

    async def _wait_for_room(self, ops: Sequence[Op[Any]]) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._queue_timeout
        while not self._has_room(ops) and self._loop is loop and not self._closed:
            if loop.time() >= until:
                raise queue_full(self._max_queue, self._queue_timeout)
            gate = loop.create_future()
            self._outside[gate] = None
            try:
                await asyncio.wait([gate], timeout=until - loop.time())
            except asyncio.CancelledError:
                if gate.done():
                    self._wake_outside()  # we leave the place that we were given to another
                raise
            finally:
                self._outside.pop(gate, None)

    def _has_room(self, ops: Sequence[Op[Any]]) -> bool:
        if not self._queue or len(self._queue) + len(ops) <= self._max_queue:
            return True
        return all(belongs_to_attempt(op) or id(op) in self._futures for op in ops)

    def _wake_outside(self) -> None:
        """Wake as many of those who wait for a place as there are places."""
        for gate in list(islice(self._outside, max(0, self._max_queue - len(self._queue)))):
            del self._outside[gate]
            if not gate.done():
                gate.set_result(None)

    def _start_batches(self) -> None:
        self._scheduled = False
        assert self._loop is not None
        while self._queue and self._idle:
            batch = self._loop.create_task(self._run_batches(self._idle.pop()), name="semel-batch")
            self._batches.add(batch)
            batch.add_done_callback(self._batches.discard)
            if len(self._queue) <= self._max_batch:
                return

    async def _run_batches(self, connection: AsyncBatchConnection) -> None:
        """Run batches over one connection until the queue is empty."""
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch: list[Op[Any]] = []
                take_batch(self._queue, batch, stored_bytes, self._max_batch, self._max_bytes)
                if self._outside:
                    self._wake_outside()
                if self._queue and self._idle and not self._scheduled:  # Ops behind a Sweep do not wait for it
                    self._scheduled = True
                    loop.call_soon(self._start_batches)
                answers: Sequence[Any] = ()
                try:
                    answers = await connection.run(batch)
                finally:
                    if len(answers) != len(batch):  # cancelled together with its loop
                        answers = [StoreUncertain("the call to the store was interrupted") for _ in batch]
                    for op, answer in zip(batch, answers, strict=True):
                        for future in self._futures.pop(id(op), ()):
                            if not future.done():
                                future.set_result(answer)
        finally:
            self._idle.append(connection)
            if self._queue and not self._scheduled and self._loop is not None and not self._loop.is_closed():
                self._scheduled = True  # the batch failed, and others still wait behind it
                self._loop.call_soon(self._start_batches)
