"""What the cache may answer, and what it is told: the one place where that is decided, for threads and for a loop.

The store behind is the primary. The cache may say two things, and everything else is asked of the primary.

*It is done, and this is the answer.* A copy is made only of what the primary has shown, or confirmed, to be DONE. The
table of states (``core/states.py``) has one move that leads out of DONE, and that is EXPIRE: nobody can release,
resolve or overwrite a finished record, not by force either. So a copy need never be taken back, and one that cannot be
reached any more can do no harm; it only has to end before its record does (``copies.py``).

*It was claimed a moment ago, and still runs.* This can become untrue, so a mark lives for seconds only: no longer than
``in_progress_ttl``, and always shorter than the lease that the primary gave, so that whoever may take over an
abandoned attempt finds no mark in the way. It is made only for attempts that take longer than ``mark_after``. Before
an owner is told that its attempt is over, its mark is gone; so is that of an operation which a person resolves or
releases. Where that fails because the cache cannot be reached, or where a person overrules an attempt of another
process in the moment before it is marked, a duplicate may be told for ``in_progress_ttl`` at most to come again later;
what runs is not touched by it. A mark answers a claim once: when the same call asks again, because its policy waits,
it asks the primary. And it never answers the claim that it stands for, which is sent again when its answer was lost.

Nothing here does I/O.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Final

from semel.core.ops import Claim, Claimed, Complete, Existing, Op, Record, Release, Renew, Resolve
from semel.core.states import DONE, State
from semel.stores.tiered.copies import MARGIN
from semel.stores.tiered.ports import Found, Tally, Write

__all__ = ["Attempt", "Rules"]

MOST_ATTEMPTS: Final = 10_000
"""Attempts under way that are kept in mind; of more, no mark and no copy is made until somebody asks for them."""
MOST_NONCES: Final = 4096
"""Claims that were answered by a mark and may come again, kept in mind."""
SHARE_OF_LEASE: Final = 0.8
"""A mark ends when so much of the lease is over."""


class Attempt:
    """An attempt that was claimed through this store: what its copy will need."""

    __slots__ = ("_lock", "at", "claim", "ends", "marked", "token")

    def __init__(self, claim: Claim, token: int, at: float, lock: threading.Lock) -> None:
        self.claim = claim
        self.token = token
        self.at = at
        self.marked = False
        self.ends = 0
        """How often its owner has said that it is over."""
        self._lock = lock

    def mark(self) -> bool:
        """Whether the mark may be written, asked right before."""
        with self._lock:
            self.marked = self.marked or not self.ends
            return not self.ends

    def end(self) -> None:
        """No mark is written from here on; ``marked`` says whether one was."""
        with self._lock:
            self.ends += 1

    def end_quietly(self) -> None:
        """The same, without a word of the owner."""
        with self._lock:
            self.ends = max(1, self.ends)


class Rules:
    """The decisions of one store."""

    def __init__(
        self, tally: Tally, *, keep: float, in_progress_ttl: float, mark_after: float, max_copy_bytes: int
    ) -> None:
        self.tally = tally
        self._keep = keep
        self._in_progress_ttl = in_progress_ttl
        self._mark_after = mark_after
        self._max_copy_bytes = max_copy_bytes
        self.renew()

    def renew(self) -> None:
        """Begin anew: in a forked child the attempts are the parent's."""
        self._lock = threading.Lock()
        self._attempts: dict[bytes, Attempt] = {}
        self._nonces: dict[int, None] = {}

    def answer(self, op: Claim, found: Found | None) -> Existing | None:
        """What the cache has found, as the answer to a claim; None: ask the primary."""
        if found is not None:
            if found.record.state is DONE:
                self.tally.replayed += 1
                return Existing(found.record)
            if found.nonce != op.nonce and op.nonce not in self._nonces:
                if len(self._nonces) >= MOST_NONCES:
                    self._nonces = {}
                self._nonces[op.nonce] = None
                self.tally.turned_away += 1
                return Existing(found.record)
        self.tally.missed += 1
        return None

    def ending(self, op: Op[Any]) -> Attempt | None:
        """The owner is about to tell the primary that its attempt is over. Remember it until that is done."""
        if not isinstance(op, (Complete, Release)):
            return None
        attempt = self._attempts.get(op.id)
        if attempt is None or attempt.token != op.token:
            return None
        attempt.end()
        return attempt

    def failed(self, op: Op[Any], attempt: Attempt | None, now: float) -> list[Write]:
        """The primary has not answered. What became of the attempt is not known here any more."""
        if attempt is None:
            return []
        self._forget(attempt)
        return [_nothing(op.id, now)] if attempt.marked else []

    def told(
        self, op: Op[Any], answer: Any, at: float, now: float, attempt: Attempt | None
    ) -> tuple[list[Write], bool]:
        """What to write now that the primary has answered, and whether the caller waits until it is written.

        ``at``: the moment when the primary was asked; ``attempt``: what ``ending`` gave.
        """
        if isinstance(op, Claim):
            writes = self._claimed(op, answer, at) if type(answer) is Claimed else self._shown(answer, at, now)
            return writes, False
        if isinstance(op, (Complete, Release)):
            return self._ended(op, answer, at, now, attempt)
        if isinstance(op, Renew):
            return (self._renewed(op, at) if answer is True else []), False
        if isinstance(op, Resolve) and answer in (State.UNKNOWN, State.ABANDONED, State.RUNNING):
            overruled = self._attempts.get(op.id) if op.force or answer is not State.RUNNING else None
            if overruled is not None:
                self._forget(overruled)
            return [_nothing(op.id, now)], True
        return [], False

    def _claimed(self, op: Claim, answer: Claimed, at: float) -> list[Write]:
        before = self._attempts.get(op.id)
        if before is not None:
            if before.token == answer.token:
                return []  # the same claim, sent again
            self._forget(before)
        if answer.attempt != 1:
            return []  # the record has the fingerprint and the age of an attempt that we have not seen
        if len(self._attempts) >= MOST_ATTEMPTS:
            with contextlib.suppress(RuntimeError):  # another thread is at it
                self._forget(next(iter(self._attempts.values())))
        attempt = self._attempts[op.id] = Attempt(op, answer.token, at, self._lock)
        return self._mark(attempt, at, op.lease, self._mark_after)

    def _ended(
        self, op: Complete | Release, answer: Any, at: float, now: float, attempt: Attempt | None
    ) -> tuple[list[Write], bool]:
        if attempt is None:
            # Claimed elsewhere, or taken over: whoever claimed it may have marked it.
            return ([_nothing(op.id, now)], True) if answer is True else ([], False)
        self._forget(attempt)
        # Done is what was answered with True: NotWritten, too, says that it is not. And of completions that were under
        # way together nobody knows which one the primary has kept.
        if answer is True and isinstance(op, Complete) and attempt.ends == 1:
            copy = self._copy(_finished(attempt, op, at), at, now)
            if copy is not None:
                return [copy], attempt.marked
        return ([_nothing(op.id, now)], True) if attempt.marked else ([], False)

    def _forget(self, attempt: Attempt) -> None:
        attempt.end_quietly()
        if self._attempts.get(attempt.claim.id) is attempt:
            self._attempts.pop(attempt.claim.id, None)

    def _renewed(self, op: Renew, at: float) -> list[Write]:
        attempt = self._attempts.get(op.id)
        if attempt is None or attempt.token != op.token:
            return []
        return self._mark(attempt, at, op.lease, 0.0)

    def _mark(self, attempt: Attempt, at: float, lease: float, delay: float) -> list[Write]:
        until = min(at + delay + self._in_progress_ttl, at + lease * SHARE_OF_LEASE)
        if until <= at + delay:
            return []
        op, age = attempt.claim, at - attempt.at
        record = Record(
            op.id, State.RUNNING, attempt.token, 1, op.fingerprint, None, lease, age, op.ttl - age,
            op.tenant, op.operation, op.key,
        )  # fmt: skip
        return [Write(op.id, record, at, until, op.nonce, delay, attempt.mark)]

    def _shown(self, answer: Existing, at: float, now: float) -> list[Write]:
        copy = self._copy(answer.record, at, now) if answer.record.state is DONE else None
        return [] if copy is None else [copy]

    def _copy(self, record: Record, at: float, now: float) -> Write | None:
        until = min(at + record.expires_in - MARGIN, now + self._keep)
        if until <= now or len(record.snapshot or b"") > self._max_copy_bytes:
            return None
        return Write(record.id, record, at, until)


def _finished(attempt: Attempt, op: Complete, at: float) -> Record:
    """The record as the primary has it now: a first attempt, completed by this Op and by no earlier one."""
    claim = attempt.claim
    return Record(
        claim.id, DONE, attempt.token, 1, claim.fingerprint, op.snapshot, 0.0, at - attempt.at, op.ttl,
        claim.tenant, claim.operation, claim.key,
    )  # fmt: skip


def _nothing(id: bytes, now: float) -> Write:
    return Write(id, None, now, now)
