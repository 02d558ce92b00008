# Twin: resumer.py is generated from this file by make twins.
# Twin: AsyncGuard -> SyncGuard
# Twin: BackgroundTask -> BackgroundThread
# Twin: of an async guard, in a task -> of a guard, in a thread
# Twin: in the background of the running event loop -> in the background
# Twin: in this task -> in this thread
# Twin: and cancels it after ``timeout`` seconds -> for at most ``timeout`` seconds
"""``AsyncResumer``: it finishes operations whose processes died, without waiting for a client's retry.

A resumer looks for abandoned operations of functions declared ``resumable=True``, and runs them with their stored
arguments. Each is claimed like any call, with its own lease, so a client that retries meanwhile and another resumer are
kept apart as always. What to resume, and when, is decided in ``core/resume.py``. A resumer drives that flow.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from semel.core.call import Call, Outcome, Raised, describe_error
from semel.core.lineage import Lineage, lineage_lines, read_label
from semel.core.ops import INPUT, Abandoned, Resumable
from semel.core.policy import Duration, at_least_one, positive_seconds, seconds
from semel.core.resume import ResumePlan, ResumeReport
from semel.engine.background import BackgroundTask
from semel.engine.declare.declaration import Declaration
from semel.errors import ConfigurationError, PolicyError, SnapshotUnreadable
from semel.observe import events

if TYPE_CHECKING:
    from semel.engine.aio import AsyncGuard

EVERY: Final = 5.0
LIMIT: Final = 50
TRIES: Final = 10
PAUSE: Final = 1.0


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
        """
        :param functions: the functions to resume; by default all that the guard has declared ``resumable=True``.
        :param every: how long to rest between two rounds.
        :param limit: how many operations are listed in one round trip to the store.
        :param tries: how many attempts an operation has, including the first one, before it is left for people.
        :param pause: how long an operation that failed rests after its second attempt; the pauses then double.
        """
        if not guard.store.resumes:
            raise ConfigurationError(
                f"a resumer needs a store that lists what was abandoned, and {type(guard.store).__name__} does not: "
                "use MemoryStore, SQLiteStore, PostgresStore or MySQLStore"
            )
        self._guard = guard
        self._functions = [getattr(function, "__wrapped__", function) for function in functions]
        for function in self._functions:
            if all(function is not declared.function for declared in guard.resumable.values()):
                raise PolicyError(f"{function!r} is not resumable: decorate it with @guard.once(…, resumable=True)")
        self._every = positive_seconds(every, "every")
        self._plan = ResumePlan(
            at_least_one(limit, "limit"), at_least_one(tries, "tries"), seconds(pause, "pause"), guard.emit
        )
        self._background = BackgroundTask("semel-resumer")

    def start(self) -> None:
        """Start, in the background of the running event loop."""
        # sync only: self.check()
        self._background.start(self.run)

    async def stop(self, timeout: float | None = None) -> None:
        """Stop after the operation that is running. Waits for it, and cancels it after ``timeout`` seconds."""
        await self._background.stop(timeout)

    async def run(self, on_round: Callable[[ResumeReport], object] | None = None) -> None:
        """Run rounds in this task until ``stop`` is called.

        :param on_round: called with the report of each round.
        """
        stopping = self._background.stopping
        while not stopping.is_set():
            try:
                report = await self.resume()
                if on_round is not None:
                    on_round(report)
            except Exception as error:  # the next round may succeed
                self._guard.emit(events.StoreFailed("", "", "", "recover", describe_error(error)))
            pause = self._every * random.uniform(0.75, 1.25)  # jitter, so that resumers do not run in step
            # sync: stopping.wait(pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), pause)

    async def resume(self) -> ResumeReport:
        """Run one round in this task: look at all abandoned operations, and resume them."""
        # sync only: self.check()
        declared = self._declared()
        flow = self._plan.round(tuple(declared), os.urandom(16), self._background.stopping.is_set)
        try:
            request = next(flow)
            while True:
                if isinstance(request, Resumable):
                    request = flow.send(await self._guard.store.execute(request))
                else:
                    request = flow.send(await self._perform(declared[request.record.operation], request))
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    # sync only: def check(self) -> None:
    # sync only:     """Raise PolicyError if a function is async, which needs an AsyncResumer."""
    # sync only:     names = [each.operation for each in self._declared().values() if each.awaits]
    # sync only:     if names:
    # sync only:         raise PolicyError(f"{', '.join(names)} is async: use an AsyncSemel, and AsyncResumer")
    # sync only:
    def _declared(self) -> dict[str, Declaration]:
        """Return the functions to resume. Functions may be declared after the resumer was created."""
        known = self._guard.resumable
        if not self._functions:
            return dict(known)
        return {name: each for name, each in known.items() if any(each.function is one for one in self._functions)}

    async def _perform(self, declared: Declaration, abandoned: Abandoned) -> Outcome[Any] | Raised:
        try:
            call, args, kwargs = self._make_call(declared, abandoned)
            return await self._guard.perform(declared, args, kwargs, call)
        except Exception as error:  # the others must still be resumed
            return Raised(error)

    def _make_call(self, declared: Declaration, abandoned: Abandoned) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
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

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
