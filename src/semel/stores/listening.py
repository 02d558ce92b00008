"""Wake the callers that wait for a record when another process has changed it. Each store has one listener.

::

    caller ──▶ wait(name) ──▶ gate ── opens when a message has its name, when the lease ends, or after a second
                               ▲
    connection ── messages ────┘

A store says how messages are received, over a connection of its own (``receive``); the rest is here. While there is no
connection, the gates open and the callers look for themselves. ``Listener`` is a thread that must survive forks and
stop by itself. ``AsyncListener`` is a task that is cancelled. So both are written by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from semel.engine.forking import renewed, survive_forks

LISTEN_AGAIN: Final = 1.0
"""Seconds after which a caller that was not woken looks again: a connection may be lost unnoticed."""
PAUSE: Final = 0.25
"""Seconds between two tries to connect."""
Receive: TypeAlias = Callable[[threading.Event, Callable[[], None], Callable[[Any], None]], None]
"""``receive(stop, ready, wake)`` calls ``ready`` when it has subscribed, then ``wake(name)`` for each message, until
``stop`` is set or the connection is lost."""
AsyncReceive: TypeAlias = Callable[[Callable[[], None], Callable[[Any], None]], Awaitable[None]]
"""``receive(ready, wake)``, until the connection is lost or the task is cancelled."""


class Listener:
    """Listens in a thread, which starts when a caller first waits, and again in a forked child."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._stop = threading.Event()
        self._reset()
        survive_forks(self._forked)

    def _reset(self) -> None:
        self._gates: dict[Any, list[threading.Lock]] = {}
        self._lock = threading.Lock()
        self._listening = threading.Event()
        self._started = False

    def _forked(self) -> None:
        self._stop = renewed(self._stop)
        self._reset()

    def wait(self, name: Any, seconds: float, lease_left: Callable[[], float | None]) -> None:
        """Wait until a message has this name, the lease ends, or ``seconds`` are over; a second at most.

        :param lease_left: asks for the message and returns the rest of the lease; None if there is nothing to wait for.
        """
        with self._lock:
            if not self._started:
                self._started = True
                events = (self._stop, self._listening)
                threading.Thread(target=self._listen, args=events, name="semel-listener", daemon=True).start()
        if not self._listening.wait(min(seconds, LISTEN_AGAIN)):
            return  # there is no connection: the caller polls
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            self._gates.setdefault(name, []).append(gate)  # before the message is asked for, so that none is missed
        try:
            left = lease_left()
            if left is not None:
                gate.acquire(timeout=max(0.0, min(seconds, left, LISTEN_AGAIN)))
        finally:
            with self._lock:
                gates = self._gates.get(name, [])
                if gate in gates:
                    gates.remove(gate)
                    if not gates:
                        del self._gates[name]

    def stop(self) -> None:
        self._stop.set()

    def resume(self) -> None:
        """After ``stop``: start again when first needed. The previous thread has events of its own."""
        if self._stop.is_set():
            self._stop, self._listening, self._started = threading.Event(), threading.Event(), False

    def _listen(self, stop: threading.Event, listening: threading.Event) -> None:
        def ready() -> None:
            listening.set()
            self._wake_all()  # for what was sent while nobody listened

        while not stop.is_set():
            with contextlib.suppress(Exception):  # whatever failed: connect again; the callers poll until then
                self._receive(stop, ready, self._wake)
            listening.clear()
            self._wake_all()
            stop.wait(PAUSE)

    def _wake_all(self) -> None:
        for name in list(self._gates):
            self._wake(name)

    def _wake(self, name: Any) -> None:
        with self._lock:
            gates = self._gates.pop(name, ())
        for gate in gates:
            gate.release()


class AsyncListener:
    """Listens in a task, which starts when a caller first waits, and again in a new event loop."""

    def __init__(self, receive: AsyncReceive) -> None:
        self._receive = receive
        self._gates: dict[Any, list[asyncio.Future[None]]] = {}
        self._listening = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, name: Any, seconds: float, lease_left: Callable[[], Awaitable[float | None]]) -> None:
        """Same as ``Listener.wait``."""
        if self._task is None or self._task.done():
            self._listening = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._listen(), name="semel-listener")
        try:
            async with asyncio.timeout(min(seconds, LISTEN_AGAIN)):
                await self._listening.wait()
        except TimeoutError:
            return
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gates.setdefault(name, []).append(gate)
        try:
            left = await lease_left()
            if left is not None:
                await asyncio.wait([gate], timeout=max(0.0, min(seconds, left, LISTEN_AGAIN)))
        finally:
            gates = self._gates.get(name, [])
            if gate in gates:
                gates.remove(gate)
                if not gates:
                    del self._gates[name]

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            try:
                await self._receive(self._ready, self._wake)
            except Exception:  # whatever failed: connect again; the callers poll until then
                pass
            finally:
                self._listening.clear()
                self._wake_all()
            await asyncio.sleep(PAUSE)

    def _ready(self) -> None:
        self._listening.set()
        self._wake_all()

    def _wake_all(self) -> None:
        for name in list(self._gates):
            self._wake(name)

    def _wake(self, name: Any) -> None:
        for gate in self._gates.pop(name, ()):
            if not gate.done():
                gate.set_result(None)
