# ruff: noqa: B023, SIM105
"""An exception from a signal handler (Ctrl-C, a soft time limit of a task queue) at every line in turn."""

import contextvars
import dis
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import semel.engine.drive.driver
import semel.engine.drive.execution
import semel.engine.drive.flights
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
    )
)


class Interrupt(BaseException):
    pass


CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD", "CALL_FUNCTION_EX", "BEFORE_WITH", "WITH_EXCEPT_START")
"""After these CPython looks for signals, and only after these."""


def interrupted_at(n: int, files: tuple[str, ...], work: Any) -> str | None:
    """Run ``work`` and raise at the n-th point where a signal handler may run in these files; where, or None."""
    seen = 0
    where: list[str] = []
    last: dict[int, int] = {}

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and not where:
            before = last.get(id(frame), -1)
            last[id(frame)] = frame.f_lasti
            if before >= 0 and dis.opname[frame.f_code.co_code[before]] in CHECKS:
                seen += 1
                if seen == n:
                    where.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
                    raise Interrupt
        elif event == "return":
            last.pop(id(frame), None)
        return trace

    def traced() -> None:
        before = sys.gettrace()  # coverage's, perhaps
        sys.settrace(trace)
        try:
            work()
        except Interrupt:
            pass
        finally:
            sys.settrace(before)

    # In a thread of its own: what is raised by a trace function can leave an exception behind as "being handled", which
    # would be the context of every error that the thread sees from then on.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(contextvars.copy_context().run, traced).result()
    return where[0] if where else None


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


@pytest.mark.parametrize("many", [False, True])
def test_no_line_of_the_combiner_loses_the_lane_when_interrupted(many: bool) -> None:
    lost = []
    for n in range(1, 200):
        combiner = Combiner([QuickLane()], max_batch=2)
        work = (
            (lambda: combiner.execute_many([Lookup(bytes([i])) for i in range(5)]))
            if many
            else (lambda: combiner.execute(Lookup(b"a")))
        )
        where = interrupted_at(n, (COMBINING,), work)
        if where is None:
            break
        if stuck(lambda: combiner.execute(Lookup(b"b"))):
            lost.append(where)
    assert n > 10
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
