"""The keeper of a sync engine: one thread that renews the leases of all running handlers, and sweeps at intervals.

It sleeps on a condition until the first lease is due. A handler that ends before that causes no wake-up and takes no
lock. Written by hand beside ``aio_keeper.py``, which has a timer and tasks instead. What both count is in
``leases.py``, and what they send to the store is in ``rounds.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from semel.engine.drive.backlog import CLOSE_TIMEOUT, Backlog, UnstoredOutcome
from semel.engine.drive.flights import Flights
from semel.engine.drive.leases import Lease, Leases
from semel.engine.drive.rounds import SWEEP_AGAIN, execute_all, renew, sweep
from semel.engine.forking import survive_forks
from semel.engine.ports import Store

_NEVER: Final = float("inf")
_AWAKE: Final = float("inf")
"""While the keeper is awake, every new lease makes it look again."""


class Keeper:
    """Renews leases. The first lease starts its thread, in a forked child too."""

    def __init__(
        self,
        store: Store,
        sweep_every: float | None,
        on_swept: Callable[[int, int], None],
        flights: Flights | None = None,
    ) -> None:
        self._store = store
        self._sweep_every = sweep_every
        self._on_swept = on_swept
        self._flights = flights or Flights()
        self._closed = False
        self._reset()
        survive_forks(self._reset)

    def _reset(self) -> None:
        self._condition = threading.Condition()
        self.leases = Leases(self._flights.lose)
        self.backlog = Backlog(self.leases, self._flights)
        self._storing: threading.Thread | None = None
        """Stores the backlog, while there is one."""
        self._closing = threading.Event()
        self._sleeps_until = _AWAKE
        self._started = False

    def hold(self, lease: Lease) -> None:
        if not self._started:
            self._start()
        self.leases.hold(lease)
        # Read after the lease is added: a keeper that is awake looks again, and one that sleeps has noted until when.
        if lease.due < self._sleeps_until:
            with self._condition:
                self._condition.notify()

    def store_later(self, outcome: UnstoredOutcome) -> None:
        """Store an outcome in the background, and renew its lease until that is done."""
        with self._condition:
            self.backlog.add(outcome)
            if self._storing is None:
                # A thread of its own: a store that fails slowly must not keep the leases waiting.
                self._storing = threading.Thread(target=self._store_backlog, name="semel-completer", daemon=True)
                self._storing.start()

    def close(self) -> None:
        self._closed = True
        self._closing.set()
        with self._condition:
            self._condition.notify()
            storing = self._storing
        if storing is not None:
            storing.join(CLOSE_TIMEOUT)

    def _start(self) -> None:
        with self._condition:
            if not self._started and not self._closed:
                self._started = True
                threading.Thread(target=self._keep, name="semel-keeper", daemon=True).start()

    def _keep(self) -> None:
        sweep_at = time.monotonic() + self._sweep_every if self._sweep_every else _NEVER
        begun = -1
        sweeper = threading.Thread()
        while not self._closed:
            with self._condition:
                now = time.monotonic()
                idle, begun = len(self.leases) == 0 and begun == self.leases.begun, self.leases.begun
                # Without traffic, sleep until the first lease wakes us. With traffic, look again about when a lease
                # that begins now would be due, so that no lease has to wake us.
                until = min(_NEVER if idle else self.leases.next_due(now), sweep_at)
                self._sleeps_until = until
                if until > now and not self._closed:
                    self._condition.wait(min(until - now, threading.TIMEOUT_MAX))
                self._sleeps_until = _AWAKE
            renew(self._store, self.leases)
            if time.monotonic() >= sweep_at and not self._closed:
                # A thread of its own: a slow sweep must not keep the leases waiting.
                if not sweeper.is_alive():
                    sweeper = threading.Thread(target=self._sweep, name="semel-sweeper", daemon=True)
                    sweeper.start()
                sweep_at = time.monotonic() + (self._sweep_every or 0)

    def _store_backlog(self) -> None:
        while True:
            self._closing.wait(self.backlog.next_pause())
            due = self.backlog.due()
            answers = execute_all(self._store, [outcome.request.op for outcome in due])
            self.backlog.note_answers(due, answers, time.monotonic())
            if self._closed:
                self.backlog.give_up()
            with self._condition:  # nobody may add an outcome and leave it to a thread that ends
                if not self.backlog:
                    self._storing = None
                    return

    def _sweep(self) -> None:
        while sweep(self._store, self._on_swept, lambda: self._closed):
            time.sleep(min(SWEEP_AGAIN, self._sweep_every or 0))
