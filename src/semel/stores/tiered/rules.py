"""The rules of a tiered store: what the cache may answer, and what is written to it. For sync and async stores.

The primary store decides. The cache may give two answers; everything else goes to the primary.

*The operation is done, and this is its result.* A copy is only made of a record that the primary has shown, or
confirmed, to be DONE. In the table of states (``core/states.py``) only EXPIRE and FREE lead out of DONE. So a copy has
to expire before its record does (``copies.py``). And before the primary frees a record, the cache notes that copies
with its token, and with older ones, are invalid. That note outlives them all. A process that was paused with an older
answer of the primary may still write a copy, but nobody gets it. If the note cannot be made, the record is not freed.
If the cache loses the note, as it may lose everything, a late copy can be replayed until it ends, for ``keep`` at most.

*The operation was claimed a moment ago and is still running.* This can become untrue, so such a mark lives only for
seconds: at most ``in_progress_ttl``, and always shorter than the lease, so that no mark hides an abandoned attempt from
a caller that may take it over. It is only made for attempts that take longer than ``mark_after``. It is removed before
the owner learns that its attempt has ended, and when a person resolves or releases the operation. There are two ways in
which a mark can outlive its attempt: the cache is down when the mark should be removed, or a person overrules an
attempt of another process just before it is marked. Then a duplicate may get InProgress for up to ``in_progress_ttl``;
the running attempt is not affected. A mark answers a call only once: if the call waits and claims again, the claim goes
to the primary. And a mark never answers the claim that it was made for, which is sent again if its answer was lost.

Nothing here does I/O.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from dataclasses import dataclass
from typing import Any, Final

from semel.core.ops import Claim, Claimed, Complete, Existing, Op, Record, Release, Renew, Resolve
from semel.core.policy import Duration, seconds
from semel.core.semantics import resolves
from semel.core.states import DONE, State, Takeover
from semel.engine.ports import STORE_MEMBERS, has_members, is_async_store
from semel.errors import ConfigurationError
from semel.stores.tiered.cache import CACHE_MEMBERS, CachedRecord, Tally, Write
from semel.stores.tiered.copies import MARGIN

KEEP: Final = "1h"
IN_PROGRESS_TTL: Final = "5s"
MARK_AFTER: Final = "50ms"
MAX_COPY_BYTES: Final = 256 * 1024
MAX_ATTEMPTS: Final = 10_000
"""The most running attempts that are tracked. Beyond that, the oldest get no mark, and no copy until the next claim."""
MAX_NONCES: Final = 4096
"""The most claims that are remembered because a mark has answered them and they may be sent again."""
NAME_TTL: Final = 10 * 365 * 86400.0
"""How long a primary has its name. When it gets a new one, the copies under the old one are not found any more."""
NAME_OPERATION: Final = "semel.tiered"
"""The operation of the record that is the name. Nobody may delete it while processes run: those that know the name
could not drop the copies of those that make a new one.
"""
SHARE_OF_LEASE: Final = 0.8
"""A mark ends when this share of the lease is over."""

_EXAMPLES: Final = {
    False: "TieredStore(PostgresStore(url), RedisCache(redis_url))",
    True: "AsyncTieredStore(AsyncPostgresStore(url), AsyncRedisCache(redis_url))",
}
_URL_EXAMPLES: Final = {
    False: "open_store('tiered:postgresql://…,redis://…')",
    True: "open_async_store('tiered:postgresql://…,redis://…')",
}


def naming_claim() -> Claim:
    """Return the claim of the record whose fingerprint is the name of a primary."""
    return Claim(
        b"semel-tier-name.", int.from_bytes(os.urandom(7)), os.urandom(16), 10.0, NAME_TTL, Takeover.RETRY,
        "semel", NAME_OPERATION, "name",
    )  # fmt: skip


@dataclass(slots=True, eq=False)
class TrackedAttempt:
    """An attempt that was claimed through this store, with the data for its copy."""

    claim: Claim
    token: int
    at: float
    _lock: threading.Lock
    marked: bool = False
    ends: int = 0
    """How often its owner has reported its end."""

    def mark(self) -> bool:
        """Return whether the mark may be written. Called immediately before the write."""
        with self._lock:
            self.marked = self.marked or not self.ends
            return not self.ends

    def end(self) -> None:
        """The owner reports the end. No mark is written from now on; ``marked`` says whether one was."""
        with self._lock:
            self.ends += 1

    def stop_tracking(self) -> None:
        """Write no mark from now on, although the owner has not reported the end."""
        with self._lock:
            self.ends = max(1, self.ends)


class TierRules:
    """The decisions of one store."""

    def __init__(
        self, tally: Tally, *, keep: Duration, in_progress_ttl: Duration, mark_after: Duration, max_copy_bytes: int
    ) -> None:
        if type(max_copy_bytes) is not int or max_copy_bytes < 0:
            raise ConfigurationError(f"max_copy_bytes is a number of bytes, not {max_copy_bytes!r}")
        self.tally = tally
        self._keep = seconds(keep, "keep")
        self._in_progress_ttl = seconds(in_progress_ttl, "in_progress_ttl")
        self._mark_after = seconds(mark_after, "mark_after")
        self._max_copy_bytes = max_copy_bytes
        self.reset()

    def reset(self) -> None:
        """Forget all attempts: in a forked child they belong to the parent."""
        self._lock = threading.Lock()
        self._attempts: dict[bytes, TrackedAttempt] = {}
        self._nonces: dict[int, None] = {}

    def answer(self, op: Claim, found: CachedRecord | None) -> Existing | None:
        """Return the cache's entry as the answer to a claim, or None to ask the primary."""
        if found is not None:
            if found.record.state is DONE:
                self.tally.replayed += 1
                return Existing(found.record)
            if found.nonce != op.nonce and op.nonce not in self._nonces:
                if len(self._nonces) >= MAX_NONCES:
                    self._nonces = {}
                self._nonces[op.nonce] = None
                self.tally.turned_away += 1
                return Existing(found.record)
        self.tally.missed += 1
        return None

    def before(self, op: Op[Any]) -> TrackedAttempt | None:
        """Call before an Op goes to the primary. Returns the attempt that it ends, if it ends one that is tracked.

        The attempt stays tracked until the primary has answered.
        """
        if not isinstance(op, (Complete, Release)):
            return None
        attempt = self._attempts.get(op.id)
        if attempt is None or attempt.token != op.token:
            return None
        attempt.end()
        return attempt

    def after_error(self, op: Op[Any], attempt: TrackedAttempt | None, now: float) -> list[Write]:
        """Return what to write when the primary has failed. The state of the attempt is unknown from then on."""
        if attempt is None:
            return []
        self._forget(attempt)
        return [_delete(op.id, now)] if attempt.marked else []

    def after(
        self, op: Op[Any], answer: Any, at: float, now: float, attempt: TrackedAttempt | None
    ) -> tuple[list[Write], bool]:
        """Return what to write now that the primary has answered, and whether the caller waits until it is written.

        :param at: when the Op was sent to the primary.
        :param attempt: what ``before`` returned.
        """
        if isinstance(op, Claim):
            writes = self._claimed(op, answer, at) if type(answer) is Claimed else self._found(answer, at, now)
            return writes, False
        if isinstance(op, (Complete, Release)):
            return self._ended(op, answer, at, now, attempt)
        if isinstance(op, Renew):
            return (self._renewed(op, at) if answer is True else []), False
        if isinstance(op, Resolve) and answer is not DONE and resolves(op, answer):
            overruled = self._attempts.get(op.id)
            if overruled is not None:
                self._forget(overruled)
            return [_delete(op.id, now)], True
        return [], False

    def _claimed(self, op: Claim, answer: Claimed, at: float) -> list[Write]:
        before = self._attempts.get(op.id)
        if before is not None:
            if before.token == answer.token:
                return []  # the same claim, sent again
            self._forget(before)
        if answer.attempt != 1:
            return []  # the record has the fingerprint and the age of an attempt that we have not seen
        if len(self._attempts) >= MAX_ATTEMPTS:
            with contextlib.suppress(RuntimeError):  # another thread is changing the dict
                self._forget(next(iter(self._attempts.values())))
        attempt = self._attempts[op.id] = TrackedAttempt(op, answer.token, at, self._lock)
        return self._mark(attempt, at, op.lease, self._mark_after)

    def _ended(
        self, op: Complete | Release, answer: Any, at: float, now: float, attempt: TrackedAttempt | None
    ) -> tuple[list[Write], bool]:
        if attempt is None:
            # It was claimed by another process, or taken over, so another process may have marked it.
            return ([_delete(op.id, now)], True) if answer is True else ([], False)
        self._forget(attempt)
        # Only True means done; NotWritten does not. And if several completions were sent at once, it is unknown which
        # of them the primary has stored.
        if answer is True and isinstance(op, Complete) and attempt.ends == 1:
            copy = self._copy(_finished_record(attempt, op, at), at, now)
            if copy is not None:
                return [copy], attempt.marked
        return ([_delete(op.id, now)], True) if attempt.marked else ([], False)

    def _forget(self, attempt: TrackedAttempt) -> None:
        attempt.stop_tracking()
        if self._attempts.get(attempt.claim.id) is attempt:
            self._attempts.pop(attempt.claim.id, None)

    def _renewed(self, op: Renew, at: float) -> list[Write]:
        attempt = self._attempts.get(op.id)
        if attempt is None or attempt.token != op.token:
            return []
        return self._mark(attempt, at, op.lease, 0.0)

    def _mark(self, attempt: TrackedAttempt, at: float, lease: float, delay: float) -> list[Write]:
        until = min(at + delay + self._in_progress_ttl, at + lease * SHARE_OF_LEASE)
        if until <= at + delay:
            return []
        op, age = attempt.claim, at - attempt.at
        record = Record(
            op.id, State.RUNNING, attempt.token, 1, op.fingerprint, None, lease, age, op.ttl - age,
            op.tenant, op.operation, op.key,
        )  # fmt: skip
        return [Write(op.id, record, at, until, op.nonce, delay, attempt.mark)]

    def _found(self, answer: Existing, at: float, now: float) -> list[Write]:
        copy = self._copy(answer.record, at, now) if answer.record.state is DONE else None
        return [] if copy is None else [copy]

    def _copy(self, record: Record, at: float, now: float) -> Write | None:
        until = min(at + record.expires_in - MARGIN, now + self._keep)
        if until <= now or len(record.snapshot or b"") > self._max_copy_bytes:
            return None
        return Write(record.id, record, at, until)


def _finished_record(attempt: TrackedAttempt, op: Complete, at: float) -> Record:
    """Return the record as the primary has it now: a first attempt, completed by this Op and by no earlier one."""
    claim = attempt.claim
    return Record(
        claim.id, DONE, attempt.token, 1, claim.fingerprint, op.snapshot, 0.0, at - attempt.at, op.ttl,
        claim.tenant, claim.operation, claim.key,
    )  # fmt: skip


def _delete(id: bytes, now: float) -> Write:
    return Write(id, None, now, now)


def check_parts(primary: Any, cache: Any, *, awaited: bool) -> None:
    """Raise ConfigurationError unless these are a store and a cache, both sync or both async.

    Otherwise the first call would fail with a missing attribute, or with a coroutine that nobody awaits.
    """
    remedy = f"write {_EXAMPLES[awaited]}, or {_URL_EXAMPLES[awaited]}"
    if _is_cache(primary) and _is_store(cache):
        raise ConfigurationError(f"a tiered store takes the store first, and then the cache: {remedy}")
    if not _is_store(primary):
        raise ConfigurationError(f"the primary of a tiered store is a store, not {_describe(primary)}: {remedy}")
    if not _is_cache(cache):
        raise ConfigurationError(f"the cache of a tiered store is a cache, not {_describe(cache)}: {remedy}")
    for part, is_async in ((primary, is_async_store(primary)), (cache, inspect.iscoroutinefunction(cache.get))):
        if is_async is not awaited:
            raise ConfigurationError(
                f"{type(part).__name__} is {'sync' if awaited else 'async'}, and both parts of a tiered store must be "
                f"of its own kind: write {_EXAMPLES[False]}, or in an async program {_EXAMPLES[True]}"
            )


def _is_store(part: Any) -> bool:
    """Whether it has the members of a store. Those of an async store have the same names."""
    return not inspect.isclass(part) and has_members(part, STORE_MEMBERS)


def _is_cache(part: Any) -> bool:
    return not inspect.isclass(part) and has_members(part, CACHE_MEMBERS)


def _describe(part: Any) -> str:
    """Describe it for an error message. A string is not quoted, because it may be a URL with a password."""
    if isinstance(part, str):
        return "a text"
    return f"the class {part.__name__}" if inspect.isclass(part) else type(part).__name__
