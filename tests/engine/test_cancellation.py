"""Cancellation: a cancelled call still settles its record, and its caller still sees the cancellation.

Where a task can be cancelled: while it claims (before and after the claim has reached the store), in the handler, while
it completes or releases, while it waits for another.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
    AsyncSQLiteStore,
    InProgress,
    KeyReused,
    Record,
    State,
    StoreUnavailable,
    Wait,
)
from semel.core.keys import identity
from semel.core.ops import Claim, Claimed, Complete, Lookup, Release
from semel.core.states import Takeover
from tests.engine.scripted import AsyncScriptedStore, Clock, Gate, Script

ID = identity("", "op", "k")


class Boom(Exception):
    pass


class Bench:
    """A guard over a scripted store, inside a running loop."""

    def __init__(self, store: Any, clock: Clock) -> None:
        self.inner = store
        self.clock = clock
        self.script = Script()
        self.events: list[str] = []
        self.store = AsyncScriptedStore(store, self.script)
        self.guard = self.another()

    def another(self) -> AsyncSemel:
        return AsyncSemel(self.store, on_event=lambda event: self.events.append(event.name), sweep_every=None)

    def start(self, call: Callable[[], Awaitable[Any]], **settings: Any) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(self.guard.run("op", key="k", call=call, **settings))

    async def record(self) -> Record | None:
        found: Record | None = await self.inner.execute(Lookup(ID))
        return found

    async def claim_elsewhere(self, nonce: int = 1, fingerprint: bytes = b"", lease: float = 30.0) -> Claimed:
        claimed = await self.inner.execute(Claim(ID, nonce, fingerprint, lease, 3600.0, Takeover.RETRY, "", "op", "k"))
        assert isinstance(claimed, Claimed)
        return claimed


Scenario = Callable[[Bench], Awaitable[None]]


@pytest.fixture(params=["memory", "sqlite"])
def play(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Run a scenario in an event loop of its own."""

    def run(scenario: Scenario) -> None:
        clock = Clock()
        monkeypatch.setattr("semel.stores.sqlite._now", lambda: int(clock() * 1_000_000))

        async def main() -> None:
            store: Any
            if request.param == "memory":
                store = AsyncMemoryStore(clock=clock)
            else:
                store = AsyncSQLiteStore(tmp_path / "records.db", synchronous="normal")
            bench = Bench(store, clock)
            async with asyncio.timeout(30):
                await scenario(bench)
            await bench.guard.close()

        asyncio.run(main())

    return run


async def cancelled(task: "asyncio.Task[Any]") -> None:
    """Cancel the task and see that it ends so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def never() -> None:
    await asyncio.Event().wait()


async def forbidden() -> None:
    raise AssertionError("it ran")


@pytest.mark.parametrize("reached", [True, False], ids=["claim reached the store", "claim did not"])
def test_a_call_cancelled_while_claiming_leaves_nothing_claimed(play: Any, reached: bool) -> None:
    async def scenario(bench: Bench) -> None:
        rule = bench.script.on(Claim, **{"hold_after" if reached else "hold_before": Gate()})
        call = bench.start(forbidden)
        await (rule.took_effect if reached else rule.seen).passed()
        await cancelled(call)
        assert await bench.record() is None
        assert bench.guard.driver.flights.by_id == {}

    play(scenario)


def test_a_call_cancelled_while_claiming_a_key_that_runs_is_cancelled_and_not_refused(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        owner = await bench.claim_elsewhere()
        rule = bench.script.on(Claim, hold_before=Gate())
        call = bench.start(forbidden)
        await rule.seen.passed()
        await cancelled(call)
        record = await bench.record()
        assert record is not None
        assert (record.state, record.token) == (State.RUNNING, owner.token)

    play(scenario)


def test_a_call_cancelled_while_claiming_another_requests_key_is_cancelled(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.claim_elsewhere(fingerprint=b"x" * 16)
        rule = bench.script.on(Claim, hold_before=Gate())
        call = bench.start(forbidden, fingerprint="mine")
        await rule.seen.passed()
        await cancelled(call)

    play(scenario)


def test_a_call_cancelled_while_claiming_at_a_dead_store_is_cancelled(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        rule = bench.script.on(Claim, hold_before=Gate())
        bench.script.on(Claim, before=StoreUnavailable("down"), times=10**6)
        call = bench.start(forbidden)
        await rule.seen.passed()
        await cancelled(call)

    play(scenario)


def test_a_call_cancelled_while_claiming_at_a_dead_store_does_not_run_unprotected(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        rule = bench.script.on(Claim, hold_before=Gate())
        bench.script.on(Claim, before=StoreUnavailable("down"), times=10**6)
        call = bench.start(forbidden, guarantee="at_least_once")
        await rule.seen.passed()
        await cancelled(call)

    play(scenario)


def test_a_follower_that_is_cancelled_sends_nothing_and_disturbs_nobody(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        held = Gate()
        rule = bench.script.on(Claim, hold_before=held)
        leader = bench.start(lambda: asyncio.sleep(0, "leader"))
        await rule.seen.passed()
        follower = bench.start(forbidden)
        await asyncio.sleep(0)
        await cancelled(follower)
        assert bench.script.count(Claim) == 1
        held.open()
        assert await leader == "leader"

    play(scenario)


@pytest.mark.parametrize("reached", [True, False], ids=["claim reached the store", "claim did not"])
def test_followers_go_on_when_their_leader_is_cancelled(play: Any, reached: bool) -> None:
    async def scenario(bench: Bench) -> None:
        rule = bench.script.on(Claim, **{"hold_after" if reached else "hold_before": Gate()})
        leader = bench.start(forbidden)
        await (rule.took_effect if reached else rule.seen).passed()
        ran: list[int] = []

        async def body() -> str:
            ran.append(1)
            await asyncio.sleep(0)
            return "follower"

        followers = [bench.start(body, on_duplicate=Wait("5s")) for _ in range(3)]
        await asyncio.sleep(0)
        await cancelled(leader)
        assert await asyncio.gather(*followers) == ["follower"] * 3
        assert ran == [1]

    play(scenario)


def test_a_follower_is_not_turned_away_for_a_leader_that_is_gone(play: Any) -> None:
    """The leader's claim is in the store and its caller has left: it must be taken back before others are told."""

    async def scenario(bench: Bench) -> None:
        rule = bench.script.on(Claim, hold_after=Gate())
        leader = bench.start(forbidden)
        await rule.took_effect.passed()
        follower = bench.start(lambda: asyncio.sleep(0, "follower"))
        await asyncio.sleep(0)
        await cancelled(leader)
        assert await follower == "follower"

    play(scenario)


def test_a_call_cancelled_in_the_handler_frees_the_key(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        inside = asyncio.Event()

        async def body() -> None:
            inside.set()
            await never()

        call = bench.start(body)
        await inside.wait()
        await cancelled(call)
        assert bench.script.kinds == ["Claim", "Release"]
        assert await bench.record() is None

    play(scenario)


def test_a_call_cancelled_in_an_at_most_once_handler_is_unknown(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        inside = asyncio.Event()

        async def body() -> None:
            inside.set()
            await never()

        call = bench.start(body, guarantee="at_most_once")
        await inside.wait()
        await cancelled(call)
        record = await bench.record()
        assert record is not None
        assert record.state is State.UNKNOWN

    play(scenario)


@pytest.mark.parametrize("reached", [True, False], ids=["complete reached the store", "complete did not"])
def test_a_call_cancelled_while_completing_is_done_and_cancelled(play: Any, reached: bool) -> None:
    async def scenario(bench: Bench) -> None:
        rule = bench.script.on(Complete, **{"hold_after" if reached else "hold_before": Gate()})
        call = bench.start(lambda: asyncio.sleep(0, "answer"))
        await (rule.took_effect if reached else rule.seen).passed()
        await cancelled(call)
        record = await bench.record()
        assert record is not None
        assert record.state is State.DONE
        assert await bench.guard.run("op", key="k", call=forbidden) == "answer"

    play(scenario)


def test_cancelling_again_during_the_clean_up_changes_nothing(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        held = Gate()
        first = bench.script.on(Complete, hold_before=Gate())
        second = bench.script.on(Complete, hold_before=held)
        call = bench.start(lambda: asyncio.sleep(0, "answer"))
        await first.seen.passed()
        call.cancel()
        await second.seen.passed()
        for _ in range(5):
            call.cancel()
            await asyncio.sleep(0)
        assert not call.done(), "it is still settling"
        held.open()
        with pytest.raises(asyncio.CancelledError):
            await call
        record = await bench.record()
        assert record is not None
        assert record.state is State.DONE

    play(scenario)


def test_cancelling_again_while_the_key_is_being_freed_changes_nothing(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        held, inside = Gate(), asyncio.Event()
        first = bench.script.on(Release, hold_before=Gate())
        second = bench.script.on(Release, hold_before=held)

        async def body() -> None:
            inside.set()
            await never()

        call = bench.start(body)
        await inside.wait()
        call.cancel()
        await first.seen.passed()
        call.cancel()
        await second.seen.passed()
        call.cancel()
        await asyncio.sleep(0)
        held.open()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await bench.record() is None

    play(scenario)


@pytest.mark.parametrize("remembered", [True, False])
def test_a_call_cancelled_while_its_failure_is_settled_is_cancelled(play: Any, remembered: bool) -> None:
    """As in a finally block: the cancellation comes last, so the cancellation is what the caller sees."""

    async def scenario(bench: Bench) -> None:
        async def body() -> None:
            raise Boom

        rule = bench.script.on(Complete if remembered else Release, hold_before=Gate())
        call = bench.start(body, **({"remember_errors": Boom} if remembered else {}))
        await rule.seen.passed()
        await cancelled(call)
        record = await bench.record()
        assert (record is not None and record.state is State.DONE) if remembered else record is None

    play(scenario)


def test_a_release_that_was_sent_twice_is_no_lost_lease(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        async def body() -> None:
            raise Boom

        rule = bench.script.on(Release, hold_after=Gate())
        call = bench.start(body)
        await rule.took_effect.passed()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, Boom)):
            await call
        assert "lease_lost" not in bench.events

    play(scenario)


def test_a_waiter_that_is_cancelled_leaves_the_owner_alone(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        owner = await bench.claim_elsewhere()
        asked = bench.script.on(Claim)
        call = bench.start(forbidden, on_duplicate=Wait("20s"))
        await asked.took_effect.passed()
        await asyncio.sleep(0.01)
        await cancelled(call)
        record = await bench.record()
        assert record is not None
        assert (record.state, record.token) == (State.RUNNING, owner.token)

    play(scenario)


def test_asyncio_timeout_works_as_usual(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()

        async def limited() -> None:
            async with asyncio.timeout(None) as timeout:

                async def late() -> None:
                    timeout.reschedule(asyncio.get_running_loop().time())
                    await never()

                await bench.guard.run("op", key="k", call=late)

        with pytest.raises(TimeoutError):
            await limited()
        assert task.cancelling() == before
        assert await bench.record() is None

    play(scenario)


@pytest.mark.parametrize("op", [Claim, Complete, Release])
def test_asyncio_timeout_works_wherever_it_strikes(play: Any, op: Any) -> None:
    async def scenario(bench: Bench) -> None:
        async def body() -> str:
            if op is Release:
                raise Boom
            return "answer"

        async def strike(timeout: asyncio.Timeout) -> None:
            await reached.seen.passed()
            timeout.reschedule(asyncio.get_running_loop().time())

        async def limited() -> None:
            async with asyncio.timeout(None) as timeout, asyncio.TaskGroup() as group:
                group.create_task(strike(timeout))
                await bench.guard.run("op", key="k", call=body)

        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        reached = bench.script.on(op, hold_before=Gate())
        with pytest.raises(TimeoutError):
            await limited()
        assert task.cancelling() == before
        record = await bench.record()
        if op is Complete:
            assert record is not None
            assert record.state is State.DONE
        else:
            assert record is None

    play(scenario)


def test_a_task_group_that_fails_cancels_the_call_cleanly(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        inside = asyncio.Event()

        async def body() -> None:
            inside.set()
            await never()

        async def fail() -> None:
            await inside.wait()
            raise Boom

        async def together() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(bench.guard.run("op", key="k", call=body))
                group.create_task(fail())

        with pytest.raises(ExceptionGroup) as raised:
            await together()
        assert [type(error) for error in raised.value.exceptions] == [Boom]
        assert await bench.record() is None

    play(scenario)


def test_a_cancelled_take_over_keeps_what_earlier_attempts_captured(play: Any) -> None:
    """Attempt 2 is cancelled before its handler began: attempt 3 must still see what attempt 1 saved."""

    async def scenario(bench: Bench) -> None:
        from semel import current_operation

        async def first() -> None:
            op = current_operation()
            assert op is not None
            await op.capture("id", lambda: "made once")  # type: ignore[attr-defined]
            raise Boom

        with pytest.raises(Boom):
            await bench.guard.run("op", key="k", call=first)
        rule = bench.script.on(Claim, hold_after=Gate())
        call = bench.start(forbidden)
        await rule.took_effect.passed()
        await cancelled(call)

        async def third() -> Any:
            op = current_operation()
            assert op is not None
            return await op.capture("id", lambda: "made again")  # type: ignore[attr-defined]

        assert await bench.guard.run("op", key="k", call=third) == "made once"

    play(scenario)


def test_a_cancelled_recovery_leaves_the_attempt_abandoned(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.claim_elsewhere()
        bench.clock.advance(31)
        inside = asyncio.Event()

        async def recover() -> None:
            inside.set()
            await never()

        call = bench.start(forbidden, recover=recover)
        await inside.wait()
        await cancelled(call)
        record = await bench.record()
        assert record is not None
        assert record.state is State.ABANDONED

    play(scenario)


def test_a_call_cancelled_between_two_tries_to_complete_still_settles(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        failing = bench.script.on(Complete, before=StoreUnavailable("busy"), times=2)
        call = bench.start(lambda: asyncio.sleep(0, "answer"))
        await failing.seen.passed()
        await asyncio.sleep(0)
        await cancelled(call)
        record = await bench.record()
        assert record is not None
        assert record.state is State.DONE

    play(scenario)


def test_a_thread_that_runs_on_after_the_cancellation_keeps_the_key(play: Any) -> None:
    """A plain function in a thread cannot be stopped: until it ends, nobody else may begin."""

    async def scenario(bench: Bench) -> None:
        inside, finish = Gate(), Gate()
        ran: list[int] = []

        def work(key: str) -> str:
            ran.append(1)
            inside.open()
            finish.wait()
            return "from the thread"

        ship: Any = bench.guard.once(key="key", operation="op")(work)  # type: ignore[type-var]
        call = asyncio.ensure_future(ship("k"))
        await inside.passed()
        call.cancel()
        for _ in range(5):
            await asyncio.sleep(0.002)
        record = await bench.record()
        try:
            assert record is not None
            assert record.state is State.RUNNING
        finally:
            finish.open()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await ship("k") == "from the thread"
        assert ran == [1]

    play(scenario)


def test_a_storm_in_which_everyone_is_cancelled_leaves_nothing(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        calls = [bench.start(never, on_duplicate=Wait("20s")) for _ in range(30)]
        for turn in range(30):
            await asyncio.sleep(0)
            calls[(turn * 7) % 30].cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        assert await bench.record() is None
        assert bench.guard.driver.flights.by_id == {}
        assert len(bench.guard.driver.keeper.leases) == 0

    play(scenario)


def test_errors_of_refused_calls_are_not_cancellations(play: Any) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.claim_elsewhere(fingerprint=bench.guard._data.digest(("a",), {}))
        with pytest.raises(InProgress):
            await bench.start(forbidden, fingerprint="a")
        with pytest.raises(KeyReused):
            await bench.start(forbidden, fingerprint="b")

    play(scenario)
