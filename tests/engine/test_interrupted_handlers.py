"""A handler stopped from outside (a cancelled task, Ctrl-C, a shutdown) has said nothing about its effect."""

import asyncio
import contextvars
import re
from typing import Any

import pytest

from semel import (
    NOT_DONE,
    AsyncMemoryStore,
    AsyncSemel,
    MemoryStore,
    OutcomeUnknown,
    Policy,
    PolicyError,
    Recovered,
    Semel,
    State,
    current_operation,
)
from semel.core.keys import identity
from semel.core.ops import Lookup
from tests.engine.driving import Engine

ID = identity("", "op", "k")


class Stop(BaseException):
    """Like KeyboardInterrupt, which would also end the event loop."""


def forbidden() -> None:
    raise AssertionError("it ran")


def interrupted() -> None:
    raise Stop


def found() -> Any:
    return Recovered("found")


ENDS: list[tuple[dict[str, Any], State | None]] = [
    ({}, None),
    ({"guarantee": "at_least_once"}, None),
    ({"guarantee": "at_most_once"}, State.UNKNOWN),
    ({"on_abandoned": "reject"}, State.UNKNOWN),
    ({"guarantee": "at_least_once", "on_abandoned": "reject"}, State.UNKNOWN),
    ({"recover": found}, State.ABANDONED),
    ({"guarantee": "at_most_once", "recover": found}, State.ABANDONED),
    ({"on_interrupted": "abandon"}, State.ABANDONED),
    ({"on_interrupted": "abandon", "on_abandoned": "reject"}, State.UNKNOWN),
    ({"on_interrupted": "release"}, None),
    ({"on_interrupted": "release", "on_abandoned": "reject"}, None),
    ({"on_interrupted": "release", "recover": found}, None),
]


def named(setting: object) -> str:
    """Without addresses: a test has the same name in every process."""
    return re.sub(r" at 0x\w+", "", str(setting))


@pytest.mark.parametrize(("settings", "state"), ENDS, ids=named)
def test_an_interrupted_handler_ends_like_an_abandoned_one_where_that_may_not_be_run_again(
    engine: Engine, settings: dict[str, Any], state: State | None
) -> None:
    with pytest.raises(Stop):
        engine.run(interrupted, **settings)
    record = engine.record()
    assert (record and record.state) == state


@pytest.mark.parametrize(("settings", "state"), ENDS, ids=named)
def test_a_cancelled_task_ends_the_same(settings: dict[str, Any], state: State | None) -> None:
    async def main() -> None:
        guard = AsyncSemel(AsyncMemoryStore(), sweep_every=None)
        inside = asyncio.Event()

        async def body() -> None:
            inside.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(guard.run("op", key="k", call=body, **settings))
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        record = await guard.store.execute(Lookup(ID))
        assert (record and record.state) == state
        await guard.close()

    asyncio.run(main())


@pytest.mark.parametrize(("settings", "state"), ENDS, ids=named)
def test_so_does_ctrl_c(settings: dict[str, Any], state: State | None) -> None:
    guard = Semel(MemoryStore(), sweep_every=None)

    def body() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard.run("op", key="k", call=body, **settings)
    record = guard.store.execute(Lookup(ID))
    assert (record and record.state) == state
    guard.close()


def test_a_failure_of_the_handlers_own_still_frees_the_key(engine: Engine) -> None:
    """It says that nothing happened, also under a policy that rejects what was abandoned."""

    def fail() -> None:
        raise ZeroDivisionError

    for settings in ({"on_abandoned": "reject"}, {"recover": found}, {"on_interrupted": "abandon"}):
        with pytest.raises(ZeroDivisionError):
            engine.run(fail, **settings)
        assert engine.record() is None


def test_an_interrupted_call_that_may_not_be_run_again_is_unknown_to_the_next(engine: Engine) -> None:
    with pytest.raises(Stop):
        engine.run(interrupted, on_abandoned="reject")
    with pytest.raises(OutcomeUnknown):
        engine.run(forbidden, on_abandoned="reject")


def test_the_recover_hook_is_asked_what_an_interrupted_call_did(engine: Engine) -> None:
    asked: list[int] = []

    def look() -> Any:
        asked.append(1)
        return NOT_DONE if len(asked) == 1 else Recovered("found")

    with pytest.raises(Stop):
        engine.run(interrupted, recover=look)
    assert asked == []
    with pytest.raises(Stop):
        engine.run(interrupted, recover=look)
    assert engine.run(forbidden, recover=look) == "found"
    assert asked == [1, 1]


def test_abandoned_on_interruption_the_next_call_runs_at_once_as_another_attempt(engine: Engine) -> None:
    with pytest.raises(Stop):
        engine.run(interrupted, on_interrupted="abandon")
    outcome = engine.run_outcome(lambda: "again", on_interrupted="abandon")
    assert (outcome.value, outcome.attempt) == ("again", 2)


def test_at_most_once_cannot_release_what_was_interrupted() -> None:
    with pytest.raises(PolicyError, match="interrupted"):
        Policy(guarantee="at_most_once", on_interrupted="release")
    with pytest.raises(PolicyError, match="on_interrupted"):
        Policy(on_interrupted="ignore")  # type: ignore[arg-type]


def test_an_interruption_just_before_the_handler_leaves_no_operation_behind() -> None:
    """current_operation() must not name a call that is over."""
    from tests.engine.test_every_interruption import ENGINE, interrupted_at

    guard = Semel(MemoryStore(), sweep_every=None)
    for n in range(1, 400):
        left: list[Any] = []
        context = contextvars.copy_context()

        def work(left: list[Any] = left, n: int = n) -> None:
            try:
                guard.run("op", key=f"k{n}", call=lambda: 1)
            finally:
                left.append(current_operation())

        where = context.run(interrupted_at, n, ENGINE, work)
        assert left == [None], where
        if where is None:
            break
    assert n > 10
    guard.close()
