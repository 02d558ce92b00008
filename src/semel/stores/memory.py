"""Stores in memory, for tests, for tools, and for services that may lose their records at a restart.

A store is a dict with the rules of ``core/semantics.py``. Its size is limited: if it is full of live records, it
refuses new claims. It never drops a live record to make room, because that could run an operation twice.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from heapq import nsmallest
from itertools import islice
from typing import Any, Final, TypeVar

from semel.core.ops import (
    INPUT,
    Abandoned,
    Claim,
    Count,
    Listing,
    ListRecords,
    Measure,
    Op,
    Page,
    Record,
    Resumable,
    SaveStep,
    Size,
    Sweep,
    Swept,
)
from semel.core.semantics import (
    RULES,
    Row,
    is_listed,
    not_a_place,
    pack_place,
    show,
    state_of,
    sweepable,
    unpack_place,
)
from semel.core.states import State, Takeover
from semel.core.trail.book import TrailBook
from semel.core.trail.moments import TRAIL_OPS
from semel.engine.ports import execute_each
from semel.errors import StoreUnavailable

R = TypeVar("R")
MAX_RECORDS: Final = 1_000_000
_MEASURED: Final = 5000
"""How many records Measure looks at, the oldest ones, for those that a sweep should remove."""


class _Records:
    """The records and the rules. Not thread-safe."""

    def __init__(self, clock: Callable[[], float], max_records: int) -> None:
        self.clock = clock
        self.max_records = max_records
        self.full_until = float("-inf")
        self.rows: dict[bytes, Row] = {}
        """In the order of their first claims."""
        self.inputs: set[bytes] = set()
        """Records that have saved their input. Some of them may be done by now."""
        self.waiters: dict[bytes, list[Callable[[], object]]] = {}
        self.trail = TrailBook()

    def execute(self, op: Op[Any]) -> Any:
        now = self.clock()
        on_many = _ON_MANY_RECORDS.get(type(op))
        if on_many is not None:
            return on_many(self, op, now)
        id = op.id
        row = self.rows.get(id)
        if row is None and type(op) is Claim and len(self.rows) >= self.max_records:
            self.make_room(now)
        changed, answer = RULES[type(op)](row, op, now)
        if changed is not row:
            if changed is None:
                del self.rows[id]
                self.inputs.discard(id)
            else:
                if row is not None and type(op) is Claim and changed.created != row.created:
                    del self.rows[id]  # a new record in the place of an expired one: it comes last
                self.rows[id] = changed
                if type(op) is SaveStep and op.name == INPUT:
                    self.inputs.add(id)
            if self.waiters and state_of(changed, now) is not State.RUNNING:
                for wake in self.waiters.pop(id, ()):
                    wake()
        return answer

    def make_room(self, now: float) -> None:
        if now < self.full_until or not self.sweep(Sweep(self.max_records // 10 + 1), now).removed:
            if now >= self.full_until:
                self.full_until = now + 1.0  # a sweep for every claim would use up the CPU
            raise StoreUnavailable(f"the memory store is full: {self.max_records} live records")

    def sweep(self, op: Sweep, now: float) -> Swept:
        removed = unknown = 0
        for id, row in list(self.rows.items()):
            if removed + unknown >= op.limit:
                break
            verdict = sweepable(row, now)
            if verdict is State.ABSENT:
                del self.rows[id]
                self.inputs.discard(id)
                removed += 1
            elif verdict is State.UNKNOWN:
                self.rows[id] = row._replace(state=State.UNKNOWN)
                unknown += 1
        return Swept(removed, unknown)

    def count(self, op: Count, now: float) -> int:
        live = (row for row in self.rows.values() if row.tenant == op.tenant and state_of(row, now) is not State.ABSENT)
        return sum(1 for _ in islice(live, op.limit))

    def resumable(self, op: Resumable, now: float) -> Page:
        candidates = nsmallest(op.limit, (id for id in self.inputs if id > op.after))
        found = []
        for id in candidates:
            row = self.rows[id]
            if row.state is State.DONE or INPUT not in dict(row.steps):
                self.inputs.discard(id)
            elif (
                row.operation in op.operations
                and row.takeover is not Takeover.REJECT
                and state_of(row, now) is State.ABANDONED
            ):
                found.append(Abandoned(show(row, now), dict(row.steps)[INPUT]))
        return Page(tuple(found), candidates[-1] if len(candidates) == op.limit else None)

    def list_page(self, op: ListRecords, now: float) -> Listing:
        candidates: list[Row] = []
        last = None if op.after is None else _place(op.after)
        for row in reversed(self.rows.values()):
            if last is not None and row.created >= last[0] and (row.created, row.id) >= last:
                continue
            # Records of one moment stay together, because only their ids say which of them have been shown.
            if len(candidates) > op.look and row.created != candidates[-1].created:
                break
            candidates.append(row)
        candidates.sort(key=lambda row: (row.created, row.id), reverse=True)
        found: list[Record] = []
        looked_at = 0
        for row in candidates[: op.look]:
            looked_at += 1
            record = show(row._replace(snapshot=None), now)
            if is_listed(op, record):
                found.append(record)
                if len(found) == op.limit:
                    break
        more = looked_at < len(candidates)
        return Listing(tuple(found), pack_place(row.created, row.id) if more else None, looked_at)

    def measure(self, op: Measure, now: float) -> Size:
        oldest = islice(self.rows.values(), _MEASURED)
        overdue = [now - max(row.lease_end, row.expires) for row in oldest if sweepable(row, now) is not None]
        return Size(len(self.rows), True, None, max(overdue, default=0.0))

    def watch(self, id: bytes, wake: Callable[[], object]) -> bool:
        """Call ``wake`` when the record is no longer running. Returns False if it is not running now."""
        if state_of(self.rows.get(id), self.clock()) is not State.RUNNING:
            return False
        self.waiters.setdefault(id, []).append(wake)
        return True

    def unwatch(self, id: bytes, wake: Callable[[], object]) -> None:
        waiting = self.waiters.get(id)
        if waiting is not None and wake in waiting:
            waiting.remove(wake)
            if not waiting:
                del self.waiters[id]


_ON_MANY_RECORDS: Final[dict[type[Op[Any]], Callable[[_Records, Any, float], Any]]] = {
    Sweep: _Records.sweep,
    Count: _Records.count,
    Resumable: _Records.resumable,
    ListRecords: _Records.list_page,
    Measure: _Records.measure,
    **dict.fromkeys(TRAIL_OPS, lambda records, op, now: records.trail.execute(op)),
}
"""What runs the Ops that are not about a single record."""


class MemoryStore:
    """A store in memory, for threads."""

    wakes = True
    counts = True
    resumes = True
    lists = True
    trails = True
    adopt = None
    accept = None

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_records: int = MAX_RECORDS) -> None:
        """
        :param clock: returns the current time in seconds; tests can replace it.
        :param max_records: maximum number of live records; beyond it, claims are refused.
        """
        self._records = _Records(clock, max_records)
        self._lock = threading.Lock()

    def execute(self, op: Op[R]) -> R:
        with self._lock:
            return self._records.execute(op)  # type: ignore[no-any-return]

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return execute_each(self.execute, ops)

    def wait(self, id: bytes, seconds: float) -> None:
        gate = threading.Lock()
        gate.acquire()
        wake = gate.release
        with self._lock:
            if not self._records.watch(id, wake):
                return
        if not gate.acquire(timeout=seconds):
            with self._lock:
                self._records.unwatch(id, wake)

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing. The records stay available to other users of the store."""


class AsyncMemoryStore:
    """A store in memory, for one event loop."""

    wakes = True
    counts = True
    resumes = True
    lists = True
    trails = True
    adopt = None
    accept = None

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_records: int = MAX_RECORDS) -> None:
        """Same parameters as ``MemoryStore``."""
        self._records = _Records(clock, max_records)

    async def execute(self, op: Op[R]) -> R:
        return self._records.execute(op)  # type: ignore[no-any-return]

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return execute_each(self._records.execute, ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        changed = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not changed.done():
                changed.set_result(None)

        if self._records.watch(id, wake):
            try:
                await asyncio.wait([changed], timeout=seconds)
            finally:
                self._records.unwatch(id, wake)

    def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def _place(after: str) -> tuple[float, bytes]:
    created, id = unpack_place(after)
    try:
        return float(created), id
    except ValueError:
        raise not_a_place(after) from None
