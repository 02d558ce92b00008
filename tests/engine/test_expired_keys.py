"""Keys whose answer has expired: run again as new ones, or refused for a while where the policy says so."""

from collections.abc import Iterator
from typing import Any

import pytest

from semel import KeyExpired, KeyReused, Policy, PolicyError, State, Wait
from semel.core.ops import Sweep
from tests.engine.driving import Engine
from tests.engine.scripted import Gate
from tests.engine.test_claiming import until_waiting

POLICY: dict[str, Any] = {"ttl": 60, "reject_expired_for": 600}


def forbidden() -> None:
    raise AssertionError("it ran")


def test_a_key_is_replayed_then_refused_then_new(engine: Engine) -> None:
    engine.run(lambda: "first", **POLICY)
    engine.clock.advance(59)
    assert engine.run(forbidden, **POLICY) == "first"
    engine.clock.advance(2)
    for _ in range(2):
        with pytest.raises(KeyExpired, match="use a new key") as raised:
            engine.run(forbidden, **POLICY)
        assert (raised.value.status, raised.value.code) == (422, "idempotency_key_expired")
        assert not raised.value.retryable
    engine.clock.advance(597)
    with pytest.raises(KeyExpired):
        engine.run(forbidden, **POLICY)
    engine.clock.advance(3)
    assert engine.run(lambda: "second", **POLICY) == "second"
    assert engine.names().count("expired") == 3


def test_without_it_an_expired_key_is_a_new_one(engine: Engine) -> None:
    engine.run(lambda: "first", ttl=60)
    engine.clock.advance(61)
    assert engine.run(lambda: "second", ttl=60) == "second"


def test_refusing_costs_one_claim_and_changes_nothing(engine: Engine) -> None:
    engine.run(lambda: "first", **POLICY)
    engine.clock.advance(100)
    before = engine.record()
    engine.script.forget()
    with pytest.raises(KeyExpired):
        engine.run(forbidden, **POLICY)
    assert engine.script.kinds == ["Claim"]
    assert engine.record() == before


def test_an_expired_key_is_refused_whatever_it_is_sent_with(engine: Engine) -> None:
    """The answer to give is the same: use a new key."""
    engine.run(lambda: "first", fingerprint="a", **POLICY)
    with pytest.raises(KeyReused):
        engine.run(forbidden, fingerprint="b", **POLICY)
    engine.clock.advance(61)
    with pytest.raises(KeyExpired):
        engine.run(forbidden, fingerprint="b", **POLICY)


def test_a_sweep_keeps_what_is_still_refused(engine: Engine) -> None:
    engine.run(lambda: "first", **POLICY)
    engine.clock.advance(300)
    assert engine.execute(Sweep(100)).removed == 0
    with pytest.raises(KeyExpired):
        engine.run(forbidden, **POLICY)
    engine.clock.advance(361)
    assert engine.execute(Sweep(100)).removed == 1


def test_remembered_failures_are_refused_too(engine: Engine) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.run(fail, remember_errors="all", **POLICY)
    engine.clock.advance(61)
    with pytest.raises(KeyExpired):
        engine.run(forbidden, remember_errors="all", **POLICY)


def test_what_was_never_finished_does_not_expire_into_a_refusal(engine: Engine) -> None:
    """An abandoned attempt has no answer that could expire: it is resumed, for as long as its record is kept."""
    kept = engine.guard.policy.replace(**POLICY)
    engine.abandon(ttl=kept.retention_seconds)
    engine.clock.advance(300)
    outcome = engine.run_outcome(lambda: "resumed", **POLICY)
    assert (outcome.value, outcome.attempt) == ("resumed", 2)


def test_the_claim_itself_is_kept_as_long(engine: Engine) -> None:
    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return 1

    inside, finish = Gate(), Gate()
    running = engine.start_run(body, **POLICY)
    inside.wait()
    record = engine.record()
    assert record is not None
    assert 600 < record.expires_in <= 660
    finish.open()
    running.result(10)


def test_what_someone_resolved_is_kept_and_refused_as_long(engine: Engine) -> None:
    guard = engine.new_guard(policy=Policy(on_abandoned="reject", **POLICY))
    engine.abandon()
    engine.do(guard.resolve, "op", "k", "resolved")
    assert engine.run(forbidden, guard=guard) == "resolved"
    engine.clock.advance(61)
    with pytest.raises(KeyExpired):
        engine.run(forbidden, guard=guard)


def test_a_look_up_shows_the_record_until_it_is_forgotten(engine: Engine) -> None:
    engine.run(lambda: "first", **POLICY)
    engine.clock.advance(100)
    record = engine.do(engine.guard.lookup, "op", "k")
    assert record.state is State.DONE
    assert record.expires_in == pytest.approx(560, abs=1)


def test_those_who_waited_for_the_first_call_get_its_answer(engine: Engine) -> None:
    """Answered from this process: the record they are shown must not look expired."""
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "answer"

    first = engine.start_run(body, lease=1, **POLICY)
    inside.wait()
    others = [engine.start_run(body, on_duplicate=Wait("20s"), lease=1, **POLICY) for _ in range(3)]
    until_waiting(engine.guard, 3)
    finish.open()
    assert [future.result(20) for future in [first, *others]] == ["answer"] * 4


@pytest.mark.parametrize("settings", [{"ttl": None, "reject_expired_for": 60}, {"reject_expired_for": "soon"}], ids=str)
def test_what_cannot_be_meant_is_refused(engine: Engine, settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match="reject_expired_for"):
        engine.run(forbidden, **settings)
