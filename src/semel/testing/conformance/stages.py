"""Stages play scripts on a store: ``Stage`` on a sync one with threads, ``AsyncStage`` on an async one with tasks.

Both are written by hand, with the same methods in the same order, because threads and tasks are started and joined
differently.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Protocol

from semel.engine.ports import AsyncStore, Store
from semel.errors import StoreError
from semel.testing.conformance.script import Batch, Elapse, Elsewhere, Linger, Request, Script, Together, WaitForChange

__all__ = ["AsyncStage", "ManualClock", "MovableClock", "Stage"]

PATIENCE: Final = 90.0
"""Seconds after which the proof fails if the store has not answered."""


class MovableClock(Protocol):
    """A clock of a store that the suite can move."""

    def advance(self, seconds: float) -> None: ...


class ManualClock:
    """A clock that moves only when told to. Pass it to the store as its source of the time."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the time. Each call returns one that is a microsecond later, as on a real clock."""
        with self._lock:
            self._now += 0.000_001
            return self._now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds


class Stage:
    """Plays scripts on a sync store."""

    def __init__(self, store: Store, second: Store | None = None, clock: MovableClock | None = None) -> None:
        self._store = store
        self._second = second or store
        self._clock = clock

    def play(self, script: Script) -> Any:
        """Run the script to its end. Returns what the script returns, or raises its AssertionError."""
        try:
            request = next(script)
            while True:
                try:
                    answer = self._perform(request, self._store)
                except StoreError as error:
                    request = script.throw(error)
                else:
                    request = script.send(answer)
        except StopIteration as stop:
            return stop.value

    def _perform(self, request: Request, store: Store) -> Any:
        match request:
            case Elsewhere(inner):
                return self._perform(inner, self._second)
            case Elapse(seconds):
                self._clock.advance(seconds) if self._clock is not None else time.sleep(seconds)
            case Linger(seconds):
                time.sleep(seconds)
            case Batch(ops):
                return store.execute_many(ops)
            case WaitForChange(id, seconds):
                began = time.monotonic()
                store.wait(id, seconds)
                return time.monotonic() - began
            case Together(parts):
                return self._together([self._part(part) for part in parts])
            case op:
                return store.execute(op)
        return None

    def _part(self, part: Request | Script) -> Callable[[], Any]:
        return lambda: self.play(part) if isinstance(part, Generator) else self._perform(part, self._store)

    def _together(self, parts: list[Callable[[], Any]]) -> list[Any]:
        answers: list[Any] = [None] * len(parts)
        errors: list[BaseException] = []
        barrier = threading.Barrier(len(parts))

        def run(index: int) -> None:
            try:
                barrier.wait(PATIENCE)
                answers[index] = parts[index]()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"the store did not answer within {PATIENCE:.0f} s"
        if errors:
            raise errors[0]
        return answers


class AsyncStage:
    """Plays scripts on an async store."""

    def __init__(self, store: AsyncStore, second: AsyncStore | None = None, clock: MovableClock | None = None) -> None:
        self._store = store
        self._second = second or store
        self._clock = clock

    async def play(self, script: Script) -> Any:
        """Run the script to its end. Returns what the script returns, or raises its AssertionError."""
        try:
            request = next(script)
            while True:
                try:
                    answer = await self._perform(request, self._store)
                except StoreError as error:
                    request = script.throw(error)
                else:
                    request = script.send(answer)
        except StopIteration as stop:
            return stop.value

    async def _perform(self, request: Request, store: AsyncStore) -> Any:
        match request:
            case Elsewhere(inner):
                return await self._perform(inner, self._second)
            case Elapse(seconds):
                self._clock.advance(seconds) if self._clock is not None else await asyncio.sleep(seconds)
            case Linger(seconds):
                await asyncio.sleep(seconds)
            case Batch(ops):
                return await store.execute_many(ops)
            case WaitForChange(id, seconds):
                began = time.monotonic()
                await store.wait(id, seconds)
                return time.monotonic() - began
            case Together(parts):
                return await self._together(parts)
            case op:
                return await store.execute(op)
        return None

    async def _together(self, parts: Sequence[Request | Script]) -> list[Any]:
        tasks = [self.play(part) if isinstance(part, Generator) else self._perform(part, self._store) for part in parts]
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers
