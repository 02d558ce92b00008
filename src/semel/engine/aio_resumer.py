"""``AsyncResumer``: the same names in the same order as ``engine/resumer.py``, in a task of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from semel.core.ops import Abandoned, Page, Resumable
from semel.core.policy import Duration
from semel.core.resume import ResumeReport, Word
from semel.engine.aio import AsyncGuard
from semel.engine.declare.declaration import Declaration
from semel.engine.resumer import EVERY, LIMIT, PAUSE, TRIES, Plan

__all__ = ["AsyncResumer"]


class AsyncResumer(Plan):
    """Resumes abandoned operations of an async guard, in a task of its own."""

    def __init__(
        self,
        guard: AsyncGuard,
        functions: Iterable[Callable[..., Any]] = (),
        *,
        every: Duration = EVERY,
        limit: int = LIMIT,
        tries: int = TRIES,
        pause: Duration = PAUSE,
    ) -> None:
        """As of ``Resumer``."""
        super().__init__(guard, functions, every, limit, tries, pause)
        self._async: AsyncGuard = guard
        self._stopping = False
        self._wake: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the background of the event loop that runs."""
        if self._task is None:
            self._stopping = False
            self._wake = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._keep_on(self._wake), name="semel-resumer")

    async def stop(self, timeout: float | None = None) -> None:
        """End after the operation in hand; waits for it, and cancels it after ``timeout`` seconds."""
        self._stopping = True
        task, self._task = self._task, None
        if task is None or self._wake is None:
            return
        self._wake.set()
        done, _ = await asyncio.wait([task], timeout=timeout)
        if not done:
            task.cancel()
            await asyncio.wait([task])

    async def resume(self) -> ResumeReport:
        """One round: look at all that was abandoned, and resume it."""
        declared = self._declared()
        steps = self._round(declared)
        answer: Any = None
        try:
            while True:
                request = steps.send(answer)
                answer = None
                if isinstance(request, Resumable):
                    answer = Page((), None) if self._stopping else await self._async.store.execute(request)
                elif not isinstance(request, Abandoned):
                    self._gave_up(request.record)
                elif self._stopping:
                    answer = "elsewhere"
                else:
                    answer = await self._resume(declared[request.record.operation], request)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _resume(self, what: Declaration, each: Abandoned) -> Word:
        try:
            call, args, kwargs = self._prepared(what, each)
            return self._came_to(await self._async.perform(what, args, kwargs, call))
        except Exception as error:  # one that cannot be resumed must not keep the others from it
            return self._failed(each, error)

    async def _keep_on(self, wake: asyncio.Event) -> None:
        while not self._stopping:
            try:
                await self.resume()
            except Exception as error:  # there is always a next round
                self._store_failed(error)
            try:
                await asyncio.wait_for(wake.wait(), self._pause())
            except TimeoutError:
                continue

    async def __aenter__(self) -> AsyncResumer:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
