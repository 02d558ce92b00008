"""The background thread of the sync Redis store: it hears which attempts have ended, and wakes who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from semel.engine.forking import survive_forks
from semel.stores.redis.link import connect
from semel.stores.redis.settings import LISTEN_AGAIN, Address, Settings

__all__ = ["Listener"]


class Listener:
    """One connection that subscribes to the store's channel. In a cluster any node hears what any other publishes."""

    def __init__(self, settings: Settings, channel: bytes, masters: Callable[[], list[Address]]) -> None:
        self._settings = settings
        self._channel = channel
        self._masters = masters
        self._stop = threading.Event()
        self._start_anew()
        survive_forks(self._start_anew)

    def _start_anew(self) -> None:
        self._gates: dict[bytes, list[threading.Lock]] = {}
        self._lock = threading.Lock()
        self._hears = threading.Event()
        self._started = False

    def listen(self, seconds: float) -> bool:
        """Start if need be; whether messages are heard, within so many seconds."""
        with self._lock:
            if not self._started:
                self._started = True
                threading.Thread(target=self._hear, name="semel-listener", daemon=True).start()
        return self._hears.wait(seconds)

    def enter(self, key: bytes) -> threading.Lock:
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            self._gates.setdefault(key, []).append(gate)
        return gate

    def leave(self, key: bytes, gate: threading.Lock) -> None:
        with self._lock:
            gates = self._gates.get(key)
            if gates is not None and gate in gates:
                gates.remove(gate)
                if not gates:
                    del self._gates[key]

    def stop(self) -> None:
        self._stop.set()

    def _hear(self) -> None:
        tries = 0
        while not self._stop.is_set():
            raw: Any = None
            try:
                masters = self._masters()
                raw = connect(self._settings, masters[tries % len(masters)])
                raw.send_command("SUBSCRIBE", self._channel)
                raw.read_response(disable_decoding=True)
                self._wake(list(self._gates))  # whatever was said while nobody listened
                self._hears.set()
                while not self._stop.is_set():
                    if raw.can_read(LISTEN_AGAIN):
                        message = raw.read_response(disable_decoding=True)
                        if message[0] == b"message":
                            self._wake([message[2]])
            except Exception:  # whatever broke: open it again; waiters look for themselves meanwhile
                tries += 1
                self._hears.clear()
                self._wake(list(self._gates))
                self._stop.wait(0.25)
            finally:
                if raw is not None:
                    raw.disconnect()

    def _wake(self, keys: list[bytes]) -> None:
        with self._lock:
            gates = [gate for key in keys for gate in self._gates.pop(key, ())]
        for gate in gates:
            gate.release()
