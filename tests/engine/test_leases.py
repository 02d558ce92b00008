"""Leases: kept alive while a handler runs, by one keeper for all; and what happens when one is lost."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, LeaseLost, MemoryStore, State, StoreUnavailable, StoreUncertain
from semel.core.keys import identity
from semel.core.ops import Complete, Renew, Sweep
from semel.engine.drive.leases import Lease, Leases
from semel.engine.operation import OperationHandle
from tests.engine.driving import Engine
from tests.engine.scripted import AsyncScriptedStore, Gate, Script

ID = identity("", "op", "k")


def keepers(engine: Engine) -> int:
    """The threads and tasks that renew leases right now."""
    threads = sum(thread.name == "semel-keeper" for thread in threading.enumerate())
    if not engine.is_async:
        return threads
    return threads + sum(task.get_name() == "semel-keeper" for task in asyncio.all_tasks(engine.loop))  # type: ignore[attr-defined]


def all_due(engine: Engine) -> None:
    """Make every held lease due now, and have the keeper look."""
    keeper = engine.guard.driver.keeper
    for lease in list(keeper.leases.held.values()):
        lease.due = 0.0
    if engine.is_async:
        engine.loop.call_soon_threadsafe(keeper._set, 0.0)  # type: ignore[attr-defined]
    else:
        with keeper._condition:
            keeper._condition.notify()


def test_a_lease_is_renewed_while_a_long_handler_runs(engine: Engine) -> None:
    first, second = engine.script.on(Renew), engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield first.took_effect
        yield second.took_effect
        return "long"

    engine.renew_early()
    assert engine.run(body) == "long"
    assert engine.script.kinds[0] == "Claim"
    assert engine.script.kinds[-1] == "Complete"
    assert set(engine.script.kinds[1:-1]) == {"Renew"}
    assert engine.script.count(Renew) >= 2
    assert "renewed" in engine.names()


def test_200_handlers_are_kept_by_one_keeper_in_one_round_trip(quick_engine: Engine) -> None:
    engine, count = quick_engine, 200
    inside: list[int] = []
    all_in, finish = Gate(), Gate()
    lock = threading.Lock()

    def body() -> Iterator[Any]:
        with lock:
            inside.append(1)
            if len(inside) == count:
                all_in.open()
        yield finish

    before = keepers(engine)
    futures = [engine.start_run(body, key=f"k{i}") for i in range(count)]
    all_in.wait()
    renewed = engine.script.on(Renew, times=count)
    last = engine.script.on(Renew, when=lambda op: engine.script.count(Renew) == count)
    all_due(engine)
    renewed.took_effect.wait()
    assert keepers(engine) - before <= 1
    finish.open()
    for future in futures:
        future.result(20)
    assert last.times == 1, "no lease was renewed twice"
    assert [len(batch) for batch in engine.script.batches] == [count]


def test_a_failed_renewal_does_not_fail_a_request_whose_handler_succeeded(engine: Engine) -> None:
    failing = engine.script.on(Renew, before=StoreUnavailable("hiccup"), times=2)
    healed = engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield failing.seen
        yield healed.took_effect
        return "succeeded"

    engine.renew_early()
    assert engine.run(body) == "succeeded"
    record = engine.record()
    assert record is not None
    assert record.state is State.DONE
    assert "renewal_failed" in engine.names()


def test_a_renewal_on_its_way_does_not_hold_up_or_undo_the_answer(engine: Engine) -> None:
    """The handler is over while its renewal still waits for the store."""
    held = Gate()
    renewing = engine.script.on(Renew, hold_before=held)

    def body() -> Iterator[Any]:
        yield renewing.seen
        return "finished"

    engine.renew_early()
    assert engine.run(body) == "finished"
    held.open()
    renewing.took_effect.wait()
    record = engine.record()
    assert record is not None
    assert record.state is State.DONE
    assert engine.run(lambda: "again") == "finished"
    assert "lease_lost" not in engine.names()


def test_a_lost_lease_is_seen_by_the_handler(engine: Engine) -> None:
    """A sync handler looks at op.lease_lost; an async one is cancelled."""
    stopped: list[str] = []
    inside = Gate()

    def body(key: str, op: OperationHandle = None) -> Iterator[Any]:  # type: ignore[assignment]
        inside.open()
        pause = threading.Event()
        try:
            for _ in range(2000):
                if op.lease_lost:
                    stopped.append("saw")
                    return "too late"
                yield from rest(engine, pause)
        except asyncio.CancelledError:
            stopped.append("cancelled")
            assert op.lease_lost
            raise
        return "never told"

    engine.renew_early()
    call = engine.start(engine.once(body), "k")
    inside.wait()
    claimed = engine.take_over(nonce=2, fingerprint=fingerprint_of(engine))
    with pytest.raises(LeaseLost):
        call.result(20)
    assert stopped == ["cancelled" if engine.is_async else "saw"]
    record = engine.record()
    assert record is not None
    assert (record.state, record.token) == (State.RUNNING, claimed.token)
    assert "lease_lost" in engine.names()


def fingerprint_of(engine: Engine) -> bytes:
    record = engine.record()
    assert record is not None
    return record.fingerprint


def rest(engine: Engine, pause: threading.Event) -> Iterator[Any]:
    if engine.is_async:
        yield asyncio.sleep(0.005)
    else:
        pause.wait(0.005)


def test_the_caller_of_a_lost_attempt_gets_the_new_owners_outcome(engine: Engine) -> None:
    inside, finish = Gate(), Gate()

    def body() -> Iterator[Any]:
        inside.open()
        yield finish
        return "too late"

    engine.renew_early()
    call = engine.start_run(body)
    inside.wait()
    # One moment for both: no renewal may come between the lease's end and the new owner.
    held = Gate()
    renewing = engine.script.on(Renew, hold_before=held)
    renewing.seen.wait()
    engine.clock.advance(31)
    assert engine.run(lambda: "in time", guard=engine.new_guard()) == "in time"
    held.open()
    if not engine.is_async:
        finish.open()
    assert call.result(20) == "in time"


def test_renewals_are_tried_until_the_span_ends_and_then_the_handler_is_stopped(engine: Engine) -> None:
    down = StoreUnavailable("down")
    failing = [engine.script.on(Renew, before=down) for _ in range(3)]
    engine.script.on(Renew, before=down, times=10**6)
    lost: list[bool] = []

    def body(key: str, op: OperationHandle = None) -> Iterator[Any]:  # type: ignore[assignment]
        pause = threading.Event()
        for again in failing:
            yield again.seen
        engine.end_leases()
        try:
            for _ in range(2000):
                if op.lease_lost and not engine.is_async:  # an async handler is stopped without looking
                    break
                yield from rest(engine, pause)
        finally:
            lost.append(op.lease_lost)
        return "it was nobody else's"

    engine.renew_early()
    call = engine.start(engine.once(body), "k")
    if engine.is_async:
        with pytest.raises(LeaseLost):
            call.result(20)
    else:
        assert call.result(20) == "it was nobody else's", "nobody took over, so the owner's word is the truth"
    assert lost == [True]
    assert engine.script.count(Renew) >= 3, "it was tried again"
    assert engine.names().count("renewal_failed") == engine.script.count(Renew)


def test_a_store_that_does_not_answer_renewals_cannot_hide_the_end_of_the_lease(engine: Engine) -> None:
    """The span passes while a renewal hangs: another owner may begin, so this one must be told."""
    held = Gate()
    renewing = engine.script.on(Renew, hold_before=held, times=10**6)
    seen: list[bool] = []

    def body(key: str, op: OperationHandle = None) -> Iterator[Any]:  # type: ignore[assignment]
        pause = threading.Event()
        yield renewing.seen
        engine.end_leases()
        try:
            for _ in range(2000):
                if op.lease_lost:
                    break
                yield from rest(engine, pause)
        finally:
            seen.append(op.lease_lost)

    engine.renew_early()
    call = engine.start(engine.once(body), "k")
    try:
        call.exception(20)
    finally:
        held.open()
    assert seen == [True]


def test_the_lease_is_kept_while_the_outcome_is_being_settled(engine: Engine) -> None:
    """The handler has succeeded and the store refuses Complete for a while: nobody may take over meanwhile."""
    renewed = Gate()
    engine.script.on(Renew, do=renewed.open, times=10**6)
    engine.script.on(Complete, before=StoreUnavailable("busy"), times=10**6, when=lambda op: not renewed.is_open)
    engine.renew_early()
    assert engine.run(lambda: "settled", completion_timeout="60s") == "settled"


@pytest.mark.parametrize("error", [RuntimeError("odd"), KeyError("odd"), AssertionError("odd")], ids=repr)
def test_the_keeper_survives_a_store_that_raises_odd_things(quick_engine: Engine, error: Exception) -> None:
    engine = quick_engine
    odd = engine.script.on(Renew, before=error)
    healed = engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield odd.seen
        yield healed.took_effect
        return "kept"

    engine.renew_early()
    assert engine.run(body) == "kept"


def test_the_keeper_survives_a_sweep_that_raises_odd_things(quick_engine: Engine) -> None:
    engine = quick_engine
    odd = engine.script.on(Sweep, before=RuntimeError("odd"), times=10**6)
    guard, began = engine.new_guard(sweep_every=0.02), time.monotonic()

    def body() -> Iterator[Any]:
        yield odd.seen
        renewed = engine.script.on(Renew)
        yield renewed.took_effect
        return "kept"

    engine.renew_early()
    assert engine.run(body, guard=guard) == "kept"
    assert engine.script.count(Sweep) <= (time.monotonic() - began) / 0.02 + 1, "and does not sweep in a tight loop"


@pytest.mark.parametrize("answers", [[], [True, True], None, [1], [StoreUncertain]], ids=repr)
def test_the_keeper_survives_a_store_that_answers_wrongly(
    quick_engine: Engine, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = quick_engine
    real, tried = engine.store.execute_many, Gate()

    def wrong(ops: Any) -> Any:
        monkeypatch.setattr(engine.store, "execute_many", real)
        tried.open()
        return answers

    async def wrong_async(ops: Any) -> Any:
        return wrong(ops)

    monkeypatch.setattr(engine.store, "execute_many", wrong_async if engine.is_async else wrong)
    healed = engine.script.on(Renew)

    def poked() -> Iterator[Any]:
        yield tried

    def body() -> Iterator[Any]:
        yield healed.took_effect
        return "kept"

    engine.renew_early()
    engine.start_run(poked, key="other").exception(20)
    assert engine.run(body) == "kept", "the keeper still works for the next one"


def test_the_keeper_survives_a_hook_that_raises(quick_engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine = quick_engine

    def hook(event: Any) -> None:
        raise ValueError("a broken sink")

    guard = engine.new_guard(on_event=hook)
    first, second = engine.script.on(Renew), engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield first.took_effect
        yield second.took_effect
        return "kept"

    engine.renew_early()
    assert engine.run(body, guard=guard) == "kept"
    assert "the event hook failed at renewed" in caplog.text


def test_a_stale_answer_to_a_renewal_of_a_finished_attempt_is_no_loss() -> None:
    leases = Leases()
    lease = Lease.__new__(Lease)
    lease.span, lease.due, lease.ends, lease.lost, lease.on_lost = 1.0, 0.0, 1.0, False, None
    leases.hold(lease)
    leases.drop(lease)
    leases.note_renewals([lease], [False], 0.0, 0.0)
    assert not lease.lost


def test_leases_that_are_due_soon_go_with_those_due_now() -> None:
    leases = Leases()
    for due in (0.0, 0.05, 0.5):
        lease = Lease.__new__(Lease)
        lease.span, lease.due, lease.latest, lease.lost = 1.0, due, 3600.0, False
        leases.hold(lease)
    assert [lease.due for lease in leases.due(0.0)] == [0.0, 0.05]
    assert leases.next_due(0.0) == 0.0


def test_a_keeper_that_sleeps_is_woken_by_a_shorter_lease(engine: Engine) -> None:
    """With nothing but a lease of a day held it sleeps for 86 s; one of 30 s must not wait for that."""
    finish = Gate()

    def long() -> Iterator[Any]:
        yield finish

    engine.renew_early()
    other = engine.start_run(long, key="long", lease="1d")
    renewed = engine.script.on(Renew)

    def body() -> Iterator[Any]:
        yield renewed.took_effect
        return "kept"

    assert engine.run(body) == "kept"
    finish.open()
    other.result(20)


# -- async only: what a lost lease does to the task


@pytest.mark.usefixtures("renews_early")
def test_a_lost_lease_leaves_no_cancellation_behind_in_the_task() -> None:
    async def scenario() -> None:
        script, store = Script(), AsyncMemoryStore()
        guard = AsyncSemel(AsyncScriptedStore(store, script), sweep_every=None)
        script.on(Renew, do=store._records.rows.clear)
        with pytest.raises(LeaseLost):
            await guard.run("op", key="k", call=asyncio.Event().wait)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)
        await guard.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("renews_early")
def test_a_lease_lost_during_a_clean_up_of_a_cancelled_task_is_told_as_such() -> None:
    """The task has been cancelled before, and its clean-up makes a guarded call: that earlier one is not ours."""

    async def scenario() -> None:
        script, store = Script(), AsyncMemoryStore()
        guard = AsyncSemel(AsyncScriptedStore(store, script), sweep_every=None)
        script.on(Renew, do=store._records.rows.clear)
        seen: list[BaseException] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                try:
                    await guard.run("op", key="k", call=asyncio.Event().wait)
                except BaseException as error:
                    seen.append(error)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert [type(error) for error in seen] == [LeaseLost]
        await guard.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("renews_early")
def test_a_handler_that_swallows_the_cancellation_is_refused_all_the_same() -> None:
    async def scenario() -> None:
        script, store = Script(), AsyncMemoryStore()
        guard = AsyncSemel(AsyncScriptedStore(store, script), sweep_every=None)
        script.on(Renew, do=store._records.rows.clear)

        async def stubborn() -> str:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return "done anyway"

        with pytest.raises(LeaseLost):
            await guard.run("op", key="k", call=stubborn)
        assert await guard.lookup("op", "k") is None
        await guard.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("renews_early")
def test_a_cancellation_that_meets_a_lost_lease_is_not_swallowed() -> None:
    async def scenario() -> None:
        script, store = Script(), AsyncMemoryStore()
        guard = AsyncSemel(AsyncScriptedStore(store, script), sweep_every=None)
        call: asyncio.Task[Any] | None = None

        def lose() -> None:
            store._records.rows.clear()
            asyncio.get_running_loop().call_soon(call.cancel)  # type: ignore[union-attr]

        script.on(Renew, do=lose)
        call = asyncio.ensure_future(guard.run("op", key="k", call=asyncio.Event().wait))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert call.cancelled()
        await guard.close()

    asyncio.run(scenario())


@pytest.mark.usefixtures("renews_early")
def test_an_async_guard_goes_on_in_a_second_event_loop() -> None:
    """asyncio.run twice, one after the other, as scripts and tests do."""
    script, store = Script(), MemoryStore()
    from semel import Semel
    from tests.engine.scripted import ScriptedStore

    guard = Semel(ScriptedStore(store, script), sweep_every=None)

    @guard.once(key="key", operation="op")
    async def ship(key: str) -> str:
        renewed = script.on(Renew)
        await renewed.took_effect.passed()
        return key

    for key in ("first", "second"):
        assert asyncio.run(asyncio.wait_for(ship(key), 60)) == key
    assert guard.lookup("op", "second").state is State.DONE  # type: ignore[union-attr]
    guard.close()
