"""``Trail``: a hook that keeps the history of events in a store, without making any call wait for it.

::

    a call ──▶ hook ──▶ counts of this minute ─┐
                  └──▶ queue (bounded) ────────┴─▶ a thread ──▶ batches ──▶ store

The hook counts the event, puts it on the queue and returns. The thread writes about once a second. If the store fails,
the thread tries again later, and the hook goes on counting: minutes are late then, and not lost. Moments that do not
fit into the queue are dropped and counted. A process that is killed loses what it has not written.
"""

from __future__ import annotations

import atexit

# A driver may import it when it connects first. When the interpreter ends, it is too late for that.
import concurrent.futures.thread  # noqa: F401
import logging
import os
import socket
import threading
import weakref
from collections import deque
from time import monotonic, time
from types import TracebackType
from typing import Any, Final

from semel.core.policy import Duration, seconds
from semel.core.trail.minutes import MINUTE, MOST_ROWS, MinuteCounter, RouteCounts, minute_row
from semel.core.trail.moments import (
    SHAPES,
    ForgetTrail,
    KeepTrail,
    Links,
    Moment,
    is_moment,
    route_of,
    shape_of,
)
from semel.engine.forking import survive_forks
from semel.engine.ports import Store, check_trails, is_async_store
from semel.errors import ConfigurationError
from semel.observe.events import Event
from semel.stores.urls import check_trails_of, open_any_store

BATCH: Final = 500
"""Moments in one batch."""
TRIES: Final = 8
"""How often a batch is tried before it is dropped, which takes about two minutes: the store may refuse its content."""
SLOWEST_PAUSE: Final = 30.0
FORGET_EVERY: Final = 10.0
"""Seconds between two removals of what is old."""
QUIET: Final = 60.0
"""Seconds for which a failure is not logged again."""
_log = logging.getLogger("semel.trail")


class Trail:
    """Keeps the history of events: ``Semel(store, on_event=Trail("postgresql://…", service="payments"))``."""

    def __init__(
        self,
        store: Store | str,
        *,
        service: str,
        keep: Duration = "6h",
        keep_minutes: Duration = "7d",
        queue: int = 10_000,
        interval: Duration = 1.0,
        secret: bytes | None = None,
    ) -> None:
        """
        :param store: a sync store, also for an ``AsyncSemel``, or its URL. With a URL the trail opens a store of its
            own, so that its batches do not hold up the calls, and closes it.
        :param service: the name of this service in the history.
        :param keep: how long single events are kept.
        :param keep_minutes: how long the counts of each minute are kept.
        :param queue: how many events may wait to be written. Further ones are counted, and otherwise dropped.
        :param interval: how often the history is written.
        :param secret: for keys that can be guessed. The history holds hashes of keys, and this is the key of the hash.
            Services that call each other need the same one, so that their histories are one.
        """
        if isinstance(store, str):
            check_trails_of(store)
        elif is_async_store(store):
            raise ConfigurationError(
                f"{type(store).__name__} is an async store, and a trail writes in a thread of its own: give it the "
                "URL, or a sync store"
            )
        else:
            check_trails(store)
        self._url = store if isinstance(store, str) else None
        self._store = None if isinstance(store, str) else store
        self._service = service
        self._keep = seconds(keep, "keep")
        self._keep_minutes = seconds(keep_minutes, "keep_minutes")
        self._most = queue
        self._interval = seconds(interval, "interval")
        self._links = Links(secret)
        self._closed = False
        self._begin()
        survive_forks(self._begin)
        atexit.register(_close, weakref.ref(self))

    def _begin(self) -> None:
        """Begin with nothing, also in a forked child: what waits belongs to the parent, which writes it."""
        self.dropped = 0
        """How many events this process has counted, but not kept."""
        # A signal handler may call a guard while this thread holds the lock.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._queue: deque[tuple[float, Event]] = deque()
        self._counter = MinuteCounter()
        self._writer = os.urandom(8)
        self._who = f"{self._service}@{socket.gethostname()}:{os.getpid()}"
        self._numbers = 0
        self._pending: tuple[Moment, ...] = ()
        """Moments that could not be written yet."""
        self._tries = 0
        """How often it was tried to write them."""
        self._counts_due = self._forget_due = 0.0
        self._written = 0
        """Moments since the last removal of old ones."""
        self._logged = -QUIET

    def __call__(self, event: Event) -> None:
        """Count the event and put it on the queue."""
        at = time()
        kind = type(event)
        shape = SHAPES.get(kind) or shape_of(kind)
        took: Any = event.seconds if shape.seconds else None  # type: ignore[attr-defined]
        route = route_of(event)
        with self._lock:
            if self._closed:
                return
            self._counter.add(at, route, kind.name, took)
            if is_moment(event):
                if len(self._queue) < self._most:
                    self._queue.append((at, event))
                    if len(self._queue) == BATCH:
                        self._wake.set()
                else:
                    self._drop(at, route, 1)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="semel-trail", daemon=True)
                self._thread.start()

    def _drop(self, at: float, route: str, count: int) -> None:
        self.dropped += count
        for _ in range(count):
            self._counter.add(at, route, "dropped", None)

    # The thread

    def _run(self) -> None:
        while not self._closed:
            self._write_all()
            pause = min(self._interval * 2**self._tries, max(SLOWEST_PAUSE, self._interval))
            self._wake.wait(pause)
            self._wake.clear()
        self._counts_due = 0.0
        self._write_all()
        if self._url is not None and self._store is not None:
            self._store.close()

    def _write_all(self) -> None:
        """Write all that waits, until the store fails."""
        try:
            while self._write_batch():
                pass
            if monotonic() >= self._forget_due and not self._tries:
                self._forget()
        except Exception as error:
            self._tries += 1
            self._report(error)

    def _write_batch(self) -> bool:
        """Write one batch. Returns whether there was anything to write."""
        now = monotonic()
        with self._lock:
            counts: list[RouteCounts] = []
            if now >= self._counts_due:
                counts = self._counter.take_changed()
                self._counter.forget(time() - MINUTE)
                if len(counts) < MOST_ROWS:
                    self._counts_due = now + self._interval / 2
            count = 0 if self._pending else min(BATCH, len(self._queue))
            taken = [self._queue.popleft() for _ in range(count)]
        if taken:
            self._pending = tuple(self._moment(at, event) for at, event in taken)
        if not (counts or self._pending):
            return False
        rows = tuple(map(minute_row, counts))
        op = KeepTrail(self._writer, self._pending, rows, self._keep, self._keep_minutes)
        try:
            self._open_store().execute(op)
        except BaseException:
            with self._lock:
                self._counter.put_back(rows)
                self._counts_due = 0.0
                if self._tries + 1 >= TRIES and self._pending:
                    self._drop(time(), "", len(self._pending))
                    self._pending, self._tries = (), 0
            raise
        self._written += len(self._pending)
        self._pending, self._tries = (), 0
        return True

    def _moment(self, at: float, event: Event) -> Moment:
        self._numbers += 1
        return self._links.moment(at, event, self._who, self._writer + self._numbers.to_bytes(8, "big"))

    def _forget(self) -> None:
        """Remove what is old: more than was written since the last time, so that the history does not grow."""
        self._forget_due = monotonic() + FORGET_EVERY
        left, self._written = 2 * self._written + BATCH, 0
        store, op = self._open_store(), ForgetTrail(self._keep, self._keep_minutes, BATCH)
        while left > 0 and store.execute(op) >= BATCH:  # small steps: others wait for the locks of each
            left -= BATCH

    def _open_store(self) -> Store:
        if self._store is None:
            assert self._url is not None
            self._store = open_any_store(self._url)
        return self._store

    def _report(self, error: Exception) -> None:
        now = monotonic()
        if now - self._logged >= QUIET:
            self._logged = now
            waiting = len(self._queue) + len(self._pending)
            _log.warning(
                "the history of events cannot be written, and is tried again; %d events wait, and %d were dropped: %s",
                waiting, self.dropped, error,
            )  # fmt: skip

    # The end

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, and end. Later events are ignored. Call it before the store is closed.

        :param timeout: how many seconds to wait for the store.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join(timeout)
        left = len(self._queue) + len(self._pending)
        if left:
            self._queue.clear()
            _log.warning("the trail was closed, and %d events could not be written to its history", left)

    def __enter__(self) -> Trail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _close(reference: weakref.ref[Trail]) -> None:
    trail = reference()
    if trail is not None:
        trail.close()
