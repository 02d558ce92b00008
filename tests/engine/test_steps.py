"""Durable steps: what is done stays done, in its order; and what failed is undone, the last first."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from semel import OutcomeUnknown, Policy, PolicyError, State, StepMismatch, StoreUncertain, current_operation
from semel.core.ops import SaveStep
from semel.errors import NotUndone, RememberedFailure, StoreUnavailable
from tests.engine.driving import Engine


class Boom(Exception):
    pass


class Shop:
    """Steps that write down what they do."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fails: set[str] = set()
        self.stuck: set[str] = set()

    def do(self, name: str, *args: object) -> str:
        if name in self.fails:
            raise Boom(name)
        self.done.append(name)
        return f"{name} {len(self.done)}"

    def undo(self, value: str) -> None:
        if value.split(maxsplit=1)[0] in self.stuck:
            raise Boom(f"stuck: {value}")
        self.done.append(f"undo {value}")


def steps_of(shop: Shop, *names: str, undo: bool = False, **changes: Any) -> Callable[[], Iterator[Any]]:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        values = []
        for name in names:
            more = {"undo": shop.undo} if undo else {}
            values.append((yield op.step(name, shop.do, name, *changes.get(name, ()), **more)))
        return values

    return body


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_a_re_run_goes_on_after_the_last_finished_step(engine: Engine, shop: Shop) -> None:
    body = steps_of(shop, "reserve", "charge", "ship")
    shop.fails = {"ship"}
    with pytest.raises(Boom):
        engine.run(body)
    assert shop.done == ["reserve", "charge"]
    record = engine.record()
    assert record is not None
    assert record.state is State.ABANDONED
    shop.fails = set()
    assert engine.run(body) == ["reserve 1", "charge 2", "ship 3"]
    assert shop.done == ["reserve", "charge", "ship"]
    assert engine.run(body) == ["reserve 1", "charge 2", "ship 3"]
    assert shop.done == ["reserve", "charge", "ship"]


def test_each_step_is_one_more_trip_to_the_store(engine: Engine, shop: Shop) -> None:
    engine.run(steps_of(shop, "a", "b"))
    assert engine.script.kinds == ["Claim", "SaveStep", "SaveStep", "Complete"]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (("bill", "ship"), "step 1 was 'charge' in an earlier attempt and is 'bill' now"),
        (("pack", "charge", "ship"), "step 1 was 'charge' in an earlier attempt and is 'pack' now"),
        (("charge", "ship", "pack"), "step 2 was 'pack' in an earlier attempt and is 'ship' now"),
        (("charge",), "an earlier attempt did 'pack', which this one did not request"),
    ],
    ids=["renamed", "inserted", "reordered", "left-out"],
)
def test_other_steps_than_those_of_the_first_run_are_refused(
    engine: Engine, shop: Shop, later: tuple[str, ...], words: str
) -> None:
    shop.fails = {"ship"}
    with pytest.raises(Boom):
        engine.run(steps_of(shop, "charge", "pack", "ship"))
    shop.fails = set()
    with pytest.raises(StepMismatch, match=words):
        engine.run(steps_of(shop, *later))
    assert shop.done == ["charge", "pack"]
    assert engine.run(steps_of(shop, "charge", "pack", "ship")) == ["charge 1", "pack 2", "ship 3"]


def test_a_step_appended_by_a_newer_program_is_run(engine: Engine, shop: Shop) -> None:
    shop.fails = {"ship"}
    with pytest.raises(Boom):
        engine.run(steps_of(shop, "charge", "ship"))
    shop.fails = set()
    assert engine.run(steps_of(shop, "charge", "ship", "thank")) == ["charge 1", "ship 2", "thank 3"]


def test_a_step_with_other_arguments_is_refused(engine: Engine, shop: Shop) -> None:
    shop.fails = {"ship"}
    with pytest.raises(Boom):
        engine.run(steps_of(shop, "charge", "ship", charge=(10, "EUR")))
    with pytest.raises(StepMismatch, match="'charge' is done, but with other arguments"):
        engine.run(steps_of(shop, "charge", "ship", charge=(11, "EUR")))
    assert shop.done == ["charge"]


def test_what_is_no_plain_data_is_not_compared(engine: Engine, shop: Shop) -> None:
    shop.fails = {"ship"}
    with pytest.raises(Boom):
        engine.run(steps_of(shop, "charge", "ship", charge=(10, object())))
    shop.fails = set()
    assert engine.run(steps_of(shop, "charge", "ship", charge=(10, object()))) == ["charge 1", "ship 2"]


@dataclass
class Charge:
    id: str
    amount: int


def test_a_typed_result_comes_back_as_its_type(engine: Engine) -> None:
    seen: list[Any] = []

    def charge(amount: int) -> Charge:
        return Charge("c1", amount)

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        seen.append((yield op.step("charge", charge, 5)))
        if len(seen) == 1:
            raise Boom
        return True

    with pytest.raises(Boom):
        engine.run(body)
    engine.run(body)
    assert seen == [Charge("c1", 5), Charge("c1", 5)]


def test_none_and_other_falsy_results_are_results(engine: Engine) -> None:
    ran: list[object] = []

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        values = []
        for at, value in enumerate((None, 0, "", [], {}, False)):
            values.append((yield op.step(f"s{at}", lambda value=value: (ran.append(value), value)[1])))
        if len(ran) == 6 and op.attempt == 1:
            raise Boom
        return values

    with pytest.raises(Boom):
        engine.run(body)
    assert engine.run(body) == [None, 0, "", [], {}, False]
    assert len(ran) == 6


def test_async_steps_are_awaited(quick_engine: Engine) -> None:
    if not quick_engine.is_async:
        pytest.skip("for async handlers")

    async def charge(amount: int) -> int:
        await asyncio.sleep(0)
        return amount + 1

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        return (yield op.step("charge", charge, 5))

    assert quick_engine.run(body) == 6


def test_steps_asked_for_at_once_are_done_one_after_the_other(quick_engine: Engine) -> None:
    if not quick_engine.is_async:
        pytest.skip("for async handlers")
    inside = 0
    most = 0

    async def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield asyncio.gather(*(op.step(f"s{n}", work) for n in range(3)))
        return most

    assert quick_engine.run(body) == 1


def test_a_step_inside_a_step_is_refused(engine: Engine, shop: Shop) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()

        def outer() -> Any:
            return op.step("inner", shop.do, "inner")

        return (yield op.step("outer", outer))

    with pytest.raises(PolicyError, match="'inner' is asked for inside another"):
        engine.run(body)
    assert shop.done == []


def test_a_value_may_be_captured_inside_a_step(engine: Engine) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        if engine.is_async:

            async def make() -> Any:
                return await op.capture("id", lambda: 7)

        else:

            def make() -> Any:
                return op.capture("id", lambda: 7)

        return (yield op.step("outer", make))

    assert engine.run(body) == 7


def test_a_name_is_used_once_in_a_run(engine: Engine, shop: Shop) -> None:
    with pytest.raises(PolicyError, match="'charge' is used twice"):
        engine.run(steps_of(shop, "charge", "charge"))


def test_a_step_that_failed_may_be_tried_again_in_the_same_run(engine: Engine, shop: Shop) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        shop.fails = {"charge"}
        try:
            yield op.step("charge", shop.do, "charge")
        except Boom:
            shop.fails = set()
        return (yield op.step("charge", shop.do, "charge"))

    assert engine.run(body) == "charge 1"


def test_a_step_whose_mark_may_be_lost_is_not_done_again_in_the_same_run(engine: Engine, shop: Shop) -> None:
    engine.script.on(SaveStep, after=StoreUncertain("cut"))

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        with contextlib.suppress(StoreUncertain):
            yield op.step("charge", shop.do, "charge")
        return (yield op.step("charge", shop.do, "charge"))

    assert engine.run(body) == "charge 1"
    assert shop.done == ["charge"]


def test_a_step_whose_mark_may_be_lost_is_not_done_again_in_the_next_run(engine: Engine, shop: Shop) -> None:
    """The attempt ends with the store's error, and must not be released as if nothing had happened."""
    engine.script.on(SaveStep, after=StoreUncertain("cut"))
    with pytest.raises(StoreUncertain):
        engine.run(steps_of(shop, "charge", "ship"))
    record = engine.record()
    assert record is not None
    assert record.state is State.ABANDONED
    assert engine.run(steps_of(shop, "charge", "ship")) == ["charge 1", "ship 2"]
    assert shop.done == ["charge", "ship"]


@pytest.mark.parametrize("name", ["", "~charge", "x" * 241, "new\nline", None])
def test_bad_names_are_refused(quick_engine: Engine, shop: Shop, name: Any) -> None:
    with pytest.raises(PolicyError, match="a step name has 1 to 240"):
        quick_engine.run(steps_of(shop, name))
    assert shop.done == []


# -- sagas


def test_a_failure_undoes_what_was_done_the_last_first_and_the_key_is_free(engine: Engine, shop: Shop) -> None:
    body = steps_of(shop, "reserve", "charge", "ship", undo=True)
    shop.fails = {"ship"}
    with pytest.raises(Boom, match="ship"):
        engine.run(body)
    assert shop.done == ["reserve", "charge", "undo charge 2", "undo reserve 1"]
    assert engine.record() is None
    shop.fails = set()
    assert engine.run(body) == ["reserve 5", "charge 6", "ship 7"]


def test_a_failure_that_is_an_answer_is_replayed_and_not_undone_twice(engine: Engine, shop: Shop) -> None:
    body = steps_of(shop, "charge", "ship", undo=True)
    shop.fails = {"ship"}
    for _ in range(2):
        with pytest.raises(Boom, match="ship"):
            engine.run(body, remember_errors=Boom)
    assert shop.done == ["charge", "undo charge 1"]


def test_an_undo_is_tried_again_for_a_while(engine: Engine, shop: Shop) -> None:
    tries: list[str] = []

    def undo(value: str) -> None:
        tries.append(value)
        if len(tries) < 3:
            raise Boom("not yet")

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", shop.do, "charge", undo=undo)
        raise Boom("later")

    with pytest.raises(Boom, match="later"):
        engine.run(body)
    assert tries == ["charge 1"] * 3
    assert engine.names().count("undo_failed") == 2
    assert engine.record() is None


def test_what_cannot_be_undone_is_reported_and_nobody_runs_it_again(engine: Engine, shop: Shop) -> None:
    guard = engine.new_guard(policy=Policy(completion_timeout="100ms"))
    body = steps_of(shop, "reserve", "charge", "pack", "ship", undo=True)
    shop.fails, shop.stuck = {"ship"}, {"charge"}
    with pytest.raises(NotUndone, match="could not be undone: 'charge'") as caught:
        engine.run(body, guard=guard)
    assert caught.value.steps == ("charge",)
    assert isinstance(caught.value.__cause__, Boom)
    assert shop.done == ["reserve", "charge", "pack", "undo pack 3", "undo reserve 1"]
    with pytest.raises(OutcomeUnknown):
        engine.run(body, guard=guard)


def test_not_undone_is_unknown_even_where_failures_are_remembered(engine: Engine, shop: Shop) -> None:
    guard = engine.new_guard(policy=Policy(completion_timeout="50ms", guarantee="at_most_once"))
    shop.fails, shop.stuck = {"ship"}, {"charge"}
    with pytest.raises(NotUndone):
        engine.run(steps_of(shop, "charge", "ship", undo=True), guard=guard)
    record = engine.record()
    assert record is not None
    assert record.state is State.UNKNOWN


@pytest.mark.parametrize("crash_after", range(5))
def test_a_crash_while_undoing_is_gone_on_with_by_the_next_attempt(
    engine: Engine, shop: Shop, crash_after: int
) -> None:
    """Saves: reserve, charge, failed, undo of charge, undo of reserve. The store dies after so many of them."""
    body = steps_of(shop, "reserve", "charge", "ship", undo=True)
    shop.fails = {"ship"}
    for _ in range(crash_after):
        engine.script.on(SaveStep)
    engine.script.on(SaveStep, before=StoreUnavailable("down"))
    with pytest.raises((Boom, StoreUnavailable)):
        engine.run(body)
    engine.clock.advance(31)
    with pytest.raises((Boom, RememberedFailure), match="ship"):  # another process need not know the class
        engine.run(body)
    undone = [line for line in shop.done if line.startswith("undo")]
    if crash_after >= 2:
        # A mark may be missing for what was undone just before the crash: each is undone at least once, in order.
        assert list(dict.fromkeys(undone)) == ["undo charge 2", "undo reserve 1"]
    assert engine.record() is None
    shop.fails = set()
    engine.run(body)
    assert shop.done[-3:] == ["reserve", "charge", "ship"]


def test_a_re_run_that_fails_before_it_comes_to_a_step_cannot_undo_it_and_says_so(engine: Engine, shop: Shop) -> None:
    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("reserve", shop.do, "reserve", undo=shop.undo)
        if op.attempt > 1:
            raise Boom("between")
        yield op.step("charge", shop.do, "charge", undo=shop.undo)
        raise StoreUnavailable("as if the process had died")

    with pytest.raises(StoreUnavailable):
        engine.run(body)
    engine.clock.advance(31)
    with pytest.raises(NotUndone, match="'charge' \\(this attempt did not get to it\\)"):
        engine.run(body)
    assert shop.done == ["reserve", "charge", "undo reserve 1"]


def test_errors_of_the_store_undo_nothing(engine: Engine, shop: Shop) -> None:
    """The work is fine; the next attempt goes on."""

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", shop.do, "charge", undo=shop.undo)
        if op.attempt == 1:
            raise StoreUnavailable("down")
        return "went on"

    with pytest.raises(StoreUnavailable):
        engine.run(body)
    assert engine.run(body) == "went on"
    assert shop.done == ["charge"]


def test_a_cancelled_handler_is_not_undone_but_gone_on_with(quick_engine: Engine, shop: Shop) -> None:
    if not quick_engine.is_async:
        pytest.skip("for async handlers")

    def body() -> Iterator[Any]:
        op: Any = current_operation()
        yield op.step("charge", shop.do, "charge", undo=shop.undo)
        if op.attempt == 1:
            raise asyncio.CancelledError
        return "went on"

    with pytest.raises(concurrent.futures.CancelledError):
        quick_engine.run(body)
    assert quick_engine.run(body) == "went on"
    assert shop.done == ["charge"]
