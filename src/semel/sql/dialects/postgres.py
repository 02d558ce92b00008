"""PostgreSQL: Ops of one kind as one statement over arrays, so that concurrent Ops share a round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from struct import Struct
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
    WatchRecord,
)
from semel.core.semantics import Row
from semel.core.states import State, Takeover
from semel.core.trail.moments import TRAIL_OPS
from semel.core.transactional import Keep, Lock, Occupied
from semel.errors import StoreUnavailable
from semel.sql.dialects.records import (
    RECORD_OPS,
    TRIES,
    RecordTable,
    add_steps,
    checked_moment,
    find_records,
    judge_claims,
    one_by_one,
    record_program,
)
from semel.sql.inbox import INBOX_OPS, inbox_program
from semel.sql.outbox import POSTGRES_PROGRAMS
from semel.sql.outbox_log import LOG_PROGRAMS
from semel.sql.program import Program, Query, Rows, Statement, batch, load_queries
from semel.sql.trail import trail_program

CHANNEL: Final = "semel"
"""The channel of notifications; the payload is the record's id in hex."""

_WORDS: Final = {
    "now": "statement_timestamp()",
    "token": "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint",
    "notify": f"pg_notify('{CHANNEL}', encode(id, 'hex'))::text",
}
"""What stands in double braces in the .sql files."""
_Q: Final = load_queries(
    "semel.sql.dialects",
    "postgres.sql",
    listed=(
        "id, state, token, attempt, fingerprint, NULL::bytea, extract(epoch FROM lease_end - {{now}})::float8, "
        "extract(epoch FROM {{now}} - created)::float8, extract(epoch FROM expires - {{now}})::float8, takeover, "
        "tenant, operation, key, to_char(sweep_after AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')"
    ),
    **_WORDS,
)


def program(ops: Sequence[Op[Any]], answers: list[Any] | None = None) -> Program[list[Any]]:
    """A batch of Ops; ``answers`` is filled in as they arrive."""
    return batch(ops, answers, _PROGRAMS)


def _claims(ops: list[Claim]) -> Program[list[Any]]:
    answers: dict[bytes, Claimed | Existing] = {}
    left = {op.id: op for op in ops}
    for _ in range(TRIES):
        rows = yield Statement(_Q["claim"], _claim_columns(list(left.values())))
        changes, resumed = judge_claims(rows, left, answers)
        if changes:
            resumed += yield from _change(changes, left, answers)
        if resumed:
            steps = yield _Q["steps"](ids=[id for id, _ in resumed], origins=[origin for _, origin in resumed])
            add_steps(answers, steps)
        if not left:
            return [answers[op.id] for op in ops]
    raise StoreUnavailable(f"a record changed {TRIES} times while it was being claimed")


def _claim_columns(claims: list[Claim]) -> dict[str, Any]:
    return {
        "ids": [op.id for op in claims],
        "nonces": [op.nonce for op in claims],
        "fingerprints": [op.fingerprint for op in claims],
        "leases": [op.lease for op in claims],
        "ttls": [op.ttl for op in claims],
        "takeovers": [op.takeover for op in claims],
        "tenants": [op.tenant for op in claims],
        "operations": [op.operation for op in claims],
        "keys": [op.key for op in claims],
    }


def _change(
    changes: dict[str, list[tuple[Claim, Record]]], left: dict[bytes, Claim], answers: dict[bytes, Claimed | Existing]
) -> Program[list[tuple[bytes, int]]]:
    """Replace expired records, take over abandoned ones, mark as unknown those that may not be taken over.

    A claim that loses a race stays in ``left``. Returns the records whose steps are to be read: (id, origin).
    """
    resumed: list[tuple[bytes, int]] = []
    for name in ("replace", "take_over"):
        pairs = changes.get(name)
        if not pairs:
            continue
        columns = _claim_columns([op for op, _ in pairs])
        rows = yield _Q[name](**columns, tokens=[record.token for _, record in pairs])
        for id, token, attempt, origin, steps in rows:
            answers[id] = Claimed(token, attempt)
            del left[id]
            if steps:
                resumed.append((id, origin))
    refused = {op.id: record for op, record in changes.get("refuse", ())}
    if refused:
        tokens = [record.token for record in refused.values()]
        for (id,) in (yield _Q["refuse"](ids=list(refused), tokens=tokens)):
            answers[id] = Existing(replace(refused[id], state=State.UNKNOWN))
            del left[id]
    return resumed


def _renewals(ops: list[Renew]) -> Program[list[Any]]:
    rows = yield _Q["renew"](
        ids=[op.id for op in ops], tokens=[op.token for op in ops], leases=[op.lease for op in ops]
    )
    held = {row[0] for row in rows}
    return [op.id in held for op in ops]


def _completions(ops: list[Complete]) -> Program[list[Any]]:
    rows = yield _Q["complete"](
        ids=[op.id for op in ops],
        tokens=[op.token for op in ops],
        snapshots=[op.snapshot for op in ops],
        ttls=[op.ttl for op in ops],
    )
    held = {row[0] for row in rows}
    left = [op for op in ops if op.id not in held]
    if left:
        rows = yield _Q["completed"](ids=[op.id for op in left], tokens=[op.token for op in left])
        held.update(row[0] for row in rows)
    return [op.id in held for op in ops]


_RELEASES: Final[dict[State, Query]] = {
    State.ABSENT: _Q["release"],
    State.ABANDONED: _Q["yield_lease"],
    State.UNKNOWN: _Q["give_up"],
}


def _releases(ops: list[Release]) -> Program[list[Any]]:
    held: set[bytes] = set()
    for to, query in _RELEASES.items():
        group = [op for op in ops if op.to is to]
        if group:
            held.update(row[0] for row in (yield query(ids=[op.id for op in group], tokens=[op.token for op in group])))
    return [op.id in held for op in ops]


def save_step(op: SaveStep) -> Program[bool]:
    return bool((yield _Q["save_step"](id=op.id, token=op.token, name=op.name, position=op.position, value=op.value)))


def _lookups(ops: list[Lookup]) -> Program[list[Any]]:
    return find_records(ops, (yield _Q["lookup"](ids=[op.id for op in ops])))


def _ask(name: str, **parameters: Any) -> Program[Rows]:
    return (yield Statement(_Q[name], parameters))


_TABLE: Final = RecordTable(_ask, _lookups, partial(checked_moment, latest="infinity"), span=float, second=1.0)


def _sweep(op: Sweep) -> Program[Swept]:
    removed = (yield _Q["sweep"](count=op.limit))[0][0]
    left = op.limit - removed
    unknown = (yield _Q["sweep_unknown"](count=left))[0][0] if left > 0 else 0
    return Swept(removed, unknown)


def _watches(ops: list[WatchRecord]) -> Program[list[Any]]:
    left: dict[bytes, float] = {row[0]: row[1] for row in (yield _Q["watch"](ids=[op.id for op in ops]))}
    return [left.get(op.id) for op in ops]


_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any], Program[list[Any]]]]] = {
    Claim: _claims,
    Renew: _renewals,
    Complete: _completions,
    Release: _releases,
    SaveStep: one_by_one(save_step),
    Lookup: _lookups,
    Sweep: one_by_one(_sweep),
    WatchRecord: _watches,
    **dict.fromkeys(RECORD_OPS, one_by_one(partial(record_program, _TABLE))),
    **dict.fromkeys(INBOX_OPS, one_by_one(partial(inbox_program, "postgresql"))),
    **{kind: one_by_one(program) for kind, program in {**POSTGRES_PROGRAMS, **LOG_PROGRAMS}.items()},
    **dict.fromkeys(TRAIL_OPS, one_by_one(partial(trail_program, "postgresql"))),
}


# The transactional mode: programs for the caller's connection

_IN_TRANSACTION: Final = load_queries("semel.sql.dialects", "postgres_transaction.sql", **_WORDS)
_LOCK: Final = _IN_TRANSACTION["lock"]
_KEEP: Final = _IN_TRANSACTION["keep"]
_COLUMN: Final = Struct("!ii").unpack_from
"""What precedes each value of a record in binary form: the oid of its type, and its length, or -1 for NULL."""
_INTEGERS: Final = frozenset({20, 21, 23, 1184})
"""The oids of the types that are sent as integers: bigint, smallint, integer, timestamptz (microseconds)."""
_STATES: Final = {int(state): state for state in State}
_TAKEOVERS: Final = {int(takeover): takeover for takeover in Takeover}


def lock(op: Lock) -> Program[Row | Occupied | None]:
    # The advisory lock is 64 bits of the record's identity.
    rows = yield Statement(_LOCK, {"id": op.id, "place": int.from_bytes(op.id[:8], "big", signed=True)})
    found = rows[0][0] if rows else None
    if found is None:
        return None
    packed = bytes(found)
    if not packed:
        return Occupied()
    now = int.from_bytes(packed[:8], "big", signed=True)
    # In the order of the table's columns. A later migration adds columns after these.
    (
        _, state, takeover, _, attempt, steps, token, origin, nonce, lease_end, created, expires, _, fingerprint,
        _, _, _, snapshot,
    ) = _columns(packed)[:18]  # fmt: skip
    saved: tuple[tuple[str, bytes], ...] = ()
    if steps:
        found_steps = yield _IN_TRANSACTION["steps"](id=op.id, origin=origin)
        saved = tuple((name, bytes(step)) for name, step in found_steps)
    return Row(
        op.id, _STATES[state], token, attempt, nonce, _TAKEOVERS[takeover], fingerprint, (lease_end - now) / 1e6,
        (created - now) / 1e6, (expires - now) / 1e6, "", "", None, snapshot, saved,
    )  # fmt: skip


def _columns(packed: bytes) -> list[Any]:
    """The values of a record in PostgreSQL's binary form: numbers and times as integers, bytes as they are. It follows
    eight bytes of time.
    """
    found: list[Any] = []
    at = 12
    for _ in range(int.from_bytes(packed[8:12], "big")):
        oid, length = _COLUMN(packed, at)
        at += 8
        if length < 0:
            found.append(None)
            continue
        value = packed[at : at + length]
        found.append(int.from_bytes(value, "big", signed=True) if oid in _INTEGERS else value)
        at += length
    return found


def keep(op: Keep) -> Program[bool]:
    values = {
        "id": op.id, "takeover": int(op.takeover), "nonce": op.nonce, "ttl": op.ttl, "fingerprint": op.fingerprint,
        "tenant": op.tenant, "operation": op.operation, "key": op.key, "snapshot": op.snapshot,
    }  # fmt: skip
    if op.instead_of is None:
        yield Statement(_KEEP, values)
    else:
        yield _IN_TRANSACTION["keep_instead"](**values, attempt=op.attempt, token=op.instead_of.token)
    return True


def step_saved(id: bytes, name: str) -> Program[bool]:
    return bool((yield _IN_TRANSACTION["step_saved"](id=id, name=name)))
