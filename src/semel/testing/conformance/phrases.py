"""Phrases that the scripts share: claims with sensible defaults, records brought into a state, records compared."""

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
    """A Claim, with a nonce of its own unless one is given."""
    nonce = new_nonce() if nonce is None else nonce
    return Claim(id, nonce, fingerprint, lease, ttl, takeover, tenant, operation, key)


def won(request: Claim | Elsewhere) -> Generator[Request, Any, Claimed]:
    """The claim must be won."""
    answer = yield request
    assert type(answer) is Claimed, answer
    return answer


def shown(request: Claim | Elsewhere, state: State) -> Generator[Request, Any, Record]:
    """The claim must be answered with a record in this state."""
    answer = yield request
    assert type(answer) is Existing, answer
    record: Record = answer.record
    assert record.state is state
    return record


def running(*, ttl: float = TTL, takeover: Takeover = Takeover.RETRY) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """A new record under a live lease."""
    id = new_id()
    return id, (yield from won(claim(id, ttl=ttl, takeover=takeover)))


def abandoned(
    *, ttl: float = TTL, takeover: Takeover = Takeover.RETRY, fingerprint: bytes = b""
) -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """A new record whose lease has ended (and its ttl, if that is SHORT)."""
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
    """A new record that is done."""
    id, claimed = yield from running(ttl=ttl)
    assert (yield Complete(id, claimed.token, snapshot, ttl)) is True
    return id, claimed


def unknown() -> Generator[Request, Any, tuple[bytes, Claimed]]:
    """A new record that its owner gave up."""
    id, claimed = yield from running()
    assert (yield Release(id, claimed.token, State.UNKNOWN)) is True
    return id, claimed


def assert_unchanged(id: bytes, before: Record | None) -> Script:
    """The record is as it was; its times have only run on. (What must not change it carries far longer times.)"""
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
    """Everything an owner can ask, with times that would show."""
    return [
        Renew(id, token, 50 * TTL),
        SaveStep(id, token, "stale", b"stale", 99),
        Complete(id, token, b"stale", 50 * TTL),
        Release(id, token, State.ABANDONED),
        Release(id, token, State.UNKNOWN),
        Release(id, token, State.ABSENT),
    ]


def assert_owner_is_refused(id: bytes, token: int, *, elsewhere: bool = False) -> Script:
    """Whoever holds ``token`` can do nothing to the record, and is told so."""
    before = yield Lookup(id)
    for move in owner_moves(id, token):
        answer = yield Elsewhere(move) if elsewhere else move
        assert answer is False, f"{type(move).__name__} of a stale token was not refused"
        yield from assert_unchanged(id, before)


def drained() -> Script:
    """Nothing is left to sweep, of other proofs either: from here on counts can be trusted."""
    yield PAST_SHORT
    for _ in range(1000):
        swept = yield Sweep(1000)
        if not swept.removed + swept.unknown:
            return
    raise AssertionError("the sweep always finds something: it does not remove what it counts")
