"""Single flight: of all calls for one key in one process, one asks the store and the others learn from it.

A *flight* is the call that asks. While it is claiming, others wait for the store's answer; while its handler runs,
others know that it runs; when it lands, others share the record it left. Both engines use this module; the sync one
guards it with its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from semel.core.ops import Claim, Claimed, Complete, Existing, Record
from semel.core.states import State
from semel.errors import StoreError

__all__ = ["Flight"]


class Flight:
    """One call in the air. ``waiters`` are called, and forgotten, at every change."""

    __slots__ = ("began", "claim", "completed", "error", "landed", "record", "running", "waiters")

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.began = 0.0
        """When the claim was sent, by the engine's clock."""
        self.running: Claimed | None = None
        self.landed = False
        self.record: Record | None = None
        """What the claim found."""
        self.completed: Complete | None = None
        """The completion that this call got through to the store; its record is made only if somebody asks."""
        self.error: StoreError | None = None
        """Why the store could not be asked."""
        self.waiters: list[Callable[[], object]] | None = None

    def claimed(self, answer: Claimed) -> None:
        """The claim is won and the handler is about to run."""
        self.running = answer
        if self.waiters is not None:
            self._wake()

    def land(self) -> None:
        """The call is over. With neither record nor completion nor error, the key is free again."""
        self.landed = True
        if self.waiters is not None:
            self._wake()

    def answer(self, now: float) -> Existing | None:
        """What another call for the key is told; None while the store has not answered, or once the key is free."""
        if not self.landed:
            return self._shown(State.RUNNING, None, self.claim.ttl, now) if self.running is not None else None
        if self.error is not None:
            # One of many callers has waited for a dead store: the others need not wait in line to learn the same.
            told = type(self.error)(*self.error.args)
            told.answered = self.error.answered
            raise told from self.error
        if self.completed is not None:
            return self._shown(State.DONE, self.completed.snapshot, self.completed.ttl, now)
        if self.record is not None and self.record.state is not State.ABANDONED:
            return Existing(self.record)
        return None  # free, or abandoned: others may have the right to take it over, so they ask for themselves

    def _shown(self, state: State, snapshot: bytes | None, expires_in: float, now: float) -> Existing:
        """The record as this process knows it; its age counts from this attempt, also where that is not the first."""
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

    def wait(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called at the next change."""
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(wake)

    def wait_in_thread(self, lock: threading.Lock, seconds: float) -> bool:
        """Wait for the next change, for so long at most; False at once when there will be none."""
        gate = threading.Lock()
        with lock:
            if self.landed:
                return False
            gate.acquire()
            self.wait(gate.release)
        if not gate.acquire(timeout=seconds):
            with lock:
                self.leave(gate.release)
        return True

    def leave(self, wake: Callable[[], object]) -> None:
        """Give up waiting."""
        if self.waiters is not None and wake in self.waiters:
            self.waiters.remove(wake)

    def _wake(self) -> None:
        waiters, self.waiters = self.waiters or (), None
        for wake in waiters:
            wake()
