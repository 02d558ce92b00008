"""Rules that are the same for every dialect: what may be resolved, what is resumed, how steps reach their claim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from semel.core.ops import Abandoned, Claimed, Existing, Lookup, Page, Record, Resolve, Resumable
from semel.core.semantics import state_at
from semel.core.states import State, Takeover
from semel.errors import StoreUnavailable
from semel.sql.program import Program, Rows

TRIES: Final = 10
"""How often an Op that lost a race looks again before it fails."""


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
    found: dict[bytes, Record] = {}
    for row in rows:
        id, stored, token, attempt, fingerprint, snapshot, lease, age, expires, takeover, tenant, operation, key = row
        state = state_at(stored, takeover, lease, expires)
        if state is not State.ABSENT:
            found[id] = Record(
                id, state, token, attempt, fingerprint, snapshot, lease / second, age / second, expires / second,
                tenant, operation, key,
            )  # fmt: skip
    return [found.get(op.id) for op in ops]


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


def resumable_page(op: Resumable, rows: Rows, seconds: Callable[[Any, Any, Any], tuple[float, float, float]]) -> Page:
    """The abandoned records among the rows of the statement ``inputs``.

    :param seconds: turns the three times of a row into seconds: left of the lease, since the claim, until it expires.
    """
    found = []
    for id, stored, takeover, token, attempt, fingerprint, lease, age, expires, *names, value in rows:
        if stored != State.RUNNING or takeover == Takeover.REJECT or value is None or names[1] not in op.operations:
            continue
        times = seconds(lease, age, expires)
        state = state_at(stored, takeover, times[0], times[2])
        if state is State.ABANDONED:
            found.append(Abandoned(Record(id, state, token, attempt, fingerprint, None, *times, *names), value))
    return Page(tuple(found), rows[-1][0] if len(rows) == op.limit else None)


def has_forgettable(rows: Rows) -> bool:
    """Whether a page of ``inputs`` has some that nobody needs any more: their record is gone or done."""
    return any(row[1] in (None, State.DONE) for row in rows)


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
