"""PostgreSQL: Ops of one kind as one statement over arrays, so that concurrent Ops share a round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
    Resolve,
    SaveStep,
    Sweep,
    Swept,
)
from semel.core.states import State, Takeover
from semel.core.values import value
from semel.errors import StoreUnavailable
from semel.sql.program import Program, Query, load_queries

__all__ = ["CHANNEL", "Watch", "program"]

CHANNEL: Final = "semel"
"""Where waiters are told, by the record's id in hex."""

_Q: Final = load_queries(
    "semel.sql.dialects",
    "postgres.sql",
    now="statement_timestamp()",
    token="(extract(epoch FROM statement_timestamp()) * 1000000)::bigint",
    notify=f"pg_notify('{CHANNEL}', encode(id, 'hex'))::text",
)
_TRIES: Final = 10
"""How often an Op that lost a race looks again before it gives up."""


PENDING: Final = object()
"""The answer of an Op that has none yet."""


def program(ops: Sequence[Op[Any]], answers: list[Any] | None = None) -> Program[list[Any]]:
    """All Ops of a batch. Those of one kind go out as one statement; those of one record keep their order.

    ``answers`` is filled in as they come: when the program breaks off, what is answered there is committed.
    """
    if answers is None:
        answers = [PENDING] * len(ops)
    for group in _groups(ops):
        # Rows are locked in the order they are given in: the same for all, so that two batches cannot deadlock.
        group.sort(key=lambda i: ops[i].id)
        found = yield from _PROGRAMS[type(ops[group[0]])]([ops[i] for i in group])
        for i, answer in zip(group, found, strict=True):
            answers[i] = answer
    return answers


def _groups(ops: Sequence[Op[Any]]) -> list[list[int]]:
    """Positions of Ops of one kind, no id twice in a group: a statement can touch a row only once."""
    groups: list[list[int]] = []
    open_group: dict[type[Op[Any]], int] = {}
    last_seen: dict[bytes, int] = {}
    for i, op in enumerate(ops):
        kind = type(op)
        at = open_group.get(kind, -1)
        if at <= last_seen.get(op.id, -1):
            at = open_group[kind] = len(groups)
            groups.append([])
        groups[at].append(i)
        last_seen[op.id] = at
    return groups


def _claims(ops: list[Claim]) -> Program[list[Any]]:
    answers: dict[bytes, Claimed | Existing] = {}
    left = {op.id: op for op in ops}
    for _ in range(_TRIES):
        asked = list(left.values())
        rows = yield _Q["claim"](
            ids=[op.id for op in asked],
            nonces=[op.nonce for op in asked],
            fingerprints=[op.fingerprint for op in asked],
            leases=[op.lease for op in asked],
            ttls=[op.ttl for op in asked],
            takeovers=[op.takeover for op in asked],
            tenants=[op.tenant for op in asked],
            operations=[op.operation for op in asked],
            keys=[op.key for op in asked],
        )
        silent: list[tuple[Claim, Record, int]] = []
        resumed: list[tuple[bytes, int]] = []
        for (
            id,
            token,
            stored,
            takeover,
            attempt,
            nonce,
            origin,
            steps,
            fingerprint,
            snapshot,
            lease_left,
            age,
            expires_in,
        ) in rows:
            if not stored:
                answers[id] = Claimed(token, 1)
                del left[id]
                continue
            op = left[id]
            state = _state(stored, takeover, lease_left, expires_in)
            record = Record(
                id,
                state,
                token,
                attempt,
                fingerprint,
                snapshot,
                lease_left,
                age,
                expires_in,
                op.tenant,
                op.operation,
                op.key,
            )
            if state is State.RUNNING and nonce == op.nonce:
                answers[id] = Claimed(token, attempt)
                if steps:
                    resumed.append((id, origin))
                del left[id]
            elif state is State.ABSENT or (state is State.ABANDONED and _same_request(op, fingerprint)):
                silent.append((op, record, takeover))
            else:
                answers[id] = Existing(record)
                del left[id]
        if silent:
            resumed += yield from _take(silent, left, answers)
        if resumed:
            yield from _resume(resumed, answers)
        if not left:
            return [answers[op.id] for op in ops]
    raise StoreUnavailable(f"a record changed {_TRIES} times while it was being claimed")


def _same_request(op: Claim, fingerprint: bytes) -> bool:
    return not op.fingerprint or not fingerprint or op.fingerprint == fingerprint


def _state(stored: int, takeover: int, lease_left: float, expires_in: float) -> State:
    """The state now, of what is written and what the clock makes of it."""
    state = _STATES[stored]
    if state is State.RUNNING and lease_left <= 0:
        state = State.ABANDONED
    gone = state is State.DONE or (state is State.ABANDONED and takeover == Takeover.RETRY)
    return State.ABSENT if gone and expires_in <= 0 else state


def _take(
    silent: list[tuple[Claim, Record, int]], left: dict[bytes, Claim], answers: dict[bytes, Claimed | Existing]
) -> Program[list[tuple[bytes, int]]]:
    """Replace what has expired, take over what was abandoned, refuse what may not be. Who loses a race stays in
    ``left``.
    """
    expired = [(op, record) for op, record, _ in silent if record.state is State.ABSENT]
    abandoned = [(op, record, takeover) for op, record, takeover in silent if record.state is State.ABANDONED]
    taken = [(op, record) for op, record, takeover in abandoned if _may_take_over(op, takeover)]
    refused = {op.id: record for op, record, takeover in abandoned if not _may_take_over(op, takeover)}
    resumed: list[tuple[bytes, int]] = []
    for query, pairs in ((_Q["replace"], expired), (_Q["take_over"], taken)):
        if not pairs:
            continue
        rows = yield query(
            ids=[op.id for op, _ in pairs],
            tokens=[record.token for _, record in pairs],
            nonces=[op.nonce for op, _ in pairs],
            fingerprints=[op.fingerprint for op, _ in pairs],
            leases=[op.lease for op, _ in pairs],
            ttls=[op.ttl for op, _ in pairs],
            takeovers=[op.takeover for op, _ in pairs],
            tenants=[op.tenant for op, _ in pairs],
            operations=[op.operation for op, _ in pairs],
            keys=[op.key for op, _ in pairs],
        )
        for id, token, attempt, origin, steps in rows:
            answers[id] = Claimed(token, attempt)
            del left[id]
            if steps:
                resumed.append((id, origin))
    if refused:
        tokens = [record.token for record in refused.values()]
        for (id,) in (yield _Q["refuse"](ids=list(refused), tokens=tokens)):
            answers[id] = Existing(replace(refused[id], state=State.UNKNOWN))
            del left[id]
    return resumed


def _may_take_over(op: Claim, takeover: int) -> bool:
    """Both must allow a plain re-run; a claimer that can find out what happened may always look."""
    return op.takeover == Takeover.RECOVER or (op.takeover == Takeover.RETRY and takeover == Takeover.RETRY)


def _resume(resumed: list[tuple[bytes, int]], answers: dict[bytes, Claimed | Existing]) -> Program[None]:
    """The steps of attempts that were taken over. Only their owner writes steps, and that is us now."""
    steps: dict[bytes, list[tuple[str, bytes]]] = {}
    for id, name, saved in (
        yield _Q["steps"](ids=[id for id, _ in resumed], origins=[origin for _, origin in resumed])
    ):
        steps.setdefault(id, []).append((name, saved))
    for id, found in steps.items():
        answer = answers[id]
        assert isinstance(answer, Claimed)
        answers[id] = Claimed(answer.token, answer.attempt, tuple(found))


_STATES: Final = {1: State.RUNNING, 2: State.DONE, 3: State.UNKNOWN}


def _held(rows: Sequence[Sequence[Any]], ops: Sequence[Op[Any]]) -> list[bool]:
    held = {row[0] for row in rows}
    return [op.id in held for op in ops]


def _renewals(ops: list[Renew]) -> Program[list[Any]]:
    rows = yield _Q["renew"](
        ids=[op.id for op in ops], tokens=[op.token for op in ops], leases=[op.lease for op in ops]
    )
    return _held(rows, ops)


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
        said = yield _Q["completed"](ids=[op.id for op in left], tokens=[op.token for op in left])
        held.update(row[0] for row in said)
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


def _saved_steps(ops: list[SaveStep]) -> Program[list[Any]]:
    answers = []
    for op in ops:
        rows = yield _Q["save_step"](id=op.id, token=op.token, name=op.name, position=op.position, value=op.value)
        answers.append(bool(rows))
    return answers


def _lookups(ops: list[Lookup]) -> Program[list[Any]]:
    found: dict[bytes, Record] = {}
    for row in (yield _Q["lookup"](ids=[op.id for op in ops])):
        (
            id,
            stored,
            token,
            attempt,
            fingerprint,
            snapshot,
            lease_left,
            age,
            expires_in,
            takeover,
            tenant,
            operation,
            key,
        ) = row
        state = _state(stored, takeover, lease_left, expires_in)
        if state is not State.ABSENT:
            found[id] = Record(
                id, state, token, attempt, fingerprint, snapshot, lease_left, age, expires_in, tenant, operation, key
            )
    return [found.get(op.id) for op in ops]


def _resolutions(ops: list[Resolve]) -> Program[list[Any]]:
    answers = []
    for op in ops:
        answers.append((yield from _resolve(op)))
    return answers


def _resolve(op: Resolve) -> Program[State]:
    for _ in range(_TRIES):
        record = (yield from _lookups([Lookup(op.id)]))[0]
        if record is None:
            return State.ABSENT
        state: State = record.state
        if state is State.DONE or (state is State.RUNNING and not op.force):
            return state
        if op.snapshot is None:
            changed: Sequence[Any] = yield _Q["release"](ids=[op.id], tokens=[record.token])
        else:
            changed = yield _Q["resolve_done"](id=op.id, token=record.token, snapshot=op.snapshot, ttl=op.ttl)
        if changed:
            return state
    raise StoreUnavailable(f"the record changed {_TRIES} times while it was being resolved")


def _sweeps(ops: list[Sweep]) -> Program[list[Any]]:
    answers = []
    for op in ops:
        removed = (yield _Q["sweep"](count=op.limit))[0][0]
        left = op.limit - removed
        unknown = (yield _Q["sweep_unknown"](count=left))[0][0] if left > 0 else 0
        answers.append(Swept(removed, unknown))
    return answers


@value
class Watch(Op["float | None"]):
    """Ask to be told on the channel when the record is no longer running; the seconds its lease has left, or None."""

    id: bytes


def _watches(ops: list[Watch]) -> Program[list[Any]]:
    left: dict[bytes, float] = {row[0]: row[1] for row in (yield _Q["watch"](ids=[op.id for op in ops]))}
    return [left.get(op.id) for op in ops]


_PROGRAMS: Final[dict[type[Op[Any]], Callable[[Any], Program[list[Any]]]]] = {
    Claim: _claims,
    Renew: _renewals,
    Complete: _completions,
    Release: _releases,
    SaveStep: _saved_steps,
    Lookup: _lookups,
    Resolve: _resolutions,
    Sweep: _sweeps,
    Watch: _watches,
}
