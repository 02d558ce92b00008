"""The conformance suite itself: it passes what is right, and fails every store that is broken in one place."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from semel.core.ops import (
    INPUT,
    Abandoned,
    Claim,
    Claimed,
    Complete,
    Count,
    Listing,
    ListRecords,
    Lookup,
    Measure,
    Op,
    Page,
    Record,
    Release,
    Renew,
    Resolve,
    Resumable,
    SaveStep,
    Size,
    Sweep,
    Swept,
)
from semel.core.semantics import Row, apply, is_listed, show, state_of, sweepable
from semel.core.states import State, Takeover
from semel.errors import StoreError, StoreUnavailable
from semel.testing import conformance

Break = Callable[[Row | None, Any, float], "tuple[Row | None, Any] | None"]

pytestmark = pytest.mark.slow


class BrokenStore:
    """The table over a dict, but for one mutation: where it answers, its answer counts."""

    wakes = False
    counts = True
    resumes = True
    lists = True
    adopt = None
    accept = None

    def __init__(self, mutation: Break, clock: Callable[[], float]) -> None:
        self.mutation = mutation
        self.clock = clock
        self.rows: dict[bytes, Row] = {}
        self.lock = threading.Lock()

    def execute(self, op: Any) -> Any:
        with self.lock:
            now = self.clock()
            if isinstance(op, Sweep):
                return self.sweep(op, now)
            if isinstance(op, Count):
                return self.count(op, now)
            if isinstance(op, Resumable):
                return self.resumable(op, now)
            if isinstance(op, ListRecords):
                return self.list_page(op, now)
            if isinstance(op, Measure):
                return self.measure(now)
            row = self.rows.get(op.id)
            changed, answer = self.mutation(row, op, now) or apply(row, op, now)
            if changed is None:
                self.rows.pop(op.id, None)
            else:
                self.rows[op.id] = changed
            return answer

    def sweep(self, op: Sweep, now: float) -> Swept:
        due = [(id, verdict) for id, row in self.rows.items() if (verdict := sweepable(row, now)) is not None]
        due = due[: op.limit]
        for id, verdict in due:
            if verdict is State.ABSENT:
                del self.rows[id]
            else:
                self.rows[id] = self.rows[id]._replace(state=State.UNKNOWN)
        verdicts = [verdict for _, verdict in due]
        return Swept(verdicts.count(State.ABSENT), verdicts.count(State.UNKNOWN))

    def count(self, op: Count, now: float) -> int:
        mine = [row for row in self.rows.values() if row.tenant == op.tenant and state_of(row, now) is not State.ABSENT]
        return min(len(mine), op.limit)

    def resumable(self, op: Resumable, now: float) -> Page:
        ids = sorted(id for id, row in self.rows.items() if id > op.after and INPUT in dict(row.steps))[: op.limit]
        found = [self.rows[id] for id in ids if self.finds(self.rows[id], op, now)]
        last = ids[-1] if len(ids) == op.limit else None
        return Page(tuple(Abandoned(show(row, now), dict(row.steps)[INPUT]) for row in found), last)

    def finds(self, row: Row, op: Resumable, now: float) -> bool:
        may = row.takeover is not Takeover.REJECT and row.operation in op.operations
        return may and state_of(row, now) is State.ABANDONED

    def list_page(self, op: ListRecords, now: float) -> Listing:
        after = "" if op.after is None else op.after
        ids = sorted(id for id in self.rows if id.hex() > after)
        records = [show(self.rows[id]._replace(snapshot=None), now) for id in ids[: op.look]]
        found = [record for record in records if self.lists_it(record, op)][: op.limit]
        last = found[-1].id if len(found) == op.limit else ids[op.look - 1] if len(ids) > op.look else None
        return Listing(tuple(found), last and last.hex(), min(len(ids), op.look))

    def lists_it(self, record: Record, op: ListRecords) -> bool:
        return is_listed(op, record)

    def measure(self, now: float) -> Size:
        overdue = [now - row.expires for row in self.rows.values() if sweepable(row, now) is not None]
        return Size(len(self.rows), True, None, max(overdue, default=0.0))

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return [self.execute(op) for op in ops]

    def wait(self, id: bytes, seconds: float) -> None:
        raise AssertionError("not declared")

    def open(self) -> None: ...

    def close(self) -> None:
        pass


class ForgetsWhoHoldsTheLock(BrokenStore):
    """Looks, then acts, and lets others in between."""

    def execute(self, op: Any) -> Any:
        if isinstance(op, (Sweep, Count, Resumable, ListRecords, Measure)):
            return super().execute(op)
        row = self.rows.get(op.id)
        time.sleep(0.001)
        changed, answer = apply(row, op, self.clock())
        if changed is None:
            self.rows.pop(op.id, None)
        else:
            self.rows[op.id] = changed
        return answer


class SweepsBeyondItsLimit(BrokenStore):
    def sweep(self, op: Sweep, now: float) -> Swept:
        return super().sweep(Sweep(op.limit + 1), now)


class SweepsWhatIsInDoubt(BrokenStore):
    def sweep(self, op: Sweep, now: float) -> Swept:
        gone = [id for id, row in self.rows.items() if sweepable(row, now) is not None][: op.limit]
        for id in gone:
            del self.rows[id]
        return Swept(len(gone), 0)


class SweepsWhatStillRuns(BrokenStore):
    def sweep(self, op: Sweep, now: float) -> Swept:
        gone = [id for id, row in self.rows.items() if row.expires <= now and row.state is not State.UNKNOWN]
        for id in gone[: op.limit]:
            del self.rows[id]
        return Swept(len(gone[: op.limit]), 0)


class CountsWhatHasExpired(BrokenStore):
    def count(self, op: Count, now: float) -> int:
        return min(sum(row.tenant == op.tenant for row in self.rows.values()), op.limit)


class CountsOnlyWhatHasNotExpired(BrokenStore):
    """But a record in doubt stays past its time."""

    def count(self, op: Count, now: float) -> int:
        return min(sum(row.tenant == op.tenant and row.expires > now for row in self.rows.values()), op.limit)


class CountsEverybody(BrokenStore):
    def count(self, op: Count, now: float) -> int:
        return min(sum(state_of(row, now) is not State.ABSENT for row in self.rows.values()), op.limit)


class CountsBeyondItsLimit(BrokenStore):
    def count(self, op: Count, now: float) -> int:
        return super().count(Count(op.tenant, op.limit + 1), now)


class FindsWhatRuns(BrokenStore):
    def finds(self, row: Row, op: Resumable, now: float) -> bool:
        return row.state is State.RUNNING and row.operation in op.operations


class FindsWhatMayNotBeRunAgain(BrokenStore):
    def finds(self, row: Row, op: Resumable, now: float) -> bool:
        return state_of(row, now) is State.ABANDONED and row.operation in op.operations


class FindsWhatHasExpired(BrokenStore):
    def finds(self, row: Row, op: Resumable, now: float) -> bool:
        return row.state is State.RUNNING and row.lease_end <= now and row.operation in op.operations


class FindsEveryOperation(BrokenStore):
    def finds(self, row: Row, op: Resumable, now: float) -> bool:
        return super().finds(row, Resumable((row.operation,), op.after, op.limit), now)


class LosesTheEndOfAPage(BrokenStore):
    def resumable(self, op: Resumable, now: float) -> Page:
        page = super().resumable(op, now)
        return Page(page.found[:-1] if page.last else page.found, page.last)


class NeverComesToTheEnd(BrokenStore):
    def resumable(self, op: Resumable, now: float) -> Page:
        page = super().resumable(op, now)
        return Page(page.found, page.last or op.after)


class ForgetsTheInputOfWhatRuns(BrokenStore):
    def resumable(self, op: Resumable, now: float) -> Page:
        page = super().resumable(op, now)
        for id, row in self.rows.items():
            if state_of(row, now) is State.RUNNING:
                self.rows[id] = row._replace(steps=tuple(step for step in row.steps if step[0] != INPUT))
        return page


class ListsWhatHasExpired(BrokenStore):
    def lists_it(self, record: Record, op: ListRecords) -> bool:
        return super().lists_it(replace(record, state=record.state or State.DONE), op)


class ListsEveryState(BrokenStore):
    def lists_it(self, record: Record, op: ListRecords) -> bool:
        return super().lists_it(record, replace(op, states=()))


class ListsEveryTenant(BrokenStore):
    def lists_it(self, record: Record, op: ListRecords) -> bool:
        return super().lists_it(record, replace(op, tenant=None))


class ListsWhatIsYoung(BrokenStore):
    def lists_it(self, record: Record, op: ListRecords) -> bool:
        return super().lists_it(record, replace(op, older=0.0))


class ListsSnapshots(BrokenStore):
    def list_page(self, op: ListRecords, now: float) -> Listing:
        page = super().list_page(op, now)
        return replace(page, records=tuple(show(self.rows[record.id], now) for record in page.records))


class LooksAtEverything(BrokenStore):
    def list_page(self, op: ListRecords, now: float) -> Listing:
        return super().list_page(replace(op, look=10_000), now)


class ListsPagesThatOverlap(BrokenStore):
    def list_page(self, op: ListRecords, now: float) -> Listing:
        page = super().list_page(op, now)
        before = [id.hex() for id in sorted(self.rows) if page.after is not None and id.hex() < page.after]
        return replace(page, after=before[-1]) if before else page


class ListsPagesWithGaps(BrokenStore):
    def list_page(self, op: ListRecords, now: float) -> Listing:
        page = super().list_page(op, now)
        rest = [id.hex() for id in sorted(self.rows) if page.after is not None and id.hex() > page.after]
        return replace(page, after=rest[0]) if rest else page


class MeasuresNothing(BrokenStore):
    def measure(self, now: float) -> Size:
        return Size(0, True, None, 0.0)


class MeasuresNoLag(BrokenStore):
    def measure(self, now: float) -> Size:
        return replace(super().measure(now), sweep_lag=0.0)


class AnswersBatchesBackwards(BrokenStore):
    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return [self.execute(op) for op in reversed(ops)][::-1]


class FailsTheWholeBatch(BrokenStore):
    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        if len({op.id for op in ops}) < len(ops):
            return [StoreUnavailable("a record twice in one batch") for _ in ops]
        return super().execute_many(ops)


def _only(kind: type[Any], then: Break) -> Break:
    return lambda row, op, now: then(row, op, now) if isinstance(op, kind) else None


def _with_token(kind: type[Any]) -> Break:
    """Any token will do."""

    def mutated(row: Row | None, op: Any, now: float) -> tuple[Row | None, Any] | None:
        if not isinstance(op, kind) or row is None:
            return None
        fields = {name: getattr(op, name) for name in type(op).__dataclass_fields__}
        return apply(row, type(op)(**{**fields, "token": row.token}), now)

    return mutated


def _claim_ignores_fingerprint(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any]:
    return apply(row, Claim(op.id, op.nonce, b"", op.lease, op.ttl, op.takeover, op.tenant, op.operation, op.key), now)


def _claim_as(takeover: Takeover) -> Break:
    def mutated(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any] | None:
        if row is None or state_of(row, now) is not State.ABANDONED:
            return None
        return apply(row._replace(takeover=takeover), op, now)

    return mutated


def _expired_is_still_there(row: Row | None, op: Any, now: float) -> tuple[Row | None, Any] | None:
    if row is None or state_of(row, now) is not State.ABSENT or not isinstance(op, (Claim, Lookup)):
        return None
    return apply(row._replace(expires=now + 1), op, now)


def _token_from_one(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any] | None:
    if state_of(row, now) is not State.ABSENT:
        return None
    changed, _ = apply(row, op, now)
    assert changed is not None
    return changed._replace(token=1), Claimed(1, 1)


def _takeover_keeps_token(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any] | None:
    changed, answer = apply(row, op, now)
    if row is None or changed is None or not isinstance(answer, Claimed) or answer.attempt == 1:
        return None
    return changed._replace(token=row.token), Claimed(row.token, answer.attempt, answer.steps)


def _last_completion_stays(row: Row | None, op: Complete, now: float) -> tuple[Row | None, Any] | None:
    if row is not None and row.state is State.DONE and row.token == op.token:
        return row._replace(snapshot=op.snapshot), True
    return None


def _renewal_revives(row: Row | None, op: Renew, now: float) -> tuple[Row | None, Any] | None:
    if row is not None and row.state is State.DONE and row.token == op.token:
        return row._replace(state=State.RUNNING, lease_end=now + op.lease), True
    return None


def _renewal_shortens(row: Row | None, op: Renew, now: float) -> tuple[Row | None, Any]:
    changed, answer = apply(row, op, now)
    return (changed._replace(lease_end=now + op.lease) if answer and changed else changed), answer


def _yielding_keeps_the_token(row: Row | None, op: Release, now: float) -> tuple[Row | None, Any] | None:
    changed, answer = apply(row, op, now)
    if row is None or changed is None or op.to is not State.ABANDONED:
        return None
    return changed._replace(token=row.token), answer


def _last_value_of_a_step_stays(row: Row | None, op: SaveStep, now: float) -> tuple[Row | None, Any] | None:
    if row is None or row.token != op.token or row.state is not State.RUNNING:
        return None
    return row._replace(steps=(*((n, v) for n, v in row.steps if n != op.name), (op.name, op.value))), True


def _steps_sorted(row: Row | None, op: SaveStep, now: float) -> tuple[Row | None, Any]:
    changed, answer = apply(row, op, now)
    return (changed._replace(steps=tuple(sorted(changed.steps))) if changed else None), answer


def _steps_survive_expiry(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any] | None:
    changed, answer = apply(row, op, now)
    if row is None or changed is None or not isinstance(answer, Claimed) or not row.steps or answer.steps:
        return None
    return changed._replace(steps=row.steps), Claimed(answer.token, answer.attempt, row.steps)


def _empty_is_none(row: Row | None, op: Complete, now: float) -> tuple[Row | None, Any]:
    changed, answer = apply(row, op, now)
    return (changed._replace(snapshot=changed.snapshot or None) if changed else None), answer


def _empty_resolution_is_absence(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any]:
    return apply(row, replace(op, snapshot=op.snapshot or None), now)


def _resolution_keeps_token(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any] | None:
    changed, answer = apply(row, op, now)
    return None if row is None or changed is None else (changed._replace(token=row.token), answer)


def _frees_whatever_the_token(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any] | None:
    return None if row is None or op.token is None else apply(row, replace(op, snapshot=None, token=row.token), now)


def _frees_nothing(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any]:
    return row, apply(row, op, now)[1]


def _resolution_is_always_forced(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any]:
    return apply(row, replace(op, force=True), now)


def _expected_state_is_ignored(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any]:
    return apply(row, replace(op, states=()), now)


def _only_the_first_expected_state_counts(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any]:
    return apply(row, replace(op, states=op.states[:1]), now)


def _expected_state_is_leave(row: Row | None, op: Resolve, now: float) -> tuple[Row | None, Any] | None:
    if row is None or not op.states or op.token is not None:
        return None
    return apply(row, replace(op, token=row.token, force=True), now)


def _ttl_of_the_claim(row: Row | None, op: Complete, now: float) -> tuple[Row | None, Any] | None:
    changed, answer = apply(row, op, now)
    return None if row is None or changed is None else (changed._replace(expires=row.expires), answer)


def _unknown_expires(row: Row | None, op: Any, now: float) -> tuple[Row | None, Any] | None:
    if row is not None and row.state is State.UNKNOWN and row.expires <= now and isinstance(op, (Claim, Lookup)):
        return apply(None, op, now)
    return None


def _late_owner_is_refused(row: Row | None, op: Any, now: float) -> tuple[Row | None, Any] | None:
    if row is not None and row.state is State.RUNNING and row.lease_end <= now:
        return row, False
    return None


def _nonce_is_forgotten(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any]:
    return apply(row._replace(nonce=-1) if row else None, op, now)


def _release_ignores_where_to(row: Row | None, op: Release, now: float) -> tuple[Row | None, Any]:
    return apply(row, Release(op.id, op.token, State.ABSENT), now)


def _text_is_stripped(row: Row | None, op: Claim, now: float) -> tuple[Row | None, Any]:
    key = op.key and op.key.strip()
    return apply(
        row, Claim(op.id, op.nonce, op.fingerprint, op.lease, op.ttl, op.takeover, op.tenant, op.operation, key), now
    )


MUTATIONS: dict[str, Break] = {
    "a stale owner completes": _with_token(Complete),
    "a stale owner renews": _with_token(Renew),
    "a stale owner releases": _with_token(Release),
    "a stale owner saves a step": _with_token(SaveStep),
    "a mismatching fingerprint takes over": _only(Claim, _claim_ignores_fingerprint),
    "everything may be taken over": _only(Claim, _claim_as(Takeover.RETRY)),
    "nothing may be taken over": _only(Claim, _claim_as(Takeover.REJECT)),
    "expired records stay": _expired_is_still_there,
    "unknown records expire": _unknown_expires,
    "tokens begin anew": _only(Claim, _token_from_one),
    "a take-over keeps the token": _only(Claim, _takeover_keeps_token),
    "the last completion stays": _only(Complete, _last_completion_stays),
    "a renewal revives what is done": _only(Renew, _renewal_revives),
    "a renewal makes the lease shorter": _only(Renew, _renewal_shortens),
    "a late renewal revives what was let go": _only(Release, _yielding_keeps_the_token),
    "the last value of a step stays": _only(SaveStep, _last_value_of_a_step_stays),
    "steps come back sorted": _only(SaveStep, _steps_sorted),
    "steps survive expiry": _only(Claim, _steps_survive_expiry),
    "an empty answer is none": _only(Complete, _empty_is_none),
    "an empty resolution is absence": _only(Resolve, _empty_resolution_is_absence),
    "a resolution keeps the token": _only(Resolve, _resolution_keeps_token),
    "a finished record is freed whatever its token": _only(Resolve, _frees_whatever_the_token),
    "nothing is freed": _only(Resolve, _frees_nothing),
    "a resolution is always forced": _only(Resolve, _resolution_is_always_forced),
    "the expected state is ignored": _only(Resolve, _expected_state_is_ignored),
    "only the first expected state counts": _only(Resolve, _only_the_first_expected_state_counts),
    "an expected state replaces the token": _only(Resolve, _expected_state_is_leave),
    "the ttl of the completion is ignored": _only(Complete, _ttl_of_the_claim),
    "a late owner may not complete": _only(Complete, _late_owner_is_refused),
    "a late owner may not renew": _only(Renew, _late_owner_is_refused),
    "a late owner may not save a step": _only(SaveStep, _late_owner_is_refused),
    "the nonce is forgotten": _only(Claim, _nonce_is_forgotten),
    "every release makes it absent": _only(Release, _release_ignores_where_to),
}
UNSEEN_BY_THE_MODEL: dict[str, Break] = {"text is stripped": _only(Claim, _text_is_stripped)}


def nothing(row: Row | None, op: Any, now: float) -> None:
    return None


def fails(make: Callable[[conformance.ManualClock], BrokenStore]) -> str | None:
    """The first proof that the store fails."""
    for family in conformance.FAMILIES:
        for proof in family.proofs:
            if proof.wakes or proof.second:
                continue
            clock = conformance.ManualClock()
            try:
                conformance.play(proof, functools.partial(make, clock), shared=False, clock=clock)
            except (AssertionError, StoreError, AttributeError):
                return f"{family.name}: {proof}"
    return None


def test_what_is_right_passes() -> None:
    assert fails(lambda clock: BrokenStore(nothing, clock)) is None


@pytest.mark.parametrize("mutation", [*MUTATIONS, *UNSEEN_BY_THE_MODEL])
def test_a_proof_fails_when(mutation: str) -> None:
    broken = {**MUTATIONS, **UNSEEN_BY_THE_MODEL}[mutation]
    assert fails(lambda clock: BrokenStore(broken, clock))


@pytest.mark.parametrize(
    "kind",
    [
        ForgetsWhoHoldsTheLock,
        SweepsBeyondItsLimit,
        SweepsWhatIsInDoubt,
        SweepsWhatStillRuns,
        CountsWhatHasExpired,
        CountsOnlyWhatHasNotExpired,
        CountsEverybody,
        CountsBeyondItsLimit,
        FindsWhatRuns,
        FindsWhatMayNotBeRunAgain,
        FindsWhatHasExpired,
        FindsEveryOperation,
        LosesTheEndOfAPage,
        NeverComesToTheEnd,
        ForgetsTheInputOfWhatRuns,
        ListsWhatHasExpired,
        ListsEveryState,
        ListsEveryTenant,
        ListsWhatIsYoung,
        ListsSnapshots,
        LooksAtEverything,
        ListsPagesThatOverlap,
        ListsPagesWithGaps,
        MeasuresNothing,
        MeasuresNoLag,
        AnswersBatchesBackwards,
        FailsTheWholeBatch,
    ],
)
def test_a_proof_fails_a_store_that(kind: type[BrokenStore]) -> None:
    assert fails(lambda clock: kind(nothing, clock))


RARE = {
    "an empty answer is none",
    "a late owner may not save a step",
    "the last completion stays",
    "steps come back sorted",
    "steps survive expiry",
}
"""The model meets them in thousands of examples only. A proof finds each of them."""


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [mutation for mutation in MUTATIONS if mutation not in RARE])
def test_the_model_differs_when(mutation: str) -> None:
    clock = conformance.ManualClock()
    machine = conformance.machine_for(lambda: BrokenStore(MUTATIONS[mutation], clock), clock=clock)
    found = settings(
        max_examples=4000,
        stateful_step_count=30,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(machine, settings=found)


def test_every_family_has_proofs_with_names_of_their_own() -> None:
    names = [(family.name, proof.name) for family in conformance.FAMILIES for proof in family.proofs]
    assert len(names) == len(set(names)) > 120
    assert all(family.proofs for family in conformance.FAMILIES)
