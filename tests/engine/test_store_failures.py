"""A store that fails: closed or open, before the effect or after it; a lost answer is asked for again."""

from collections.abc import Iterator
from typing import Any

import pytest

from semel import Policy, State, StoreError, StoreUnavailable, StoreUncertain, Wait, current_operation
from semel.core.keys import identity
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Release
from semel.core.states import Takeover
from tests.engine.driving import Engine
from tests.engine.scripted import Gate


class Boom(Exception):
    pass


ERRORS = [StoreUnavailable, StoreUncertain]


def forbidden() -> None:
    raise AssertionError("it ran")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("guarantee", ["effectively_once", "at_most_once"])
def test_a_closed_operation_does_not_run_without_its_claim(engine: Engine, guarantee: Any, error: Any) -> None:
    engine.script.on(Claim, before=error("down"), times=2 if error is StoreUncertain else 1)
    with pytest.raises(error, match="down") as raised:
        engine.run(forbidden, guarantee=guarantee)
    assert raised.value.retryable
    assert raised.value.status == 503
    assert set(engine.names()) == {"store_failed"}
    assert engine.run(lambda: "later", guarantee=guarantee) == "later"


def test_an_open_operation_runs_unprotected_and_says_so(engine: Engine) -> None:
    engine.script.on(Claim, before=StoreUnavailable("down"))
    tokens: list[int] = []

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        tokens.append(op.token)
        return (yield op.capture("id", lambda: "captured"))

    outcome = engine.run_outcome(body, guarantee="at_least_once")
    assert (outcome.value, outcome.replayed) == ("captured", False)
    assert engine.names() == ["store_failed", "unprotected"]
    assert engine.script.kinds == ["Claim"]
    assert tokens == [0]
    assert engine.record() is None


class Deaf:
    """A store whose wake-up fails."""

    def __init__(self, engine: Engine, error: BaseException) -> None:
        self.inner, self.engine, self.error = engine.store, engine, error
        self.wakes = self.counts = self.resumes = self.lists = self.trails = True
        self.adopt = self.accept = None
        self.execute, self.execute_many = self.inner.execute, self.inner.execute_many
        self.open, self.close = self.inner.open, self.inner.close
        self.waits = 0
        self.wait = self.wait_async if engine.is_async else self.wait_sync

    def wait_sync(self, id: bytes, seconds: float) -> None:
        self.waits += 1
        raise self.error

    async def wait_async(self, id: bytes, seconds: float) -> None:
        self.wait_sync(id, seconds)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("policy", ["closed", "open"])
def test_a_store_that_cannot_wake_is_asked_again_instead(engine: Engine, error: Any, policy: Any) -> None:
    """Being woken is a comfort; only a claim that fails means that the store is down."""
    claimed = engine.claim_elsewhere()
    answer = engine.guard._plain_call("op", "k", None, None, None, {}).seal_value("theirs")
    deaf = Deaf(engine, error("deaf"))
    guard = engine.new_guard(deaf)
    asked, gate = engine.script.on(Claim), Gate()
    looked = engine.script.on(Claim, hold_before=gate)
    waiting = engine.start_run(forbidden, guard=guard, on_duplicate=Wait("20s"), on_store_error=policy)
    asked.seen.wait()
    looked.seen.wait()
    engine.execute(Complete(identity("", "op", "k"), claimed.token, answer, 60.0))
    gate.open()
    assert waiting.result(20) == "theirs"
    assert deaf.waits >= 1
    assert ("store_failed", "wait") in [(event.name, getattr(event, "op", "")) for event in engine.events]


@pytest.mark.parametrize("policy", ["closed", "open"])
def test_a_store_that_dies_while_we_wait_is_followed_as_the_policy_says(engine: Engine, policy: Any) -> None:
    engine.claim_elsewhere()
    guard = engine.new_guard(Deaf(engine, StoreUnavailable("down")))
    engine.script.on(Claim)
    engine.script.on(Claim, before=StoreUnavailable("down"), times=5)
    if policy == "closed":
        with pytest.raises(StoreUnavailable, match="down"):
            engine.run(forbidden, guard=guard, on_duplicate=Wait("20s"))
    else:
        ran = engine.run(lambda: "unprotected", guard=guard, on_duplicate=Wait("20s"), on_store_error="open")
        assert ran == "unprotected"


def test_an_unprotected_handlers_failure_is_its_own(engine: Engine) -> None:
    engine.script.on(Claim, before=StoreUnavailable("down"))

    def body() -> None:
        raise Boom

    with pytest.raises(Boom):
        engine.run(body, on_store_error="open")
    assert engine.script.kinds == ["Claim"]


@pytest.mark.parametrize("error", ERRORS)
def test_a_complete_whose_answer_was_lost_is_sent_again_and_recognised(engine: Engine, error: Any) -> None:
    engine.script.on(Complete, after=error("cut"))
    outcome = engine.run_outcome(lambda: "answer")
    assert (outcome.value, outcome.replayed) == ("answer", False)
    assert engine.script.kinds == ["Claim", "Complete", "Complete"]
    assert engine.run(forbidden) == "answer"
    assert engine.names() == ["started", "store_failed", "completed", "replayed"]


def test_a_complete_that_did_not_get_through_is_sent_again(engine: Engine) -> None:
    engine.script.on(Complete, before=StoreUnavailable("busy"), times=3)
    assert engine.run(lambda: "answer") == "answer"
    assert engine.script.count(Complete) == 4
    assert engine.run(forbidden) == "answer"


def test_a_complete_that_never_gets_through_hands_the_result_to_the_caller(engine: Engine) -> None:
    engine.script.on(Complete, before=StoreUnavailable("down"), times=10**6)
    outcome = engine.run_outcome(lambda: "the effect's", completion_timeout="50ms")
    assert (outcome.value, outcome.stored) == ("the effect's", False)
    assert "unstored" in engine.names()
    assert engine.script.count(Complete) >= 2
    record = engine.record()
    assert record is not None
    assert record.state is State.RUNNING, "the lease ends by itself; it is not released, for it ran"


def test_completion_timeout_bounds_how_often_the_outcome_is_offered(engine: Engine) -> None:
    engine.script.on(Complete, before=StoreUnavailable("down"), times=10**6)
    assert engine.run(lambda: 1, completion_timeout=0) == 1
    assert engine.names() == ["started", "store_failed", "unstored"]


def test_an_open_operation_that_cannot_complete_answers_all_the_same(engine: Engine) -> None:
    engine.script.on(Complete, before=StoreUnavailable("down"), times=100)
    assert engine.run(lambda: "answer", on_store_error="open", completion_timeout=0) == "answer"
    assert "completed" not in engine.names(), "nothing is stored, so nothing may say so"


def test_a_store_error_does_not_hide_the_handlers_own(engine: Engine) -> None:
    def body() -> None:
        raise Boom

    engine.script.on(Release, before=StoreUnavailable("down"))
    with pytest.raises(Boom):
        engine.run(body)
    assert engine.names() == ["started", "store_failed"]
    engine.script.on(Complete, before=StoreUnavailable("down"), times=100)
    with pytest.raises(Boom):
        engine.run(body, key="other", remember_errors=Boom, completion_timeout=0)
    assert "failure_remembered" not in engine.names()


def test_a_claim_whose_answer_was_lost_is_sent_again_and_recognised(engine: Engine) -> None:
    """Otherwise the key is blocked for a whole lease by an owner that does not exist."""
    engine.script.on(Claim, after=StoreUncertain("cut"))
    outcome = engine.run_outcome(lambda: "answer")
    assert (outcome.value, outcome.replayed, outcome.attempt) == ("answer", False, 1)
    assert engine.script.kinds == ["Claim", "Claim", "Complete"]


def test_the_same_claim_sent_twice_is_answered_twice_alike(engine: Engine) -> None:
    claim = Claim(b"i" * 16, 77, b"", 30.0, 60.0, Takeover.RETRY, "", "op", "twice")
    first, second = engine.execute(claim), engine.execute(claim)
    assert isinstance(first, Claimed)
    assert first == second
    rival = Claim(b"i" * 16, 78, b"", 30.0, 60.0, Takeover.RETRY, "", "op", "twice")
    assert isinstance(engine.execute(rival), Existing)


def test_every_call_has_a_nonce_of_its_own(engine: Engine) -> None:
    for _ in range(50):
        engine.run(lambda: 1)
    nonces = [op.nonce for op in engine.script.ops if isinstance(op, Claim)]
    assert len(set(nonces)) == 50
    assert all(0 <= nonce < 2**63 for nonce in nonces), "databases keep it as a signed 64-bit number"


@pytest.mark.parametrize("error", ERRORS)
def test_a_look_up_that_fails_after_a_lost_lease_is_the_stores_error(engine: Engine, error: Any) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish

    call = engine.start_run(body)
    inside.wait()
    engine.clock.advance(31)
    engine.claim_elsewhere(nonce=2)
    engine.script.on(Lookup, before=error("down"))
    finish.open()
    with pytest.raises(StoreError, match="down"):
        call.result(20)


def test_a_store_error_is_never_swallowed_by_people_s_commands(engine: Engine) -> None:
    engine.script.on(Lookup, before=StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        engine.do(engine.guard.lookup, "op", "k")


@pytest.mark.parametrize("guarantee", ["effectively_once", "at_least_once"])
def test_a_failing_store_and_a_failing_handler_end_in_finite_time(engine: Engine, guarantee: Any) -> None:
    engine.script.on(Claim, before=StoreUnavailable("down"))
    engine.script.on(Release, before=StoreUnavailable("down"))

    def body() -> None:
        raise Boom

    expected = StoreUnavailable if guarantee == "effectively_once" else Boom
    with pytest.raises(expected):
        engine.run(body, guarantee=guarantee)
    assert engine.guard.driver.flights.by_id == {}


def test_the_guards_own_policy_is_the_default(engine: Engine) -> None:
    guard = engine.new_guard(policy=Policy(guarantee="at_least_once", ttl="1h"))
    engine.script.on(Claim, before=StoreUnavailable("down"))
    assert engine.run(lambda: "open", guard=guard) == "open"
    engine.script.on(Claim, before=StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        engine.run(forbidden, guard=guard, on_store_error="closed")
    assert engine.run(lambda: 1, guard=guard) == 1
    record = engine.record()
    assert record is not None
    assert record.expires_in == pytest.approx(3600)
