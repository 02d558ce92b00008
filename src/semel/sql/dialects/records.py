"""What every dialect does alike with its records, from statements of the same names.

Each program is written once. A ``RecordTable`` says how a dialect runs a statement and counts time. The rest are rules
for rows: what a claim makes of the record that it finds, and how steps reach their claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from semel.core.ops import (
    Abandoned,
    Claim,
    Claimed,
    Count,
    Existing,
    Listing,
    ListRecords,
    Lookup,
    Measure,
    Op,
    Page,
    Record,
    Resolve,
    Resumable,
    Size,
)
from semel.core.semantics import (
    is_listed,
    may_take_over,
    not_a_place,
    pack_place,
    resolves,
    same_request,
    state_at,
    unpack_place,
)
from semel.core.states import State, Takeover
from semel.errors import StoreUnavailable
from semel.sql.program import Program, Rows

TRIES: Final = 10
"""How often an Op that lost a race looks again before it fails."""
COUNTED: Final = 10_000
"""Measure counts records up to this number. If there are more, it takes the server's estimate."""
OVERDUE: Final = 1000
"""How many records Measure looks at, of those that a sweep would look at first."""
_ABOVE_ALL: Final = b"\xff" * 17
"""Greater than every id."""
_BY_ID: Final = "="
"""Marks a place in a listing where the records of one moment are found by their ids."""


@dataclass(frozen=True)
class RecordTable:
    """How the programs of this module use the table of one dialect."""

    ask: Callable[..., Program[Rows]]
    """``ask(name, **parameters)`` runs the statement of that name. One that changes something returns rows."""
    lookups: Callable[[list[Lookup]], Program[list[Record | None]]]
    place: Callable[[str], Any]
    """Converts a place in a listing to a parameter; "" is after all records. Raises PolicyError if it is none."""
    span: Callable[[float], float]
    """Converts seconds to a parameter."""
    second: float
    """One second in the unit of the rows: 1, or 1e6 if they count microseconds."""


def record_program(table: RecordTable, op: Op[Any]) -> Program[Any]:
    """The program of an Op of ``RECORD_OPS``."""
    return _PROGRAMS[type(op)](op, table)


def one_by_one(program: Callable[[Any], Program[Any]]) -> Callable[[list[Any]], Program[list[Any]]]:
    """The program of several Ops of a kind that cannot share statements, from the program of one."""

    def programs(ops: list[Any]) -> Program[list[Any]]:
        answers = []
        for op in ops:
            answers.append((yield from program(op)))
        return answers

    return programs


def find_records(ops: list[Lookup], rows: Rows, second: float = 1.0) -> list[Record | None]:
    """The records among the rows of the statement ``lookup``, which count ``second`` as one second."""
    found = {record.id: record for row in rows if (record := _record(row, second)).state is not State.ABSENT}
    return [found.get(op.id) for op in ops]


def _record(row: Sequence[Any], second: float) -> Record:
    id, stored, token, attempt, fingerprint, snapshot, lease, age, expires, takeover, tenant, operation, key = row
    return Record(
        id, state_at(stored, takeover, lease, expires), token, attempt, fingerprint, snapshot, lease / second,
        age / second, expires / second, tenant, operation, key,
    )  # fmt: skip


def _resolve(op: Resolve, table: RecordTable) -> Program[State]:
    """Free or complete a record, if the Op may change it in its state. Returns the state it had."""
    for _ in range(TRIES):
        (record,) = yield from table.lookups([Lookup(op.id)])
        if record is None or (op.token is not None and op.token != record.token):
            return State.ABSENT
        if not resolves(op, record.state):
            return record.state
        # Both change nothing if the record has another token or another state than when it was looked up.
        alive = record.state is State.RUNNING
        stored = State.RUNNING if record.state is State.ABANDONED else record.state
        seen = {"id": op.id, "token": record.token, "stored": int(stored), "alive": alive}
        if op.snapshot is None:
            changed = yield from table.ask("free", **seen)
        else:
            changed = yield from table.ask("resolve_done", **seen, snapshot=op.snapshot, ttl=table.span(op.ttl))
        if changed:
            return record.state
    raise StoreUnavailable(f"the record changed {TRIES} times while it was being resolved")


def _count(op: Count, table: RecordTable) -> Program[int]:
    name = "count" if op.tenant else "count_without_tenant"
    rows = yield from table.ask(name, tenant=op.tenant, most=op.limit)
    return int(rows[0][0])


def _resumable(op: Resumable, table: RecordTable) -> Program[Page]:
    """A page of the abandoned records that have saved their input."""
    rows = yield from table.ask("inputs", after=op.after, most=op.limit)
    if any(row[1] in (None, State.DONE) for row in rows):  # the record is gone or done: nobody needs its input
        yield from table.ask("forget_inputs", after=op.after, last=rows[-1][0])
    found = []
    for id, stored, takeover, token, attempt, fingerprint, lease, age, expires, *names, value in rows:
        if stored != State.RUNNING or takeover == Takeover.REJECT or value is None or names[1] not in op.operations:
            continue
        state = state_at(stored, takeover, lease, expires)
        if state is State.ABANDONED:
            times = (lease / table.second, age / table.second, expires / table.second)
            found.append(Abandoned(Record(id, state, token, attempt, fingerprint, None, *times, *names), value))
    return Page(tuple(found), rows[-1][0] if len(rows) == op.limit else None)


def _measure(op: Measure, table: RecordTable) -> Program[Size]:
    rows = yield from table.ask("measure", most=COUNTED + 1, oldest=OVERDUE)
    counted, estimate, room, overdue = rows[0]
    exact = counted <= COUNTED
    records = counted if exact else max(counted, int(estimate or 0))
    return Size(records, exact, int(room), max(0, overdue or 0) / table.second)


def _list(op: ListRecords, table: RecordTable) -> Program[Listing]:
    """A page of records by ``sweep_after``, the newest first, and by id among those of one moment.

    ``sweep_after`` is set by the claim, so a record keeps its place. The index is on that column alone, so records of
    one moment come in no order. They are sorted here, and the last moment of a result is left to the next one if some
    of its records may be missing. If a moment has more records than a page may look at, as after a bulk import, the
    primary key is walked for them instead, a part of it for each page.

    Both statements return rows like ``lookup``, and the place of each as text. ``newest`` returns those up to a place,
    or up to ``past`` microseconds before it, the newest first; ``by_id`` those below an id, the greatest first.
    """
    position = ("", _ABOVE_ALL) if op.after is None else unpack_place(op.after)
    found: list[Record] = []
    looked_at, left, ended = 0, op.look, False
    while left > 0 and len(found) < op.limit and not ended:
        place, last = position
        if place.endswith(_BY_ID):
            moment = place.removesuffix(_BY_ID)
            rows = yield from table.ask("by_id", id=last, most=left)
            usable = [(row, (place, row[0])) for row in rows]
            end = (moment, b"") if len(rows) < left else usable[-1][1]
            left -= len(rows)
        else:
            moment = ""
            most = min(left, op.limit) if left == op.look else left  # without filters the first look is enough
            past = 0 if last else 1
            # One more, which shows what is complete.
            rows = yield from table.ask("newest", place=table.place(place), past=past, most=most + 1)
            ended = len(rows) <= most
            left -= min(len(rows), most)
            usable = [(row, (row[-1], row[0])) for row in _whole_moments(rows, position, ended)]
            end = usable[-1][1] if usable else position
            if not (usable or ended or left or looked_at):
                end = (rows[-1][-1] + _BY_ID, last if rows[-1][-1] == place else _ABOVE_ALL)
        for row, here in usable:
            looked_at += 1
            if moment not in ("", row[-1]) or not _may_be_listed(op, row):
                continue
            if is_listed(op, record := _record(row[:-1], table.second)):
                found.append(record)
                if len(found) == op.limit and here != usable[-1][1]:
                    return Listing(tuple(found), pack_place(*here), looked_at)
        position = end
    return Listing(tuple(found), None if ended else pack_place(*position), looked_at)


def _may_be_listed(op: ListRecords, row: Sequence[Any]) -> bool:
    """False if the row is surely not shown. Most are not, and making a record of each would take most of the time."""
    return (
        op.operation in (None, row[11])
        and op.tenant in (None, row[10])
        and (row[1] != State.DONE or not op.states or State.DONE in op.states)
    )


def _whole_moments(rows: Rows, position: tuple[str, bytes], ended: bool) -> list[Sequence[Any]]:
    """The rows after this position, by id within each moment, without the last moment unless they end there."""
    found: list[Sequence[Any]] = []
    for moment, group in groupby(rows, itemgetter(-1)):
        if ended or moment != rows[-1][-1]:
            found += sorted(
                (row for row in group if moment != position[0] or row[0] < position[1]), key=itemgetter(0), reverse=True
            )
    return found


def checked_moment(place: str, latest: str) -> str:
    """Return the place in a listing, or ``latest`` for "". Raises PolicyError if the caller has sent something else."""
    if not place:
        return latest
    try:
        datetime.fromisoformat(place)
    except ValueError:
        raise not_a_place(place) from None
    return place


_PROGRAMS: Final[Mapping[type[Op[Any]], Callable[[Any, RecordTable], Program[Any]]]] = {
    Resolve: _resolve,
    Count: _count,
    Resumable: _resumable,
    ListRecords: _list,
    Measure: _measure,
}
RECORD_OPS: Final = frozenset(_PROGRAMS)
"""The Ops that ``record_program`` runs."""


# Claims


def judge_claims(
    rows: Rows, left: dict[bytes, Claim], answers: dict[bytes, Claimed | Existing], second: float = 1.0
) -> tuple[dict[str, list[tuple[Claim, Record]]], list[tuple[bytes, int]]]:
    """Answer the claims that the rows decide, and take them out of ``left``. A record that is missing is claimed again.

    Returns the claims that change a record, by the statement that does it: ``replace`` an expired one, ``take_over`` an
    abandoned one, or ``refuse`` that. And returns the records whose steps are to be read: (id, origin).

    :param rows: the records as they are; 0 as the state says that this claim has created it.
    :param second: one second in the unit of the rows.
    """
    changes: dict[str, list[tuple[Claim, Record]]] = {}
    resumed: list[tuple[bytes, int]] = []
    for row in rows:
        id, token, stored, takeover, attempt, nonce, origin, steps, fingerprint, snapshot, lease, age, expires = row
        if not stored:
            answers[id] = Claimed(token, 1)
            del left[id]
            continue
        op = left[id]
        state = state_at(stored, takeover, lease, expires)
        if state is State.RUNNING and nonce == op.nonce:
            answers[id] = Claimed(token, attempt)
            if steps:
                resumed.append((id, origin))
            del left[id]
            continue
        record = Record(
            id, state, token, attempt, fingerprint, snapshot, lease / second, age / second, expires / second, op.tenant,
            op.operation, op.key,
        )  # fmt: skip
        if state is State.ABSENT:
            changes.setdefault("replace", []).append((op, record))
        elif state is State.ABANDONED and same_request(fingerprint, op.fingerprint):
            change = "take_over" if may_take_over(takeover, op.takeover) else "refuse"
            changes.setdefault(change, []).append((op, record))
        else:
            answers[id] = Existing(record)
            del left[id]
    return changes, resumed


def add_steps(answers: dict[bytes, Claimed | Existing], rows: Iterable[Sequence[Any]]) -> None:
    """Add the steps of attempts that were taken over: (id, name, value).

    They are read after the take-over. Only the owner writes steps, and that is the new claim now.
    """
    steps: dict[bytes, list[tuple[str, bytes]]] = {}
    for id, name, value in rows:
        steps.setdefault(id, []).append((name, value))
    for id, found in steps.items():
        answer = answers[id]
        assert isinstance(answer, Claimed)
        answers[id] = Claimed(answer.token, answer.attempt, tuple(found))
