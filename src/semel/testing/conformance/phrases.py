"""Parts that the scripts share: claims with defaults, records in a given state, and comparisons of records."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Op, Record, Release, Renew, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.testing.conformance.script import (
    LIVE,
    PAST_SHORT,
    SHORT,
    TTL,
    Elsewhere,
    Request,
    Script,
    new_id,
    new_nonce,
)

__all__ = [
    "abandoned",
    "abandoned_many",
    "assert_owner_is_refused",
    "assert_unchanged",
    "claim",
    "done",
    "drained",
    "running",
    "shown",
    "unknown",
    "won",
]


def claim(
    id: bytes,
    *,
    nonce: int | None = None,
    fingerprint: bytes = b"",
    lease: float = LIVE,
    ttl: float = TTL,
    takeover: Takeover = Takeover.RETRY,
    tenant: str = "acme",
    operation: str = "conformance",
    key: str | None = "key",
) -> Claim:
    """Return a Claim. The nonce defaults to a new one."""
    nonce = new_nonce() if nonce is None else nonce
    return Claim(id, nonce, fingerprint, lease, ttl, takeover, tenant, operation, key)


def won(request: Claim | Elsewhere) -> Generator[Request, Any, Claimed]:
    """Send a claim that must be won. Returns the answer."""
    answer = yield request
    assert type(answer) is Claimed, answer
    return answer


def shown(request: Claim | Elsewhere, state: State) -> Generator[Request, Any, Record]:
    """Send a claim that must be answered with a record in this state. Returns the record."""
    answer = yield request
    assert type(answer) is Existing, answer
    record: Record = answer.record
    assert record.state is state
    return record


def running(*, ttl: float = TTL, takeover: Takeover = Takeover.RETRY) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a record with a live lease. Returns its id and the answer to the claim."""
    id = new_id()
    return id, (yield from won(claim(id, ttl=ttl, takeover=takeover)))


def abandoned(
    *, ttl: float = TTL, takeover: Takeover = Takeover.RETRY, fingerprint: bytes = b""
) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a record whose lease has ended, and its ttl too if that is SHORT."""
    id = new_id()
    claimed = yield from won(claim(id, lease=SHORT, ttl=ttl, takeover=takeover, fingerprint=fingerprint))
    yield PAST_SHORT
    return id, claimed


def abandoned_many(
    count: int, *, ttl: float = TTL, takeover: Takeover = Takeover.RETRY
) -> Generator[Request, Any, list[bytes]]:
    ids = [new_id() for _ in range(count)]
    for id in ids:
        yield from won(claim(id, lease=SHORT, ttl=ttl, takeover=takeover))
    yield PAST_SHORT
    return ids


def done(snapshot: bytes = b"answer", *, ttl: float = TTL) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a finished record."""
    id, claimed = yield from running(ttl=ttl)
    assert (yield Complete(id, claimed.token, snapshot, ttl)) is True
    return id, claimed


def unknown() -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """Make a record that its owner released to UNKNOWN."""
    id, claimed = yield from running()
    assert (yield Release(id, claimed.token, State.UNKNOWN)) is True
    return id, claimed


def assert_unchanged(id: bytes, before: Record | None) -> Script:
    """Check that the record is the same, except for the time that has passed.

    An Op that must not change the record carries far longer times, so a change of the times would show.
    """
    after = yield Lookup(id)
    if before is None:
        assert after is None
        return
    assert after is not None
    assert (after.state, after.token, after.attempt) == (before.state, before.token, before.attempt)
    assert (after.fingerprint, after.snapshot) == (before.fingerprint, before.snapshot)
    assert (after.tenant, after.operation, after.key) == (before.tenant, before.operation, before.key)
    assert before.lease_left - LIVE < after.lease_left <= before.lease_left + 0.001
    assert before.expires_in - LIVE < after.expires_in <= before.expires_in + 0.001
    assert before.age - 0.001 <= after.age < before.age + LIVE


def owner_moves(id: bytes, token: int) -> list[Op[bool]]:
    """Return every Op of an owner, with times so long that a change would show."""
    return [
        Renew(id, token, 50 * TTL),
        SaveStep(id, token, "stale", b"stale", 99),
        Complete(id, token, b"stale", 50 * TTL),
        Release(id, token, State.ABANDONED),
        Release(id, token, State.UNKNOWN),
        Release(id, token, State.ABSENT),
    ]


def assert_owner_is_refused(id: bytes, token: int, *, elsewhere: bool = False) -> Script:
    """Check that every Op with this token is answered with False and changes nothing."""
    before = yield Lookup(id)
    for move in owner_moves(id, token):
        answer = yield Elsewhere(move) if elsewhere else move
        assert answer is False, f"{type(move).__name__} with a stale token was not refused"
        yield from assert_unchanged(id, before)


def drained() -> Script:
    """Sweep until nothing is left, also of other proofs, so that later counts are exact."""
    yield PAST_SHORT
    for _ in range(1000):
        swept = yield Sweep(1000)
        if not swept.removed + swept.unknown:
            return
    raise AssertionError("the sweep never ends: it does not remove what it counts")
