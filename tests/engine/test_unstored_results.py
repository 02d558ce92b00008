"""A handler has returned, and the store does not take its result: the caller gets it, and it is stored later."""

import asyncio
import os
from typing import Any

import pytest

from semel import InProgress, OutcomeUnknown, Policy, PolicyError, State, StoreUnavailable, StoreUncertain
from semel.core.ops import Complete, Renew
from semel.engine.drive import backlog
from semel.testing.faults import until
from tests.engine.driving import Engine
from tests.engine.scripted import PATIENCE, Gate

pytestmark = pytest.mark.slow  # most of it waits for the next try to store

DOWN = StoreUnavailable("down")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once: no test waits for the clock."""
    monkeypatch.setattr(backlog, "FIRST_PAUSE", 0.002)
    monkeypatch.setattr(backlog, "SLOWEST_PAUSE", 0.01)


def forbidden() -> None:
    raise AssertionError("it ran again")


def is_idle(engine: Engine) -> bool:
    """Whether the guard holds nothing for a call any more."""
    driver = engine.guard.driver
    return not driver.flights.by_id and len(driver.keeper.leases) == 0 and not driver.keeper.backlog


def settled(engine: Engine) -> None:
    until(lambda: is_idle(engine), PATIENCE, "the backlog is empty")


@pytest.mark.parametrize("error", [StoreUnavailable, StoreUncertain])
@pytest.mark.parametrize("guarantee", ["effectively_once", "at_most_once", "at_least_once"])
def test_the_caller_gets_the_result_and_it_is_stored_later(engine: Engine, guarantee: Any, error: Any) -> None:
    engine.script.on(Complete, before=error("down"), times=40)
    stored = engine.script.on(Complete)
    outcome = engine.run_outcome(lambda: "paid", guarantee=guarantee, completion_timeout=0, lease="1s")
    assert (outcome.value, outcome.replayed, outcome.stored) == ("paid", False, False)
    assert engine.names() == ["started", "store_failed", "unstored"]
    stored.took_effect.wait()
    settled(engine)
    assert engine.names()[-1] == "completed"
    later = engine.run_outcome(forbidden, guarantee=guarantee)
    assert (later.value, later.replayed, later.stored) == ("paid", True, True)


def test_nobody_runs_it_again_while_it_is_not_stored(engine: Engine) -> None:
    """The lease is renewed meanwhile, and the late result still counts."""
    open_again = Gate()
    engine.script.on(Complete, before=DOWN, times=10**6, when=lambda op: not open_again.is_open)
    renewed = engine.script.on(Renew)
    engine.renew_early()
    assert engine.run(lambda: "paid", completion_timeout=0) == "paid"
    renewed.took_effect.wait()
    for guard in (engine.guard, engine.new_guard()):
        with pytest.raises(InProgress):
            engine.run(forbidden, guard=guard)
    open_again.open()
    settled(engine)
    assert engine.run(forbidden) == "paid"


def test_a_policy_may_withhold_a_result_that_is_not_stored(engine: Engine) -> None:
    engine.script.on(Complete, before=DOWN, times=5)
    with pytest.raises(OutcomeUnknown, match="ran, but its outcome could not be stored: down") as raised:
        engine.run(lambda: "paid", completion_timeout=0, on_unstored="withhold")
    assert (raised.value.result, raised.value.status, raised.value.retryable) == ("paid", 500, False)
    settled(engine)
    assert engine.run(forbidden) == "paid", "it is stored later all the same"


def test_the_setting_is_checked() -> None:
    with pytest.raises(PolicyError, match='on_unstored is one of "deliver", "withhold"'):
        Policy(on_unstored="drop")  # type: ignore[arg-type]


def test_a_result_of_which_another_owner_knows_nothing_is_given_up(engine: Engine) -> None:
    held = Gate()
    engine.script.on(Complete, before=DOWN)
    later = engine.script.on(Complete, hold_before=held)
    assert engine.run(lambda: "first", completion_timeout=0) == "first"
    later.seen.wait()
    other = engine.new_guard()
    engine.do(other.release, "op", "k", force=True)
    engine.clock.advance(1)
    assert engine.run(lambda: "second", guard=other) == "second"
    held.open()
    settled(engine)
    assert engine.names()[-1] == "lease_lost"
    assert engine.run(forbidden) == "second"


@pytest.mark.parametrize("guarantee", ["effectively_once", "at_most_once"])
def test_a_store_that_is_away_for_good(engine: Engine, guarantee: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller has its result. When the time is over, the lease ends as if the process had died."""
    monkeypatch.setattr(backlog, "KEEP_TRYING", 0.05)
    engine.script.on(Complete, before=DOWN, times=10**6, when=lambda op: True)
    assert engine.run(lambda: "paid", guarantee=guarantee, completion_timeout=0) == "paid"
    settled(engine)
    assert engine.names()[-1] == "store_failed"
    assert "given up" in engine.events[-1].error  # type: ignore[attr-defined]
    engine.clock.advance(31)
    engine.script.forget()
    if guarantee == "at_most_once":
        with pytest.raises(OutcomeUnknown):
            engine.run(forbidden, guarantee=guarantee)
    else:
        assert engine.run(lambda: "again", guarantee=guarantee) == "again"


def test_it_is_tried_after_the_lease_has_ended_too_if_nobody_took_over(engine: Engine) -> None:
    """While the store is away nobody can take over. When it is back, the late result still counts."""
    back = Gate()
    engine.script.on(Renew, before=DOWN, times=10**6, when=lambda op: not back.is_open)
    engine.script.on(Complete, before=DOWN, times=10**6, when=lambda op: not back.is_open)
    assert engine.run(lambda: "paid", completion_timeout=0, lease="20ms") == "paid"
    until(lambda: len(engine.guard.driver.keeper.leases) == 0, PATIENCE, "the lease is lost")
    back.open()
    settled(engine)
    assert engine.run(forbidden) == "paid"


def test_a_remembered_failure_is_stored_later_too(engine: Engine) -> None:
    def fail() -> None:
        raise ValueError("card declined")

    engine.script.on(Complete, before=DOWN, times=3)
    for _ in range(2):
        with pytest.raises(ValueError, match="card declined"):
            engine.run(fail, guarantee="at_most_once", completion_timeout=0)
        settled(engine)
    assert engine.names() == ["started", "store_failed", "unstored", "failure_remembered", "replayed"]


def test_closing_the_guard_ends_it_after_a_last_try(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog, "FIRST_PAUSE", 600.0)
    engine.script.on(Complete, before=DOWN)
    assert engine.run(lambda: "paid", completion_timeout=0) == "paid"
    assert not is_idle(engine)
    engine.do(engine.guard.driver.keeper.close)
    assert is_idle(engine)
    record = engine.record()
    assert record is not None
    assert record.state is State.DONE


def test_closing_the_guard_does_not_wait_for_a_store_that_hangs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keeper in ("keeper", "aio_keeper"):
        monkeypatch.setattr(f"semel.engine.drive.{keeper}.CLOSE_TIMEOUT", 0.01)
    held = Gate()
    engine.script.on(Complete, before=DOWN)
    later = engine.script.on(Complete, hold_before=held)
    assert engine.run(lambda: "paid", completion_timeout=0) == "paid"
    later.seen.wait()
    closing = engine.start(engine.guard.driver.keeper.close)
    closing.result(PATIENCE)
    held.open()
    settled(engine)


def test_many_results_are_stored_together(quick_engine: Engine) -> None:
    engine = quick_engine
    open_again = Gate()
    engine.script.on(Complete, before=DOWN, times=10**6, when=lambda op: not open_again.is_open)
    for number in range(50):
        assert engine.run(lambda: "paid", key=f"k{number}", completion_timeout=0) == "paid"
    engine.script.batches.clear()
    open_again.open()
    settled(engine)
    assert any(len(batch) == 50 for batch in engine.script.batches)
    for number in range(50):
        assert engine.run(forbidden, key=f"k{number}") == "paid"


def test_a_cancelled_caller_leaves_the_storing_to_the_background(quick_engine: Engine) -> None:
    engine = quick_engine
    if not engine.is_async:
        pytest.skip("threads are not cancelled")
    completing = engine.script.on(Complete, hold_before=Gate())
    engine.script.on(Complete, before=DOWN, times=3)

    async def cancelled() -> None:
        call = engine.function(lambda: "paid")
        task = asyncio.ensure_future(engine.guard.run("op", key="k", call=call, completion_timeout=0))
        await completing.seen.passed()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    engine.do(cancelled)
    settled(engine)
    assert engine.run(forbidden) == "paid"


def test_an_attempt_that_an_adapter_completes(engine: Engine) -> None:
    engine.script.on(Complete, before=DOWN, times=4)
    policy = engine.guard.policy.replace(completion_timeout=0)
    attempt = engine.do(engine.guard.begin, engine.guard.make_call("op", "k", "", b"", policy))
    outcome = engine.do(attempt.complete, "paid")
    assert (outcome.value, outcome.stored) == ("paid", False)
    del attempt
    settled(engine)
    assert engine.run(forbidden) == "paid"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_it_to_its_parent(quick_engine: Engine) -> None:
    engine = quick_engine
    if engine.is_async:
        pytest.skip("an event loop does not survive a fork")
    open_again = Gate()
    engine.script.on(Complete, before=DOWN, times=10**6, when=lambda op: not open_again.is_open)
    assert engine.run(lambda: "paid", completion_timeout=0) == "paid"
    keeper = engine.guard.driver.keeper
    child = os.fork()
    if child == 0:
        os._exit(len(keeper.backlog) + len(keeper.leases))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert keeper.backlog
    open_again.open()
    settled(engine)
