"""What each Op does to a record: the transition table put to work, as pure functions of (record, Op, now).

The memory store is this module and a dict. For the stores that speak to a server it is the model: the conformance suite
runs the same Ops against both and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    Lookup,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
)
from semel.core.states import TRANSITIONS, Move, State, Takeover, follow

__all__ = ["Row", "apply", "expired", "state_of", "sweepable"]


_RUNNING: Final = TRANSITIONS[State.ABSENT, Move.CLAIM]


class Row(NamedTuple):
    """A record as it is kept: instants of the store's own clock, in seconds."""

    id: bytes
    state: State
    token: int
    attempt: int
    nonce: int
    takeover: Takeover
    fingerprint: bytes
    lease_end: float
    created: float
    expires: float
    tenant: str
    operation: str
    key: str | None
    snapshot: bytes | None = None
    steps: tuple[tuple[str, bytes], ...] = ()


def state_of(row: Row | None, now: float) -> State:
    """The state of a row at a moment: what is written, and what the clock makes of it."""
    if row is None or expired(row, now):
        return State.ABSENT
    if row.state is State.RUNNING and row.lease_end <= now:
        return State.ABANDONED
    return row.state


def expired(row: Row, now: float) -> bool:
    """Whether the row counts as absent: past its time, and nothing about it is in doubt."""
    if row.expires > now:
        return False
    return row.state is State.DONE or (
        row.state is State.RUNNING and row.lease_end <= now and row.takeover is Takeover.RETRY
    )


def sweepable(row: Row, now: float) -> State | None:
    """What a sweep makes of the row: ABSENT, UNKNOWN, or None to leave it."""
    if expired(row, now):
        return State.ABSENT
    if row.state is State.RUNNING and row.lease_end <= now and row.expires <= now:
        return State.UNKNOWN
    return None


def show(row: Row, now: float) -> Record:
    """The row as readers see it."""
    return Record(
        row.id,
        state_of(row, now),
        row.token,
        row.attempt,
        row.fingerprint,
        row.snapshot,
        row.lease_end - now,
        now - row.created,
        row.expires - now,
        row.tenant,
        row.operation,
        row.key,
    )


def same_request(row: Row, fingerprint: bytes) -> bool:
    return not fingerprint or not row.fingerprint or row.fingerprint == fingerprint


def may_take_over(row: Row, claim: Claim) -> bool:
    """Both must allow a plain re-run; a claimer that can find out what happened may always look."""
    return claim.takeover is Takeover.RECOVER or (claim.takeover is Takeover.RETRY and row.takeover is Takeover.RETRY)


def next_token(row: Row | None, now: float) -> int:
    """Grows with every attempt, also across a removal of the record: microseconds of the store's clock, or one more."""
    return max(row.token + 1 if row else 1, int(now * 1_000_000))


def claim(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Claimed | Existing]:
    state = state_of(row, now)
    if row is None or state is State.ABSENT:
        token = next_token(row, now)
        fresh = Row(
            op.id,
            _RUNNING,
            token,
            1,
            op.nonce,
            op.takeover,
            op.fingerprint,
            now + op.lease,
            now,
            now + op.ttl,
            op.tenant,
            op.operation,
            op.key,
        )
        return fresh, Claimed(token, 1)
    if state is State.RUNNING and row.nonce == op.nonce:
        return row, Claimed(row.token, row.attempt, row.steps)
    if state is not State.ABANDONED or not same_request(row, op.fingerprint):
        return row, Existing(show(row, now))
    if not may_take_over(row, op):
        refused = row._replace(state=TRANSITIONS[state, Move.REFUSE])
        return refused, Existing(show(refused, now))
    taken = row._replace(
        state=TRANSITIONS[state, Move.TAKE_OVER],
        token=next_token(row, now),
        attempt=row.attempt + 1,
        nonce=op.nonce,
        takeover=op.takeover,
        lease_end=now + op.lease,
        expires=now + op.ttl,
    )
    return taken, Claimed(taken.token, taken.attempt, taken.steps)


def renew(row: Row | None, op: Renew, now: float) -> tuple[Row | None, bool]:
    if row is None or not _owner_may(row, op.token, Move.RENEW, now):
        return row, False
    return row._replace(lease_end=now + op.lease), True


def complete(row: Row | None, op: Complete, now: float) -> tuple[Row | None, bool]:
    if row is None or row.token != op.token:
        return row, False
    if row.state is State.DONE:
        return row, True  # said before, by the same owner: its answer was lost on the way
    if not _owner_may(row, op.token, Move.COMPLETE, now):
        return row, False
    # Spelled out, for _replace() is slow and this is done for every call of the memory store.
    return Row(
        row.id, State.DONE, row.token, row.attempt, row.nonce, row.takeover, row.fingerprint, now, row.created,
        now + op.ttl, row.tenant, row.operation, row.key, op.snapshot, row.steps,
    ), True  # fmt: skip


_RELEASES: Final = {State.ABSENT: Move.RELEASE, State.ABANDONED: Move.YIELD, State.UNKNOWN: Move.GIVE_UP}


def release(row: Row | None, op: Release, now: float) -> tuple[Row | None, bool]:
    if row is None or not _owner_may(row, op.token, _RELEASES[op.to], now):
        return row, False
    if op.to is State.ABSENT:
        return None, True
    if op.to is State.UNKNOWN:
        return row._replace(state=State.UNKNOWN), True
    return row._replace(lease_end=now), True


def save_step(row: Row | None, op: SaveStep, now: float) -> tuple[Row | None, bool]:
    if row is None or not _owner_may(row, op.token, Move.SAVE_STEP, now):
        return row, False
    if any(name == op.name for name, _ in row.steps):
        return row, True
    return row._replace(steps=(*row.steps, (op.name, op.value))), True


def lookup(row: Row | None, op: Lookup, now: float) -> tuple[Row | None, Record | None]:
    return row, None if row is None or state_of(row, now) is State.ABSENT else show(row, now)


def resolve(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, State]:
    state = state_of(row, now)
    if row is None or not (state in (State.UNKNOWN, State.ABANDONED) or (op.force and state is State.RUNNING)):
        return row, state
    if op.snapshot is None:
        return None, state
    # A new token, so that the lost owner, should it come back, finds its own stale.
    return (
        row._replace(
            state=State.DONE,
            token=next_token(row, now),
            snapshot=op.snapshot,
            lease_end=now,
            expires=now + op.ttl,
        ),
        state,
    )


def _owner_may(row: Row, token: int, move: Move, now: float) -> bool:
    """Expiry is left aside: while nobody has taken the place of an expired attempt, its owner's word still counts."""
    state = State.ABANDONED if row.state is State.RUNNING and row.lease_end <= now else row.state
    return row.token == token and follow(state, move) is not None


_APPLY: Final[dict[type[Op[Any]], Callable[..., tuple[Row | None, Any]]]] = {
    Claim: claim,
    Renew: renew,
    Complete: complete,
    Release: release,
    SaveStep: save_step,
    Lookup: lookup,
    Resolve: resolve,
}


def apply(row: Row | None, op: Op[Any], now: float) -> tuple[Row | None, Any]:
    """The row after ``op``, and the Op's answer. Sweep is over many rows and is the store's own loop."""
    return _APPLY[type(op)](row, op, now)
