"""The background threads of the sync PostgreSQL store: one hears notifications, one breaks dead connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from semel.engine.forking import survive_forks
from semel.sql.dialects.postgres import CHANNEL
from semel.stores.postgres.settings import LISTEN_AGAIN, Settings

if TYPE_CHECKING:
    import psycopg

__all__ = ["Listener", "Watchdog"]


def renewed(event: threading.Event) -> threading.Event:
    """The event for a forked child: a thread of the parent may hold the old one's lock, and never lets go here."""
    fresh = threading.Event()
    if event.is_set():
        fresh.set()
    return fresh


class Overdue(Protocol):
    """A lane, as the watchdog sees it."""

    overdue_at: float

    def abort(self) -> None: ...


class Watchdog:
    """One thread that breaks connections whose server fell silent: the server's own time limit needs a live server."""

    def __init__(self) -> None:
        self._lanes: set[Overdue] = set()
        self._started = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._started = False
        self._lock = threading.Lock()
        self._stop = renewed(self._stop)

    def watch(self, lane: Overdue) -> None:
        self._lanes.add(lane)
        if not self._started:
            self._start()

    def stop(self) -> None:
        self._stop.set()

    def _start(self) -> None:
        with self._lock:
            if not self._started and not self._stop.is_set():
                self._started = True
                threading.Thread(target=self._look, name="semel-watchdog", daemon=True).start()

    def _look(self) -> None:
        while not self._stop.wait(1.0):
            now = time.monotonic()
            for lane in list(self._lanes):
                if lane.overdue_at < now:
                    lane.abort()


class Listener:
    """One connection and thread that hear which records are done, and wake who waits for them."""

    def __init__(self, settings: Settings, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._settings = settings
        self._connect = connect
        self._gates: dict[str, list[threading.Lock]] = {}
        self._lock = threading.Lock()
        self._hears = threading.Event()
        self._stop = threading.Event()
        self._started = False
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._gates = {}
        self._lock = threading.Lock()
        self._hears = threading.Event()
        self._stop = renewed(self._stop)
        self._started = False

    def listen(self, seconds: float) -> bool:
        """Start if need be; whether notifications are heard."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._hear, name="semel-listener", daemon=True).start()
        return self._hears.wait(min(seconds, self._settings.connect_timeout))

    def enter(self, id: bytes) -> threading.Lock:
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            self._gates.setdefault(id.hex(), []).append(gate)
        return gate

    def leave(self, id: bytes, gate: threading.Lock) -> None:
        with self._lock:
            gates = self._gates.get(id.hex())
            if gates is not None and gate in gates:
                gates.remove(gate)
                if not gates:
                    del self._gates[id.hex()]

    def stop(self) -> None:
        self._stop.set()

    def _hear(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as raw:
                    raw.execute(f"LISTEN {CHANNEL}")
                    self._wake(list(self._gates))  # whatever was said while nobody listened
                    self._hears.set()
                    while not self._stop.is_set():
                        for notification in raw.notifies(timeout=LISTEN_AGAIN):
                            self._wake([notification.payload])
            except Exception:
                self._hears.clear()
                self._wake(list(self._gates))
                self._stop.wait(0.25)

    def _wake(self, ids: list[str]) -> None:
        with self._lock:
            gates = [gate for id in ids for gate in self._gates.pop(id, ())]
        for gate in gates:
            gate.release()
