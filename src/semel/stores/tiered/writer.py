"""The thread that keeps a sync cache: it writes what callers leave behind, and opens lines that were lost.

Callers never write to the cache themselves and never open a connection, so that none of them waits for either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from semel.engine.forking import survive_forks
from semel.stores.tiered.ports import Tally, Write

__all__ = ["MOST_WAITING", "Writer"]

MOST_WAITING: Final = 10_000
"""Writes that wait for the thread; more are dropped, and counted."""
BATCH: Final = 256
"""Writes in one trip."""
LINGER: Final = 0.002
"""Seconds that a write may wait for others to share its trip; one that a caller waits for goes at once."""
STOP_SECONDS: Final = 1.0
"""How long closing waits for the last trip; and the pause after a mistake of ours."""
_log: Final = logging.getLogger("semel.tiered")


class Writer:
    """One thread, started when first needed, and again in a forked child."""

    def __init__(self, deliver: Callable[[list[Write]], None], tend: Callable[[], float], tally: Tally) -> None:
        """
        :param deliver: writes to the cache; may wait.
        :param tend: keeps the lines open; answers in how many seconds it wants to be called again.
        """
        self._deliver = deliver
        self._tend = tend
        self._tally = tally
        self._stopped = False
        self._renew()
        survive_forks(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._queue: deque[Write | threading.Event] = deque()
        self._later: deque[tuple[float, Write]] = deque()
        self._urgent = False
        self._thread: threading.Thread | None = None

    def offer(self, write: Write) -> None:
        if len(self._queue) + len(self._later) >= MOST_WAITING or self._stopped:
            self._tally.dropped += 1
        elif write.delay:
            first = not self._later
            self._later.append((time.monotonic() + write.delay, write))  # all are held back alike: in their order
            if first:
                self.wake()
        else:
            self._queue.append(write)
            self.wake()

    def settle(self, seconds: float) -> None:
        """Wait until what was offered before is written, or left out."""
        done = threading.Event()
        self._urgent = True
        self._queue.append(done)
        self.wake()
        done.wait(seconds)

    def wake(self) -> None:
        self._work.set()
        self.begin()

    def begin(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None:
            with self._lock:
                self._begin()

    def stop(self) -> None:
        self._stopped = True
        self._work.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_SECONDS)

    def _begin(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(target=self._run, name="semel-tier", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._work.wait(self._pause(self._tend()))
                if not self._urgent and not self._stopped:
                    time.sleep(LINGER)
                self._work.clear()
                self._urgent = False
                self._write()
            except Exception:
                _log.exception("the cache is not written to for a moment")
                time.sleep(STOP_SECONDS)

    def _pause(self, seconds: float) -> float:
        if self._later:
            return min(seconds, max(0.0, self._later[0][0] - time.monotonic()))
        return seconds

    def _write(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            self._queue.append(self._later.popleft()[1])
        while self._queue:
            batch: list[Write] = []
            settled: list[threading.Event] = []
            while self._queue and len(batch) < BATCH:
                first = self._queue.popleft()
                if isinstance(first, threading.Event):
                    settled.append(first)
                elif first.wanted is None or first.wanted():
                    batch.append(first)
            try:
                if batch:
                    self._deliver(batch)
            finally:
                for each in settled:
                    each.set()
