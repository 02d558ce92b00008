"""Kill an operation at every point where a crash could hurt, try it again, and see whether your invariant holds.

::

    def setup():        return make_a_database()            # a fresh world; what it returns must be picklable
    def operation(db):  guard(db).run("pay", key="k1", call=lambda: charge(db))
    def check(db):      assert charges(db) == 1

    report = crash_everywhere(setup, operation, check)

A point is the moment just before, or just after, a call that reaches a database or a store: ``execute``, ``commit`` and
their like, of the drivers and of the stores. The operation runs in a process of its own, which is killed (SIGKILL) at
the first point; it is tried again, as a client would, until it gets an answer; then ``check`` looks at the world. Then
the same with the second point, in a fresh world, and so on until a run comes to its end. The functions must be
importable, for they are called in other processes. ``break_everywhere`` does the same with a store that fails.
"""

from __future__ import annotations

import contextlib
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
"""Seconds that one try, and all tries after a crash, may take."""

MODULES: Final = (
    "psycopg.", "asyncpg.", "pymysql.", "asyncmy.", "aiosqlite.", "redis.", "botocore.client", "semel.stores.",
)  # fmt: skip
NAMES: Final = frozenset(
    {
        *("execute", "executemany", "execute_many", "commit", "rollback", "query", "wait", "send_command"),
        *("fetch", "fetchrow", "fetchval", "start", "execute_command", "_make_api_call"),
    }
)
"""Python functions of these modules, and sqlite3's own, that reach a database."""
_SQLITE: Final = frozenset({"execute", "executemany", "executescript", "commit", "rollback", "__exit__"})


class CrashFailure(AssertionError):
    """The invariant does not hold, or the operation never got an answer, after a crash at ``point``."""

    def __init__(self, point: str, why: str) -> None:
        super().__init__(f"after {point}: {why}")
        self.point = point


@dataclass
class Report:
    """What was tried."""

    points: list[str] = field(default_factory=list)
    """In words, such as ``killed before Connection.commit (call 7)``."""


def crash_everywhere(
    setup: Callable[[], W],
    operation: Callable[[W], Any],
    check: Callable[[W], None],
    *,
    teardown: Callable[[W], None] | None = None,
    patience: float = PATIENCE,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Kill the operation before and after every call to a database, one after the other."""
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
    """Let the store fail before (not done) and after (done, and nobody knows) every Op, one after the other.

    The operation opens its store as ``faulty.store(SQLiteStore(…))`` (``faulty.async_store`` for an async one).
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
    with contextlib.closing(_Nursery(operation)) as nursery:
        for target in range(1, MOST_POINTS + 1):
            point = _at(how, target, nursery, setup, check, teardown, patience)
            if point is None:
                return report
            report.points.append(point)
            if progress is not None:
                progress(point)
    raise CrashFailure(f"{MOST_POINTS} points", "the operation has more points than that: make it smaller")


def _at(
    how: How,
    target: int,
    nursery: _Nursery,
    setup: Callable[[], W],
    check: Callable[[W], None],
    teardown: Callable[[W], None] | None,
    patience: float,
) -> str | None:
    """One crash, in a world of its own; None when the operation came to its end before it."""
    world = setup()
    try:
        point = nursery.attempt(world, patience, how, target)
        if point is not None:
            nursery.attempt(world, patience)
        where = point or "a run without a crash"
        try:
            check(world)
        except AssertionError as error:
            raise CrashFailure(where, str(error) or "check() failed") from error
    except CrashFailure:
        raise
    except Exception as error:
        raise CrashFailure(f"point {target}", repr(error)) from error
    finally:
        if teardown is not None:
            teardown(world)
    return point


class _Nursery:
    """A process that has imported the operation and forks a fresh one for every try."""

    def __init__(self, operation: Callable[[Any], Any]) -> None:
        try:
            pickle.dumps(operation)
        except Exception as error:
            raise TypeError(f"the operation must be picklable, a function of a module: {error}") from error
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_nurse, args=(operation, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def attempt(self, world: Any, patience: float, how: How | None = None, target: int = 0) -> str | None:
        """Run the operation in a process; the point it was stopped at, or None: it came to its end."""
        try:
            self._pipe.send((world, how, target, patience))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"what setup() returns must be picklable: {error}") from error
        if not self._pipe.poll(patience * 2):
            raise TimeoutError(f"the operation did not end within {patience * 2:g} s")
        code, said = self._pipe.recv()
        if code == -signal.SIGKILL and said:
            return str(said)
        if code != 0:
            raise RuntimeError(said or f"the operation's process ended with {code}")
        return said or None

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _nurse(operation: Callable[[Any], Any], pipe: Any) -> None:
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
            with open(reading, "rb") as told:
                said = told.read().rstrip(b"\0").rpartition(b"\0")[2].decode()
            pipe.send((os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said))


def _child(
    operation: Callable[[Any], Any],
    world: Any,
    how: How | None,
    target: int,
    patience: float,
    writing: int,
) -> None:
    def tell(text: str) -> None:
        os.write(writing, text.encode() + b"\0")

    code = 0
    try:
        if how is None:
            _until_answered(operation, world, patience)
        elif how == "kill":
            _killed_at(target, tell, operation, world)
        else:
            faulty.break_at(target, how, tell)
            try:
                operation(world)
            except SemelError:
                if not faulty.broken():
                    raise
    except BaseException:
        tell(traceback.format_exc())
        code = 1
    finally:
        os._exit(code)


def _until_answered(operation: Callable[[Any], Any], world: Any, patience: float) -> None:
    """As a client would: the same again, while the error says that it may be."""
    end = time.monotonic() + patience
    while True:
        try:
            operation(world)
            return
        except SemelError as error:
            if not error.retryable or time.monotonic() > end:
                raise
            time.sleep(0.02)


def _killed_at(target: int, tell: Callable[[str], Any], operation: Callable[[Any], Any], world: Any) -> None:
    passed = 0

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal passed
        name = _named(frame, event, arg)
        if name is None:
            return
        passed += 1
        if passed == target:
            moment = "before" if event in ("call", "c_call") else "after"
            tell(f"killed {moment} {name} (point {target})")
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # it comes in a moment, and nothing else may happen until then

    sys.setprofile(watch)
    try:
        operation(world)
    finally:
        sys.setprofile(None)


def _named(frame: FrameType, event: str, arg: Any) -> str | None:
    """The function that reaches a database here, or None."""
    if event.startswith("c_"):
        if event == "c_exception" or getattr(arg, "__name__", "") not in _SQLITE:
            return None
        # By the class it derives from: Django has a cursor of its own.
        kinds = (each for each in type(getattr(arg, "__self__", None)).__mro__ if each.__module__ == "sqlite3")
        kind = next(kinds, None)
        return None if kind is None else f"sqlite3.{kind.__name__}.{arg.__name__}"
    code = frame.f_code
    if code.co_name not in NAMES:
        return None
    module: str = frame.f_globals.get("__name__", "")
    return f"{module}.{code.co_qualname}" if module.startswith(MODULES) else None


def run_async(operation: Callable[[W], Awaitable[Any]], world: W) -> Any:
    """For an async operation: ``def operation(db): return run_async(pay, db)``."""
    import asyncio

    async def main() -> Any:
        return await operation(world)

    return asyncio.run(main())
