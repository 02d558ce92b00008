"""Tasks that begin at once."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

from semel.engine.tasks import started


async def work(done: list[Any]) -> str:
    done.append(asyncio.current_task())
    return "done"


def test_work_that_never_waits_costs_no_turn_of_the_loop() -> None:
    async def run() -> None:
        done: list[Any] = []
        outer = asyncio.current_task()
        task = started(work(done), asyncio.get_running_loop())
        assert task.done()
        assert done == [task]
        assert asyncio.current_task() is outer
        await asyncio.sleep(0)
        assert done == [task]

    asyncio.run(run())


def test_what_it_raises_is_its_own() -> None:
    async def fails() -> None:
        raise KeyError("no such order")

    async def run() -> None:
        outer = asyncio.current_task()
        task = started(fails(), asyncio.get_running_loop())
        assert asyncio.current_task() is outer
        with pytest.raises(KeyError, match="no such order"):
            await task

    asyncio.run(run())


def test_it_may_be_cancelled_while_it_waits_and_nobody_else_is() -> None:
    async def run() -> None:
        stopped = asyncio.Event()

        async def waits() -> None:
            try:
                async with asyncio.timeout(60):
                    await asyncio.Event().wait()
            finally:
                stopped.set()

        task = started(waits(), asyncio.get_running_loop())
        assert not task.done()
        task.cancel()
        await asyncio.wait_for(stopped.wait(), 10)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_what_it_sets_in_its_context_stays_there() -> None:
    seen: ContextVar[str] = ContextVar("seen", default="nothing")

    async def sets() -> str:
        token = seen.set("its own")
        await asyncio.sleep(0)
        found = seen.get()
        seen.reset(token)
        return found

    async def run() -> None:
        task = started(sets(), asyncio.get_running_loop())
        assert seen.get() == "nothing"
        assert await task == "its own"

    asyncio.run(run())


def test_what_other_threads_ask_of_the_loop_meanwhile_is_done_once() -> None:
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
        task = started(work(done), loop)
        assert told == [], "another's callback was run in our place"
        assert await task == "done"
        loop.call_soon(told.append, 2)
        await asyncio.sleep(0)
        assert [number for number in told if number == 2] == [2]
        assert told.count(1) <= 1
        assert len(done) == 1

    asyncio.run(run())


def test_work_that_waits_goes_on_in_a_task_of_its_own() -> None:
    async def run() -> None:
        gate = asyncio.Event()
        done: list[Any] = []

        async def waits() -> str:
            await gate.wait()
            return await work(done)

        task = started(waits(), asyncio.get_running_loop())
        gate.set()
        assert await task == "done"
        assert done == [task]

    asyncio.run(run())


def test_a_loop_that_makes_its_tasks_itself_makes_these_too() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        made: list[Any] = []

        def factory(loop: Any, coroutine: Any, **settings: Any) -> Any:
            task = asyncio.Task(coroutine, loop=loop, **settings)
            made.append(task)
            return task

        loop.set_task_factory(factory)
        task = started(work([]), loop)
        assert made == [task]
        assert await task == "done"

    asyncio.run(run())
