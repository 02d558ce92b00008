"""``Resumer`` and ``AsyncResumer``: they finish operations whose processes died, without waiting for a client's retry.

A resumer looks for abandoned operations of functions declared ``resumable=True``, and runs them with their stored
arguments. Each is claimed like any call, with its own lease, so a client that retries meanwhile and another resumer are
kept apart as always. What to resume, and when, is decided in ``core/resume.py``. The two resumers drive that flow, one
in a thread and one in a task, which start, wait and stop in different ways.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from semel.core.call import Call, Outcome, Raised, describe_error
from semel.core.lineage import Lineage, lineage_lines, read_label
from semel.core.ops import INPUT, Abandoned, Resumable
from semel.core.policy import Duration, seconds
from semel.core.resume import ResumeFlow, ResumePlan, ResumeReport
from semel.engine.declare.declaration import Declaration
from semel.engine.forking import survive_forks
from semel.engine.guard import Guard, at_least_one
from semel.errors import ConfigurationError, PolicyError, SnapshotUnreadable
from semel.observe import events

if TYPE_CHECKING:
    from semel.engine.aio import AsyncGuard
    from semel.engine.sync import SyncGuard

EVERY: Final = 5.0
LIMIT: Final = 50
TRIES: Final = 10
PAUSE: Final = 1.0


class _Resuming:
    """What both resumers have in common: their settings, and the calls they make of stored arguments."""

    def __init__(
        self,
        guard: Guard,
        functions: Iterable[Callable[..., Any]],
        every: Duration,
        limit: int,
        tries: int,
        pause: Duration,
    ) -> None:
        store = guard.store
        if not store.resumes:
            raise ConfigurationError(
                f"a resumer needs a store that lists what was abandoned, and {type(store).__name__} does not: "
                "use MemoryStore, SQLiteStore, PostgresStore or MySQLStore"
            )
        self._guard = guard
        self._functions = [getattr(function, "__wrapped__", function) for function in functions]
        for function in self._functions:
            if all(function is not declared.function for declared in guard.resumable.values()):
                raise PolicyError(f"{function!r} is not resumable: decorate it with @guard.once(…, resumable=True)")
        self.every = seconds(every, "every")
        if self.every <= 0:
            raise PolicyError("every must be longer than 0 s")
        self.plan = ResumePlan(at_least_one(limit), at_least_one(tries), seconds(pause, "pause"), guard.emit)

    def declared(self) -> dict[str, Declaration]:
        """Return the functions to resume. Functions may be declared after the resumer was created."""
        known = self._guard.resumable
        if not self._functions:
            return dict(known)
        return {name: each for name, each in known.items() if any(each.function is one for one in self._functions)}

    def round(self, declared: dict[str, Declaration], stopping: Callable[[], bool]) -> ResumeFlow:
        return self.plan.round(tuple(declared), os.urandom(16), stopping)

    def make_call(self, declared: Declaration, abandoned: Abandoned) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
        """Return the abandoned call, made again from its stored arguments. Raises SnapshotUnreadable."""
        assert declared.inputs is not None
        stored = self._guard.codec.open(abandoned.input, abandoned.record.id, INPUT)
        args, kwargs = declared.inputs.decode(stored.payload)
        call = self._guard.declared_call(declared, args, kwargs)
        if call.id != abandoned.record.id:
            raise SnapshotUnreadable(
                f"{call}: its stored arguments make another key or tenant than it was called with: "
                "let key= and tenant= depend on the arguments alone"
            )
        record = read_label(abandoned.record)
        if record.root is not None and call.stored_key is not None:
            call.stored_key = abandoned.record.key
            call.lineage = lineage_lines(Lineage(record.root, record.parent or ""))
        call.resumption = True
        call.quota = None  # its key is already counted
        call.policy = declared.policy.replace(on_duplicate="raise")
        return call, args, kwargs

    def report_failure(self, error: BaseException) -> None:
        self._guard.emit(events.StoreFailed("", "", "", "recover", describe_error(error)))

    def pause(self) -> float:
        """Return the seconds until the next round, with some jitter so that resumers do not run in step."""
        return self.every * random.uniform(0.75, 1.25)


class Resumer:
    """Resumes abandoned operations of a guard, in a thread of its own. Any number of resumers may run anywhere."""

    def __init__(
        self,
        guard: SyncGuard,
        functions: Iterable[Callable[..., Any]] = (),
        *,
        every: Duration = EVERY,
        limit: int = LIMIT,
        tries: int = TRIES,
        pause: Duration = PAUSE,
    ) -> None:
        """
        :param functions: the functions to resume; by default all that the guard has declared ``resumable=True``.
        :param every: how long to rest between two rounds.
        :param limit: how many operations are listed in one round trip to the store.
        :param tries: how many attempts an operation has, including the first one, before it is left for people.
        :param pause: how long an operation that failed rests after its second attempt; the pauses then double.
        """
        self._guard = guard
        self._resuming = _Resuming(guard, functions, every, limit, tries, pause)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        survive_forks(self._forked)

    def start(self) -> None:
        """Start, in the background."""
        self.check()
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self.run, name="semel-resumer", daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Stop after the operation that is running. Waits for it, for at most ``timeout`` seconds."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def run(self, on_round: Callable[[ResumeReport], object] | None = None) -> None:
        """Run rounds in this thread until ``stop`` is called.

        :param on_round: called with the report of each round.
        """
        while not self._stopping.is_set():
            try:
                report = self.resume()
                if on_round is not None:
                    on_round(report)
            except Exception as error:  # the next round may succeed
                self._resuming.report_failure(error)
            self._stopping.wait(self._resuming.pause())

    def resume(self) -> ResumeReport:
        """Run one round in this thread: look at all abandoned operations, and resume them."""
        self.check()
        declared = self._resuming.declared()
        flow = self._resuming.round(declared, self._stopping.is_set)
        try:
            request = next(flow)
            while True:
                if isinstance(request, Resumable):
                    request = flow.send(self._guard.store.execute(request))
                else:
                    request = flow.send(self._perform(declared[request.record.operation], request))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def check(self) -> None:
        """Raise PolicyError if a function is async, which needs an AsyncResumer."""
        names = [each.operation for each in self._resuming.declared().values() if each.awaits]
        if names:
            raise PolicyError(f"{', '.join(names)} is async: use an AsyncSemel, and AsyncResumer")

    def _perform(self, declared: Declaration, abandoned: Abandoned) -> Outcome[Any] | Raised:
        try:
            call, args, kwargs = self._resuming.make_call(declared, abandoned)
            return self._guard.perform(declared, args, kwargs, call)
        except Exception as error:  # the others must still be resumed
            return Raised(error)

    def _forked(self) -> None:
        """In a forked child: the thread stayed in the parent."""
        self._stopping = threading.Event()
        self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class AsyncResumer:
    """Resumes abandoned operations of an async guard, in a task of its own. Any number of resumers may run anywhere."""

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
        """Same parameters as ``Resumer``."""
        self._guard = guard
        self._resuming = _Resuming(guard, functions, every, limit, tries, pause)
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, in the background of the running event loop."""
        if self._task is None:
            self._stopping = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self.run(), name="semel-resumer")

    async def stop(self, timeout: float | None = None) -> None:
        """Stop after the operation that is running. Waits for it, and cancels it after ``timeout`` seconds."""
        self._stopping.set()
        task, self._task = self._task, None
        if task is None:
            return
        done, _ = await asyncio.wait([task], timeout=timeout)
        if not done:
            task.cancel()
            await asyncio.wait([task])

    async def run(self, on_round: Callable[[ResumeReport], object] | None = None) -> None:
        """Run rounds in this task until ``stop`` is called. Same parameters as ``Resumer.run``."""
        stopping = self._stopping
        while not stopping.is_set():
            try:
                report = await self.resume()
                if on_round is not None:
                    on_round(report)
            except Exception as error:  # the next round may succeed
                self._resuming.report_failure(error)
            try:
                await asyncio.wait_for(stopping.wait(), self._resuming.pause())
            except TimeoutError:
                continue

    async def resume(self) -> ResumeReport:
        """Run one round: look at all abandoned operations, and resume them."""
        declared = self._resuming.declared()
        flow = self._resuming.round(declared, self._stopping.is_set)
        try:
            request = next(flow)
            while True:
                if isinstance(request, Resumable):
                    request = flow.send(await self._guard.store.execute(request))
                else:
                    request = flow.send(await self._perform(declared[request.record.operation], request))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _perform(self, declared: Declaration, abandoned: Abandoned) -> Outcome[Any] | Raised:
        try:
            call, args, kwargs = self._resuming.make_call(declared, abandoned)
            return await self._guard.perform(declared, args, kwargs, call)
        except Exception as error:  # the others must still be resumed
            return Raised(error)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
