"""What an operator must know is in the log without any setting: once per cause, and never with the key."""

import logging
import socket
from collections.abc import Iterator
from typing import Any

import flask
import psycopg
import pytest

from semel import (
    InProgress,
    MemoryStore,
    OutcomeUnknown,
    Resumer,
    Semel,
    StoreUnavailable,
    StoreUncertain,
    current_operation,
    log_events,
)
from semel.core.keys import identity
from semel.core.ops import INPUT, Claim, Claimed, Complete, Renew, SaveStep
from semel.core.states import Takeover
from semel.engine.problem_log import _TEXTS, QUIET, ProblemLog
from semel.errors import NotUndone
from semel.http import flask as on_flask
from semel.messaging.reporting import _MessagingLog
from semel.observe.events import EVENTS
from semel.testing.conformance import ManualClock
from semel.testing.faults import until
from tests.engine.driving import Engine
from tests.engine.scripted import PATIENCE, Gate, Script, ScriptedStore

pytestmark = pytest.mark.slow  # most of it waits for the next try to store

KEY = "secret-key"
RECORD = identity("", "op", KEY).hex()


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What is logged at warning and above, by anyone of ours."""
    found = [record for record in caplog.records if record.name.startswith("semel") and record.levelno >= 30]
    assert not any(KEY in record.getMessage() for record in found if record.name != "semel")
    return found


def only(caplog: pytest.LogCaptureFixture) -> str:
    (record,) = lines(caplog)
    assert record.name == "semel.guard"
    return record.getMessage()


@pytest.fixture
def quiet(engine: Engine) -> Engine:
    """An engine whose guard has no hook."""
    engine.guard = engine.new_guard(on_event=None)
    return engine


def test_a_store_that_is_down_is_logged_once(quiet: Engine, caplog: pytest.LogCaptureFixture) -> None:
    quiet.script.on(Claim, before=StoreUnavailable("no route to host"), times=20)
    for number in range(20):
        with pytest.raises(StoreUnavailable):
            quiet.run(lambda: 1, key=KEY if number == 0 else f"{KEY}-{number}")
    text = only(caplog)
    assert "'op'" in text
    assert RECORD in text
    assert "no route to host" in text


def test_another_reason_is_another_line(quiet: Engine, caplog: pytest.LogCaptureFixture) -> None:
    for reason in ("no route to host", "too many connections"):
        quiet.script.on(Claim, before=StoreUnavailable(reason))
        with pytest.raises(StoreUnavailable):
            quiet.run(lambda: 1, key=KEY)
    assert len(lines(caplog)) == 2


@pytest.mark.parametrize("settings", [{"guarantee": "at_least_once"}, {"on_store_error": "open"}])
def test_running_without_protection_is_logged(
    quiet: Engine, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    quiet.script.on(Claim, before=StoreUncertain("cut"), times=20)
    for _ in range(10):
        assert quiet.run(lambda: "ran", key=KEY, **settings) == "ran"
    text = only(caplog)
    assert "without protection" in text
    assert RECORD in text
    assert "'op'" in text


def test_an_outcome_that_is_not_stored_is_logged(quiet: Engine, caplog: pytest.LogCaptureFixture) -> None:
    quiet.script.on(Complete, before=StoreUnavailable("disk full"), times=6)
    assert quiet.run(lambda: "paid", key=KEY, completion_timeout="60ms") == "paid"
    text = only(caplog)
    assert "not stored" in text
    assert "disk full" in text
    assert RECORD in text
    until(lambda: not quiet.guard.driver.keeper.backlog, PATIENCE, "it is stored")


def test_a_lost_lease_is_logged_when_it_is_lost(quiet: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Not when its handler ends: that may be never."""
    inside, free = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield free

    quiet.renew_early()
    call = quiet.start_run(body, key=KEY)
    inside.wait()
    quiet.do(quiet.new_guard().release, "op", KEY, force=True)
    until(lambda: lines(caplog), PATIENCE, "a line in the log")
    free.open()
    call.exception(PATIENCE)
    text = only(caplog)
    assert "lost its lease" in text
    assert RECORD in text


def test_an_unknown_outcome_is_logged_once(quiet: Engine, caplog: pytest.LogCaptureFixture) -> None:
    quiet.abandon(KEY, takeover=Takeover.REJECT)
    for _ in range(3):
        with pytest.raises(OutcomeUnknown):
            quiet.run(lambda: 1, key=KEY)
    text = only(caplog)
    assert "nobody knows what attempt 1 did" in text
    assert RECORD in text


def test_a_step_that_cannot_be_undone_is_logged_when_its_tries_are_over(
    quiet: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def undo(value: int) -> None:
        raise ValueError("stuck")

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", lambda: 1, undo=undo)
        raise KeyError

    with pytest.raises(NotUndone):
        quiet.run(body, key=KEY, completion_timeout=0.05)
    assert "the step 'charge' cannot be undone" in only(caplog)


def test_what_a_resumer_gives_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    with Semel(MemoryStore(clock=clock), sweep_every=None) as guard:

        @guard.once(operation="op", key="key", resumable=True)
        def pay(key: str) -> None:
            raise ValueError("no")

        call = guard.declared_call(guard.resumable["op"], (KEY,), {})
        claimed = guard.store.execute(call.make_claim())
        assert isinstance(claimed, Claimed)
        guard.store.execute(SaveStep(call.id, claimed.token, INPUT, call.seal_input(), 0))
        resumer = Resumer(guard, tries=2)
        for _ in range(4):
            clock.advance(3600)
            resumer.resume()
    found = [record.getMessage() for record in lines(caplog)]
    assert len(found) == 2
    assert "attempt 2 to resume it failed" in found[0]
    assert "no resumer tries again" in found[1]
    assert all(RECORD in text for text in found)


def test_each_event_that_somebody_must_act_on_is_logged_without_a_hook() -> None:
    told_to_the_caller = {"taken_over", "mismatched", "expired", "over_quota", "renewal_failed", "call_unknown"}
    """The caller gets an error that says it, or Semel has mended it."""
    elsewhere = {"cache_lost": "semel.tiered"}
    logged = {event.name for event in (*_TEXTS, *_MessagingLog._TEXTS)}
    missing = {event.name for event in EVENTS if event.level >= logging.WARNING} - logged
    assert missing == told_to_the_caller | set(elsewhere)


def test_what_is_ordinary_is_not_logged(quiet: Engine, caplog: pytest.LogCaptureFixture) -> None:
    renewed = quiet.script.on(Renew)

    def body() -> Iterator[Any]:
        yield renewed.took_effect
        with pytest.raises(InProgress):
            yield quiet.guard.run("op", key=KEY, call=lambda: 1)

    quiet.renew_early()
    quiet.run(body, key=KEY)
    quiet.run(lambda: 1, key=KEY)
    with pytest.raises(ValueError, match="mine"):
        quiet.run(lambda: int("mine"), key="other")
    assert lines(caplog) == []


def test_log_events_takes_the_place_of_it(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Fifteen lines for one failing call would hide everything else."""
    engine.guard = engine.new_guard(on_event=log_events())
    engine.script.on(Complete, before=StoreUnavailable("disk full"), times=6)
    assert engine.run(lambda: "paid", key=KEY, completion_timeout="200ms") == "paid"
    until(lambda: not engine.guard.driver.keeper.backlog, PATIENCE, "it is stored")
    assert [record.semel_event for record in lines(caplog)] == ["store_failed", "unstored"]  # type: ignore[attr-defined]
    assert {record.name for record in lines(caplog)} == {"semel"}


def test_a_hook_that_is_added_later_takes_its_place_too(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.guard.add_event_hook(log_events())
    engine.script.on(Claim, before=StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        engine.run(lambda: 1, key=KEY)
    assert {record.name for record in lines(caplog)} == {"semel"}


def test_a_cause_is_logged_again_after_a_while_with_how_often_it_came(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = ProblemLog(lambda: now[0])
    with Semel(MemoryStore(), sweep_every=None) as guard:
        call = guard._plain_call("op", KEY, None, None, None, {})
        from semel.observe import events

        for _ in range(8):
            log(call, events.StoreFailed, ("claim", "down"))
        now[0] += QUIET + 1
        log(call, events.StoreFailed, ("claim", "down"))
    first, second = lines(caplog)
    assert "more" not in first.getMessage()
    assert second.getMessage().endswith("(7 more like this in between)")


@pytest.mark.parametrize("kind", ["leased", "transactional"])
def test_a_503_is_explained_in_the_log(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    app, script = flask.Flask("shop"), Script()
    script.on(Claim, before=StoreUnavailable("no route to host"), times=10**6)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"postgresql://app:hunter2@127.0.0.1:{taken.getsockname()[1]}/shop"
        rule: dict[str, Any] = {} if kind == "leased" else {"connection": lambda: psycopg.connect(url)}
        with Semel(ScriptedStore(MemoryStore(), script), sweep_every=None) as guard:
            on_flask.install(app, guard=guard, tenant=lambda request: "alice")
            app.post("/pay")(on_flask.idempotent(**rule)(lambda: "paid"))
            for _ in range(3):
                assert app.test_client().post("/pay", headers={"Idempotency-Key": KEY}).status_code == 503
    text = only(caplog)
    assert "'POST /pay'" in text
    assert "hunter2" not in text
