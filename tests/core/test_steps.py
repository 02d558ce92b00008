"""The flows of steps, driven by hand: what they ask for, and the bytes they store, which must never change."""

from typing import Any

import pytest

from semel.codec import Codec
from semel.core.call import Call, Failed, Pause, Raised, Returned
from semel.core.encoding.plain import PLAIN
from semel.core.flows import perform
from semel.core.keys import identity
from semel.core.ops import Claim, Claimed, SaveStep
from semel.core.policy import Policy
from semel.core.steps import FindMark, RunStep, RunUndo, StepFlow, StepJournal, WriteMark
from semel.errors import LeaseLost, NotUndone, RecordTooLarge, StoreUncertain

AT = bytes.fromhex("010100046a736f6e2b1565102b7b22247475706c65223a5b312c325d7d")
CHARGE = bytes.fromhex("010100046a736f6e60c88420a5bb2cd0bb60a53f4be2ce74888fcfe7017b226964223a2263227d")
NOT_CHARGED = bytes.fromhex("010100046a736f6e3b9625f96e756c6c")
FAILED = bytes.fromhex(
    "01020000b9ce3f142b5b2256616c75654572726f72222c226e6f222c7b22247475706c65223a5b226e6f225d7d2c6e756c6c5d"
)
CHARGE_WITHOUT_RESULT = bytes.fromhex("01030000e0077921a5bb2cd0bb60a53f4be2ce74888fcfe700746f6f206c61726765")


def charge(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("flows run nothing themselves")


def refund(result: Any) -> None:
    raise AssertionError("flows run nothing themselves")


def make_call(**policy: Any) -> Call:
    id = identity("acme", "ship", "o-1")
    call = Call(id, "acme", "ship", "o-1", "o-1", b"", 7, Policy(**policy), PLAIN, Codec(), None)
    next(perform(call))  # it claims
    return call


class Flow:
    """One flow: ``asks`` is what it waits for, ``result`` what it returned."""

    def __init__(self, flow: StepFlow) -> None:
        self._flow = flow
        self.asks: Any = None
        self.result: Any = None
        self.answer(None)

    def answer(self, answer: Any) -> "Flow":
        try:
            self.asks = self._flow.throw(answer) if isinstance(answer, BaseException) else self._flow.send(answer)
        except StopIteration as stop:
            self.asks, self.result = None, stop.value
        return self


def steps(journal: StepJournal, **options: Any) -> Flow:
    return Flow(journal.step("charge", charge, (1, "a"), {"b": [2]}, **options))


def test_the_stored_bytes_are_those_of_the_first_release() -> None:
    journal = StepJournal(make_call(), 5)
    flow = Flow(journal.capture("at", lambda: (1, 2)))
    assert flow.asks == SaveStep(make_call().id, 5, "at", AT, 0)
    assert flow.answer(True).result == (1, 2)
    flow = steps(journal, undo=refund)
    assert flow.asks == RunStep(charge, (1, "a"), {"b": [2]}, "charge")
    assert flow.answer(Returned({"id": "c"})).asks == SaveStep(make_call().id, 5, "~step:charge", CHARGE, 1)
    assert flow.answer(True).result == {"id": "c"}
    flow = Flow(journal.compensate(ValueError("no")))
    assert flow.asks == SaveStep(make_call().id, 5, "~failed", FAILED, 2)
    assert flow.answer(True).asks == RunUndo(refund, {"id": "c"}, "charge")
    assert flow.answer(Returned(None)).asks == SaveStep(make_call().id, 5, "~undo:charge", NOT_CHARGED, 3)
    assert isinstance(flow.answer(True).result, ValueError)
    assert journal.compensated


def test_a_result_that_the_store_cannot_hold_is_left_out() -> None:
    flow = steps(StepJournal(make_call(), 5)).answer(Returned({"id": "c"})).answer(RecordTooLarge("too large"))
    assert flow.asks.value == CHARGE_WITHOUT_RESULT
    assert flow.answer(True).result == {"id": "c"}


def test_what_is_stored_is_not_run_again() -> None:
    saved = [("at", AT), ("~step:charge", CHARGE)]
    journal = StepJournal(make_call(), 6, saved)
    assert Flow(journal.capture("at", charge)).result == (1, 2)
    assert steps(journal, undo=refund).result == {"id": "c"}
    assert Flow(journal.compensate(ValueError("no"))).asks.name == "~failed"


def test_a_step_whose_save_was_not_answered_is_saved_again_and_not_run_again() -> None:
    journal = StepJournal(make_call(), 5)
    flow = steps(journal).answer(Returned(1))
    save = flow.asks
    with pytest.raises(StoreUncertain):
        flow.answer(StoreUncertain("no answer"))
    assert steps(journal).asks == save


def test_a_step_that_raised_may_be_tried_again() -> None:
    journal = StepJournal(make_call(), 5)
    error = StopIteration("garbled by a generator that raises it")
    flow = steps(journal).answer(Raised(error))
    assert flow.result == Failed(error)
    assert steps(journal).asks == RunStep(charge, (1, "a"), {"b": [2]}, "charge")


def test_without_a_lease_nothing_is_stored() -> None:
    journal = StepJournal(make_call(), None)
    assert Flow(journal.capture("at", lambda: 1)).result == 1
    assert steps(journal, undo=refund).answer(Returned(2)).result == 2
    flow = Flow(journal.compensate(ValueError("no")))
    assert flow.asks == RunUndo(refund, 2, "charge")
    assert isinstance(flow.answer(Returned(None)).result, ValueError)


def test_an_undo_is_tried_again_for_a_while() -> None:
    journal = StepJournal(make_call(completion_timeout=0.1), 5)
    steps(journal, undo=refund).answer(Returned(1)).answer(True)
    flow = Flow(journal.compensate(ValueError("no"))).answer(True)
    pauses = []
    while flow.asks is not None:
        flow.answer(Raised(OSError("down")))
        if isinstance(flow.asks, Pause):
            pauses.append(flow.asks.seconds)
            flow.answer(None)
    assert pauses == [0.02, 0.05]
    assert isinstance(flow.result, NotUndone)
    assert flow.result.__cause__ is not None


def test_a_mark_in_the_callers_transaction_counts_once_that_is_committed() -> None:
    journal = StepJournal(make_call(), 5)
    flow = steps(journal, in_transaction=True)
    assert flow.asks == RunStep(charge, (1, "a"), {"b": [2]}, "charge")
    assert isinstance(flow.answer(Returned(1)).asks, WriteMark)
    assert flow.answer(True).result == 1
    assert journal.in_transaction
    flow = steps(journal, in_transaction=True)
    assert flow.asks == FindMark(make_call().id, "~step:charge")
    assert isinstance(flow.answer(False).asks, RunStep)  # rolled back: run it again


def test_before_undoing_the_store_is_asked_what_was_committed() -> None:
    journal = StepJournal(make_call(), 5)
    steps(journal, in_transaction=True, undo=refund).answer(Returned(1)).answer(True)
    error = ValueError("no")
    flow = Flow(journal.compensate(error))
    assert isinstance(flow.asks, Claim)
    assert flow.answer(Claimed(5, 1)).result is error  # rolled back: nothing to undo
    assert not journal.compensated


def test_a_stale_token_ends_the_step() -> None:
    flow = steps(StepJournal(make_call(), 5)).answer(Returned(1))
    with pytest.raises(LeaseLost):
        flow.answer(False)
