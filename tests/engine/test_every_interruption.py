# ruff: noqa: B023, SIM105
"""An exception from a signal handler (Ctrl-C, a soft time limit of a task queue) at every line in turn."""

import contextvars
import dis
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

import semel.engine.drive.driver
import semel.engine.drive.execution
import semel.engine.drive.flights
import semel.engine.drive.work
import semel.engine.sync
import semel.stores.batching.combiner
from semel import MemoryStore, Semel
from semel.core.ops import Lookup
from semel.stores.batching.combiner import Combiner

COMBINING = semel.stores.batching.combiner.__file__
ENGINE = tuple(
    module.__file__
    for module in (
        semel.engine.sync,
        semel.engine.drive.driver,
        semel.engine.drive.execution,
        semel.engine.drive.flights,
        semel.engine.drive.work,
    )
)


class Interrupt(BaseException):
    pass


CHECKS = ("CALL", "CALL_KW", "RESUME", "JUMP_BACKWARD", "CALL_FUNCTION_EX", "BEFORE_WITH", "WITH_EXCEPT_START")
"""After these CPython looks for signals, and only after these."""


class Steps:
    """Counts the points where a signal handler may run, and raises at the n-th."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._seen = 0
        self._last: dict[int, int] = {}
        self.where: str | None = None

    def step(self, frame: FrameType, offset: int) -> None:
        """The frame is about to run its instruction at this offset."""
        before = self._last.get(id(frame))
        self._last[id(frame)] = offset
        if before is None or self.where:
            return
        if dis.opname[frame.f_code.co_code[before]] in CHECKS:
            self._seen += 1
            if self._seen == self._n:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise Interrupt

    def forget(self, frame: FrameType) -> None:
        """The frame has ended, or begins and may have the id of one that is gone."""
        self._last.pop(id(frame), None)


@contextmanager
def every_instruction(files: tuple[str, ...], steps: Steps) -> Iterator[None]:
    """Tell ``steps`` of all instructions of these files that this thread runs."""
    if sys.version_info < (3, 12):

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                steps.step(frame, frame.f_lasti)
            elif event == "return":
                steps.forget(frame)
            return trace

        before = sys.gettrace()  # coverage's, perhaps
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)
        return

    # Since 3.12 a trace function misses instructions: it is told of those that were instrumented before it came.
    monitoring, tool, thread = sys.monitoring, 4, threading.get_ident()
    events = monitoring.events

    def instruction(code: CodeType, offset: int) -> None:
        if threading.get_ident() == thread:
            steps.step(sys._getframe(1), offset)

    def started(code: CodeType, offset: int) -> None:
        if threading.get_ident() == thread:
            steps.forget(sys._getframe(1))

    monitoring.use_tool_id(tool, __name__)
    try:
        monitoring.register_callback(tool, events.INSTRUCTION, instruction)
        monitoring.register_callback(tool, events.PY_START, started)
        for code in codes_of(files):
            monitoring.set_local_events(tool, code, events.INSTRUCTION | events.PY_START)
        yield
    finally:
        for code in codes_of(files):
            monitoring.set_local_events(tool, code, events.NO_EVENTS)
        for event in (events.INSTRUCTION, events.PY_START):
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


@cache
def codes_of(files: tuple[str, ...]) -> list[CodeType]:
    """The code of all functions and methods of these files, and of what is defined inside them."""
    modules = [module for module in sys.modules.values() if getattr(module, "__file__", None) in files]
    values = [value for module in modules for value in vars(module).values()]
    values += [value for kind in values if isinstance(kind, type) for value in vars(kind).values()]
    values += [value.fget for value in values if isinstance(value, property)]
    functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in values if callable(value)]
    found = [f.__code__ for f in functions if isinstance(f, FunctionType) and f.__code__.co_filename in files]
    for code in found:
        found += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found


def interrupted_at(n: int, files: tuple[str, ...], work: Any) -> str | None:
    """Run ``work`` and raise at the n-th point where a signal handler may run in these files; where, or None."""
    steps = Steps(n)

    def traced() -> None:
        try:
            with every_instruction(files, steps):
                work()
        except Interrupt:
            pass

    # In a thread of its own: what is raised by a trace function can leave an exception behind as "being handled", which
    # would be the context of every error that the thread sees from then on.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(contextvars.copy_context().run, traced).result()
    return steps.where


def stuck(work: Any) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.3)
    return thread.is_alive()


class QuickLane:
    gathers = True

    def run(self, ops: Sequence[Any]) -> list[Any]:
        return [op.id for op in ops]

    def close(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("how", ["at once", "queued", "many"])
def test_no_line_of_the_combiner_loses_the_lane_when_interrupted(how: str) -> None:
    lost = []
    for n in range(1, 200):
        combiner = Combiner([QuickLane()], max_batch=2)
        if how == "queued":
            combiner._last_batch = 2  # after a shared batch others are expected, so an Op is not sent at once
        work = (
            (lambda: combiner.execute_many([Lookup(bytes([i])) for i in range(5)]))
            if how == "many"
            else (lambda: combiner.execute(Lookup(b"a")))
        )
        where = interrupted_at(n, (COMBINING,), work)
        if where is None:
            break
        if stuck(lambda: combiner.execute(Lookup(b"b"))):
            lost.append(where)
    assert n > (8 if how == "at once" else 10)
    assert not lost, " ".join(dict.fromkeys(lost))


def test_no_line_of_the_engine_blocks_the_key_when_interrupted() -> None:
    blocked = []
    for n in range(1, 400):
        store = MemoryStore()
        guard = Semel(store, sweep_every=None)
        where = interrupted_at(n, ENGINE, lambda: guard.run("op", key="k", call=lambda: 1))
        if where is None:
            break

        def again() -> None:
            try:
                guard.run("op", key="k", call=lambda: 2)
            except Exception:
                pass

        if stuck(again) or guard.driver.flights.by_id:
            blocked.append(where)
    assert n > 10
    assert not blocked, " ".join(dict.fromkeys(blocked))
