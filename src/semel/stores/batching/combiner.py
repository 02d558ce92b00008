"""Concurrent Ops of one process share round trips to the store. This is the combiner for threads.

::

    caller A ──▶ connection 1   [A]              A finds it free and sends its own Op at once
    caller B ──▶ connection 2   [B]
    caller C ──┐
    caller D ──┼▶ queue [C D E]                  both are busy, so these wait
    caller E ──┘
    A is done ─▶ connection 1   [C D E]          A hands the connection to C, and C sends one batch for all three

A connection runs one batch of Ops at a time. If one is free, an Op is sent immediately and alone. If all are busy, the
Op waits in a queue, and the next free connection takes everything that waits. So batches grow with the load, without
timers.

No thread is added. The caller that gets a free connection leads: it runs the batch for all who wait, then hands the
connection to one of the next. Callers that were answered by one batch usually come back together, but one by one,
because only one Python thread runs at a time. So after a shared batch the next leader first lets the others catch up.

``aio_combiner.py`` is the combiner for an event loop. Both are written by hand: here the callers themselves do the work
and hand it on, there a task does it, so they have no code in common but the limits, which are in ``batches.py``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.engine.ports import STORE_CLOSED
from semel.errors import SemelError, StoreUnavailable, StoreUncertain
from semel.stores.batching.batches import (
    MAX_BATCH,
    MAX_BATCH_BYTES,
    MAX_QUEUE,
    QUEUE_TIMEOUT,
    belongs_to_attempt,
    queue_full,
    stored_bytes,
    take_batch,
)

R = TypeVar("R")
MAX_YIELDS: Final = 4
"""How often, at most, a new leader lets other callers catch up."""


class BatchConnection(Protocol):
    """Runs one batch at a time. Every Op is answered with its result or its error; ``run`` raises only for a bug."""

    gathers: bool
    """Whether a batch has a fixed cost that is worth sharing: a round trip, a commit."""

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    def close(self) -> None: ...


class _Entry:
    """One Op in the combiner, and the caller that waits for its answer. Guarded by the combiner's lock."""

    op: Op[Any]
    answer: Any = None
    answered = False
    connection: BatchConnection | None = None
    """The connection that this caller leads with, until it hands it on."""
    batch: list[_Entry] | None = None
    """The entries that this caller leads, until they are answered."""
    gate: threading.Lock | None = None
    """What the caller waits at. A caller that finds a free connection needs none."""

    def wake(self) -> None:
        if self.gate is not None:
            with contextlib.suppress(RuntimeError):  # already awake: it looks for itself
                self.gate.release()


class Combiner:
    """Runs the Ops of many threads in batches, over a few connections.

    What a caller holds (a connection, a batch) is written on its entry before it is taken. So a caller that is
    interrupted between any two lines (Ctrl-C, the time limit of a task queue) can give everything back.
    """

    def __init__(
        self,
        connections: Sequence[BatchConnection],
        max_batch: int = MAX_BATCH,
        *,
        max_bytes: int = MAX_BATCH_BYTES,
        max_queue: int = MAX_QUEUE,
        queue_timeout: float = QUEUE_TIMEOUT,
    ) -> None:
        self._connections = list(connections)
        self._idle = list(connections)
        self._queue: deque[_Entry] = deque()
        self._outside: dict[threading.Lock, None] = {}
        """Gates of the callers that wait for a place in the queue."""
        self._lock = threading.Lock()
        self._max_batch, self._max_bytes = max_batch, max_bytes
        self._max_queue, self._queue_timeout = max_queue, queue_timeout
        self._last_batch = 1
        self._gathering = False
        self._closed = False
        survive_forks(self._forked)

    def _forked(self) -> None:
        """Start empty in a forked child: the batches are the parent's, and connections open anew by themselves."""
        self._lock = threading.Lock()
        self._gathering = False
        self._queue.clear()
        self._outside.clear()
        self._idle = list(self._connections)

    def execute(self, op: Op[R]) -> R:
        """Run one Op; return its result or raise its error."""
        entry = _Entry()
        entry.op = op
        answer: Any
        try:
            with self._lock:
                idle = self._idle
                if idle and self._last_batch <= 1 and not (self._queue or self._gathering or self._closed):
                    entry.connection = idle[-1]  # on the entry before it leaves the list
                    idle.pop()
            connection = entry.connection
            if connection is None:
                self._enqueue([entry])
                answer = self._wait(entry)
            else:  # the usual case: nobody else waits, and nobody is expected
                (answer,) = connection.run((op,))
                with self._lock:
                    if self._queue or self._closed:
                        self._deliver(entry, ())
                    else:
                        self._idle.append(connection)
                        entry.connection = None
        except BaseException:  # interrupted: the connection and the batch that we hold must not be lost
            self._abandon([entry])
            raise
        if isinstance(answer, SemelError):
            raise answer
        result: R = answer
        return result

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Run several Ops; an Op that failed is answered with its error."""
        entries: list[_Entry] = []
        for op in ops:
            entry = _Entry()
            entry.op = op
            entries.append(entry)
        try:
            try:
                self._enqueue(entries)
            except SemelError as error:  # none was queued
                self._abandon(entries)
                return [error] * len(entries)
            return [self._wait(entry) for entry in entries]
        except BaseException:  # interrupted: the connection and the batch that we hold must not be lost
            self._abandon(entries)
            raise

    def close(self) -> None:
        """Refuse new Ops and close the connections: idle ones now, busy ones after their batch."""
        with self._lock:
            idle = [] if self._closed else list(self._idle)
            self._closed = True
            self._wake_outside()
        for connection in idle:
            connection.close()

    def open(self) -> None:
        """Accept Ops again after ``close``. Connections open when first used."""
        self._closed = False

    def _enqueue(self, entries: list[_Entry]) -> None:
        if not entries:
            return
        for entry in entries:
            entry.gate = threading.Lock()
            entry.gate.acquire()
        until = 0.0
        while True:
            with self._lock:
                if self._closed:
                    raise StoreUnavailable(STORE_CLOSED)
                if self._has_room(entries):
                    self._queue.extend(entries)
                    if self._idle and not self._gathering:
                        self._assign_idle(entries[0])
                    return
                gate = threading.Lock()
                gate.acquire()
                self._outside[gate] = None
            until = until or time.monotonic() + self._queue_timeout
            if not gate.acquire(timeout=max(0.0, until - time.monotonic())):
                with self._lock:
                    self._outside.pop(gate, None)
                    if not self._has_room(entries):
                        raise queue_full(self._max_queue, self._queue_timeout)

    def _has_room(self, entries: list[_Entry]) -> bool:
        if not self._queue or len(self._queue) + len(entries) <= self._max_queue:
            return True
        return all(belongs_to_attempt(entry.op) for entry in entries)

    def _wake_outside(self) -> None:
        """Wake everyone who waits for a place; each checks for itself whether there is room."""
        while self._outside:
            gate, _ = self._outside.popitem()
            gate.release()

    def _assign_idle(self, entry: _Entry) -> None:
        entry.connection = self._idle[-1]  # on the entry before it leaves the list
        self._idle.pop()
        entry.wake()

    def _wait(self, entry: _Entry) -> Any:
        gate = entry.gate
        assert gate is not None
        while True:
            gate.acquire()
            if entry.connection is not None:
                self._lead(entry, entry.connection)
            if entry.answered:
                return entry.answer

    def _lead(self, leader: _Entry, connection: BatchConnection) -> None:
        """Run one batch for those who wait, then hand the connection on."""
        leader.batch = batch = leader.batch or []
        with self._lock:
            self._fill(batch)
        if connection.gathers and 0 < len(batch) < self._last_batch:
            self._gather(batch)
        self._last_batch = len(batch)
        answers = connection.run([entry.op for entry in batch]) if batch else []
        with self._lock:
            self._deliver(leader, answers)

    def _deliver(self, leader: _Entry, answers: Sequence[Any]) -> None:
        """Hand the connection to the next caller, then the answers to those of the batch.

        If nobody waits, the connection becomes idle, or is closed with the store.
        """
        connection, batch = leader.connection, leader.batch
        if connection is not None:
            successor = next((entry for entry in self._queue if entry.connection is None), None)
            if successor is not None:
                successor.connection, leader.connection = connection, None
                successor.wake()
            else:
                if connection not in self._idle:
                    self._idle.append(connection)
                leader.connection = None
                if self._closed:
                    connection.close()
        for entry, answer in zip(batch or (), answers, strict=True):
            entry.answer, entry.answered = answer, True
            entry.wake()
        leader.batch = None

    def _abandon(self, entries: list[_Entry]) -> None:
        """Give back what an interrupted caller holds. Its own Ops may be in a batch that another caller leads."""
        with self._lock:
            mine = set(map(id, entries))
            self._queue = deque(entry for entry in self._queue if id(entry) not in mine)
            for entry in entries:
                if entry.connection is not None or entry.batch:
                    lost = [StoreUncertain("the call to the store was interrupted") for _ in entry.batch or ()]
                    self._deliver(entry, lost)
            self._gathering = False
            if self._queue and self._idle and all(entry.connection is None for entry in self._queue):
                self._assign_idle(self._queue[0])
            for entry in self._queue:
                if entry.connection is not None:
                    entry.wake()  # the interruption may have come between handing it on and waking it

    def _fill(self, batch: list[_Entry]) -> None:
        take_batch(self._queue, batch, _stored_bytes, self._max_batch, self._max_bytes)
        if self._outside:
            self._wake_outside()

    def _gather(self, batch: list[_Entry]) -> None:
        """Let other callers catch up while each pause brings some. Meanwhile they take no other connection."""
        self._gathering = True
        try:
            for _ in range(MAX_YIELDS):
                waiting = len(self._queue)
                if len(batch) + waiting >= self._last_batch:
                    break
                time.sleep(0)
                if len(self._queue) == waiting:
                    break
        finally:
            with self._lock:
                self._gathering = False
                self._fill(batch)
                if self._queue and self._idle and self._queue[0].connection is None:  # more came than fit in one batch
                    self._assign_idle(self._queue[0])


def _stored_bytes(entry: _Entry) -> int:
    return stored_bytes(entry.op)
