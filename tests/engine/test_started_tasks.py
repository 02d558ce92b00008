"""Tasks that begin at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeAlias

import pytest
import uvloop

from semel.engine.drive.waiting import start_task

EAGER = sys.version_info >= (3, 12)
"""Whether Python can start a task at once; before, it takes a turn of the loop."""
Runs: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def runs(request: pytest.FixtureRequest) -> Runs:
    """On the loop of the standard library, and on the one that servers take where it is installed."""

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(coroutine)

    return run


async def work(done: list[Any]) -> str:
    done.append(asyncio.current_task())
    return "done"


def test_work_that_never_waits_costs_no_turn_of_the_loop(runs: Runs) -> None:
    async def run() -> None:
        done: list[Any] = []
        outer = asyncio.current_task()
        task = start_task(work(done), asyncio.get_running_loop())
        assert task.done() is EAGER
        assert done == ([task] if EAGER else [])
        assert asyncio.current_task() is outer
        await asyncio.sleep(0)
        assert done == [task]

    runs(run())


def test_what_it_raises_is_its_own(runs: Runs) -> None:
    async def fails() -> None:
        raise KeyError("no such order")

    async def run() -> None:
        outer = asyncio.current_task()
        task = start_task(fails(), asyncio.get_running_loop())
        assert asyncio.current_task() is outer
        with pytest.raises(KeyError, match="no such order"):
            await task

    runs(run())


def test_it_may_be_cancelled_while_it_waits_and_nobody_else_is(runs: Runs) -> None:
    async def run() -> None:
        stopped = asyncio.Event()

        async def waits() -> None:
            try:
                async with asyncio.timeout(60):
                    await asyncio.Event().wait()
            finally:
                stopped.set()

        task = start_task(waits(), asyncio.get_running_loop())
        assert not task.done()
        if not EAGER:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait_for(stopped.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await task

    runs(run())


def test_what_it_sets_in_its_context_stays_there(runs: Runs) -> None:
    seen: ContextVar[str] = ContextVar("seen", default="nothing")

    async def sets() -> str:
        token = seen.set("its own")
        await asyncio.sleep(0)
        found = seen.get()
        seen.reset(token)
        return found

    async def run() -> None:
        task = start_task(sets(), asyncio.get_running_loop())
        assert seen.get() == "nothing"
        assert await task == "its own"

    runs(run())


def test_what_other_threads_ask_of_the_loop_meanwhile_is_done_once(runs: Runs) -> None:
    """The step of a new task may not be the last that the loop has to do."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        told: list[int] = []
        done: list[Any] = []
        make = loop.create_task

        def interrupted(coroutine: Any, **settings: Any) -> Any:
            task = make(coroutine, **settings)
            loop.call_soon_threadsafe(told.append, 1)
            return task

        loop.create_task = interrupted  # type: ignore[method-assign, assignment]
        task = start_task(work(done), loop)
        assert told == [], "another's callback was run in our place"
        assert await task == "done"
        loop.call_soon(told.append, 2)
        await asyncio.sleep(0)
        assert [number for number in told if number == 2] == [2]
        assert told.count(1) <= 1
        assert len(done) == 1

    runs(run())


def test_work_that_waits_goes_on_in_a_task_of_its_own(runs: Runs) -> None:
    async def run() -> None:
        gate = asyncio.Event()
        done: list[Any] = []

        async def waits() -> str:
            await gate.wait()
            return await work(done)

        task = start_task(waits(), asyncio.get_running_loop())
        gate.set()
        assert await task == "done"
        assert done == [task]

    runs(run())


def test_a_loop_that_makes_its_tasks_itself_makes_these_too(runs: Runs) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        made: list[Any] = []

        def factory(loop: Any, coroutine: Any, **settings: Any) -> Any:
            task = asyncio.Task(coroutine, loop=loop, **settings)
            made.append(task)
            return task

        loop.set_task_factory(factory)
        task = start_task(work([]), loop)
        assert made == [task]
        assert await task == "done"

    runs(run())


@pytest.mark.skipif(EAGER, reason="Python's own eager_start does not ask the loop")
def test_others_that_listen_in_on_the_loop_are_left_alone(runs: Runs) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        soon, heard = loop.call_soon, []

        def listener(callback: Any, *args: Any, **settings: Any) -> Any:
            heard.append(callback)
            return soon(callback, *args, **settings)

        loop.call_soon = listener  # type: ignore[method-assign]
        task = start_task(work([]), loop)
        assert loop.call_soon is listener
        assert heard, "the new task's first step was not the listener's to hear"
        assert await task == "done"

    runs(run())
