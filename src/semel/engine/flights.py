"""Single flight: of all calls for one key in one process, one asks the store and the others learn from it.

A *flight* is the call that asks. While it is claiming, others wait for the store's answer; while its handler runs,
others know that it runs; when it lands, others share the record it left. Both engines use this module; the sync one
guards it with its lock.
"""

from __future__ import annotations

from collections.abc import Callable

from semel.core.ops import Claimed, Complete, Existing, Record
from semel.core.states import State

__all__ = ["Flight"]


class Flight:
    """One call in the air. ``waiters`` are called, and forgotten, at every change."""

    __slots__ = ("completed", "fingerprint", "landed", "lease", "record", "running", "waiters")

    def __init__(self, fingerprint: bytes, lease: float) -> None:
        self.fingerprint = fingerprint
        self.lease = lease
        self.running: Claimed | None = None
        self.landed = False
        self.record: Record | None = None
        self.completed: Complete | None = None
        """The completion that this call got through to the store; its record is made only if somebody asks."""
        self.waiters: list[Callable[[], object]] | None = None

    def claimed(self, answer: Claimed) -> None:
        """The claim is won and the handler is about to run."""
        self.running = answer
        self._wake()

    def land(self, record: Record | None = None) -> None:
        """The call is over; ``record`` is what it found. With neither that nor a completion the key is free again."""
        if not self.landed:
            self.landed = True
            self.record = record
        self._wake()

    def answer(self, id: bytes) -> Existing | None:
        """What another call for the key is told; None while the store has not answered, or once the key is free."""
        if self.landed:
            if self.completed is not None:
                op, attempt = self.completed, self.running.attempt if self.running is not None else 1
                self.record = Record(id, State.DONE, op.token, attempt, self.fingerprint, op.snapshot, 0.0, 0.0, op.ttl)
            return Existing(self.record) if self.record is not None else None
        if self.running is None:
            return None
        claimed = self.running
        return Existing(
            Record(
                id, State.RUNNING, claimed.token, claimed.attempt, self.fingerprint, None, self.lease, 0.0, self.lease
            )
        )

    def wait(self, wake: Callable[[], object]) -> None:
        """Have ``wake`` called at the next change."""
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(wake)

    def _wake(self) -> None:
        if self.waiters is not None:
            waiters, self.waiters = self.waiters, None
            for wake in waiters:
                wake()
