"""Kill an operation at every point where a crash matters, retry it, and check that your invariant holds.

::

    def setup():        return make_a_database()            # a new state to work on; must be picklable
    def operation(db):  guard(db).run("pay", key="k1", call=lambda: charge(db))
    def check(db):      assert charges(db) == 1

    report = crash_everywhere(setup, operation, check)

A point is just before or just after a call that reaches a database or a store, such as ``execute`` or ``commit`` of a
driver. The operation runs in a process of its own, which is killed (SIGKILL) at the first point. Then it is retried, as
a client would do, until it returns, and ``check`` is called. The same follows for the second point with a new
``setup()``, and so on, until a run ends before it reaches its point. The functions are called in other processes, so
they must be importable. ``break_everywhere`` does the same with failures of the store instead of crashes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Literal, TypeVar

from semel.errors import SemelError
from semel.testing import faulty

__all__ = ["CrashFailure", "Report", "break_everywhere", "crash_everywhere"]

W = TypeVar("W")
How = Literal["kill", "before", "after"]

MOST_POINTS: Final = 2000
PATIENCE: Final = 30.0
"""Seconds allowed for one run, and for all retries after a crash."""

MODULES: Final = (
    "psycopg.", "asyncpg.", "pymysql.", "asyncmy.", "aiosqlite.", "redis.", "botocore.client", "semel.stores.",
)  # fmt: skip
NAMES: Final = frozenset(
    {
        *("execute", "executemany", "execute_many", "commit", "rollback", "query", "wait", "send_command"),
        *("fetch", "fetchrow", "fetchval", "start", "execute_command", "_make_api_call"),
    }
)
"""The names of functions in ``MODULES`` that reach a database. Those of sqlite3 are in ``_SQLITE``."""
_SQLITE: Final = frozenset({"execute", "executemany", "executescript", "commit", "rollback", "__exit__"})


class CrashFailure(AssertionError):
    """After a crash at ``point`` the invariant does not hold, or the operation never returned."""

    def __init__(self, point: str, why: str) -> None:
        super().__init__(f"after {point}: {why}")
        self.point = point


@dataclass
class Report:
    """The result of a successful run over all points."""

    points: list[str] = field(default_factory=list)
    """Descriptions of the points, such as ``killed before sqlite3.Connection.commit (point 7)``."""


def crash_everywhere(
    setup: Callable[[], W],
    operation: Callable[[W], Any],
    check: Callable[[W], None],
    *,
    teardown: Callable[[W], None] | None = None,
    patience: float = PATIENCE,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Kill the operation before and after each of its calls to a database, one point per run.

    Returns the points that were tried. Raises CrashFailure at the first one that breaks the invariant.

    :param setup: returns the state to work on, such as a path. It is passed to the other functions.
    :param check: raises AssertionError if the invariant does not hold.
    :param teardown: removes what ``setup`` made.
    :param patience: seconds allowed for one run, and for all retries after a crash.
    :param progress: called with the description of each point.
    """
    return _everywhere("kill", setup, operation, check, teardown, patience, progress)


def break_everywhere(
    setup: Callable[[], W],
    operation: Callable[[W], Any],
    check: Callable[[W], None],
    *,
    teardown: Callable[[W], None] | None = None,
    patience: float = PATIENCE,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Make the store fail before each Op (not stored) and after each Op (stored, but the answer is lost), one per run.

    The operation must open its store as ``faulty.store(SQLiteStore(…))``, or with ``faulty.async_store``. Same
    parameters as ``crash_everywhere``.
    """
    report = Report()
    for how in ("before", "after"):
        report.points += _everywhere(how, setup, operation, check, teardown, patience, progress).points
    return report


def _everywhere(
    how: How,
    setup: Callable[[], W],
    operation: Callable[[W], Any],
    check: Callable[[W], None],
    teardown: Callable[[W], None] | None,
    patience: float,
    progress: Callable[[str], None] | None,
) -> Report:
    report = Report()

    def crash_at(target: int) -> str | None:
        """Crash at one point, in a world of its own. Returns None if the operation ended before that point."""
        world = setup()
        try:
            point = nursery.attempt(world, patience, how, target)
            if point is not None:
                nursery.attempt(world, patience)
            try:
                check(world)
            except AssertionError as error:
                raise CrashFailure(point or "a run without a crash", str(error) or "check() failed") from error
        except CrashFailure:
            raise
        except Exception as error:
            raise CrashFailure(f"point {target}", repr(error)) from error
        finally:
            if teardown is not None:
                teardown(world)
        return point

    with contextlib.closing(_Nursery(operation)) as nursery:
        for target in range(1, MOST_POINTS + 1):
            point = crash_at(target)
            if point is None:
                return report
            report.points.append(point)
            if progress is not None:
                progress(point)
    raise CrashFailure(f"{MOST_POINTS} points", "the operation has more points than this limit: use a smaller one")


class _Nursery:
    """A process that has imported the operation and forks a child for each run."""

    def __init__(self, operation: Callable[[Any], Any]) -> None:
        try:
            pickle.dumps(operation)
        except Exception as error:
            raise TypeError(
                f"the operation must be picklable, such as a function defined in a module: {error}"
            ) from error
        context = multiprocessing.get_context("forkserver")
        self._pipe, other_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(operation, other_end), daemon=True)
        self._process.start()
        other_end.close()

    def attempt(self, world: Any, patience: float, how: How | None = None, target: int = 0) -> str | None:
        """Run the operation in a process. Returns the point at which it was stopped, or None if it ended."""
        try:
            self._pipe.send((world, how, target, patience))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"what setup() returns must be picklable: {error}") from error
        if not self._pipe.poll(patience * 2):
            raise TimeoutError(f"the operation did not end within {patience * 2:g} s")
        code, report = self._pipe.recv()
        if code == -signal.SIGKILL and report:
            return str(report)
        if code != 0:
            raise RuntimeError(report or f"the operation's process ended with {code}")
        return report or None

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(operation: Callable[[Any], Any], pipe: Any) -> None:
    """Fork a child for each request, and send back its exit code and the last thing it reported."""
    gc.freeze()  # otherwise a garbage collection in each child reads, and so copies, everything that is imported
    with contextlib.suppress(EOFError):
        while True:
            world, how, target, patience = pipe.recv()
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                pipe.close()
                os.close(reading)
                _child(operation, world, how, target, patience, writing)
            os.close(writing)
            with open(reading, "rb") as reports:
                report = reports.read().rstrip(b"\0").rpartition(b"\0")[2].decode()
            pipe.send((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), report))


def _child(
    operation: Callable[[Any], Any], world: Any, how: How | None, target: int, patience: float, writing: int
) -> None:
    def report(text: str) -> None:
        os.write(writing, text.encode() + b"\0")

    code = 0
    try:
        if how is None:
            _retry(operation, world, patience)
        elif how == "kill":
            _kill_at(target, report, operation, world)
        else:
            faulty.break_at(target, how, report)
            try:
                operation(world)
            except SemelError:
                if not faulty.broken():
                    raise
    except BaseException:
        report(traceback.format_exc())
        code = 1
    finally:
        os._exit(code)


def _retry(operation: Callable[[Any], Any], world: Any, patience: float) -> None:
    """Run the operation until it returns, as a client would: again after every error that is retryable."""
    end = time.monotonic() + patience
    while True:
        try:
            operation(world)
            return
        except SemelError as error:
            if not error.retryable or time.monotonic() > end:
                raise
            time.sleep(0.02)


def _kill_at(target: int, report: Callable[[str], Any], operation: Callable[[Any], Any], world: Any) -> None:
    """Run the operation, and kill this process at the given point."""
    passed = 0

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal passed
        name = _database_call(frame, event, arg)
        if name is None:
            return
        passed += 1
        if passed == target:
            moment = "before" if event in ("call", "c_call") else "after"
            report(f"killed {moment} {name} (point {target})")
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # the signal arrives in a moment; nothing else may run until then

    sys.setprofile(watch)
    try:
        operation(world)
    finally:
        sys.setprofile(None)


def _database_call(frame: FrameType, event: str, arg: Any) -> str | None:
    """Return the name of the function if the event is a call that reaches a database, otherwise None."""
    if event.startswith("c_"):
        if event == "c_exception" or getattr(arg, "__name__", "") not in _SQLITE:
            return None
        # Look at the base classes too: Django derives its own cursor from sqlite3's.
        kinds = (each for each in type(getattr(arg, "__self__", None)).__mro__ if each.__module__ == "sqlite3")
        kind = next(kinds, None)
        return None if kind is None else f"sqlite3.{kind.__name__}.{arg.__name__}"
    code = frame.f_code
    if code.co_name not in NAMES:
        return None
    module: str = frame.f_globals.get("__name__", "")
    return f"{module}.{code.co_qualname}" if module.startswith(MODULES) else None


def run_async(operation: Callable[[W], Awaitable[Any]], world: W) -> Any:
    """Run an async operation: ``def operation(db): return run_async(pay, db)``."""
    import asyncio

    async def main() -> Any:
        return await operation(world)

    return asyncio.run(main())
