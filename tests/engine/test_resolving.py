"""lookup, resolve, release and sweep: what people and programs may do to a record, in every state."""

from collections.abc import Iterator
from typing import Any

import pytest

from semel import LeaseLost, NotResolvable, OutcomeUnknown, PolicyError, Record, State, StoreUnavailable
from semel.core.keys import identity
from semel.core.ops import Complete, Release, Renew, Resolve, Sweep
from semel.core.states import Takeover
from tests.engine.driving import Engine
from tests.engine.scripted import Gate

ID = identity("", "op", "k")
STATES = [State.ABSENT, State.RUNNING, State.ABANDONED, State.UNKNOWN, State.DONE]


def bring_to(engine: Engine, state: State) -> Any:
    """A record in that state; answers its claim, if any."""
    if state is State.ABSENT:
        return None
    claimed = engine.claim_elsewhere()
    if state is State.ABANDONED:
        engine.clock.advance(31)
    elif state is State.UNKNOWN:
        assert engine.execute(Release(ID, claimed.token, State.UNKNOWN))
    elif state is State.DONE:
        engine.execute(Release(ID, claimed.token))
        engine.run(lambda: "done")
        engine.events.clear()
        engine.script.forget()
    return claimed


def state(engine: Engine) -> State:
    record = engine.record()
    return State.ABSENT if record is None else record.state


@pytest.mark.parametrize("at", STATES, ids=lambda s: s.name)
def test_lookup_shows_the_record_and_changes_nothing(engine: Engine, at: State) -> None:
    bring_to(engine, at)
    for _ in range(2):
        found = engine.do(engine.guard.lookup, "op", "k")
        if at is State.ABSENT:
            assert found is None
        else:
            assert isinstance(found, Record)
            assert (found.state, found.operation, found.key, found.tenant) == (at, "op", "k", "")
    assert engine.do(engine.guard.lookup, "op", "k", tenant="other") is None
    assert set(engine.script.kinds) == {"Lookup"}


@pytest.mark.parametrize("at", STATES, ids=lambda s: s.name)
def test_resolve_settles_only_what_is_in_doubt(engine: Engine, at: State) -> None:
    bring_to(engine, at)
    before = engine.record()
    if at in (State.ABANDONED, State.UNKNOWN):
        engine.do(engine.guard.resolve, "op", "k", {"by": "hand"})
        assert engine.run(lambda: "ran") == {"by": "hand"}
        assert engine.names() == ["resolved", "replayed"]
        assert engine.events[0].happened is True  # type: ignore[attr-defined]
    else:
        words = {State.ABSENT: "no such record", State.RUNNING: "is running", State.DONE: "is done"}[at]
        with pytest.raises(NotResolvable, match=words):
            engine.do(engine.guard.resolve, "op", "k", {"by": "hand"})
        assert engine.record() == before
        assert engine.names() == []


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("at", STATES, ids=lambda s: s.name)
def test_release_frees_only_what_is_in_doubt_unless_forced(engine: Engine, at: State, force: bool) -> None:
    bring_to(engine, at)
    before = engine.record()
    if at in (State.ABANDONED, State.UNKNOWN) or (force and at is State.RUNNING):
        engine.do(engine.guard.release, "op", "k", force=force)
        assert state(engine) is State.ABSENT
        assert engine.names() == ["resolved"]
        assert engine.events[0].happened is False  # type: ignore[attr-defined]
        assert engine.run_outcome(lambda: "anew").attempt == 1
    else:
        with pytest.raises(NotResolvable):
            engine.do(engine.guard.release, "op", "k", force=force)
        assert engine.record() == before


def test_a_forced_release_fences_off_the_owner(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "the old owner's"

    owner = engine.start_run(body)
    inside.wait()
    engine.do(engine.guard.release, "op", "k", force=True)  # the clock stands still, and the token grows all the same
    elsewhere = engine.new_guard()
    assert engine.run(lambda: "anew", guard=elsewhere) == "anew"
    finish.open()
    assert owner.result(20) == "anew"


def test_a_forced_release_with_nobody_after_it_is_a_lost_lease_to_the_owner(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish

    owner = engine.start_run(body)
    inside.wait()
    engine.do(engine.guard.release, "op", "k", force=True)
    finish.open()
    with pytest.raises(LeaseLost):
        owner.result(20)
    assert state(engine) is State.ABSENT


def test_resolving_fences_off_the_lost_owner(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "too late"

    owner = engine.start_run(body)
    inside.wait()
    engine.clock.advance(31)
    engine.do(engine.guard.resolve, "op", "k", "by hand")
    finish.open()
    assert owner.result(20) == "by hand"
    assert engine.run(lambda: None) == "by hand"


def test_a_result_that_cannot_be_stored_resolves_nothing(engine: Engine) -> None:
    bring_to(engine, State.UNKNOWN)
    with pytest.raises(PolicyError, match="nothing is resolved"):
        engine.do(engine.guard.resolve, "op", "k", object())
    assert state(engine) is State.UNKNOWN
    assert engine.script.ops == []


def test_a_result_may_be_given_as_what_the_function_returns(engine: Engine) -> None:
    import dataclasses

    @dataclasses.dataclass
    class Receipt:
        id: int

    def body(key: str) -> Receipt:
        raise AssertionError("it ran")

    body.__annotations__["return"] = Receipt
    bring_to(engine, State.UNKNOWN)
    engine.do(engine.guard.resolve, "op", "k", Receipt(7), returns=Receipt)
    assert engine.do(engine.once(body), "k") == Receipt(7)


def test_an_unknown_operation_stays_so_for_ever_until_it_is_resolved(engine: Engine) -> None:
    engine.abandon(takeover=Takeover.REJECT, ttl=60.0)
    engine.clock.advance(10 * 365 * 86400)
    engine.do(engine.guard.sweep)
    with pytest.raises(OutcomeUnknown):
        engine.run(lambda: "ran", guarantee="at_most_once")


@pytest.mark.parametrize("at", STATES, ids=lambda s: s.name)
def test_sweep_removes_only_what_has_expired(engine: Engine, at: State) -> None:
    bring_to(engine, at)
    swept = engine.do(engine.guard.sweep)
    assert (swept.removed, swept.unknown) == (0, 0)
    assert state(engine) is at
    engine.clock.advance(2 * 86400)
    swept = engine.do(engine.guard.sweep)
    gone = at in (State.DONE, State.RUNNING, State.ABANDONED)
    assert (swept.removed, swept.unknown) == (int(gone), 0)
    assert state(engine) is (State.UNKNOWN if at is State.UNKNOWN else State.ABSENT)
    assert engine.names()[-1] == "swept"


def test_sweep_keeps_what_may_not_be_run_again_as_unknown(engine: Engine) -> None:
    engine.abandon(takeover=Takeover.REJECT, ttl=60.0)
    engine.clock.advance(3600)
    swept = engine.do(engine.guard.sweep)
    assert (swept.removed, swept.unknown) == (0, 1)
    assert state(engine) is State.UNKNOWN


def test_sweep_removes_at_most_its_limit(engine: Engine) -> None:
    for i in range(5):
        engine.run(lambda: 1, key=f"k{i}", ttl=1)
    engine.clock.advance(2)
    assert [engine.do(engine.guard.sweep, 2).removed for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("limit", [0, -1, -1000])
def test_a_sweep_without_a_limit_is_refused_or_removes_nothing(engine: Engine, limit: int) -> None:
    """LIMIT -1 means no limit to some databases."""
    for i in range(3):
        engine.run(lambda: 1, key=f"k{i}", ttl=1)
    engine.clock.advance(2)
    try:
        assert engine.do(engine.guard.sweep, limit).removed == 0
    except PolicyError:
        assert engine.script.count(Sweep) == 0


def test_expired_records_are_swept_in_the_background(engine: Engine) -> None:
    """The keeper sweeps while a handler runs, again and again, and through a failure of the store."""
    engine.run(lambda: 1, key="old", ttl=1)
    engine.clock.advance(2)
    guard = engine.new_guard(sweep_every="20ms")
    first = engine.script.on(Sweep)
    failing = engine.script.on(Sweep, before=StoreUnavailable("down"))
    third = engine.script.on(Sweep)

    def body() -> Iterator[Any]:
        yield first.took_effect
        yield failing.seen
        yield third.took_effect
        return "done"

    assert engine.run(body, guard=guard) == "done"
    assert engine.record("old") is None
    assert "swept" in engine.names()


def test_the_background_sweep_needs_no_long_handler(engine: Engine) -> None:
    guard = engine.new_guard(sweep_every="20ms")
    sweeping = engine.script.on(Sweep)
    assert engine.run(lambda: "short", guard=guard) == "short"
    sweeping.took_effect.wait()
    again = engine.script.on(Sweep)
    again.took_effect.wait()


def test_no_background_sweep_where_none_is_asked_for(quick_engine: Engine) -> None:
    from semel.core.ops import Renew

    guard = quick_engine.new_guard(sweep_every=None)
    rounds = [quick_engine.script.on(Renew) for _ in range(3)]

    def body() -> Iterator[Any]:
        for rule in rounds:
            yield rule.took_effect

    quick_engine.renew_early()
    quick_engine.run(body, guard=guard)
    assert quick_engine.script.count(Sweep) == 0


def test_a_guard_is_a_context_manager_and_may_be_closed_twice(engine: Engine) -> None:
    store = engine.wrapped(engine.open_store())
    guard = engine.new_guard(store)
    if engine.is_async:

        async def use() -> Any:
            async with guard as same:
                assert same is guard
                answer = await guard.run("op", key="k", call=engine.function(lambda: 1))
            await guard.close()
            return answer

        assert engine.do(use) == 1
    else:
        with guard as same:
            assert same is guard
            assert guard.run("op", key="k", call=lambda: 1) == 1
        guard.close()
    if engine.store_kind == "sqlite":
        with pytest.raises(StoreUnavailable, match="closed"):
            engine.run(lambda: 1, guard=guard, key="late")


# With the record that the caller has seen


def settle(engine: Engine, way: str, expected: Record, guard: Any = None) -> None:
    target = guard or engine.guard
    if way == "resolve":
        engine.do(target.resolve, "op", "k", "by hand", expected=expected)
    else:
        more: Any = {"force": {"force": True}, "stored": {"stored": "any"}}.get(way, {})
        engine.do(target.release, "op", "k", **more, expected=expected)


WAYS = {
    "resolve": {State.ABANDONED, State.UNKNOWN},
    "release": {State.ABANDONED, State.UNKNOWN},
    "force": {State.RUNNING, State.ABANDONED, State.UNKNOWN},
    "stored": {State.ABANDONED, State.UNKNOWN, State.DONE},
}
"""For each way the states in which it settles a record."""


def moves_on(engine: Engine, to: State, token: int) -> None:
    """The owner of this token brings the record to that state, and keeps its token."""
    if to is State.DONE:
        assert engine.execute(Complete(ID, token, b"reported", 3600.0))
    elif to is State.UNKNOWN:
        assert engine.execute(Release(ID, token, State.UNKNOWN))
    elif to is State.RUNNING:
        assert engine.execute(Renew(ID, token, 30.0))
    else:
        engine.clock.advance(31)


@pytest.mark.parametrize("at", STATES[1:], ids=lambda s: s.name)
@pytest.mark.parametrize("way", WAYS)
def test_a_record_that_is_still_as_it_was_seen_is_settled_as_without_it(engine: Engine, way: str, at: State) -> None:
    bring_to(engine, at)
    seen = engine.do(engine.guard.lookup, "op", "k")
    if at in WAYS[way]:
        settle(engine, way, seen)
        assert state(engine) is (State.DONE if way == "resolve" else State.ABSENT)
        assert engine.names() == ["outcome_released" if at is State.DONE else "resolved"]
    else:
        with pytest.raises(NotResolvable, match="is running" if at is State.RUNNING else "is done"):
            settle(engine, way, seen)
        assert engine.do(engine.guard.lookup, "op", "k") == seen
        assert engine.names() == []


@pytest.mark.parametrize(
    ("at", "to"),
    [
        (State.RUNNING, State.ABANDONED), (State.RUNNING, State.UNKNOWN), (State.RUNNING, State.DONE),
        (State.ABANDONED, State.RUNNING), (State.ABANDONED, State.UNKNOWN), (State.ABANDONED, State.DONE),
        (State.UNKNOWN, State.DONE),
    ],
    ids=lambda s: s.name,
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_a_record_that_has_another_state_than_was_seen_stays(engine: Engine, way: str, at: State, to: State) -> None:
    claimed = bring_to(engine, at)
    seen = engine.do(engine.guard.lookup, "op", "k")
    moves_on(engine, to, claimed.token)
    before = engine.record()
    with pytest.raises(NotResolvable, match=f"has changed since it was looked up: it is {to.name.lower()} now"):
        settle(engine, way, seen)
    assert engine.record() == before
    assert engine.names() == []


@pytest.mark.parametrize("at", STATES[1:], ids=lambda s: s.name)
@pytest.mark.parametrize("way", WAYS)
def test_another_attempt_than_was_seen_stays(engine: Engine, way: str, at: State) -> None:
    bring_to(engine, at)
    seen = engine.do(engine.guard.lookup, "op", "k")
    assert engine.execute(Resolve(ID, None, 60.0, True, seen.token)) is at
    with pytest.raises(NotResolvable, match=r"has changed since it was looked up: it has another token, or is gone"):
        settle(engine, way, seen)
    engine.clock.advance(1)  # the token of a record that was removed is forgotten: the next one comes from the clock
    bring_to(engine, at)
    before = engine.record()
    with pytest.raises(NotResolvable, match=r"has changed since it was looked up|is done"):
        settle(engine, way, seen)
    assert engine.record() == before
    assert engine.names() == []


@pytest.mark.parametrize("way", WAYS)
def test_the_record_of_another_call_is_refused(engine: Engine, way: str) -> None:
    bring_to(engine, State.UNKNOWN)
    engine.run(lambda: 1, key="k2")
    other = engine.do(engine.guard.lookup, "op", "k2")
    with pytest.raises(PolicyError, match="expected= is the record of another operation, key or tenant"):
        settle(engine, way, other)
    assert state(engine) is State.UNKNOWN
