"""Single flight: of all calls for one key in one process, one asks the store and the others learn from it.

A *flight* is the call that asks. While it is claiming, the others wait for the store's answer. While its handler runs,
they know that it runs. When it lands, they share the record that it left. When it loses its lease, it knows nothing any
more, and the next call asks the store. Both engines use this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from semel.core.ops import Claim, Claimed, Complete, Existing, Record
from semel.core.states import State
from semel.engine.drive.leases import Lease
from semel.engine.forking import survive_forks
from semel.errors import StoreError


class Flight:
    """One call that asks the store. It changes when its claim is won, when its lease is lost, and when it lands."""

    claim: Claim
    began = 0.0
    """When the claim was sent, by the engine's clock."""
    changes = 0
    """How often it has changed."""
    running: Claimed | None = None
    lease: Lease | None = None
    """The lease under which it runs."""
    landed = False
    """Whether the call is over. Without a record, a completion or an error, the key is free again."""
    record: Record | None = None
    """The record that the claim found."""
    completed: Complete | None = None
    """The completion that the store has accepted; a record is made from it only if another call asks."""
    error: StoreError | None = None
    """Why the store could not be asked."""
    waiters: list[Callable[[], object]] | None = None
    """Called, and forgotten, at the next change."""

    def is_stale(self, now: float) -> bool:
        """Whether the lease of its handler has ended. Only the store knows what became of the key since then."""
        lease = self.lease
        return lease is not None and (lease.lost or now >= lease.ends) and not self.landed

    def answer(self, now: float) -> Existing | None:
        """Return what another call for the key may know; None while the store has not answered, or if the key is free.

        Raises a copy of the StoreError if the store could not be asked.
        """
        if not self.landed:
            return self._existing(State.RUNNING, None, self.claim.ttl, now) if self.running is not None else None
        if self.error is not None:
            # One of many callers has waited for a dead store: the others need not wait in line for the same error.
            copy = type(self.error)(*self.error.args)
            copy.answered = self.error.answered
            raise copy from self.error
        if self.completed is not None:
            return self._existing(State.DONE, self.completed.snapshot, self.completed.ttl, now)
        if self.record is not None and self.record.state is not State.ABANDONED:
            return Existing(self.record)
        return None  # free; or abandoned, and then another call may have the right to take over, so it asks for itself

    def _existing(self, state: State, snapshot: bytes | None, expires_in: float, now: float) -> Existing:
        """The record as this process knows it. Its age counts from this attempt, even if that is not the first."""
        claim, claimed = self.claim, self.running or Claimed(0, 1)
        return Existing(
            Record(
                claim.id,
                state,
                claimed.token,
                claimed.attempt,
                claim.fingerprint,
                snapshot,
                claim.lease,
                now - self.began,
                expires_in,
                claim.tenant,
                claim.operation,
                claim.key,
            )
        )

    def wake(self) -> None:
        """Call the waiters. The lock of the flights must be held, since the change that they wait for."""
        waiters, self.waiters = self.waiters or (), None
        for wake in waiters:
            wake()


class Flights:
    """All flights of one guard, by the identity of their record."""

    def __init__(self) -> None:
        self.by_id: dict[bytes, Flight] = {}
        self.lock = threading.RLock()
        """Held while a flight changes, and while a waiter looks if it has changed already. Never held while waiting.

        Reentrant: the garbage collector may run in its owner, and end an attempt that an adapter has dropped.
        """
        survive_forks(self._forked)

    def land(self, flight: Flight) -> None:
        """End the flight. Safe to call again."""
        try:
            if self.by_id.get(flight.claim.id) is flight:
                self.by_id.pop(flight.claim.id, None)
        finally:
            with self.lock:
                flight.landed = True
                flight.changes += 1
                if flight.waiters is not None:
                    flight.wake()

    def forget(self, flight: Flight) -> None:
        """Let the next call for its key ask the store, although this one may not be over."""
        with self.lock:
            if self.by_id.get(flight.claim.id) is flight:
                del self.by_id[flight.claim.id]

    def lose(self, lease: Lease) -> None:
        """Wake those who wait for a call that has lost its lease."""
        with self.lock:
            flight = self.by_id.get(lease.call.id)
            if flight is not None and flight.lease is lease:
                flight.changes += 1
                flight.wake()

    def watch(self, flight: Flight, seen: int, wake: Callable[[], object]) -> bool:
        """Call ``wake`` at the next change. Returns False if there have been more than ``seen`` changes already."""
        with self.lock:
            if flight.changes != seen:
                return False
            if flight.waiters is None:
                flight.waiters = []
            flight.waiters.append(wake)
            return True

    def unwatch(self, flight: Flight, wake: Callable[[], object]) -> None:
        """Give up waiting."""
        with self.lock:
            if flight.waiters is not None and wake in flight.waiters:
                flight.waiters.remove(wake)

    def _forked(self) -> None:
        """A forked child has none of its parent's flights."""
        self.by_id = {}
        self.lock = threading.RLock()
