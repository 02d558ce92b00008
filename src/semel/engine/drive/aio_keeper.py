"""The keeper of an async engine: one timer that renews the leases of all running handlers, and sweeps at intervals.

The timer is set for the first lease that is due. A handler that ends before that costs only a dictionary entry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from semel.engine.drive.aio_rounds import SWEEP_AGAIN, execute_all_async, renew_async, sweep_async
from semel.engine.drive.backlog import CLOSE_TIMEOUT, Backlog, UnstoredOutcome
from semel.engine.drive.flights import Flights
from semel.engine.drive.leases import RETRY_AFTER, Lease, Leases
from semel.engine.ports import AsyncStore
from semel.errors import ConfigurationError

_NEVER: Final = float("inf")


class AsyncKeeper:
    """Renews leases, in the event loop that uses it first."""

    def __init__(
        self,
        store: AsyncStore,
        sweep_every: float | None,
        on_swept: Callable[[int, int], None],
        flights: Flights | None = None,
    ) -> None:
        self._store = store
        self._sweep_every = sweep_every
        self._on_swept = on_swept
        self._flights = flights or Flights()
        self.leases = Leases(self._flights.lose)
        self.backlog = Backlog(self.leases, self._flights)
        self._storing: asyncio.Task[None] | None = None
        """Stores the backlog, while there is one."""
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = _NEVER
        self._round: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._sweep_at = _NEVER
        self._closed = False

    def hold(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._adopt(loop)
        leases = self.leases
        leases.held[id(lease)] = lease  # as leases.hold() does; this is in the path of every request
        leases.begun += 1
        if lease.span < leases.shortest:  # noqa: PLR1730 - faster than min()
            leases.shortest = lease.span
        if lease.due < self._rings_at:
            self._set(lease.due)

    def store_later(self, outcome: UnstoredOutcome) -> None:
        """Store an outcome in the background, and renew its lease until that is done."""
        self.backlog.add(outcome)
        if self._storing is None or self._storing.done():
            # A task of its own: a store that fails slowly must not keep the leases waiting.
            self._storing = asyncio.get_running_loop().create_task(self._store_backlog(), name="semel-completer")

    def stop(self) -> None:
        """Stop, from any thread, and wait for nothing."""
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._closing.set()
        if self._storing is not None:
            await asyncio.wait([self._storing], timeout=CLOSE_TIMEOUT)
            self._storing.cancel()
        await asyncio.gather(*filter(None, (self._round, self._sweeping, self._storing)), return_exceptions=True)

    def _set(self, when: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = min(when, self._sweep_at)
        self._timer = self._loop.call_later(max(0.0, self._rings_at - time.monotonic()), self._ring)

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigurationError("this AsyncSemel belongs to another event loop: make one per loop")
        # What a closed loop has left behind is over: its timer never fires, and its leases have no owner.
        self._loop, self._timer, self._round, self._sweeping, self._storing = loop, None, None, None, None
        self.leases, self._rings_at = Leases(self._flights.lose), _NEVER
        self.backlog, self._closing = Backlog(self.leases, self._flights), asyncio.Event()
        self._sweep_at = time.monotonic() + self._sweep_every if self._sweep_every else _NEVER

    def _ring(self) -> None:
        assert self._loop is not None
        self._timer = None
        self._rings_at = _NEVER
        now = time.monotonic()
        if self._closed:
            return
        if now >= self._sweep_at:
            # A task of its own: a slow sweep must not keep the leases waiting.
            self._sweep_at = _NEVER
            self._sweeping = self._loop.create_task(self._sweep(), name="semel-sweeper")
        if self._round is not None and not self._round.done():
            self.leases.expire(now)  # the last round still waits for the store, which may never answer
            self._set(now + self.leases.shortest * RETRY_AFTER)
        elif self.leases.due(now):
            self._round = self._loop.create_task(renew_async(self._store, self.leases), name="semel-keeper")
            self._set(now + self.leases.shortest * RETRY_AFTER)
        elif len(self.leases):
            self._set(self.leases.next_due(now))
        elif self._sweep_at < _NEVER:
            self._set(self._sweep_at)

    async def _store_backlog(self) -> None:
        waiting = self.backlog
        try:
            while waiting:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), waiting.next_pause())
                due = waiting.due()
                answers = await execute_all_async(self._store, [outcome.request.op for outcome in due])
                waiting.note_answers(due, answers, time.monotonic())
                if self._closed:
                    break
        finally:
            waiting.give_up()

    async def _sweep(self) -> None:
        pause = self._sweep_every or 0
        try:
            if await sweep_async(self._store, self._on_swept, lambda: self._closed):
                pause = min(SWEEP_AGAIN, pause)
        finally:
            self._sweep_at = time.monotonic() + pause
            if not self._closed and self._sweep_at < self._rings_at:
                self._set(self._sweep_at)
