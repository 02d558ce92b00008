"""What each Op does to a record: the transition table as pure functions of (row, Op, now).

The memory store is this module and a dict. For the other stores it is the model: the conformance suite runs the same
Ops against both and compares the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from semel.core.ops import (
    Claim,
    Claimed,
    Complete,
    Existing,
    ListRecords,
    Lookup,
    Op,
    Record,
    Release,
    Renew,
    Resolve,
    SaveStep,
    make_claimed,
    make_existing,
)
from semel.core.states import (
    ABANDONED,
    ABSENT,
    DONE,
    RUNNING,
    TRANSITIONS,
    UNKNOWN,
    Move,
    State,
    Takeover,
)
from semel.errors import PolicyError

_RETRY: Final = Takeover.RETRY
_RECOVER: Final = Takeover.RECOVER
_RENEW: Final = Move.RENEW
_COMPLETE: Final = Move.COMPLETE
_CLAIMED: Final = TRANSITIONS[ABSENT, Move.CLAIM]


class Row(NamedTuple):
    """A record as the memory store holds it. Times are instants of the store's own clock, in seconds."""

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


_row: Final[Callable[[tuple[Any, ...]], Row]] = partial(tuple.__new__, Row)
"""Creates a Row from all fields in order. ``Row(...)`` is slower: it is a Python function."""


def state_at(stored: int, takeover: int, lease_left: float, expires_in: float) -> State:
    """Return the state of a record from the stored state and the time that is left, in any unit.

    An expired record counts as absent, unless its outcome is in doubt.
    """
    if stored == RUNNING:
        if lease_left > 0:
            return RUNNING
        return ABSENT if expires_in <= 0 and takeover == _RETRY else ABANDONED
    if stored == DONE:
        return DONE if expires_in > 0 else ABSENT
    return UNKNOWN


def state_of(row: Row | None, now: float) -> State:
    """Return the state of a row at the time ``now``."""
    if row is None:
        return ABSENT
    return state_at(row.state, row.takeover, row.lease_end - now, row.expires - now)


def is_expired(row: Row, now: float) -> bool:
    """Whether the row counts as absent."""
    return state_of(row, now) is ABSENT


def sweepable(row: Row, now: float) -> State | None:
    """Return the state that a sweep moves the row to, ABSENT or UNKNOWN; None if it stays as it is."""
    if is_expired(row, now):
        return ABSENT
    if row.state is RUNNING and row.lease_end <= now and row.expires <= now:
        return UNKNOWN
    return None


def show(row: Row, now: float, state: State | None = None) -> Record:
    """Return the row as a Record.

    :param state: its state at that time, if it is known.
    """
    # Unpacked at once: on Python 3.11 reading one field by its name is as slow as unpacking all of them.
    (
        id, stored, token, attempt, _, takeover, fingerprint, lease_end, created, expires, tenant, operation, key,
        snapshot, _,
    ) = row  # fmt: skip
    lease_left, expires_in = lease_end - now, expires - now
    if state is None:
        state = state_at(stored, takeover, lease_left, expires_in)
    return Record(
        id, state, token, attempt, fingerprint, snapshot, lease_left, now - created, expires_in, tenant, operation, key
    )


def is_listed(op: ListRecords, record: Record) -> bool:
    """Whether a page of records shows this one."""
    return (
        record.state is not ABSENT
        and (not op.states or record.state in op.states)
        and op.operation in (None, record.operation)
        and op.tenant in (None, record.tenant)
        and (not op.older or record.age >= op.older)
    )


def is_filtered(op: ListRecords) -> bool:
    """Whether the list leaves out records that are not absent."""
    return bool(op.states or op.older) or op.operation is not None or op.tenant is not None


def pack_place(place: object, id: bytes) -> str:
    """Return where a page has ended, as ``Listing.after``: a place in the store's order, and the id there."""
    return f"{place}~{id.hex()}"


def unpack_place(after: str) -> tuple[str, bytes]:
    """Return the place and the id. Raises PolicyError if this is not the end of a page."""
    place, _, id = after.rpartition("~")
    try:
        if place:
            return place, bytes.fromhex(id)
    except ValueError:
        pass
    raise not_a_place(after)


def not_a_place(after: str) -> PolicyError:
    return PolicyError(f"after={after[:80]!r} is not the end of a page of this store: pass on what a page returned")


def same_request(stored: bytes, claimed: bytes) -> bool:
    """Whether two fingerprints may belong to one request. An empty one matches every other."""
    return not claimed or not stored or stored == claimed


def may_take_over(owner: int, claimer: int) -> bool:
    """Whether a claimer may take over an abandoned record, by the takeover rules of both. Both must allow a re-run; a
    claimer with a recover hook always may, because it finds out what happened.
    """
    return claimer == _RECOVER or (claimer == _RETRY and owner == _RETRY)


def next_token(row: Row | None, now: float) -> int:
    """Return a token that is greater than all before it, also across a removal of the record: the microseconds of the
    store's clock, or the row's token plus one.
    """
    token = int(now * 1_000_000)
    least = 1 if row is None else row.token + 1
    return token if token > least else least


def claim(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Claimed | Existing]:
    if row is None:
        state = ABSENT
    elif row.state is DONE and row.expires > now:  # as state_of() says, in the path of every replay
        return row, make_existing((show(row, now, DONE),))
    else:
        state = state_of(row, now)
    if row is None or state is ABSENT:
        token = next_token(row, now)
        fresh = _row((
            op.id, _CLAIMED, token, 1, op.nonce, op.takeover, op.fingerprint, now + op.lease, now, now + op.ttl,
            op.tenant, op.operation, op.key, None, (),
        ))  # fmt: skip
        return fresh, make_claimed((token, 1, ()))
    if state is RUNNING and row.nonce == op.nonce:
        return row, Claimed(row.token, row.attempt, row.steps)
    if state is not ABANDONED or not same_request(row.fingerprint, op.fingerprint):
        return row, Existing(show(row, now, state))
    if not may_take_over(row.takeover, op.takeover):
        refused = row._replace(state=TRANSITIONS[state, Move.REFUSE])
        return refused, Existing(show(refused, now))
    successor = row._replace(
        state=TRANSITIONS[state, Move.TAKE_OVER],
        token=next_token(row, now),
        attempt=row.attempt + 1,
        nonce=op.nonce,
        takeover=op.takeover,
        lease_end=now + op.lease,
        expires=now + op.ttl,
    )
    return successor, Claimed(successor.token, successor.attempt, successor.steps)


def renew(row: Row | None, op: Renew, now: float) -> tuple[Row | None, bool]:
    if row is None or not _owner_may(row, op.token, _RENEW, now):
        return row, False
    return row._replace(lease_end=max(row.lease_end, now + op.lease)), True


def complete(row: Row | None, op: Complete, now: float) -> tuple[Row | None, bool]:
    if row is None:
        return row, False
    # Spelled out, because _replace() is slow, and the memory store does this in every call.
    (
        id, state, token, attempt, nonce, takeover, fingerprint, _, created, _, tenant, operation, key, _, steps,
    ) = row  # fmt: skip
    if token != op.token:
        return row, False
    if state is DONE:
        return row, True  # sent before by the same owner, whose answer was lost
    if not _owner_may(row, token, _COMPLETE, now):
        return row, False
    return _row((
        id, DONE, token, attempt, nonce, takeover, fingerprint, now, created, now + op.ttl, tenant, operation, key,
        op.snapshot, steps,
    )), True  # fmt: skip


_RELEASES: Final = {ABSENT: Move.RELEASE, ABANDONED: Move.YIELD, UNKNOWN: Move.GIVE_UP}


def release(row: Row | None, op: Release, now: float) -> tuple[Row | None, bool]:
    if row is None or not _owner_may(row, op.token, _RELEASES[op.to], now):
        return row, False
    if op.to is ABSENT:
        return None, True
    if op.to is UNKNOWN:
        return row._replace(state=UNKNOWN), True
    # A new token, so that a renewal that is still on its way cannot revive the attempt.
    return row._replace(lease_end=now, token=next_token(row, now)), True


def save_step(row: Row | None, op: SaveStep, now: float) -> tuple[Row | None, bool]:
    if row is None or not _owner_may(row, op.token, Move.SAVE_STEP, now):
        return row, False
    if any(name == op.name for name, _ in row.steps):
        return row, True
    return row._replace(steps=(*row.steps, (op.name, op.value))), True


def lookup(row: Row | None, op: Lookup, now: float) -> tuple[Row | None, Record | None]:
    return row, None if row is None or state_of(row, now) is ABSENT else show(row, now)


def resolves(op: Resolve, state: State) -> bool:
    """Whether a resolution changes a record that is in this state and has the token that the resolution names."""
    if op.states and state not in op.states:
        return False
    if state is RUNNING:
        return op.force
    if state is DONE:
        return op.token is not None and op.snapshot is None
    return state is not ABSENT


def resolve(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, State]:
    state = state_of(row, now)
    if row is None or (op.token is not None and op.token != row.token):
        return row, ABSENT
    if not resolves(op, state):
        return row, state
    # A new token, so that a late report of the lost owner is refused.
    settled = row._replace(
        state=DONE, token=next_token(row, now), snapshot=op.snapshot, lease_end=now, expires=now + op.ttl
    )
    if op.snapshot is None:
        # Expired, and not removed: so the next token is greater than this one, whatever the clock does until then.
        settled = settled._replace(expires=0.0, steps=())
    return settled, state


def _owner_may(row: Row, token: int, move: Move, now: float) -> bool:
    """Whether an owner's move is allowed. Expiry does not matter: while nobody has replaced an expired attempt, its
    owner's report counts.
    """
    state = ABANDONED if row.state is RUNNING and row.lease_end <= now else row.state
    return row.token == token and (state, move) in TRANSITIONS


RULES: Final[dict[type[Op[Any]], Callable[..., tuple[Row | None, Any]]]] = {
    Claim: claim,
    Renew: renew,
    Complete: complete,
    Release: release,
    SaveStep: save_step,
    Lookup: lookup,
    Resolve: resolve,
}
"""For each kind of Op on one record: a function of the row, the Op and the time that returns the row after it, and the
answer."""


def apply(row: Row | None, op: Op[Any], now: float) -> tuple[Row | None, Any]:
    """Return the row after ``op``, and the answer. Sweep and Count concern many rows: the store loops over them."""
    return RULES[type(op)](row, op, now)
