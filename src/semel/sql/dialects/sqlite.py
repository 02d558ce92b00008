"""SQLite: each Op as a program of small statements, atomic because one writer at a time holds the file.

A program reads first. If that answers the Op (a replay), it never asks for the write lock. Otherwise the first
statement that writes runs inside the writer's transaction and checks again what was read, because the record may have
changed in between. The writer gives that statement the time at which it got the lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

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
    SaveStep,
    Sweep,
    Swept,
)
from semel.core.semantics import Row, may_take_over, not_a_place, same_request, state_at
from semel.core.states import State, Takeover
from semel.core.trail.moments import TRAIL_OPS
from semel.core.transactional import Keep, Lock, Occupied
from semel.errors import StoreUnavailable
from semel.sql.dialects.records import RECORD_OPS, TRIES, RecordTable, find_records, record_program
from semel.sql.inbox import INBOX_OPS, inbox_program
from semel.sql.outbox import RELAY_OPS, sqlite_program
from semel.sql.program import Program, Rows, Statement, load_queries
from semel.sql.trail import trail_program

_Q: Final = load_queries("semel.sql.dialects", "sqlite.sql")
_FIND, _CLAIM, _COMPLETE = _Q["find"], _Q["claim"], _Q["complete"]

_LATEST: Final = 2**63 - 1

Clock = Callable[[], int]


def _micros(seconds: float) -> int:
    return int(seconds * 1_000_000)


def claim(op: Claim, clock: Clock) -> Program[Claimed | Existing]:
    for _ in range(TRIES):
        rows = yield Statement(_FIND, {"id": op.id})
        now = clock()
        if not rows:
            state = State.ABSENT
        else:
            stored, token, attempt, fingerprint, snapshot, lease_end, created, expires, nonce, *ownership = rows[0]
            takeover, origin, steps = ownership
            state = state_at(stored, takeover, lease_end - now, expires - now)
            if state is State.RUNNING and nonce == op.nonce:
                return Claimed(token, attempt, (yield from _steps(op.id, origin, steps)))
            record = Record(
                op.id, state, token, attempt, fingerprint, snapshot, (lease_end - now) / 1e6, (now - created) / 1e6,
                (expires - now) / 1e6, op.tenant, op.operation, op.key,
            )  # fmt: skip
        if state is State.ABSENT:
            values = {
                "id": op.id, "takeover": op.takeover, "now": now, "nonce": op.nonce, "lease": int(op.lease * 1_000_000),
                "ttl": int(op.ttl * 1_000_000), "fingerprint": op.fingerprint, "tenant": op.tenant,
                "operation": op.operation, "key": op.key,
            }  # fmt: skip
            won = yield Statement(_CLAIM, values)
            if won:
                return Claimed(won[0][0], 1)
            continue
        if state is not State.ABANDONED or not same_request(fingerprint, op.fingerprint):
            return Existing(record)
        if may_take_over(takeover, op.takeover):
            won = yield _Q["take_over"](
                id=op.id, token=token, takeover=op.takeover, now=clock(), nonce=op.nonce, lease=_micros(op.lease),
                ttl=_micros(op.ttl),
            )  # fmt: skip
            if won:
                return Claimed(won[0][0], won[0][1], (yield from _steps(op.id, origin, steps)))
        else:
            yield _Q["refuse"](id=op.id, token=token, now=clock())
    raise StoreUnavailable(f"the record changed {TRIES} times while it was being claimed")


def _steps(id: bytes, origin: int, steps: int) -> Program[tuple[tuple[str, bytes], ...]]:
    if not steps:
        return ()
    return tuple((name, value) for name, value in (yield _Q["steps"](id=id, origin=origin)))


def renew(op: Renew, clock: Clock) -> Program[bool]:
    return bool((yield _Q["renew"](id=op.id, token=op.token, now=clock(), lease=_micros(op.lease))))


def complete(op: Complete, clock: Clock) -> Program[bool]:
    values = {"id": op.id, "token": op.token, "snapshot": op.snapshot, "ttl": int(op.ttl * 1_000_000)}
    if (yield Statement(_COMPLETE, values)):
        return True
    return bool((yield _Q["completed"](id=op.id, token=op.token)))


def release(op: Release, clock: Clock) -> Program[bool]:
    if op.to is State.ABSENT:
        gone = yield _Q["release"](id=op.id, token=op.token)
        if gone and gone[0][0]:
            yield _Q["forget_steps"](id=op.id)
        return bool(gone)
    if op.to is State.UNKNOWN:
        return bool((yield _Q["give_up"](id=op.id, token=op.token)))
    return bool((yield _Q["yield_lease"](id=op.id, token=op.token, now=clock())))


def save_step(op: SaveStep, clock: Clock | None = None) -> Program[bool]:
    held = yield _Q["count_step"](id=op.id, token=op.token)
    if not held:
        return False
    yield _Q["save_step"](id=op.id, origin=held[0][0], name=op.name, position=op.position, value=op.value)
    return True


def lookup(op: Lookup, clock: Clock) -> Program[Record | None]:
    return find_records([op], (yield _Q["lookup"](id=op.id, now=clock())), 1e6)[0]


def sweep(op: Sweep, clock: Clock) -> Program[Swept]:
    gone = yield _Q["sweep"](now=clock(), count=op.limit)
    for id, steps in gone:
        if steps:
            yield _Q["forget_steps"](id=id)
    left = op.limit - len(gone)
    unknown = (yield _Q["sweep_unknown"](now=clock(), count=left)) if left > 0 else ()
    return Swept(len(gone), len(unknown))


def _record_program(op: Op[Any], clock: Clock) -> Program[Any]:
    def ask(name: str, **parameters: Any) -> Program[Rows]:
        return (yield Statement(_Q[name], {**parameters, "now": clock()}))

    def lookups(ops: list[Lookup]) -> Program[list[Record | None]]:
        return find_records(ops, (yield from ask("lookup", id=ops[0].id)), 1e6)

    return record_program(RecordTable(ask, lookups, _place, span=_micros, second=1e6), op)


def _place(place: str) -> int:
    if place and not place.isdecimal():
        raise not_a_place(place)
    return min(int(place or _LATEST), _LATEST)


PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any, Clock], Program[Any]]]] = {
    Claim: claim,
    Renew: renew,
    Complete: complete,
    Release: release,
    SaveStep: save_step,
    Lookup: lookup,
    Sweep: sweep,
    **dict.fromkeys(RECORD_OPS, _record_program),
    **dict.fromkeys(INBOX_OPS, partial(inbox_program, "sqlite")),
    **dict.fromkeys(RELAY_OPS, sqlite_program),
    **dict.fromkeys(TRAIL_OPS, partial(trail_program, "sqlite")),
}
"""The program of each Op. The clock returns microseconds since 1970."""


# The transactional mode: programs for the caller's connection
#
# The lock of a key is the lock of the file: from the guard on there is one writer. A duplicate waits for the file, as
# every writer does, up to the connection's busy timeout, and then sees the record.

_IN_TRANSACTION: Final = load_queries("semel.sql.dialects", "sqlite_transaction.sql")


def _now() -> int:
    return time.time_ns() // 1000


def lock(op: Lock) -> Program[Row | Occupied | None]:
    rows = yield _IN_TRANSACTION["lock"](id=op.id)
    if not rows:
        return None
    state, takeover, attempt, token, nonce, origin, steps, fingerprint, snapshot, lease_end, created, expires = rows[0]
    saved = (yield _IN_TRANSACTION["steps"](id=op.id, origin=origin)) if steps else ()
    now = _now()
    return Row(
        op.id, State(state), token, attempt, nonce, Takeover(takeover), fingerprint, (lease_end - now) / 1e6,
        (created - now) / 1e6, (expires - now) / 1e6, "", "", None, snapshot,
        tuple((name if isinstance(name, str) else bytes(name).decode(), step) for name, step in saved),
    )  # fmt: skip


def keep(op: Keep) -> Program[bool]:
    values = {
        "id": op.id, "takeover": int(op.takeover), "attempt": op.attempt, "nonce": op.nonce,
        "ttl": int(op.ttl * 1_000_000), "fingerprint": op.fingerprint, "tenant": op.tenant, "operation": op.operation,
        "key": op.key, "snapshot": op.snapshot, "now": _now(),
    }  # fmt: skip
    if op.instead_of is None:
        yield _IN_TRANSACTION["keep"](**values)
        return True
    return bool((yield _IN_TRANSACTION["keep_instead"](**values, token=op.instead_of.token)))


def step_saved(id: bytes, name: str) -> Program[bool]:
    return bool((yield _IN_TRANSACTION["step_saved"](id=id, name=name)))
