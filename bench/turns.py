"""A turn: so many callers do a job again and again for a moment, and the operations they finished are counted."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TypeAlias

__all__ = ["Turn", "tasks", "threads"]

Turn: TypeAlias = Callable[[float], float]
"""Takes seconds, gives operations per second."""


def threads(call: Callable[[int], object], callers: int) -> Turn:
    """Each caller is a thread; a single one is the thread that measures. ``call`` gets another number each time."""
    numbers = itertools.count()

    def loop(seconds: float) -> int:
        done = 0
        end = perf_counter() + seconds
        while not done or perf_counter() < end:  # once at least, however late its turn has come
            call(next(numbers))
            done += 1
        return done

    def turn(seconds: float) -> float:
        gc.collect()
        if callers == 1:
            began = perf_counter()
            return loop(seconds) / (perf_counter() - began)
        counts: list[int] = []
        failures: list[BaseException] = []
        gate = threading.Barrier(callers + 1)

        def work() -> None:
            gate.wait()
            try:
                counts.append(loop(seconds))
            except BaseException as failure:
                failures.append(failure)

        crew = [threading.Thread(target=work) for _ in range(callers)]
        for thread in crew:
            thread.start()
        gate.wait()
        began = perf_counter()
        for thread in crew:
            thread.join()
        if failures:
            raise failures[0]
        return sum(counts) / (perf_counter() - began)

    return turn


def tasks(runner: asyncio.Runner, call: Callable[[int], Awaitable[object]], callers: int) -> Turn:
    """Each caller is a task of the runner's loop."""
    numbers = itertools.count()

    async def loop(end: float) -> int:
        done = 0
        while not done or perf_counter() < end:
            await call(next(numbers))
            done += 1
        return done

    async def crew(seconds: float) -> float:
        began = perf_counter()
        counts = await asyncio.gather(*(loop(began + seconds) for _ in range(callers)))
        return sum(counts) / (perf_counter() - began)

    def turn(seconds: float) -> float:
        gc.collect()
        return runner.run(crew(seconds))

    return turn
