"""Claiming: of all calls with one key, one runs; and whatever becomes of it, the key is neither stuck nor stolen."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import InProgress, KeyReused, LeaseLost, State, Wait
from semel.core.keys import identity
from semel.core.ops import Claim, Complete, Release, Renew
from tests.engine.driving import EVERY_ENGINE, Engine, engine_of
from tests.engine.scripted import Gate

ID = identity("", "op", "k")


class Boom(Exception):
    pass


@pytest.fixture(params=EVERY_ENGINE)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Both engines on both stores: who wins a key is the store's word."""
    yield from engine_of(request.param, tmp_path, monkeypatch)


def test_a_second_call_gets_the_first_ones_answer_and_does_not_run(engine: Engine) -> None:
    ran: list[int] = []

    def body() -> str:
        ran.append(1)
        return "shipped"

    first, second = engine.run_outcome(body), engine.run_outcome(body)
    assert (first.value, first.replayed, first.attempt) == ("shipped", False, 1)
    assert (second.value, second.replayed, second.attempt) == ("shipped", True, 1)
    assert ran == [1]


def test_the_loser_of_a_race_for_the_claim_does_not_run(engine: Engine) -> None:
    """Look up, then lock, without looking again: between the two, another process has finished."""
    ran: list[str] = []
    held = Gate()
    rule = engine.script.on(Claim, hold_before=held)
    late = engine.start_run(lambda: ran.append("late"))
    rule.seen.wait()
    engine.run(lambda: ran.append("winner"), guard=engine.new_guard())
    held.open()
    assert late.result(20) is None
    assert ran == ["winner"]


@pytest.mark.parametrize("shared", [True, False], ids=["one process", "four processes"])
def test_four_duplicates_at_once_run_once(engine: Engine, shared: bool) -> None:
    """The lock must cover the handler, not the look-up alone."""
    ran: list[int] = []
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        ran.append(1)
        inside.open()
        yield finish
        return "answer"

    first = engine.start_run(body)
    inside.wait()
    for _ in range(3):
        with pytest.raises(InProgress):
            engine.run(body, guard=engine.guard if shared else engine.new_guard())
    finish.open()
    assert first.result(20) == "answer"
    assert engine.run(body) == "answer"
    assert ran == [1]


def test_a_handler_that_raises_frees_the_key(engine: Engine) -> None:
    def body() -> None:
        raise Boom("no stock")

    with pytest.raises(Boom, match="no stock"):
        engine.run(body)
    assert engine.record() is None
    assert engine.run_outcome(lambda: "second try").value == "second try"


def test_a_crashed_owner_blocks_the_key_for_its_lease_only(engine: Engine) -> None:
    engine.claim_elsewhere(lease=30, ttl=86400)
    with pytest.raises(InProgress):
        engine.run(lambda: "never")
    engine.clock.advance(31)
    outcome = engine.run_outcome(lambda: "again")
    assert (outcome.value, outcome.replayed, outcome.attempt) == ("again", False, 2)


def test_a_waiter_that_times_out_leaves_the_owners_claim(engine: Engine) -> None:
    inside, finish = Gate(), Gate()
    elsewhere = engine.new_guard()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "the owner's"

    owner = engine.start_run(body)
    inside.wait()
    before = engine.record()
    for guard in (engine.guard, elsewhere):
        with pytest.raises(InProgress) as refused:
            engine.run(lambda: "a second run", guard=guard, on_duplicate=Wait("20ms"))
        assert refused.value.retry_after is not None
        assert refused.value.retry_after > 0
    after = engine.record()
    assert before is not None
    assert after is not None
    assert (after.state, after.token, after.attempt) == (State.RUNNING, before.token, 1)
    finish.open()
    assert owner.result(20) == "the owner's"
    assert engine.run(lambda: "a second run") == "the owner's"


def test_a_paused_owner_cannot_overwrite_a_finished_record(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "late"

    paused = engine.start_run(body)
    inside.wait()
    engine.clock.advance(31)
    elsewhere = engine.new_guard()
    assert engine.run(lambda: "in time", guard=elsewhere) == "in time"
    finish.open()
    assert paused.result(20) == "in time", "the paused owner's caller gets the outcome that counts"
    assert engine.run(lambda: "never", guard=elsewhere) == "in time"


def test_a_paused_owner_that_was_replaced_by_a_running_one_is_told(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "late"

    paused = engine.start_run(body)
    inside.wait()
    engine.clock.advance(31)
    claimed = engine.claim_elsewhere(nonce=2)
    finish.open()
    with pytest.raises(LeaseLost):
        paused.result(20)
    record = engine.record()
    assert record is not None
    assert (record.state, record.token, record.attempt) == (State.RUNNING, claimed.token, 2)


@pytest.mark.parametrize("ended", [True, False], ids=["done", "running"])
def test_a_stale_owners_failure_does_not_remove_the_new_owners_record(engine: Engine, ended: bool) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        raise Boom("late failure")

    stale = engine.start_run(body)
    inside.wait()
    engine.clock.advance(31)
    claimed = engine.claim_elsewhere(nonce=2)
    if ended:
        assert engine.execute(Complete(ID, claimed.token, b"snapshot", 60.0)) is True
    finish.open()
    with pytest.raises(Boom, match="late failure"):
        stale.result(20)
    record = engine.record()
    assert record is not None
    assert record.token == claimed.token
    assert record.state is (State.DONE if ended else State.RUNNING)
    assert "lease_lost" in engine.names()


def test_a_late_heartbeat_does_not_reopen_a_done_record(engine: Engine) -> None:
    engine.run(lambda: "done")
    record = engine.record()
    assert record is not None
    assert engine.execute(Renew(ID, record.token, 30.0)) is False
    again = engine.record()
    assert again is not None
    assert again.state is State.DONE
    assert again.snapshot == record.snapshot


def test_a_stale_heartbeat_does_not_touch_the_new_owners_lease(engine: Engine) -> None:
    stale = engine.abandon(lease=5)
    engine.claim_elsewhere(nonce=2, lease=5)
    assert engine.execute(Renew(ID, stale.token, 1000.0)) is False
    record = engine.record()
    assert record is not None
    assert record.lease_left <= 5


def test_a_key_that_expires_between_claim_and_read_is_claimed_properly(engine: Engine) -> None:
    """The record goes just as the claim comes: the call must win a claim of its own, never run without one."""
    engine.run(lambda: "old", ttl="1h")
    engine.script.on(Claim, do=lambda: engine.clock.advance(3601))
    states: list[State | None] = []
    elsewhere = engine.new_guard()

    def body() -> Iterator[Any]:
        yield probe(engine, states)
        return "new"

    outcome = engine.run_outcome(body, guard=elsewhere)
    assert (outcome.value, outcome.replayed, outcome.attempt) == ("new", False, 1)
    assert states == [State.RUNNING]


def probe(engine: Engine, states: list[State | None]) -> Any:
    """The state of the record as seen from inside the handler."""
    from semel.core.ops import Lookup

    if not engine.is_async:
        record = engine.store.inner.execute(Lookup(ID))
        states.append(record and record.state)
        return None

    async def look() -> None:
        record = await engine.store.inner.execute(Lookup(ID))
        states.append(record and record.state)

    return look()


def test_a_waiter_is_woken_with_the_winners_answer(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return {"n": 1}

    for guard, key in ((engine.guard, "here"), (engine.new_guard(), "elsewhere")):
        inside, finish = Gate(), Gate()
        owner = engine.start_run(body, key=key)
        inside.wait()
        waiter = engine.start(
            guard.run_outcome, "op", key=key, call=engine.function(lambda: "ran"), on_duplicate=Wait("20s")
        )
        finish.open()
        assert owner.result(20) == {"n": 1}
        outcome = waiter.result(20)
        assert (outcome.value, outcome.replayed) == ({"n": 1}, True)


def test_a_waiter_runs_when_the_winner_fails(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        raise Boom

    owner = engine.start_run(body)
    inside.wait()
    waiter = engine.start(
        engine.guard.run_outcome, "op", key="k", call=engine.function(lambda: "mine"), on_duplicate=Wait("20s")
    )
    finish.open()
    with pytest.raises(Boom):
        owner.result(20)
    outcome = waiter.result(20)
    assert (outcome.value, outcome.replayed) == ("mine", False)


def test_a_waiter_takes_over_when_the_owner_falls_silent(engine: Engine) -> None:
    engine.claim_elsewhere(lease=0.05)
    waiter = engine.start_run(lambda: "mine", on_duplicate=Wait("20s"))
    engine.clock.advance(1)
    assert waiter.result(20) == "mine"


def test_another_request_under_a_key_in_flight_is_refused_as_reused(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish

    owner = engine.start_run(body, fingerprint={"amount": 1})
    inside.wait()
    for guard in (engine.guard, engine.new_guard()):
        with pytest.raises(KeyReused):
            engine.run(lambda: None, guard=guard, fingerprint={"amount": 2})
        with pytest.raises(KeyReused):
            engine.run(lambda: None, guard=guard, fingerprint={"amount": 2}, on_duplicate=Wait("20s"))
        with pytest.raises(InProgress):
            engine.run(lambda: None, guard=guard, fingerprint={"amount": 1})
    finish.open()
    owner.result(20)


def test_a_call_from_within_itself_is_refused_and_does_not_hang(engine: Engine) -> None:
    seen: list[BaseException] = []
    calls: dict[str, Any] = {}

    def body(key: str) -> Iterator[Any]:
        try:
            yield calls["f"](key)
        except InProgress as error:
            seen.append(error)
        return "outer"

    calls["f"] = engine.once(body)
    assert engine.do(calls["f"], "k") == "outer"
    assert len(seen) == 1


def test_a_follower_takes_over_though_its_leader_came_with_another_request(engine: Engine) -> None:
    """The leader's answer is an abandoned record that is not its own; to the follower it is."""
    runner = engine.new_guard()
    mine = runner._data.digest(("mine",), {})
    engine.abandon(fingerprint=mine)
    held = Gate()
    rule = engine.script.on(Claim, hold_after=held)
    leader = engine.start_run(lambda: "leader", guard=runner, fingerprint="other")
    rule.took_effect.wait()
    follower = engine.start_run(lambda: "follower", guard=runner, fingerprint="mine")
    until_waiting(runner, 1)
    held.open()
    with pytest.raises(KeyReused):
        leader.result(20)
    assert follower.result(20) == "follower"


def until_waiting(guard: Any, count: int, id: bytes = ID) -> None:
    """Until so many calls wait for the flight of this key."""
    pause = threading.Event()
    for _ in range(2000):
        flight = guard.driver.flights.by_id.get(id)
        if flight is not None and len(flight.waiters or ()) >= count:
            return
        pause.wait(0.005)
    raise AssertionError(f"{count} calls never came to wait")


def test_a_followers_attempt_is_the_one_that_gave_the_answer(engine: Engine) -> None:
    engine.abandon()
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "second"

    leader = engine.start_run(body)
    inside.wait()
    held = Gate()
    completing = engine.script.on(Complete, hold_after=held)
    finish.open()
    completing.took_effect.wait()
    call = engine.function(lambda: None)
    follower = engine.start(engine.guard.run_outcome, "op", key="k", call=call, on_duplicate=Wait("20s"))
    until_waiting(engine.guard, 1)
    held.open()
    assert leader.result(20) == "second"
    assert follower.result(20).attempt == 2


def test_keyboard_interrupt_passes_through_and_frees_the_key(engine: Engine) -> None:
    class Stop(BaseException):
        """A stand-in: a real KeyboardInterrupt would also end the event loop."""

    error = Stop if engine.is_async else KeyboardInterrupt

    def body() -> None:
        raise error

    with pytest.raises(error):
        engine.run(body)
    assert engine.script.kinds == ["Claim", "Release"]
    assert engine.record() is None


def test_stop_iteration_of_a_handler_reaches_the_caller() -> None:
    """The flow is a generator: what its handler raises must not be mistaken for the generator's own end."""
    from semel import MemoryStore, Semel

    def body() -> int:
        return next(iter(()))

    with pytest.raises(StopIteration):
        Semel(MemoryStore(), sweep_every=None).run("op", key="k", call=body)


def test_release_is_not_asked_for_a_call_that_never_claimed(engine: Engine) -> None:
    engine.claim_elsewhere()
    with pytest.raises(InProgress):
        engine.run(lambda: None)
    assert engine.script.count(Release) == 0


def test_cancelled_error_of_a_child_passes_like_any_other_error() -> None:
    from semel import AsyncMemoryStore, AsyncSemel

    async def scenario() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)

        async def body() -> None:
            child = asyncio.ensure_future(asyncio.Event().wait())
            asyncio.get_running_loop().call_soon(child.cancel)
            await child

        with pytest.raises(asyncio.CancelledError):
            await guard.run("op", key="k", call=body)
        assert await guard.lookup("op", "k") is None
        await guard.close()

    asyncio.run(scenario())
