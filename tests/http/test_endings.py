"""How a protected request is claimed and how it ends, shown on the flow alone: no server, no store and no framework."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from semel import InProgress, LeaseLost, MemoryStore, PreconditionFailed, Semel, StoreUnavailable, TransactionConflict
from semel.core.call import Call, Declined, Outcome, Pause, Raised, Returned, Stopped
from semel.core.encoding.snapshot import StoredResponse
from semel.engine.transaction.rules import TRIES
from semel.errors import BodyTooLarge, ConfigurationError, NotUndone
from semel.http.contract.endpoint import (
    Compensate,
    Ending,
    EndpointFlow,
    FindTenant,
    Framework,
    Lifecycle,
    OpenTransaction,
    ReadBody,
    Rerun,
    RunAgain,
)
from semel.http.contract.exchange import CLAIMED, Exchange
from semel.http.contract.rules import Idempotent, conditional, exempt, idempotent, natural
from semel.http.wsgi import WSGIMiddleware

DONE = StoredResponse(201, [(b"content-type", b"text/plain")], b"done")
FRAMEWORK = Framework(lambda: "blank", lambda status: RuntimeError(f"aborted with {status}"), RunAgain)


class FakeAttempt:
    """An attempt that only shows what the flow asks of it."""

    def __init__(self, lost: bool = False, transaction: bool = False) -> None:
        self.call: Any = SimpleNamespace(alert=lambda event, *details: None, tell=lambda event, *details: None)
        self.lease = None if transaction else SimpleNamespace(lost=lost)

    def conflicts(self, error: BaseException) -> bool:
        return self.lease is None and isinstance(error, TransactionConflict)


class Played:
    """What a flow asked for, and what came of it."""

    def __init__(self, flow: EndpointFlow[Any], *answers: Any) -> None:
        """:param answers: sent to the flow one by one; an error is thrown, except as the answer to Compensate."""
        waiting = list(answers)
        self.asked: list[Any] = []
        try:
            request = next(flow)
            while True:
                self.asked.append(request)
                answer = waiting.pop(0)
                fails = isinstance(answer, BaseException) and not isinstance(request, Compensate)
                request = flow.throw(answer) if fails else flow.send(answer)
        except StopIteration as end:
            self.result = end.value
        assert not waiting, "not all was asked for"

    @property
    def kinds(self) -> list[type]:
        return [type(each) for each in self.asked]


@pytest.fixture
def guard() -> Iterator[Semel]:
    with Semel(MemoryStore(), tenant="alice") as guard:
        yield guard


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.http.contract.endpoint.pause_after", lambda call, tried: 0.5)


def life_of(guard: Semel, *headers: tuple[bytes, bytes], key: bytes | None = b"k", tenant: Any = None) -> Any:
    lines = [*headers, *([] if key is None else [(b"idempotency-key", key)])]
    middleware = WSGIMiddleware(lambda environ, start: [], guard=guard, tenant=tenant)
    life: Any = Lifecycle(middleware, {}, lambda environment, _: Exchange("POST", "/pay", b"", lines))
    return life


def running(guard: Semel, rule: Idempotent | None = None, **attempt: Any) -> Any:
    """A request whose handler runs now."""
    rule = rule or idempotent()
    life = life_of(guard, (b"if-match", b'"7"'))
    life.rerun = Rerun(life._environment)
    assert Played(life.claim(rule), True, FakeAttempt(**attempt)).result is True
    life.rerun.body = [b"{}"]
    return life


# -- the claim


def test_a_claim_reads_the_body_and_then_begins(guard: Semel) -> None:
    life = life_of(guard)
    attempt = FakeAttempt()
    played = Played(life.claim(idempotent()), True, attempt)
    assert (played.kinds, played.result) == ([ReadBody, Call], True)
    assert (life.attempt, life.answer, life._environment[CLAIMED]) == (attempt, None, True)
    with pytest.raises(ConfigurationError, match="claimed already"):
        Played(life.claim(idempotent()))


def test_the_tenant_is_asked_for_where_there_are_tenants_and_before_the_body(guard: Semel) -> None:
    life = life_of(guard, tenant=lambda environ: "bob")
    played = Played(life.claim(idempotent()), "bob", True, FakeAttempt())
    assert played.kinds == [FindTenant, ReadBody, Call]
    assert played.asked[-1].tenant == "bob"


@pytest.mark.parametrize("rule", [natural(), exempt("finds")])
def test_what_needs_no_key_claims_nothing(guard: Semel, rule: Any) -> None:
    life = life_of(guard)
    played = Played(life.claim(rule))
    assert (played.kinds, played.result, life.attempt, life.rule) == ([], True, None, None)


@pytest.mark.parametrize(
    ("rule", "key", "status"),
    [
        (idempotent(), None, 400),
        (idempotent(key_format="uuid"), b"k", 400),
        (conditional(), b"k", 428),
        (idempotent(required=False), None, None),
    ],
)
def test_headers_decide_before_anything_is_read(guard: Semel, rule: Any, key: bytes | None, status: int | None) -> None:
    life = life_of(guard, key=key)
    played = Played(life.claim(rule))
    assert (played.kinds, played.result) == ([], status is None)
    assert (life.answer and life.answer.status) == status


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ((False,), None),  # the client left
        ((BodyTooLarge(),), 413),
        ((True, InProgress("first", retry_after=1)), 409),
        ((True, StoreUnavailable("down")), 503),
        ((True, Outcome(DONE, True, 1)), 201),
    ],
)
def test_nothing_runs_without_an_attempt(guard: Semel, answers: Any, status: int | None) -> None:
    life = life_of(guard)
    assert Played(life.claim(idempotent()), *answers).result is False
    assert (life.attempt, life.capture, CLAIMED in life._environment) == (None, None, False)
    assert (life.answer and life.answer.status) == status


def test_a_conflict_before_the_handler_has_run_is_only_tried_again(guard: Semel) -> None:
    rule = idempotent(connection=lambda: None)
    life = life_of(guard)
    life.rerun = Rerun(life._environment)
    met = TransactionConflict("it met another one")
    played = Played(life.claim(rule), True, met, None, FakeAttempt(transaction=True))
    assert played.kinds == [ReadBody, OpenTransaction, Pause, OpenTransaction]
    assert played.result is True
    life = life_of(guard)
    life.rerun = Rerun(life._environment)
    played = Played(life.claim(rule), True, *[met, None] * (TRIES - 1), met)
    assert (played.result, life.answer.status) == (False, 503)
    assert played.kinds.count(OpenTransaction) == TRIES


def test_a_conflict_before_the_handler_is_tried_again_also_if_the_request_was_not_kept(guard: Semel) -> None:
    """As of the first request to an application whose routes are not listed."""
    life = life_of(guard)
    played = Played(
        life.claim(idempotent(connection=lambda: None)), True, TransactionConflict("met"), None, FakeAttempt()
    )
    assert played.kinds == [ReadBody, OpenTransaction, Pause, OpenTransaction]
    assert (played.result, life.rerun) == (True, None)


# -- an answer


@pytest.mark.parametrize(
    ("status", "lost", "asked"),
    [
        (201, False, Returned),
        (404, False, Returned),
        (500, False, Declined),
        (500, True, Stopped),
        (201, True, Returned),
    ],
)
def test_an_answer_is_stored_or_frees_the_key(guard: Semel, status: int, lost: bool, asked: type) -> None:
    life = running(guard, lost=lost)
    life.capture.start(status, [])
    life.capture.add(b"said")
    played = Played(life.answered(), Outcome(None, False, 1))
    assert (played.kinds, life.answer) == ([asked], None)
    assert (life.attempt, life.capture, CLAIMED in life._environment) == (None, None, False)


@pytest.mark.parametrize(
    ("end", "status"),
    [(Outcome(DONE, True, 2), 201), (StoreUnavailable("down"), 503), (LeaseLost("replaced"), 409)],
)
def test_another_answer_is_sent_where_it_could_not_be_stored(guard: Semel, end: Any, status: int) -> None:
    life = running(guard)
    life.capture.start(200, [])
    Played(life.answered(), end)
    assert (life.answer.status, life.attempt) == (status, None)


@pytest.mark.parametrize("overflowed", [False, True])
def test_a_conflict_at_the_commit_runs_the_request_again_unless_a_part_was_sent(guard: Semel, overflowed: bool) -> None:
    life = running(guard, idempotent(connection=lambda: None), transaction=True)
    life.capture.start(200, [])
    life.capture.overflowed = overflowed
    Played(life.answered(), TransactionConflict("it met another one"))
    assert (life.runs_again, life.answer is None) == (not overflowed, not overflowed)
    if life.runs_again:
        life._environment["changed"] = True
        assert life.start_over() == b"{}"
        assert (life.rule, life.runs_again, life._environment) == (None, False, {})


# -- an error


CONFLICT = TransactionConflict("it met another one")
BROKEN = KeyError("broken")
NOT_UNDONE = NotUndone("it stands", ("charge",))


@pytest.mark.parametrize(
    ("error", "answers", "asked", "raised", "status"),
    [
        (PreconditionFailed("changed"), (Outcome(None, False, 1),), [Declined], "aborted with 412", 412),
        (PreconditionFailed("changed"), (Outcome(DONE, True, 2),), [Declined], "aborted with 412", 201),
        (BROKEN, (BROKEN,), [Compensate], "broken", None),
        (BROKEN, (NOT_UNDONE, None), [Compensate, Raised], f"aborted with {NotUndone.status}", NotUndone.status),
        (LeaseLost("replaced"), (BROKEN,), [Compensate], "broken", None),
    ],
)
def test_a_handler_that_raises(
    guard: Semel, error: Exception, answers: Any, asked: list[type], raised: str, status: int | None
) -> None:
    life = running(guard, conditional())
    played = Played(life.handler_raised(error, FRAMEWORK), *answers)
    assert played.kinds == asked
    assert raised in str(played.result)
    assert (life.answer and life.answer.status) == status
    assert (life.attempt is None) == (status is not None), "the attempt goes on where the framework may answer"


@pytest.mark.parametrize("possible", [True, False])
def test_a_handler_whose_transaction_conflicts(guard: Semel, possible: bool) -> None:
    life = running(guard, idempotent(connection=lambda: None), transaction=True)
    life.rerun.body = [b"{}"] if possible else None
    played = Played(life.handler_raised(CONFLICT, FRAMEWORK), CONFLICT)
    assert (played.kinds, life.runs_again) == ([Raised], possible)
    assert isinstance(played.result, RunAgain) == possible
    assert (life.answer and life.answer.status) == (None if possible else 503)


def test_a_handler_that_was_cancelled_for_its_lease(guard: Semel) -> None:
    life = running(guard, lost=True)
    played = Played(life.handler_raised(BaseException(), FRAMEWORK, superseded=True), Outcome(DONE, True, 2))
    assert (played.kinds, played.result, life.answer.status) == ([Stopped], None, 201)


@pytest.mark.parametrize(
    ("settings", "error", "superseded", "answers", "asked", "ending", "status"),
    [
        ({}, BROKEN, False, (BROKEN, None), [Compensate, Raised], Ending.RAISE, None),
        ({"external_effects": True}, BROKEN, False, (BROKEN, Outcome(None, False, 1)), [Compensate, Returned],
         Ending.ANSWER_AND_RAISE, 500),
        ({"remember_errors": (KeyError,)}, BROKEN, False, (BROKEN, Outcome(DONE, True, 2)), [Compensate, Returned],
         Ending.ANSWER_AND_RAISE, 201),
        ({}, BROKEN, False, (NOT_UNDONE, None), [Compensate, Raised], Ending.ANSWER, NotUndone.status),
        ({}, BROKEN, False, (LeaseLost("replaced"), None), [Compensate, Raised], Ending.ANSWER, 409),
        ({}, PreconditionFailed("changed"), False, (Outcome(None, False, 1),), [Declined], Ending.ANSWER, 412),
        ({}, BROKEN, True, (Outcome(DONE, True, 2),), [Stopped], Ending.ANSWER, 201),
        ({}, BROKEN, True, (LeaseLost("replaced"),), [Stopped], Ending.ANSWER, 409),
        ({"external_effects": True}, SystemExit(), False, (SystemExit(), None), [Compensate, Raised], Ending.RAISE,
         None),
    ],
)  # fmt: skip
def test_an_error_that_leaves_the_application(
    guard: Semel, settings: Any, error: BaseException, superseded: bool, answers: Any, asked: list[type],
    ending: Ending, status: int | None,
) -> None:  # fmt: skip
    life = running(guard, idempotent(**settings), lost=superseded)
    played = Played(life.application_raised(error, superseded=superseded), *answers)
    assert (played.kinds, played.result) == (asked, ending)
    assert (life.answer and life.answer.status) == status
    assert (life.attempt, CLAIMED in life._environment) == (None, False)


def test_an_error_after_the_attempt_has_ended_is_raised(guard: Semel) -> None:
    life = life_of(guard)
    assert Played(life.application_raised(BROKEN)).result is Ending.RAISE
    life.runs_again = True
    assert Played(life.application_raised(RunAgain())).result is Ending.RUN_AGAIN
    assert Played(life.application_raised(ExceptionGroup("", [BROKEN]))).result is Ending.RUN_AGAIN
    assert Played(life.application_raised(KeyboardInterrupt())).result is Ending.RAISE


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("rule", [conditional(), natural()], ids=["conditional", "natural"])
def test_a_precondition_of_a_request_without_a_key(guard: Semel, rule: Any, sent: bool) -> None:
    life = life_of(guard, (b"if-match", b'"7"'), key=None)
    assert Played(life.claim(rule)).result is True
    played = Played(life.application_raised(PreconditionFailed("changed"), sent=sent))
    assert played.result is (Ending.RAISE if sent else Ending.ANSWER)
    assert (life.answer and life.answer.status) == (None if sent else 412)


def test_a_store_that_fails_while_a_failure_is_stored_is_raised(guard: Semel) -> None:
    life = running(guard)
    flow = life.application_raised(BROKEN)
    assert isinstance(next(flow), Compensate)
    assert isinstance(flow.send(BROKEN), Raised)
    with pytest.raises(StoreUnavailable):
        flow.throw(StoreUnavailable("down"))
    assert (life.attempt, life.answer) == (None, None)
