"""Rules that are the same for every dialect: what may be resolved, what is resumed or listed, how steps reach their
claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from semel.core.ops import (
    Abandoned,
    Claimed,
    Existing,
    Listing,
    ListRecords,
    Lookup,
    Page,
    Record,
    Resolve,
    Resumable,
    Size,
)
from semel.core.semantics import is_listed, not_a_place, pack_place, state_at, unpack_place
from semel.core.states import State, Takeover
from semel.errors import StoreUnavailable
from semel.sql.program import Program, Rows

TRIES: Final = 10
"""How often an Op that lost a race looks again before it fails."""
COUNTED: Final = 10_000
"""Measure counts so many records. If there are more, it takes the server's estimate."""
OVERDUE: Final = 1000
"""Measure looks at so many of the records that a sweep would look at first."""
_ABOVE_ALL: Final = b"\xff" * 17
"""Greater than every id."""
_BY_ID: Final = "="
"""Marks a place in a listing where the records of one moment are found by their ids."""


def one_by_one(program: Callable[[Any], Program[Any]]) -> Callable[[list[Any]], Program[list[Any]]]:
    """The program of several Ops of a kind that cannot share statements, from the program of one."""

    def programs(ops: list[Any]) -> Program[list[Any]]:
        answers = []
        for op in ops:
            answers.append((yield from program(op)))
        return answers

    return programs


def find_records(ops: list[Lookup], rows: Rows, second: float = 1.0) -> list[Record | None]:
    """The records among the rows of the statement ``lookup``. ``second`` is how the rows count one."""
    found = {record.id: record for row in rows if (record := _record(row, second)).state is not State.ABSENT}
    return [found.get(op.id) for op in ops]


def _record(row: Sequence[Any], second: float) -> Record:
    id, stored, token, attempt, fingerprint, snapshot, lease, age, expires, takeover, tenant, operation, key = row
    return Record(
        id, state_at(stored, takeover, lease, expires), token, attempt, fingerprint, snapshot, lease / second,
        age / second, expires / second, tenant, operation, key,
    )  # fmt: skip


def resolve_record(
    op: Resolve,
    lookup: Callable[[], Program[Record | None]],
    free: Callable[[Record], Program[bool]],
    complete: Callable[[Record], Program[bool]],
) -> Program[State]:
    """Free or complete a record, unless it is done or, without force, still running. Returns the state it had.

    ``free`` and ``complete`` return False if the record has changed since it was looked up.
    """
    for _ in range(TRIES):
        record = yield from lookup()
        if record is None or (op.token is not None and op.token != record.token):
            return State.ABSENT
        if record.state is State.DONE and (op.token is None or op.snapshot is not None):
            return record.state
        if record.state is State.RUNNING and not op.force:
            return record.state
        if (yield from (free if op.snapshot is None else complete)(record)):
            return record.state
    raise StoreUnavailable(f"the record changed {TRIES} times while it was being resolved")


def resumable_page(op: Resumable, rows: Rows, second: float = 1.0) -> Page:
    """The abandoned records among the rows of the statement ``inputs``. ``second`` is how the rows count one."""
    found = []
    for id, stored, takeover, token, attempt, fingerprint, lease, age, expires, *names, value in rows:
        if stored != State.RUNNING or takeover == Takeover.REJECT or value is None or names[1] not in op.operations:
            continue
        state = state_at(stored, takeover, lease, expires)
        if state is State.ABANDONED:
            times = (lease / second, age / second, expires / second)
            found.append(Abandoned(Record(id, state, token, attempt, fingerprint, None, *times, *names), value))
    return Page(tuple(found), rows[-1][0] if len(rows) == op.limit else None)


def has_forgettable(rows: Rows) -> bool:
    """Whether a page of ``inputs`` has some that nobody needs any more: their record is gone or done."""
    return any(row[1] in (None, State.DONE) for row in rows)


def list_page(
    op: ListRecords,
    newest: Callable[[str, int, int], Program[Rows]],
    by_id: Callable[[bytes, int], Program[Rows]],
    second: float = 1.0,
) -> Program[Listing]:
    """A page of records by ``sweep_after``, the newest first, and by id among those of one moment.

    ``sweep_after`` is set by the claim, so a record keeps its place. The index is on that column alone, so records of
    one moment come in no order. They are sorted here, and the last moment of a result is left to the next one if some
    of its records may be missing. If a moment has more records than a page may look at, as after a bulk import, the
    primary key is walked for them instead, a part of it for each page.

    :param newest: (place, past, most) the rows up to this place, or up to ``past`` microseconds before it, newest
        first. A row is one of the statement ``lookup``, and its place as text. The place "" is after all records.
    :param by_id: (id, most) the rows below this id, the greatest first.
    :param second: how the rows count one.
    """
    position = ("", _ABOVE_ALL) if op.after is None else unpack_place(op.after)
    found: list[Record] = []
    looked_at, left, ended = 0, op.look, False
    while left > 0 and len(found) < op.limit and not ended:
        place, last = position
        if place.endswith(_BY_ID):
            moment = place.removesuffix(_BY_ID)
            rows = yield from by_id(last, left)
            usable = [(row, (place, row[0])) for row in rows]
            end = (moment, b"") if len(rows) < left else usable[-1][1]
            left -= len(rows)
        else:
            moment = ""
            most = min(left, op.limit) if left == op.look else left  # without filters the first look is enough
            rows = yield from newest(place, 0 if last else 1, most + 1)  # one more, which shows what is complete
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
            if is_listed(op, record := _record(row[:-1], second)):
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


def checked_moment(place: str) -> str:
    """Return the place in a listing if it is a time. Raises PolicyError otherwise: it comes from a caller."""
    try:
        datetime.fromisoformat(place)
    except ValueError:
        raise not_a_place(place) from None
    return place


def size_of(rows: Rows, second: float = 1.0) -> Size:
    """The answer to Measure, from the row of the statement ``measure``."""
    counted, estimate, room, overdue = rows[0]
    exact = counted <= COUNTED
    return Size(counted if exact else max(counted, int(estimate or 0)), exact, int(room), max(0, overdue or 0) / second)


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
