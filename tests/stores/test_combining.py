"""Combining, with a lane made of events: who travels together, who gets which answer, and that nobody is left."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from semel.core.ops import Claim, Complete, Lookup, Op, Release, Renew, Resolve, SaveStep, Sweep
from semel.core.states import Takeover
from semel.engine.ports import STORE_CLOSED
from semel.errors import ConfigurationError, StoreUnavailable, StoreUncertain
from semel.stores.batching.aio_combiner import AsyncCombiner
from semel.stores.batching.batches import stored_bytes
from semel.stores.batching.combiner import Combiner

PATIENCE = 10.0


def op(number: int) -> Lookup:
    return Lookup(b"%d" % number)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


class FakeLane:
    """Answers an Op with its id. While ``held``, its trips do not come back."""

    gathers = False

    def __init__(self) -> None:
        self.trips: list[list[bytes]] = []
        self.free = threading.Event()
        self.free.set()
        self.fails: dict[bytes, BaseException] = {}
        self.closed = 0

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        self.trips.append([each.id for each in ops])
        assert self.free.wait(PATIENCE)
        for each in ops:
            error = self.fails.pop(each.id, None)
            if isinstance(error, StoreUnavailable):
                return [error if other is each else other.id for other in ops]
            if error is not None:
                raise error
        return [each.id for each in ops]

    def close(self) -> None:
        self.closed += 1

    @contextlib.contextmanager
    def held(self, combiner: Combiner) -> Iterator[list[Any]]:
        """One Op is on its way and does not come back before the block ends."""
        self.free.clear()
        first: list[Any] = []
        thread = start(lambda: first.append(combiner.execute(op(0))))
        until(lambda: bool(self.trips))
        try:
            yield first
        finally:
            self.free.set()
            thread.join(PATIENCE)


def start(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def finish(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a caller is left behind"


def waiting(combiner: Combiner) -> int:
    return len(combiner._queue)


# Threads


def test_an_op_with_a_free_lane_leaves_at_once_and_alone() -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    assert [combiner.execute(op(i)) for i in range(3)] == [b"0", b"1", b"2"]
    assert lane.trips == [[b"0"], [b"1"], [b"2"]]


def test_those_who_wait_for_a_busy_lane_leave_together() -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    answers: list[Any] = []
    with lane.held(combiner) as first:
        threads = [start(lambda i=i: answers.append((i, combiner.execute(op(i))))) for i in range(1, 9)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 8)
    finish(threads)
    assert first == [b"0"]
    assert sorted(answers) == [(i, b"%d" % i) for i in range(1, 9)]
    assert [len(trip) for trip in lane.trips] == [1, 8]


def test_a_batch_keeps_its_order() -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    ids = [b"%d" % (i % 5) for i in range(50)]
    assert combiner.execute_many([Lookup(id) for id in ids]) == ids
    assert lane.trips == [ids]
    assert combiner.execute_many([]) == []
    assert len(lane.trips) == 1


def test_a_batch_beyond_the_limit_takes_several_batches() -> None:
    lane = FakeLane()
    combiner = Combiner([lane], max_batch=4)
    assert combiner.execute_many([op(i) for i in range(10)]) == [b"%d" % i for i in range(10)]
    assert [len(trip) for trip in lane.trips] == [4, 4, 2]


def test_callers_behind_a_full_batch_take_the_next_trip() -> None:
    lane = FakeLane()
    combiner = Combiner([lane], max_batch=3)
    answers: list[Any] = []
    with lane.held(combiner):
        threads = [start(lambda i=i: answers.append(combiner.execute(op(i)))) for i in range(1, 9)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 8)
    finish(threads)
    assert sorted(answers) == [b"%d" % i for i in range(1, 9)]
    assert [len(trip) for trip in lane.trips] == [1, 3, 3, 2]


def test_an_error_is_its_ops_alone() -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    lane.fails[b"3"] = refused = StoreUnavailable("refused")
    outcomes: dict[int, Any] = {}

    def call(i: int) -> None:
        try:
            outcomes[i] = combiner.execute(op(i))
        except StoreUnavailable as error:
            outcomes[i] = error

    with lane.held(combiner):
        threads = [start(lambda i=i: call(i)) for i in range(1, 6)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 5)
    finish(threads)
    assert outcomes == {1: b"1", 2: b"2", 3: refused, 4: b"4", 5: b"5"}
    lane.fails[b"7"] = refused
    assert combiner.execute_many([op(6), op(7), op(8)]) == [b"6", refused, b"8"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug")])
def test_a_leader_that_is_interrupted_leaves_nobody_waiting(error: BaseException) -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    lane.fails[b"1"] = error
    outcomes: list[str] = []

    def call(i: int) -> None:
        try:
            combiner.execute(op(i))
        except BaseException as raised:
            outcomes.append(type(raised).__name__)
        else:
            outcomes.append("answered")

    with lane.held(combiner):
        threads = [start(lambda i=i: call(i)) for i in range(1, 6)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 5)
    finish(threads)
    assert sorted(outcomes) == sorted([type(error).__name__, *["StoreUncertain"] * 4])
    assert combiner.execute(op(9)) == b"9"


def test_a_caller_interrupted_while_it_waits_does_not_take_the_lane_with_it() -> None:
    """Ctrl-C reaches the main thread while another thread's trip runs: the lane must not be handed to one that left."""
    lane = FakeLane()
    combiner = Combiner([lane])
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:

        def interrupt() -> None:
            until(lambda: waiting(combiner) == 1)
            signal.pthread_kill(main, signal.SIGINT)

        with lane.held(combiner) as first:
            thread = start(interrupt)
            with pytest.raises(KeyboardInterrupt):
                combiner.execute(op(1))
            finish([thread])
    finally:
        signal.signal(signal.SIGINT, before)
    assert first == [b"0"]
    later: list[Any] = []
    finish([start(lambda: later.append(combiner.execute(op(2))))])
    assert later == [b"2"]


def test_several_lanes_travel_at_the_same_time() -> None:
    lanes = [FakeLane(), FakeLane()]
    for lane in lanes:
        lane.free.clear()
    combiner = Combiner(lanes)
    answers: list[Any] = []
    threads = [start(lambda i=i: answers.append(combiner.execute(op(i)))) for i in range(2)]  # type: ignore[misc]
    until(lambda: all(lane.trips for lane in lanes))
    threads += [start(lambda i=i: answers.append(combiner.execute(op(i)))) for i in range(2, 6)]  # type: ignore[misc]
    until(lambda: waiting(combiner) == 4)
    lanes[0].free.set()
    finish(threads[2:])
    assert len(lanes[1].trips) == 1
    lanes[1].free.set()
    finish(threads)
    assert sorted(answers) == [b"%d" % i for i in range(6)]


@pytest.mark.parametrize("gathers", [False, True])
def test_everyone_gets_their_own_answer(gathers: bool) -> None:
    lanes = [FakeLane(), FakeLane()]
    for lane in lanes:
        lane.gathers = gathers
    combiner = Combiner(lanes, max_batch=5)
    wrong: list[Any] = []

    def call(caller: int) -> None:
        for i in range(100):
            many = [op(caller * 1000 + i + j) for j in range(1 if i % 10 else 8)]
            given = combiner.execute_many(many) if len(many) > 1 else [combiner.execute(many[0])]
            if given != [each.id for each in many]:
                wrong.append((given, many))

    finish([start(lambda caller=caller: call(caller)) for caller in range(16)])  # type: ignore[misc]
    assert wrong == []
    assert sum(len(trip) for lane in lanes for trip in lane.trips) == 16 * (90 + 80)


def test_a_closed_combiner_refuses() -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    combiner.close()
    combiner.close()
    assert lane.closed == 1
    with pytest.raises(StoreUnavailable):
        combiner.execute(op(1))
    assert [type(answer) for answer in combiner.execute_many([op(1), op(2)])] == [StoreUnavailable] * 2
    assert lane.trips == []


def test_closing_lets_those_on_their_way_arrive() -> None:
    lane = FakeLane()
    combiner = Combiner([lane])
    answers: list[Any] = []
    with lane.held(combiner) as first:
        threads = [start(lambda i=i: answers.append(combiner.execute(op(i)))) for i in (1, 2)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 2)
        combiner.close()
        assert lane.closed == 0
    finish(threads)
    assert first == [b"0"]
    assert sorted(answers) == [b"1", b"2"]
    assert lane.closed == 1


# One event loop


class FakeAsyncLane:
    def __init__(self) -> None:
        self.trips: list[list[bytes]] = []
        self.free = asyncio.Event()
        self.free.set()
        self.fails: dict[bytes, BaseException] = {}
        self.closed = 0

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        self.trips.append([each.id for each in ops])
        await self.free.wait()
        for each in ops:
            error = self.fails.pop(each.id, None)
            if isinstance(error, StoreUnavailable):
                return [error if other is each else other.id for other in ops]
            if error is not None:
                raise error
        return [each.id for each in ops]

    async def close(self) -> None:
        self.closed += 1


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(main: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


def test_ops_of_the_same_turn_leave_together() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        combiner = AsyncCombiner([lane])
        assert await asyncio.gather(*(combiner.execute(op(i)) for i in range(5))) == [b"%d" % i for i in range(5)]
        assert [len(trip) for trip in lane.trips] == [5]
        assert await combiner.execute(op(9)) == b"9"
        assert [len(trip) for trip in lane.trips] == [5, 1]
        assert await combiner.execute_many([]) == []

    run(main)


def test_tasks_that_wait_for_a_busy_lane_leave_together() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        lane.free.clear()
        combiner = AsyncCombiner([lane], max_batch=6)
        first = asyncio.ensure_future(combiner.execute(op(0)))
        await settle()
        others = [asyncio.ensure_future(combiner.execute(op(i))) for i in range(1, 9)]
        await settle()
        assert [len(trip) for trip in lane.trips] == [1]
        lane.free.set()
        assert await asyncio.gather(first, *others) == [b"%d" % i for i in range(9)]
        assert [len(trip) for trip in lane.trips] == [1, 6, 2]

    run(main)


def test_many_ops_take_all_lanes() -> None:
    async def main() -> None:
        lanes = [FakeAsyncLane() for _ in range(3)]
        for lane in lanes:
            lane.free.clear()
        combiner = AsyncCombiner(lanes, max_batch=4)
        answers = asyncio.ensure_future(combiner.execute_many([op(i) for i in range(10)]))
        await settle()
        assert sorted(len(trip) for lane in lanes for trip in lane.trips) == [2, 4, 4]
        for lane in lanes:
            lane.free.set()
        assert await answers == [b"%d" % i for i in range(10)]

    run(main)


def test_an_error_is_its_tasks_alone() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        combiner = AsyncCombiner([lane])
        lane.fails[b"1"] = refused = StoreUnavailable("refused")
        answers = await asyncio.gather(*(combiner.execute(op(i)) for i in range(3)), return_exceptions=True)
        assert answers == [b"0", refused, b"2"]
        lane.fails[b"1"] = refused
        assert await combiner.execute_many([op(0), op(1), op(2)]) == [b"0", refused, b"2"]

    run(main)


def test_a_cancelled_caller_interrupts_no_trip() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        lane.free.clear()
        combiner = AsyncCombiner([lane])
        doomed, other = (asyncio.ensure_future(combiner.execute(op(i))) for i in (1, 2))
        await settle()
        later = asyncio.ensure_future(combiner.execute(op(3)))
        await settle()
        doomed.cancel()
        await settle()
        assert doomed.cancelled()
        lane.free.set()
        assert (await other, await later) == (b"2", b"3")
        assert lane.trips == [[b"1", b"2"], [b"3"]]

    run(main)


def test_a_trip_that_breaks_leaves_nobody_waiting() -> None:
    """Those on it are told that it is uncertain; those behind it are sent all the same."""

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        lane = FakeAsyncLane()
        lane.free.clear()
        combiner = AsyncCombiner([lane])
        lane.fails[b"1"] = RuntimeError("a bug")
        broken = asyncio.ensure_future(combiner.execute(op(1)))
        await settle()
        behind = asyncio.ensure_future(combiner.execute(op(2)))
        await settle()
        lane.free.set()
        with pytest.raises(StoreUncertain):
            await broken
        async with asyncio.timeout(5):
            assert await behind == b"2"

    run(main)


def test_a_closed_async_combiner_refuses() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        lane.free.clear()
        combiner = AsyncCombiner([lane])
        first = asyncio.ensure_future(combiner.execute(op(1)))
        await settle()
        second = asyncio.ensure_future(combiner.execute(op(2)))
        await settle()
        closing = asyncio.ensure_future(combiner.close())
        await settle()
        assert lane.closed == 0
        lane.free.set()
        await closing
        assert (await first, await second) == (b"1", b"2")
        await combiner.close()
        assert lane.closed == 1
        with pytest.raises(StoreUnavailable):
            await combiner.execute(op(3))

    run(main)


def test_an_op_submitted_just_before_closing_is_answered() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        combiner = AsyncCombiner([lane])
        task = combiner.submit(op(1))
        await combiner.close()
        async with asyncio.timeout(5):
            answer = await task
        assert answer == b"1" or isinstance(answer, StoreUnavailable)

    run(main)


def test_a_store_belongs_to_one_loop_while_that_lives() -> None:
    async def use(combiner: AsyncCombiner) -> Any:
        return await combiner.execute(op(1))

    lane_loop = asyncio.new_event_loop()
    try:

        async def make() -> AsyncCombiner:
            return AsyncCombiner([FakeAsyncLane()])

        combiner = lane_loop.run_until_complete(make())
        assert lane_loop.run_until_complete(use(combiner)) == b"1"
        with pytest.raises(ConfigurationError):
            asyncio.run(use(combiner))
        assert lane_loop.run_until_complete(use(combiner)) == b"1"
    finally:
        lane_loop.close()
    assert asyncio.run(use(combiner)) == b"1"


# Bounds


def done(number: int, size: int) -> Complete:
    return Complete(b"%d" % number, 1, b"x" * size, 60.0)


def test_a_batch_is_bounded_by_what_it_stores() -> None:
    """Many large answers at once would make one statement of all of them."""
    lane = FakeLane()
    combiner = Combiner([lane], max_bytes=100)
    ops = [done(0, 60), done(1, 40), done(2, 1), op(3), done(4, 500), op(5), done(6, 10)]
    assert combiner.execute_many(ops) == [b"%d" % i for i in range(7)]
    assert lane.trips == [[b"0", b"1"], [b"2", b"3"], [b"4"], [b"5", b"6"]]


@pytest.mark.parametrize(
    ("heavy", "bytes_stored"),
    [
        (Complete(b"1", 1, b"x" * 9, 1.0), 9),
        (SaveStep(b"1", 1, "charge", b"x" * 8, 0), 8),
        (Resolve(b"1", b"x" * 7, 1.0), 7),
        (Resolve(b"1", None, 1.0), 0),
        (Lookup(b"1"), 0),
        (Claim(b"1", 1, b"f" * 16, 1.0, 1.0, Takeover.RETRY, "", "op", "key"), 0),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_op_weighs_what_it_has_the_store_keep(heavy: Any, bytes_stored: int) -> None:
    assert stored_bytes(heavy) == bytes_stored


def test_who_finds_a_full_queue_waits_and_is_turned_away_in_the_end() -> None:
    lane = FakeLane()
    combiner = Combiner([lane], max_queue=2, queue_timeout=0.05)
    with lane.held(combiner):
        threads = [start(lambda i=i: combiner.execute(op(i))) for i in (1, 2)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 2)
        with pytest.raises(StoreUnavailable, match="queue for the store is full: 2 Ops were still waiting"):
            combiner.execute(op(3))
        assert waiting(combiner) == 2
        assert combiner._outside == {}
    finish(threads)
    assert combiner.execute(op(4)) == b"4"


def test_who_waits_for_a_place_gets_one_as_soon_as_there_is_one() -> None:
    lane = FakeLane()
    combiner = Combiner([lane], max_queue=2, queue_timeout=PATIENCE)
    answers: list[Any] = []
    with lane.held(combiner):
        threads = [start(lambda i=i: answers.append(combiner.execute(op(i)))) for i in range(1, 9)]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 2 and len(combiner._outside) == 6)
    finish(threads)
    assert sorted(answers) == [b"%d" % i for i in range(1, 9)]
    assert max(len(trip) for trip in lane.trips) <= 2


def test_an_owner_is_let_into_a_full_queue() -> None:
    """Its handler has run: what it says must not be lost because others are many."""
    lane = FakeLane()
    combiner = Combiner([lane], max_queue=1, queue_timeout=0.0)
    owners = [Renew(b"1", 1, 1.0), done(2, 1), Release(b"3", 1), SaveStep(b"4", 1, "charge", b"", 0)]
    with lane.held(combiner):
        threads = [start(lambda: combiner.execute(op(9)))]
        until(lambda: waiting(combiner) == 1)
        threads += [start(lambda each=each: combiner.execute(each)) for each in owners]  # type: ignore[misc]
        until(lambda: waiting(combiner) == 5)
        with pytest.raises(StoreUnavailable):
            combiner.execute(op(8))
    finish(threads)


def test_a_batch_larger_than_the_queue_is_taken_when_nobody_waits() -> None:
    combiner = Combiner([FakeLane()], max_queue=3, queue_timeout=0.0)
    assert len(combiner.execute_many([op(i) for i in range(10)])) == 10


def test_those_outside_are_told_when_the_store_is_closed() -> None:
    lane = FakeLane()
    combiner = Combiner([lane], max_queue=1, queue_timeout=PATIENCE)
    refused: list[BaseException] = []

    def ask() -> None:
        try:
            combiner.execute(op(2))
        except StoreUnavailable as error:
            refused.append(error)

    with lane.held(combiner):
        threads = [start(lambda: combiner.execute(op(1)))]
        until(lambda: waiting(combiner) == 1)
        outside = start(ask)
        until(lambda: len(combiner._outside) == 1)
        combiner.close()
        outside.join(PATIENCE)
    finish(threads)
    assert [str(error) for error in refused] == [STORE_CLOSED]


def test_an_async_batch_is_bounded_by_what_it_stores() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        combiner = AsyncCombiner([lane], max_bytes=100)
        await combiner.execute_many([done(0, 60), done(1, 40), done(2, 1), done(3, 500), op(4)])
        assert lane.trips == [[b"0", b"1"], [b"2"], [b"3"], [b"4"]]

    run(main)


def test_a_task_that_finds_a_full_queue_waits_and_is_turned_away_in_the_end() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        lane.free.clear()
        combiner = AsyncCombiner([lane], max_queue=2, queue_timeout=0.02)
        others = []
        for i in range(3):  # one on its way, two in the queue
            others.append(asyncio.ensure_future(combiner.execute(op(i))))
            await settle()
        with pytest.raises(StoreUnavailable, match="queue for the store is full: 2 Ops were still waiting"):
            await combiner.execute(op(3))
        refused = await combiner.execute_many([op(4), op(5)])
        assert [type(answer) for answer in refused] == [StoreUnavailable] * 2
        owner = asyncio.ensure_future(combiner.execute(done(6, 1)))
        await settle()
        lane.free.set()
        assert await asyncio.gather(*others, owner) == [b"0", b"1", b"2", b"6"]
        assert combiner._outside == {}

    run(main)


def test_tasks_that_wait_for_a_place_are_let_in_in_their_order() -> None:
    async def main() -> None:
        lane = FakeAsyncLane()
        lane.free.clear()
        combiner = AsyncCombiner([lane], max_queue=2, queue_timeout=PATIENCE)
        tasks = []
        for i in range(9):
            tasks.append(asyncio.ensure_future(combiner.execute(op(i))))
            await settle()
        assert len(combiner._outside) == 6
        lane.free.set()
        assert await asyncio.gather(*tasks) == [b"%d" % i for i in range(9)]
        assert [id for trip in lane.trips for id in trip] == [b"%d" % i for i in range(9)]
        assert max(len(trip) for trip in lane.trips) <= 2

    run(main)


def test_a_place_given_to_a_cancelled_task_is_handed_on() -> None:
    """Those outside are woken one for each place: one that goes away must wake the next, or nobody ever does."""
    tasks: list[asyncio.Task[Any]] = []

    class Cancelling(FakeAsyncLane):
        async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
            if ops[0].id == b"1":  # its place in the queue has just been given to the third, who does not know yet
                tasks[2].cancel()
            return await super().run(ops)

    async def main() -> None:
        lane = Cancelling()
        lane.free.clear()
        combiner = AsyncCombiner([lane], max_queue=1, queue_timeout=PATIENCE * 2)
        for i in range(4):
            tasks.append(asyncio.ensure_future(combiner.execute(op(i))))
            await settle()
        assert len(combiner._outside) == 2
        lane.free.set()
        assert await tasks[3] == b"3"
        assert tasks[2].cancelled()

    run(main)


# Sweeps


def test_a_sweep_travels_alone() -> None:
    """It takes longer than all others together: whoever shared its trip would wait for it."""
    lane = FakeLane()
    combiner = Combiner([lane])
    assert combiner.execute_many([op(0), op(1), Sweep(9, b"sweep"), op(2), op(3)])[2] == b"sweep"
    assert lane.trips == [[b"0", b"1"], [b"sweep"], [b"2", b"3"]]


def test_an_async_sweep_travels_alone_and_those_behind_it_take_another_lane() -> None:
    class Sweeping(FakeAsyncLane):
        async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
            if type(ops[0]) is Sweep:
                return await super().run(ops)
            self.trips.append([each.id for each in ops])
            return [each.id for each in ops]

    async def main() -> None:
        lanes = [Sweeping(), Sweeping()]
        for lane in lanes:
            lane.free.clear()
        combiner = AsyncCombiner(lanes)
        first = asyncio.ensure_future(combiner.execute(op(0)))
        sweep = asyncio.ensure_future(combiner.execute(Sweep(9, b"sweep")))
        others = [asyncio.ensure_future(combiner.execute(op(i))) for i in (1, 2)]
        assert await asyncio.gather(first, *others) == [b"0", b"1", b"2"]
        assert not sweep.done()
        assert sorted(trip for lane in lanes for trip in lane.trips) == [[b"0"], [b"1", b"2"], [b"sweep"]]
        for lane in lanes:
            lane.free.set()
        assert await sweep == b"sweep"

    run(main)


def test_closing_waits_for_those_who_depart_behind_a_sweep() -> None:
    async def main() -> None:
        swept, found = asyncio.Event(), asyncio.Event()

        class Guarded(FakeAsyncLane):
            async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
                await (swept if type(ops[0]) is Sweep else found).wait()
                assert not self.closed
                return [each.id for each in ops]

        combiner = AsyncCombiner([Guarded(), Guarded()])
        calls = [asyncio.ensure_future(combiner.execute(each)) for each in (Sweep(9, b"sweep"), op(1))]
        for _ in range(10):
            if combiner._batches and combiner._scheduled:
                break
            await asyncio.sleep(0)
        else:
            raise AssertionError("nobody departs behind the sweep")
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, swept.set)
        loop.call_later(0.05, found.set)  # long after the sweep, which alone was under way when closing began
        async with asyncio.timeout(10):
            await combiner.close()
            assert await asyncio.gather(*calls) == [b"sweep", b"1"]

    run(main)
