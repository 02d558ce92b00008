"""The flow by itself: a generator that is sent answers. No engine, no store, no clock."""

from typing import Any
from unittest.mock import ANY

import pytest

from semel.core.call import (
    NOT_DONE,
    Await,
    Call,
    Failed,
    NotRun,
    Pause,
    Raised,
    Recover,
    Recovered,
    Returned,
    Run,
    Stopped,
    StoreLater,
)
from semel.core.encoding.plain import PLAIN
from semel.core.encoding.snapshot import Envelope, Kind
from semel.core.endings import SETTLE_PAUSES
from semel.core.flows import perform
from semel.core.keys import identity
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Record, Release
from semel.core.policy import Policy, Wait
from semel.core.states import State, Takeover
from semel.errors import (
    InProgress,
    KeyReused,
    LeaseLost,
    OutcomeUnknown,
    RecordTooLarge,
    ResultNotStored,
    StoreUnavailable,
    StoreUncertain,
)
from semel.observe import events
from semel.observe.events import Event

ID = identity("t", "op", "k")


class Boom(Exception):
    pass


class Driven:
    """A flow in a test's hands: ``next`` is what it asks for."""

    def __init__(self, fingerprint: bytes = b"", **policy: Any) -> None:
        self.events: list[Event] = []
        self.call = Call(
            ID, "t", "op", "k", "k", fingerprint, 7, Policy(**policy), PLAIN, Envelope(), self.events.append
        )
        self.flow = perform(self.call)
        self.next: Any = next(self.flow)

    def answer(self, value: Any) -> "Driven":
        try:
            self.next = self.flow.send(value)
        except StopIteration as stop:
            if isinstance(stop.value, Failed):  # as an engine does
                raise stop.value.error from None
            raise
        return self

    def fail(self, error: BaseException) -> "Driven":
        self.next = self.flow.throw(error)
        return self

    def ends(self, value: Any) -> Any:
        with pytest.raises(StopIteration) as stop:
            self.flow.send(value)
        return stop.value.value

    def names(self) -> list[str]:
        return [event.name for event in self.events]


def record(state: State, **changes: Any) -> Existing:
    fields: dict[str, Any] = {
        "id": ID, "state": state, "token": 1, "attempt": 1, "fingerprint": b"", "snapshot": None, "lease_left": 10.0,
        "age": 1.0, "expires_in": 60.0,
    }  # fmt: skip
    return Existing(Record(**{**fields, **changes}))


def test_a_claim_says_all_that_the_store_needs() -> None:
    flow = Driven(b"f" * 16, lease=5, ttl=60, guarantee="at_most_once")
    assert flow.next == Claim(ID, 7, b"f" * 16, 5.0, 60.0, Takeover.REJECT, "t", "op", "k")


def test_claim_run_complete() -> None:
    flow = Driven(ttl=60).answer(Claimed(11, 1))
    assert flow.next == Run(Claimed(11, 1))
    flow.answer(Returned("x"))
    assert flow.next == Complete(ID, 11, flow.call.seal_value("x"), 60.0)
    outcome = flow.ends(True)
    assert (outcome.value, outcome.replayed, outcome.attempt) == ("x", False, 1)
    assert flow.names() == ["started", "completed"]


def test_a_done_record_is_replayed_at_once() -> None:
    flow = Driven()
    outcome = flow.ends(record(State.DONE, snapshot=flow.call.seal_value([1]), attempt=3))
    assert (outcome.value, outcome.replayed, outcome.attempt) == ([1], True, 3)


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE, State.UNKNOWN, State.ABANDONED])
def test_another_requests_record_is_refused_in_every_state(state: State) -> None:
    flow = Driven(b"a" * 16, on_duplicate=Wait(5))
    with pytest.raises(KeyReused):
        flow.answer(record(state, fingerprint=b"b" * 16))


@pytest.mark.parametrize(("mine", "theirs"), [(b"", b"b" * 16), (b"a" * 16, b"")])
def test_where_one_side_has_no_fingerprint_it_is_the_same_request(mine: bytes, theirs: bytes) -> None:
    flow = Driven(mine)
    assert flow.ends(record(State.DONE, fingerprint=theirs, snapshot=flow.call.seal_value(1))).value == 1


def test_an_unknown_record_is_told_as_such() -> None:
    with pytest.raises(OutcomeUnknown, match="attempt 1"):
        Driven(on_duplicate=Wait(5)).answer(record(State.UNKNOWN))


@pytest.mark.parametrize(("left", "retry_after"), [(0.1, 1.0), (3.0, 3.0), (100.0, 5.0), (-1.0, 1.0)])
def test_a_running_record_turns_away_with_a_hint(left: float, retry_after: float) -> None:
    with pytest.raises(InProgress) as refused:
        Driven().answer(record(State.RUNNING, lease_left=left))
    assert refused.value.retry_after == retry_after


def test_a_waiter_waits_no_longer_than_its_patience_and_no_longer_than_the_lease() -> None:
    flow = Driven(on_duplicate=Wait(5)).answer(record(State.RUNNING, lease_left=2.0))
    assert flow.next == Await(ID, 2.0, 0.005)
    flow.answer(2.0)
    assert isinstance(flow.next, Claim), "it claims again, and does not look and then act"
    flow.answer(record(State.RUNNING, lease_left=30.0))
    assert flow.next == Await(ID, 3.0, 0.01)
    flow.answer(3.0)
    with pytest.raises(InProgress):
        flow.answer(record(State.RUNNING))
    assert flow.names() == ["waited", "waited", "turned_away"]


def test_polls_become_slower_up_to_a_bound() -> None:
    flow = Driven(on_duplicate=Wait(1000))
    intervals = []
    for _ in range(12):
        flow.answer(record(State.RUNNING, lease_left=30.0))
        intervals.append(flow.next.interval)
        flow.answer(flow.next.interval)
    assert intervals == sorted(intervals)
    assert intervals[0] == 0.005
    assert intervals[-1] == 0.5


def test_every_claim_of_one_call_has_the_same_nonce() -> None:
    flow = Driven(on_duplicate=Wait(5))
    first = flow.next
    flow.answer(record(State.RUNNING)).answer(0.1)
    assert flow.next == first


def test_a_wait_for_a_lease_that_has_ended_is_short_and_not_zero() -> None:
    flow = Driven(on_duplicate=Wait(5)).answer(record(State.RUNNING, lease_left=-3.0))
    assert flow.next == Await(ID, 0.005, 0.005)


def offer(flow: Driven, pauses: list[float]) -> None:
    """Refuse the outcome until the flow leaves it to the engine."""
    while True:
        assert isinstance(flow.next, Complete)
        flow.fail(StoreUnavailable("down"))
        if isinstance(flow.next, StoreLater):
            return
        assert isinstance(flow.next, Pause)
        pauses.append(flow.next.seconds)
        flow.answer(None)


def test_settling_pauses_between_tries_and_stops_in_time() -> None:
    flow = Driven(completion_timeout=1.0).answer(Claimed(1, 1)).answer(Returned("x"))
    pauses: list[float] = []
    offer(flow, pauses)
    assert pauses == list(SETTLE_PAUSES)
    assert sum(pauses) <= 1.0
    assert flow.names()[-1] == "unstored"
    outcome = flow.ends(None)
    assert (outcome.value, outcome.replayed, outcome.stored) == ("x", False, False)


@pytest.mark.parametrize("guarantee", ["effectively_once", "at_most_once", "at_least_once"])
def test_a_result_that_is_not_stored_may_be_withheld(guarantee: Any) -> None:
    flow = Driven(completion_timeout=0, on_unstored="withhold", guarantee=guarantee)
    flow.answer(Claimed(1, 1)).answer(Returned("x")).fail(StoreUnavailable("down"))
    assert flow.next == StoreLater(Complete(ID, 1, flow.call.seal_value("x"), 86400.0), (events.Completed, 1, ANY))
    with pytest.raises(OutcomeUnknown, match="ran, but its outcome could not be stored: down") as raised:
        flow.answer(None)
    assert raised.value.result == "x"


def test_settling_goes_on_at_the_slowest_pace_for_as_long_as_it_may() -> None:
    flow = Driven(completion_timeout=3.0).answer(Claimed(1, 1)).answer(Returned("x"))
    pauses: list[float] = []
    offer(flow, pauses)
    assert 2.0 < sum(pauses) <= 3.0
    assert max(pauses) == SETTLE_PAUSES[-1]


def test_a_completion_found_stale_while_settling_is_superseded() -> None:
    flow = (
        Driven()
        .answer(Claimed(1, 1))
        .answer(Returned("mine"))
        .fail(StoreUnavailable("down"))
        .answer(None)
        .answer(False)
    )
    assert flow.next == Lookup(ID)
    theirs = record(State.DONE, snapshot=flow.call.seal_value("theirs"), attempt=2).record
    assert flow.ends(theirs).value == "theirs"
    assert flow.names() == ["started", "store_failed", "lease_lost", "replayed"]


@pytest.mark.parametrize("found", [None, record(State.RUNNING).record, record(State.UNKNOWN).record], ids=str)
def test_a_superseded_attempt_without_an_answer_to_hand_on_is_lost(found: Any) -> None:
    flow = Driven().answer(Claimed(1, 1)).answer(Stopped())
    assert flow.next == Lookup(ID)
    with pytest.raises(LeaseLost):
        flow.answer(found)


def test_what_did_not_run_is_released() -> None:
    gone = Boom("the caller went away")
    flow = Driven(guarantee="at_most_once").answer(Claimed(1, 1)).answer(NotRun(gone))
    assert flow.next == Release(ID, 1, State.ABSENT), "also at most once: it never began"
    with pytest.raises(Boom):
        flow.answer(True)


def test_what_did_not_run_keeps_the_steps_of_earlier_attempts() -> None:
    flow = Driven().answer(Claimed(2, 2, (("id", b"v"),))).answer(NotRun(Boom()))
    assert flow.next == Release(ID, 2, State.ABANDONED)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit(), BaseException("x")], ids=repr)
@pytest.mark.parametrize("remember", [None, "all"])
def test_an_interruption_is_never_an_answer(error: BaseException, remember: Any) -> None:
    flow = Driven(remember_errors=remember).answer(Claimed(1, 1)).answer(Raised(error))
    assert flow.next == Release(ID, 1, State.ABSENT)
    with pytest.raises(type(error)):
        flow.answer(True)
    flow = Driven(guarantee="at_most_once").answer(Claimed(1, 1)).answer(Raised(error))
    assert flow.next == Release(ID, 1, State.UNKNOWN)


def test_recover_comes_before_run_and_only_for_a_take_over() -> None:
    flow = Driven(recover=lambda: None).answer(Claimed(1, 1))
    assert isinstance(flow.next, Run)
    flow = Driven(recover=lambda: None).answer(Claimed(2, 2))
    assert flow.next == Recover(Claimed(2, 2))
    flow.answer(Returned(NOT_DONE))
    assert flow.next == Run(Claimed(2, 2))
    flow = Driven(recover=lambda: None).answer(Claimed(2, 2)).answer(Returned(Recovered("found")))
    assert isinstance(flow.next, Complete)
    assert flow.ends(True).value == "found"


def test_a_recovery_whose_lease_was_lost_hands_on_the_new_owners_answer() -> None:
    flow = Driven(recover=lambda: None).answer(Claimed(2, 2)).answer(Stopped())
    assert flow.next == Lookup(ID)
    theirs = record(State.DONE, snapshot=flow.call.seal_value("theirs")).record
    assert flow.ends(theirs).value == "theirs"


def test_a_result_that_cannot_be_kept_is_completed_all_the_same() -> None:
    flow = Driven().answer(Claimed(1, 1)).answer(Returned(object()))
    assert isinstance(flow.next, Complete)
    with pytest.raises(ResultNotStored):
        flow.answer(True)
    assert flow.names() == ["started", "result_dropped"]


def test_an_outcome_that_the_store_cannot_hold_is_remembered_as_done_without_its_result() -> None:
    flow = Driven().answer(Claimed(1, 1)).answer(Returned("x" * 1000)).fail(RecordTooLarge("400 KB at most"))
    assert isinstance(flow.next, Complete), "sent again, it would be refused again"
    snapshot = Envelope().open(flow.next.snapshot, ID)
    assert (snapshot.kind, snapshot.reason) == (Kind.EMPTY, "400 KB at most")
    with pytest.raises(ResultNotStored, match="will not run again") as raised:
        flow.answer(True)
    assert raised.value.result == "x" * 1000
    assert flow.names() == ["started", "result_dropped"]


def test_that_an_outcome_is_too_large_may_be_learned_while_settling() -> None:
    flow = Driven().answer(Claimed(1, 1)).answer(Returned("x")).fail(StoreUnavailable("down")).answer(None)
    flow.fail(RecordTooLarge("400 KB at most"))
    assert isinstance(flow.next, Complete)
    assert Envelope().open(flow.next.snapshot, ID).kind is Kind.EMPTY
    flow.fail(StoreUnavailable("down again"))
    assert isinstance(flow.next, Pause)
    assert Envelope().open(flow.answer(None).next.snapshot, ID).kind is Kind.EMPTY
    with pytest.raises(ResultNotStored):
        flow.answer(True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("on_store_error", ["closed", "open"])
def test_a_store_that_cannot_hold_even_that_keeps_the_result_from_nobody(on_store_error: Any, late: bool) -> None:
    """More tries would not help, so none are asked for."""
    flow = Driven(on_store_error=on_store_error).answer(Claimed(1, 1)).answer(Returned("x"))
    flow.fail(RecordTooLarge("full"))
    if late:
        flow.fail(StoreUnavailable("down")).answer(None)
    with pytest.raises(StopIteration) as stop:
        flow.fail(RecordTooLarge("full"))
    assert (stop.value.value.value, stop.value.value.stored) == ("x", False)
    assert flow.names()[-1] == "unstored"


def test_a_store_that_cannot_hold_even_that_withholds_it_where_the_policy_says_so() -> None:
    flow = Driven(on_unstored="withhold").answer(Claimed(1, 1)).answer(Returned("x")).fail(RecordTooLarge("full"))
    with pytest.raises(OutcomeUnknown, match="ran, but its outcome could not be stored: full") as raised:
        flow.fail(RecordTooLarge("full"))
    assert raised.value.result == "x"


def test_an_open_policy_runs_nothing_in_the_place_of_an_answer_that_is_there() -> None:
    unconfirmed = StoreUncertain("no replica has confirmed it")
    unconfirmed.answered = True
    flow = Driven(on_store_error="open")
    with pytest.raises(StoreUncertain, match="no replica"):
        flow.fail(unconfirmed)
    assert flow.names() == ["store_failed"]


def test_a_remembered_failure_that_is_too_large_is_remembered_without_its_words() -> None:
    flow = (
        Driven(remember_errors=(Boom,)).answer(Claimed(1, 1)).answer(Raised(Boom("long"))).fail(RecordTooLarge("full"))
    )
    snapshot = Envelope().open(flow.next.snapshot, ID)
    assert (snapshot.kind, snapshot.reason) == (Kind.EMPTY, "Boom, full")
    with pytest.raises(Boom):
        flow.answer(True)
    assert flow.names() == ["started", "failure_remembered"]


def test_a_flow_that_is_closed_half_way_asks_for_nothing_more() -> None:
    flow = Driven().answer(Claimed(1, 1))
    flow.flow.close()
    with pytest.raises(StopIteration):
        next(flow.flow)


def test_without_a_hook_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from semel.observe import events

    def explode(*args: Any) -> None:
        raise AssertionError("an event was made")

    for event in events.EVENTS:
        monkeypatch.setattr(event, "__init__", explode)
    call = Call(ID, "t", "op", "k", "k", b"", 7, Policy(), PLAIN, Envelope(), None)
    flow = perform(call)
    next(flow)
    flow.send(Claimed(1, 1))
    flow.send(Returned(1))
    with pytest.raises(StopIteration):
        flow.send(True)
