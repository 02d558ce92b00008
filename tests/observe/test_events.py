"""Events: each one in the table is emitted by some scenario, with the right fields; and a sink can do no harm."""

import copy
import dataclasses
import inspect
import pickle
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from semel import (
    NOT_DONE,
    InProgress,
    KeyExpired,
    KeyReused,
    LeaseLost,
    MemoryStore,
    OutcomeUnknown,
    Policy,
    Quota,
    Recovered,
    ResultNotStored,
    Semel,
    State,
    StoreUnavailable,
    TooManyKeys,
    Wait,
    current_operation,
)
from semel.core.call import Raised, Returned
from semel.core.flows import perform
from semel.core.keys import identity
from semel.core.ops import Claim, Claimed, Complete, Existing, Record, Release, Renew
from semel.core.quota import Meter
from semel.engine.guard import Guard
from semel.errors import NotUndone
from semel.http.contract.endpoint import Lifecycle
from semel.http.contract.exchange import Exchange
from semel.http.contract.routes import Middleware
from semel.http.contract.rules import idempotent
from semel.observe import events
from semel.observe.events import EVENTS, Event
from semel.testing.faults import until
from tests.engine.driving import Engine
from tests.engine.scripted import Gate

ROOT = Path(__file__).parents[2]

ID = identity("acme", "op", "k")
VALUE = Semel(MemoryStore()).make_call("op", "k", "", b"", Policy()).seal_value(1)
Found = dict[str, Any]


class Boom(Exception):
    pass


def fail() -> None:
    raise Boom("no")


def started(engine: Engine) -> Found:
    engine.run(lambda: 1, tenant="acme")
    return {"attempt": 1, "token": int, "root": "", "parent": "", "seconds": float}


def taken_over(engine: Engine) -> Found:
    engine.abandon(tenant="acme")
    engine.run(lambda: 1, tenant="acme")
    return {"attempt": 2, "token": int}


def completed(engine: Engine) -> Found:
    engine.run(lambda: 1, tenant="acme")
    record = engine.record(tenant="acme")
    assert record is not None
    return {"attempt": 1, "size": len(record.snapshot or b""), "seconds": float, "store_seconds": float}


def failure_remembered(engine: Engine) -> Found:
    with pytest.raises(Boom):
        engine.run(fail, tenant="acme", remember_errors=Boom)
    return {"attempt": 1, "error": "Boom('no')", "seconds": float}


def recovered(engine: Engine) -> Found:
    engine.abandon(tenant="acme")
    engine.run(fail, tenant="acme", recover=lambda: Recovered(1))
    return {"attempt": 2}


def released(engine: Engine) -> Found:
    with pytest.raises(Boom):
        engine.run(fail, tenant="acme")
    return {"attempt": 1, "error": "Boom('no')", "resumable": False, "seconds": float}


def replayed(engine: Engine) -> Found:
    engine.run(lambda: 1, tenant="acme")
    engine.clock.advance(5)
    engine.run(lambda: 1, tenant="acme")
    return {"age": pytest.approx(5, abs=0.01), "attempt": 1, "seconds": float, "trace": ""}


def waited(engine: Engine) -> Found:
    engine.claim_elsewhere(tenant="acme")
    with pytest.raises(InProgress):
        engine.run(lambda: 1, tenant="acme", on_duplicate=Wait("10ms"))
    return {"seconds": float}


def turned_away(engine: Engine) -> Found:
    engine.claim_elsewhere(tenant="acme", lease=3.0)
    with pytest.raises(InProgress) as refused:
        engine.run(lambda: 1, tenant="acme")
    return {"retry_after": refused.value.retry_after}


def mismatched(engine: Engine) -> Found:
    engine.claim_elsewhere(tenant="acme", fingerprint=b"f" * 16)
    with pytest.raises(KeyReused):
        engine.run(lambda: 1, tenant="acme", fingerprint="other")
    return {}


def went_unknown(engine: Engine) -> Found:
    claimed = engine.claim_elsewhere(tenant="acme")
    engine.execute(Release(ID, claimed.token, State.UNKNOWN))
    with pytest.raises(OutcomeUnknown):
        engine.run(lambda: 1, tenant="acme")
    return {"attempt": 1}


def lease_lost(engine: Engine) -> Found:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish

    call = engine.start_run(body, tenant="acme")
    inside.wait()
    mine = engine.record(tenant="acme")
    assert mine is not None
    engine.clock.advance(31)
    engine.claim_elsewhere(tenant="acme", nonce=2)
    finish.open()
    with pytest.raises(LeaseLost):
        call.result(20)
    return {"attempt": 1, "token": mine.token}


def renewed(engine: Engine) -> Found:
    first, second = engine.script.on(Renew), engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield first.took_effect
        yield second.took_effect

    engine.renew_early()
    engine.run(body, tenant="acme")
    return {"attempt": 1}


def renewal_failed(engine: Engine) -> Found:
    failing = engine.script.on(Renew, before=StoreUnavailable("hiccup"))
    again = engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield failing.seen
        yield again.took_effect

    engine.renew_early()
    engine.run(body, tenant="acme")
    return {"error": "hiccup"}


def step_saved(engine: Engine) -> Found:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.capture("id", lambda: 1)

    engine.run(body, tenant="acme")
    return {"step": "id"}


def step_replayed(engine: Engine) -> Found:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", lambda: 1)
        if op.attempt == 1:
            raise Boom

    with pytest.raises(Boom):
        engine.run(body, tenant="acme")
    engine.run(body, tenant="acme")
    return {"step": "charge"}


def undo_failed(engine: Engine) -> Found:
    def undo(value: int) -> None:
        raise ValueError("stuck")

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", lambda: 1, undo=undo)
        raise KeyError

    with pytest.raises(NotUndone):
        engine.run(body, tenant="acme", completion_timeout=0.01)
    return {"step": "charge", "error": "ValueError('stuck')"}


def result_dropped(engine: Engine) -> Found:
    with pytest.raises(ResultNotStored):
        engine.run(lambda: {1: object()}, tenant="acme")
    return {"reason": str}


def unstored(engine: Engine) -> Found:
    engine.script.on(Complete, before=StoreUnavailable("down"))
    engine.run(lambda: 1, tenant="acme", completion_timeout=0)
    until(lambda: not engine.guard.driver.keeper.backlog, 10, "it is stored")
    return {"attempt": 1, "error": "down"}


def store_failed(engine: Engine) -> Found:
    engine.script.on(Claim, before=StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        engine.run(lambda: 1, tenant="acme")
    return {"op": "claim", "error": "down"}


def unprotected(engine: Engine) -> Found:
    engine.script.on(Claim, before=StoreUnavailable("down"))
    engine.run(lambda: 1, tenant="acme", on_store_error="open")
    return {}


class Edge(Middleware[None, Guard, Any]):
    GUARD = Guard


def unkeyed(engine: Engine) -> Found:
    middleware = Edge(None, guard=engine.guard, tenant=lambda request: "acme")
    life: Lifecycle[Any] = Lifecycle(middleware, {}, lambda environ, middleware: Exchange("POST", "/pay", b"", []))
    with pytest.raises(StopIteration, match="True"):
        next(life.claim(idempotent(required=False)))
    return {"operation": "POST /pay", "tenant": "", "key": "", "id": b""}


def expired(engine: Engine) -> Found:
    engine.run(lambda: 1, tenant="acme", ttl=60, reject_expired_for=600)
    engine.clock.advance(100)
    with pytest.raises(KeyExpired):
        engine.run(lambda: 1, tenant="acme", ttl=60, reject_expired_for=600)
    return {"age": pytest.approx(100, abs=0.01)}


def over_quota(engine: Engine) -> Found:
    engine.guard._meter = Meter(Quota(live_keys=1), engine.clock)
    engine.run(lambda: 1, key="first", tenant="acme")
    with pytest.raises(TooManyKeys):
        engine.run(lambda: 1, tenant="acme")
    return {"live_keys": 1}


def resolved(engine: Engine) -> Found:
    engine.abandon(tenant="acme")
    engine.do(engine.guard.resolve, "op", "k", 1, tenant="acme")
    return {"happened": True}


def outcome_released(engine: Engine) -> Found:
    engine.run(lambda: 1, tenant="acme")
    engine.do(engine.guard.release, "op", "k", tenant="acme", stored="any")
    return {"outcome": "result", "token": int}


def swept(engine: Engine) -> Found:
    engine.run(lambda: 1, tenant="acme", ttl=1)
    engine.clock.advance(2)
    engine.do(engine.guard.sweep)
    return {"operation": "", "tenant": "", "key": "", "removed": 1, "unknown": 0, "id": b""}


SCENARIOS: dict[str, Callable[[Engine], Found]] = {
    scenario.__name__: scenario
    for scenario in (
        started, taken_over, completed, failure_remembered, recovered, released, replayed, waited, turned_away,
        mismatched, went_unknown, lease_lost, renewed, renewal_failed, step_saved, step_replayed, undo_failed,
        result_dropped, unstored, store_failed, unprotected, unkeyed, expired, over_quota, resolved, outcome_released,
        swept,
    )
}  # fmt: skip


ELSEWHERE: dict[str, str] = {
    "prepared": "tests/transactional",
    "conflicted": "tests/transactional",
    "cache_lost": "tests/stores",
    "cache_back": "tests/stores",
    "recovery_failed": "tests/engine",
    "recovery_given_up": "tests/engine",
    "emitted": "tests/http",
    "key_missing": "tests/http",
    "key_invalid": "tests/http",
    "body_too_large": "tests/http",
    "precondition_refused": "tests/http",
    "body_omitted": "tests/http",
    "applied": "tests/core",
    "skipped": "tests/core",
    "published": "tests/core",
    "publish_failed": "tests/core",
    "publish_given_up": "tests/core",
    "stream_blocked": "tests/core",
    "broker_lost": "tests/core",
    "broker_back": "tests/core",
    "relay_late": "tests/core",
    "slot_lag": "tests/messaging",
    "apply_failed": "tests/core",
    "apply_given_up": "tests/core",
    "stream_gap": "tests/messaging",
    "consumer_interrupted": "tests/core",
    "call_retried": "tests/client",
    "call_resumed": "tests/client",
    "call_ended": "tests/client",
    "call_unknown": "tests/client",
}
"""Events that need more than an engine: the folder with the tests that see them."""


@pytest.mark.parametrize("name", ELSEWHERE)
def test_events_that_need_more_are_seen_where_they_are_told(name: str) -> None:
    event = next(event for event in EVENTS if event.name == name)
    texts = [file.read_text() for file in (ROOT / ELSEWHERE[name]).rglob("*.py")]
    assert any(f'"{name}"' in text or f"events.{event.__name__}" in text for text in texts)


@pytest.mark.parametrize("event", [event for event in EVENTS if event.name not in ELSEWHERE], ids=lambda e: e.name)
def test_every_event_is_emitted_with_the_right_fields(engine: Engine, event: type[Event]) -> None:
    assert event.name in SCENARIOS, "an event without a scenario may never be seen by anyone"
    expected = {"operation": "op", "tenant": "acme", "key": "k", "id": ID, **SCENARIOS[event.name](engine)}
    expected.setdefault("route", expected["operation"])
    emitted = [found for found in engine.events if type(found) is event]
    assert emitted, f"{event.name} was not emitted, but {engine.names()}"
    details = dataclasses.asdict(emitted[0])
    assert details.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, type):
            assert isinstance(details[name], value), name
        else:
            assert details[name] == value, name


def test_the_table_holds_every_event_there_is() -> None:
    defined = [
        cls for cls in vars(events).values() if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
    ]
    assert list(EVENTS) == defined
    assert {*SCENARIOS, *ELSEWHERE} == {event.name for event in EVENTS}


def test_events_are_frozen_documented_and_named_after_their_class() -> None:
    for event in EVENTS:
        assert event.__doc__
        assert not event.__doc__.startswith(event.__name__ + "("), f"{event.__name__} has no words of its own"
        assert event.name == re.sub(r"(?<!^)(?=[A-Z])", "_", event.__name__.removesuffix("Event")).lower()
        assert event.level in (10, 20, 30, 40)
    assert {event.source for event in EVENTS} == set(typing.get_args(events.Source))
    made = events.Waited("op", "t", "k", 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seconds = 2.0  # type: ignore[misc]


def test_events_are_compared_copied_and_shown_by_their_fields() -> None:
    for cls in EVENTS:
        values = {each.name: each.name for each in dataclasses.fields(cls) if each.default is dataclasses.MISSING}
        made: Any = cls(**values, route="r", id=b"1")  # type: ignore[arg-type]
        shown = ", ".join(f"{each.name}={getattr(made, each.name)!r}" for each in dataclasses.fields(cls))
        assert repr(made) == f"{cls.__name__}({shown})"
        assert dataclasses.asdict(made) == vars(made)
        assert vars(made).items() >= {**values, "route": "r", "id": b"1"}.items()
        same = dataclasses.replace(made, route="another", id=b"2")
        assert (same, hash(same)) == (made, hash(made)), "the route and the id are not compared"
        assert dataclasses.replace(made, key="another") != made
        assert [vars(copy.copy(made)), vars(pickle.loads(pickle.dumps(made)))] == [vars(made)] * 2
        names = inspect.signature(cls).parameters
        assert names.keys() == vars(made).keys()
        assert list(names)[:3] == ["operation", "tenant", "key"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            del made.key
        with pytest.raises(TypeError, match="missing"):
            cls("op", "t")  # type: ignore[call-arg]
    assert events.Waited("op", "t", "k", 1.0) != events.TurnedAway("op", "t", "k", 1.0)


def test_with_no_hook_no_event_is_made(quick_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = quick_engine
    made: list[str] = []
    for event in EVENTS:
        real = event.__init__

        def count(self: Any, *args: Any, real: Any = real, name: str = event.name, **more: Any) -> None:
            made.append(name)
            real(self, *args, **more)

        monkeypatch.setattr(event, "__init__", count)
    loud = engine.guard
    engine.guard = engine.new_guard(on_event=None)
    assert engine.guard.make_call("op", "k", "", b"", Policy()).clock is float, "no time is taken"
    for index, (name, scenario) in enumerate(SCENARIOS.items()):
        if name not in ("renewed", "renewal_failed"):
            fresh(engine, index)
            scenario(engine)
    assert made == []
    engine.guard = loud
    fresh(engine, 99)
    scenario = SCENARIOS["started"]
    scenario(engine)
    assert made == ["started", "completed"], "the count works"


def fresh(engine: Engine, index: int) -> None:
    """Forget what earlier scenarios left: far in the future, everything resolved."""
    engine.script.forget()
    engine.store.inner._records.rows.clear()
    engine.guard._meter = None


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_hook_that_raises_never_fails_the_call(
    quick_engine: Engine, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = quick_engine
    seen: list[Event] = []

    def hook(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("a broken sink")

    engine.guard = engine.new_guard(on_event=hook)
    SCENARIOS[name](engine)
    assert name in [event.name for event in seen]
    assert f"the event hook failed at {name}" in caplog.text


def test_several_hooks_are_called_in_turn_and_one_that_raises_stops_no_other(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def broken(event: Event) -> None:
        seen.append("broken")
        raise RuntimeError

    engine.guard = engine.new_guard(on_event=[broken, lambda event: seen.append(event.name)])
    engine.guard.add_event_hook(lambda event: seen.append("added"))
    engine.run(lambda: 1)
    assert seen == ["broken", "started", "added", "broken", "completed", "added"]
    assert caplog.text.count("the event hook failed at") == 2


def timed(*answers: tuple[float, Any]) -> dict[str, Any]:
    """Run a flow by hand. Each answer comes at its time, and the last one ends it. Returns the last event's times."""
    told: list[Event] = []
    guard = Semel(MemoryStore(), on_event=told.append, sweep_every=None)
    call = guard.make_call("op", "k", "", b"", Policy(on_duplicate=Wait("1m")))
    now = 0.0
    call.clock, call.began = (lambda: now), 0.0
    flow = perform(call)
    next(flow)
    for at, answer in answers:
        now = at
        with suppress(StopIteration):
            flow.send(answer)
    return {name: getattr(told[-1], name) for name in ("name", "seconds", "store_seconds") if hasattr(told[-1], name)}


RUNNING, DONE = (Existing(Record(ID, state, 1, 1, b"", VALUE, 1.0, 0.0, 9.0)) for state in (State.RUNNING, State.DONE))


def test_seconds_count_from_the_claim_and_those_of_a_duplicate_with_its_wait() -> None:
    assert timed((1.0, Claimed(1, 1))) == {"name": "started", "seconds": 1.0}
    ran = ((1.0, Claimed(1, 1)), (5.0, Returned(1)), (7.0, True))
    assert timed(*ran) == {"name": "completed", "seconds": 7.0, "store_seconds": 2.0}
    raised = ((1.0, Claimed(1, 1)), (5.0, Raised(Boom())), (7.0, True))
    assert timed(*raised) == {"name": "released", "seconds": 7.0}
    assert timed((3.0, DONE)) == {"name": "replayed", "seconds": 3.0}
    waited = ((1.0, RUNNING), (11.0, 10.0))
    assert timed(*waited, (12.0, DONE)) == {"name": "replayed", "seconds": 12.0}
    took_over = (*waited, (12.0, Claimed(2, 2)), (15.0, Returned(1)), (17.0, True))
    assert timed(*took_over) == {"name": "completed", "seconds": 7.0, "store_seconds": 2.0}


def test_lineage_is_told_at_the_start(engine: Engine) -> None:
    def outer() -> Iterator[Any]:
        yield engine.guard.run("inner", key="i", call=lambda: 1)

    engine.run(outer)
    starts = {event.operation: event for event in engine.events if isinstance(event, events.Started)}
    assert (starts["op"].root, starts["op"].parent) == ("", "")
    assert (starts["inner"].root, starts["inner"].parent) == ("k", "k")


def test_the_order_of_events_of_a_first_call_and_a_replay(engine: Engine) -> None:
    engine.run(lambda: 1)
    engine.run(lambda: 1)
    assert engine.names() == ["started", "completed", "replayed"]


def test_a_released_attempt_with_steps_is_told_as_resumable(engine: Engine) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.capture("id", lambda: 1)
        raise Boom

    with pytest.raises(Boom):
        engine.run(body)
    found = [event for event in engine.events if isinstance(event, events.Released)]
    assert [event.resumable for event in found] == [True]


def test_not_done_is_no_recovery(engine: Engine) -> None:
    engine.abandon()
    engine.run(lambda: 1, recover=lambda: NOT_DONE)
    assert engine.names() == ["taken_over", "completed"]
