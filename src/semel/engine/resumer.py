"""``Resumer``: finishes what processes that died have left half-done, without waiting for anyone to ask again.

It looks for abandoned operations of functions declared ``resumable=True``, and runs them with the arguments they were
called with. Each is claimed like any call, with a lease of its own, so a client that retries meanwhile and another
resumer are kept apart as always. What is decided is decided in ``core/resume.py``; ``engine/aio_resumer.py`` has
the same names in the same order.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final

from semel.core.call import Call, Outcome, describe_error
from semel.core.ops import Abandoned, Page, Record, Resumable
from semel.core.policy import Duration, seconds
from semel.core.resume import ResumeReport, Rules, Word, look_through
from semel.engine.declare.declaration import Declaration
from semel.engine.forking import survive_forks
from semel.engine.guard import Guard, at_least_one
from semel.engine.sync import Semel
from semel.errors import (
    ConfigurationError,
    InProgress,
    LeaseLost,
    PolicyError,
    SnapshotUnreadable,
)
from semel.observe import events

__all__ = ["Plan", "Resumer"]

EVERY: Final = 5.0
LIMIT: Final = 50
TRIES: Final = 10
PAUSE: Final = 1.0
REMEMBERED: Final = 1000
"""Operations that were given up, of which this resumer has told already."""


class Plan:
    """What the sync and the async resumer share."""

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
        self._only = [_inner(function) for function in functions]
        for function in self._only:
            if all(function is not declared.function for declared in guard._resumable.values()):
                raise PolicyError(f"{function!r} is not resumable: decorate it with @guard.once(…, resumable=True)")
        self._every = seconds(every, "every")
        if self._every <= 0:
            raise PolicyError("every must be longer than 0 s")
        self._rules = Rules(at_least_one(limit), at_least_one(tries), seconds(pause, "pause"))
        self._told: set[tuple[bytes, int]] = set()

    def _declared(self) -> dict[str, Declaration]:
        """Looked up each time: functions may be declared after the resumer was made."""
        known = self._guard._resumable
        if not self._only:
            return dict(known)
        return {name: each for name, each in known.items() if any(each.function is one for one in self._only)}

    def _round(self, declared: dict[str, Declaration]) -> Any:
        return look_through(tuple(declared), os.urandom(16), self._rules)

    def _prepared(self, what: Declaration, each: Abandoned) -> tuple[Call, tuple[Any, ...], dict[str, Any]]:
        """The call that was abandoned, made again from its input."""
        assert what.inputs is not None
        args, kwargs = what.inputs.decode(self._guard.codec.open(each.input, each.record.id).payload)
        call = self._guard._declared_call(what, args, kwargs)
        if call.id != each.record.id:
            raise SnapshotUnreadable(
                f"{call}: its stored input makes another key or tenant than it was called with: "
                "let key= and tenant= depend on the arguments alone"
            )
        call.resumption = True
        call.quota = None  # its key is counted already
        call.policy = what.policy.replace(on_duplicate="raise")
        return call, args, kwargs

    def _came_to(self, outcome: Outcome[Any]) -> Word:
        return "elsewhere" if outcome.replayed or outcome.attempt == 0 else "resumed"

    def _failed(self, each: Abandoned, error: Exception) -> Word:
        if isinstance(error, (InProgress, LeaseLost)):
            return "elsewhere"
        record = each.record
        self._tell(events.RecoveryFailed, record, record.attempt + 1, describe_error(error))
        return "failed"

    def _gave_up(self, record: Record) -> None:
        told = (record.id, record.attempt)
        if told not in self._told:
            if len(self._told) >= REMEMBERED:
                self._told.clear()
            self._told.add(told)
            self._tell(events.RecoveryGivenUp, record, record.attempt)

    def _tell(self, event: type[events.Event], record: Record, *details: Any) -> None:
        if self._guard._hook is not None:
            self._guard._hook(event(record.operation, record.tenant, record.key or "", *details))

    def _store_failed(self, error: BaseException) -> None:
        if self._guard._hook is not None:
            self._guard._hook(events.StoreFailed("", "", "", "recover", describe_error(error)))

    def _pause(self) -> float:
        """Between two rounds; never quite the same, so that resumers do not go in step."""
        return self._every * random.uniform(0.75, 1.25)


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "__wrapped__", function)


class Resumer(Plan):
    """Resumes abandoned operations of a guard, in a thread of its own; as many of them as you like, anywhere."""

    def __init__(
        self,
        guard: Semel,
        functions: Iterable[Callable[..., Any]] = (),
        *,
        every: Duration = EVERY,
        limit: int = LIMIT,
        tries: int = TRIES,
        pause: Duration = PAUSE,
    ) -> None:
        """
        :param functions: those to be resumed; all that the guard has declared ``resumable=True`` unless told.
        :param every: how long to rest between two rounds.
        :param limit: how many operations are looked at in one trip to the store.
        :param tries: attempts, the first one included, after which an operation is left for people.
        :param pause: how long one that failed is left alone: so long after the second attempt, then ever longer.
        """
        super().__init__(guard, functions, every, limit, tries, pause)
        self._sync: Semel = guard
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        survive_forks(self._forked)

    def start(self) -> None:
        """Begin, in the background."""
        self._refuse_async()
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._keep_on, name="semel-recoverer", daemon=True)
            self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End after the operation in hand; waits for it, for ``timeout`` seconds at most."""
        self._stopping.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def resume(self) -> ResumeReport:
        """One round, in this thread: look at all that was abandoned, and resume it."""
        self._refuse_async()
        declared = self._declared()
        steps = self._round(declared)
        answer: Any = None
        try:
            while True:
                request = steps.send(answer)
                answer = None
                if isinstance(request, Resumable):
                    answer = Page((), None) if self._stopping.is_set() else self._sync.store.execute(request)
                elif not isinstance(request, Abandoned):
                    self._gave_up(request.record)
                elif self._stopping.is_set():
                    answer = "elsewhere"
                else:
                    answer = self._resume(declared[request.record.operation], request)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _resume(self, what: Declaration, each: Abandoned) -> Word:
        try:
            call, args, kwargs = self._prepared(what, each)
            recover = what.recover
            return self._came_to(
                self._sync._drive(
                    call, lambda op: what.invoke(op, args, kwargs), recover and (lambda: recover(args, kwargs))
                )
            )
        except Exception as error:  # one that cannot be resumed must not keep the others from it
            return self._failed(each, error)

    def _refuse_async(self) -> None:
        awaited = [each.operation for each in self._declared().values() if each.awaits]
        if awaited:
            raise PolicyError(f"{', '.join(awaited)} is async: use an AsyncSemel, and AsyncResumer")

    def _keep_on(self) -> None:
        while not self._stopping.is_set():
            try:
                self.resume()
            except Exception as error:  # there is always a next round
                self._store_failed(error)
            self._stopping.wait(self._pause())

    def _forked(self) -> None:
        """The thread stayed with the parent."""
        self._stopping = threading.Event()
        self._thread = None

    def __enter__(self) -> Resumer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
