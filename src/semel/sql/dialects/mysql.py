"""MySQL and MariaDB: Ops of one kind as one packet, so that concurrent Ops share a round trip.

Neither returns the rows that an UPDATE changed. For a single Op the number of touched rows is the answer. For several
Ops the packet first locks and lists the rows that are still held. A claim knows by its nonce whether it won.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
from semel.core.semantics import Row, state_of
from semel.core.states import State, Takeover
from semel.core.trail.moments import TRAIL_OPS
from semel.core.transactional import Keep, Lock, Occupied
from semel.errors import StoreUnavailable
from semel.sql.connections.errors import Contention, DuplicateRow, LockHeld
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
from semel.sql.outbox import RELAY_OPS, mysql_program
from semel.sql.program import Packet, Piece, Program, Query, Rows, batch, load_queries
from semel.sql.trail import trail_program

_LEFT: Final = (
    "TIMESTAMPDIFF(MICROSECOND, {{now}}, lease_end), TIMESTAMPDIFF(MICROSECOND, created, {{now}}), "
    "TIMESTAMPDIFF(MICROSECOND, {{now}}, expires)"
)
_COLUMNS: Final = f"id, token, state, takeover, attempt, nonce, origin, steps, fingerprint, snapshot, {_LEFT}"
_EXPIRED: Final = (
    "expires <= {{now}} AND (state = 2 OR (state = 1 AND lease_end <= {{now}} AND takeover = 0))"  # counts as absent
)
_LATEST: Final = "9999-12-31 23:59:59.999999"


def _queries(now: str) -> dict[str, Query]:
    queries = load_queries(
        "semel.sql.dialects",
        "mysql.sql",
        columns=_COLUMNS,
        left=_LEFT,
        expired=_EXPIRED,
        token="TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {{now}})",
        now=now,
    )
    returning = f"{queries['claim'].sql} RETURNING {_COLUMNS.replace('{{now}}', now)}"
    return {**queries, "claim_returning": Query("claim_returning", returning, True)}


_Q: Final = _queries("UTC_TIMESTAMP(6)")
_SHARED: Final = _queries("CAST(@semel_now AS DATETIME(6))")
"""The same for packets whose statements share one moment; the statement ``clock`` sets it."""


def program(ops: Sequence[Op[Any]], answers: list[Any] | None = None, *, returning: bool) -> Program[list[Any]]:
    """A batch of Ops; ``answers`` is filled in as they arrive.

    :param returning: whether the server has INSERT … RETURNING: MariaDB does, MySQL does not.
    """
    return batch(ops, answers, _PROGRAMS | {Claim: partial(_claims, returning=returning)})


def _micros(seconds: float) -> int:
    return round(seconds * 1_000_000)


def _claims(ops: list[Claim], *, returning: bool) -> Program[list[Any]]:
    answers: dict[bytes, Claimed | Existing] = {}
    left = {op.id: op for op in ops}
    resumed: list[tuple[bytes, int]] = []
    for _ in range(TRIES):
        values = [_claim_row(op) for op in left.values()]
        if returning:
            rows = yield Packet(Piece(_Q["claim_returning"], values))
        else:
            rows = yield Packet(Piece(_Q["clock"]), Piece(_SHARED["claim"], values), Piece(_SHARED["look"], values))
        changes, found = judge_claims(rows, left, answers, 1e6)
        resumed += found
        if changes:
            # A claim that loses a race against another stays in `left`.
            resumed += judge_claims((yield _change(changes)), left, answers, 1e6)[1]
        if not left:
            if resumed:
                steps = yield Packet(Piece(_Q["steps"], [{"id": id, "origin": origin} for id, origin in resumed]))
                add_steps(answers, ((id, name.decode(), value) for id, name, value in steps))
            return [answers[op.id] for op in ops]
    raise StoreUnavailable(f"a record changed {TRIES} times while it was being claimed")


def _claim_row(op: Claim, token: int = 0) -> dict[str, Any]:
    return {
        "id": op.id, "token": token, "nonce": op.nonce, "fingerprint": op.fingerprint, "lease": _micros(op.lease),
        "ttl": _micros(op.ttl), "takeover": op.takeover, "tenant": op.tenant, "operation": op.operation, "key": op.key,
    }  # fmt: skip


def _change(changes: dict[str, list[tuple[Claim, Record]]]) -> Packet:
    """Replace expired records, take over abandoned ones, mark as unknown the others, and read the result."""
    pieces = [
        Piece(_SHARED[name], [_claim_row(op, record.token) for op, record in pairs]) for name, pairs in changes.items()
    ]
    ids = [{"id": op.id} for pairs in changes.values() for op, _ in pairs]
    return Packet(Piece(_Q["clock"]), *pieces, Piece(_SHARED["look"], ids))


def _moved(name: str, rows: list[dict[str, Any]], state: State) -> Program[set[bytes]]:
    """Changes by owners; return the ids whose token is the newest. ``state``: allowed besides RUNNING."""
    piece = Piece(_Q[name], rows)
    if len(rows) == 1:
        touched = (yield Packet(piece))[0][0]
        return {rows[0]["id"]} if touched else set()
    return {row[0] for row in (yield Packet.transaction(Piece(_Q["held"], rows, state=state), piece))}


def _renewals(ops: list[Renew]) -> Program[list[Any]]:
    rows = [{"id": op.id, "token": op.token, "lease": _micros(op.lease)} for op in ops]
    held = yield from _moved("renew", rows, State.RUNNING)
    return [op.id in held for op in ops]


def _completions(ops: list[Complete]) -> Program[list[Any]]:
    rows = [{"id": op.id, "token": op.token, "snapshot": op.snapshot, "ttl": _micros(op.ttl)} for op in ops]
    held = yield from _moved("complete", rows, State.UNKNOWN)
    left = [row for row in rows if row["id"] not in held]
    if left:
        held.update(row[0] for row in (yield Packet(Piece(_Q["completed"], left))))
    return [op.id in held for op in ops]


def _releases(ops: list[Release]) -> Program[list[Any]]:
    held: set[bytes] = set()
    for to, move in _RELEASES.items():
        rows = [{"id": op.id, "token": op.token} for op in ops if op.to is to]
        if rows:
            held |= yield from move(rows)
    return [op.id in held for op in ops]


def _removed(rows: list[dict[str, Any]]) -> Program[set[bytes]]:
    held = Piece(_Q["held"], rows, state=State.UNKNOWN)
    gone = yield Packet.transaction(held, Piece(_Q["forget_steps_of_held"], rows), Piece(_Q["release"], rows))
    return {row[0] for row in gone}


_RELEASES: Final[dict[State, Callable[[list[dict[str, Any]]], Program[set[bytes]]]]] = {
    State.ABSENT: _removed,
    State.ABANDONED: partial(_moved, "yield_lease", state=State.RUNNING),
    State.UNKNOWN: partial(_moved, "give_up", state=State.UNKNOWN),
}


def _save_step(op: SaveStep) -> Program[bool]:
    held = Piece(_Q["held"], [{"id": op.id, "token": op.token}], state=State.RUNNING)
    step = {"id": op.id, "token": op.token, "name": op.name.encode(), "position": op.position, "value": op.value}
    rows = yield Packet.transaction(
        held, Piece(_Q["count_step"], id=op.id, token=op.token), Piece(_Q["save_step"], **step)
    )
    return bool(rows)


def save_step(op: SaveStep) -> Program[bool]:
    """One step, as plain statements, for a connection whose transaction is the caller's."""
    if not (yield _Q["count_step"](id=op.id, token=op.token))[0][0]:
        return False
    yield _Q["save_step"](id=op.id, token=op.token, name=op.name.encode(), position=op.position, value=op.value)
    return True


def _lookups(ops: list[Lookup]) -> Program[list[Any]]:
    return find_records(ops, (yield Packet(Piece(_Q["lookup"], [{"id": op.id} for op in ops]))), 1e6)


def _ask(name: str, **parameters: Any) -> Program[Rows]:
    query = _Q[name]
    rows = yield Packet(Piece(query, **parameters))
    return () if query.writes and not rows[0][0] else rows  # a change returns how many rows it has touched


_TABLE: Final = RecordTable(_ask, _lookups, partial(checked_moment, latest=_LATEST), span=_micros, second=1e6)


def _sweep(op: Sweep) -> Program[Swept]:
    # One transaction over three packets. It skips what others have locked, and keeps what it found locked.
    dead = yield Packet(Piece(_Q["dead"], most=op.limit), begins=True)
    with_steps = [{"id": id} for id, steps in dead if steps]
    pieces = [Piece(_Q["forget_steps"], with_steps)] if with_steps else []
    if dead:
        pieces.append(Piece(_Q["remove"], [{"id": id} for id, _ in dead]))
    silent = yield Packet(*pieces, Piece(_Q["silent"], most=op.limit - len(dead)))
    marks = [Piece(_Q["mark_unknown"], [{"id": id} for (id,) in silent])] if silent else []
    yield Packet(*marks, ends=True)
    return Swept(len(dead), len(silent))


_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any], Program[list[Any]]]]] = {
    Renew: _renewals,
    Complete: _completions,
    Release: _releases,
    SaveStep: one_by_one(_save_step),
    Lookup: _lookups,
    Sweep: one_by_one(_sweep),
    **dict.fromkeys(RECORD_OPS, one_by_one(partial(record_program, _TABLE))),
    **dict.fromkeys(INBOX_OPS, one_by_one(partial(inbox_program, "mysql"))),
    **dict.fromkeys(RELAY_OPS, one_by_one(mysql_program)),
    **dict.fromkeys(TRAIL_OPS, one_by_one(partial(trail_program, "mysql"))),
}


# The transactional mode: programs for the caller's connection
#
# In MySQL only the lock of a row ends with the transaction. So the key is locked by inserting its row,
# which is completed when the handler is done: two statements, and the primary key decides. An existing record is read
# only when that insert fails.

_IN_TRANSACTION: Final = load_queries(
    "semel.sql.dialects",
    "mysql_transaction.sql",
    token="GREATEST(token + 1, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {{now}}))",
    now="UTC_TIMESTAMP(6)",
)


def lock(op: Lock) -> Program[Row | Occupied | None]:
    began = time.monotonic()
    try:
        yield _IN_TRANSACTION["lock"](id=op.id)
        return None
    except DuplicateRow:
        pass
    except LockHeld as error:
        if int((yield _IN_TRANSACTION["undone"]())[0][0]):
            raise Contention(f"{error}; this server undoes all of a transaction then") from error.__cause__
        return Occupied(waited=time.monotonic() - began)
    rows = yield _IN_TRANSACTION["look"](id=op.id)
    if not rows:
        raise Contention("the record went away while it was looked at")
    row = yield from _row(op.id, rows[0])
    if op.waits and not op.own and state_of(row, 0.0) is State.RUNNING:
        # An attempt under a lease must write the row that this transaction has locked now. If we waited for it here,
        # we would wait for ourselves.
        return Occupied(waited=math.inf)
    return row


def _row(id: bytes, found: Any) -> Program[Row]:
    # The caller's converters may have left numbers as text.
    state, takeover, attempt, token, nonce, origin, steps = (int(value) for value in found[:7])
    fingerprint, snapshot = found[7:9]
    lease_left, age, expires_in = (int(value) / 1e6 for value in found[9:12])
    saved = (yield _IN_TRANSACTION["steps"](id=id, origin=origin)) if steps else ()
    return Row(
        id, State(state), token, attempt, nonce, Takeover(takeover), bytes(fingerprint), lease_left, age, expires_in,
        "", "", None, None if snapshot is None else bytes(snapshot),
        tuple((bytes(name).decode(), bytes(step)) for name, step in saved),
    )  # fmt: skip


def keep(op: Keep) -> Program[bool]:
    rows = yield _IN_TRANSACTION["keep"](
        id=op.id, takeover=int(op.takeover), attempt=op.attempt, nonce=op.nonce, ttl=round(op.ttl * 1_000_000),
        fingerprint=op.fingerprint, tenant=op.tenant, operation=op.operation, key=op.key, snapshot=op.snapshot,
        token=0 if op.instead_of is None else op.instead_of.token,
    )  # fmt: skip
    return bool(rows[0][0])


def step_saved(id: bytes, name: str) -> Program[bool]:
    return bool((yield _IN_TRANSACTION["step_saved"](id=id, name=name.encode())))
