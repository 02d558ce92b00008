"""Fault tests with real processes: workers on one store are killed, or paused past their lease and resumed.

::

    with Workers("sqlite:////tmp/app.db", folder, policy="at_most_once") as workers:
        workers.spawn(3)
        …                                   # workers.kill(one), workers.pause(one), workers.resume(one)
        workers.stop()
        lines = workers.finish()
    assert not verdicts(lines)

The store is a URL, or ``package.module:function`` that returns a store, so a third party can test its own. The evidence
is the effect log (``semel.testing.effects``), which the workers write without Semel. Needs POSIX signals.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from semel.core.ops import Record
from semel.core.states import State
from semel.errors import SemelError
from semel.stores.guard import Semel
from semel.testing.effects import EffectLog, Line, answered_twice, effects, overlapping, unexcused, verdicts
from semel.testing.hammer import OPERATION, Hammer, HammerPolicy, Job, open_job_store

__all__ = [
    "EffectLog", "Line", "Worker", "Workers", "answered_twice", "effects", "overlapping", "unexcused", "until",
    "verdicts",
]  # fmt: skip

STOP_SECONDS: Final = 60.0
"""Seconds that workers have to end by themselves before they are killed."""


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds. Raises TimeoutError with ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:g} s: {what}")
        time.sleep(0.01)


class Worker:
    """One worker process."""

    def __init__(self, job: Job, errors: Path) -> None:
        command = [sys.executable, "-m", "semel.testing.hammer"]
        with errors.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, bufsize=0, process_group=0
            )
        self.pid = self._process.pid
        self.paused = False
        self._write(json.dumps(asdict(job)))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def tell_to_stop(self) -> None:
        """Ask the worker to finish its calls and to exit."""
        self._write("stop")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")

    def wait(self, seconds: float) -> int:
        """Wait for the process and return its exit code. Kills it if it takes longer."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()


class Workers:
    """A group of processes that call one operation on the same keys of one store."""

    def __init__(
        self,
        store: str,
        folder: Path,
        *,
        policy: HammerPolicy = "retry",
        lease: float = 1.0,
        work: float = 0.12,
        threads: int = 3,
        rate: float = 40.0,
        hot: int = 24,
        seed: int | None = None,
    ) -> None:
        """
        :param folder: the directory for the effect log and the workers' error output.
        :param policy: ``retry``, ``recover`` (with a hook that looks into the effect log) or ``at_most_once``.
        :param work: seconds that a handler takes.
        :param rate: new keys per second.
        :param hot: how many keys are in use at a time.
        """
        self.seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
        self.log = EffectLog(folder / "effects.jsonl")
        self.errors = folder / "workers.err"
        self.hurt: set[int] = set()
        """The processes that were killed or paused."""
        self.running: list[Worker] = []
        self.dice = random.Random(self.seed)
        self._number = 0
        self._job = Job(store, str(self.log.path), policy, lease, work, threads, time.time(), rate, hot, self.seed)
        self.guard = Semel(open_job_store(store), sweep_every=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.running:
            worker.send(signal.SIGKILL)
            worker.wait(STOP_SECONDS)
        self.guard.close()
        self.log.close()
        if error is not None:
            output = self.errors.read_text(errors="replace")[-4000:] if self.errors.exists() else ""
            error.add_note(f"seed of the workers: {self.seed}\n{output}")

    # -- processes -------------------------------------------------------------------------------------------------

    def spawn(self, count: int = 1, *, only: str = "", work: float | None = None) -> list[Worker]:
        """Start processes.

        :param only: let each process call this one key once, and end.
        :param work: seconds that their handlers take, if other than those of the group.
        """
        started = []
        for _ in range(count):
            self._number += 1
            job = replace(
                self._job, seed=self.seed + self._number, only=only, work=self._job.work if work is None else work
            )
            started.append(Worker(job, self.errors))
        self.running += started
        return started

    def kill(self, worker: Worker) -> None:
        """Kill the process with SIGKILL."""
        self.hurt.add(worker.pid)
        worker.send(signal.SIGKILL)
        self.running.remove(worker)
        self._check({worker.pid: worker.wait(STOP_SECONDS)})

    def pause(self, worker: Worker) -> None:
        """Stop the process with SIGSTOP. All its threads stop, including the one that renews leases."""
        self.hurt.add(worker.pid)
        worker.paused = True
        worker.send(signal.SIGSTOP)

    def resume(self, worker: Worker) -> None:
        """Continue a paused process with SIGCONT."""
        worker.paused = False
        worker.send(signal.SIGCONT)

    def stop(self) -> None:
        """Let all processes finish their calls and exit. Raises RuntimeError if one has failed."""
        for worker in self.running:
            self.resume(worker)
            worker.tell_to_stop()
        codes = {worker.pid: worker.wait(STOP_SECONDS) for worker in self.running}
        self.running.clear()
        self._check(codes)

    def _check(self, codes: dict[int, int]) -> None:
        """A worker exits with 0, or by our signal. Any other code means that a caller met an unexpected error."""
        if any(code > 0 for code in codes.values()):
            raise RuntimeError(f"workers ended with {codes}: {self.errors.read_text(errors='replace')[-2000:]}")

    # -- afterwards ------------------------------------------------------------------------------------------------

    def finish(self) -> list[Line]:
        """Call every key once more, in this process, after the last worker is gone. Returns the whole log.

        Within one lease of the end no record may be running any more, and every call must return at once. Raises
        TimeoutError or AssertionError otherwise.
        """
        keys = sorted({line.key for line in self.log.read()})
        until(lambda: not any(map(self._is_held, keys)), self._job.lease + 1.0, "keys are stuck in progress")
        hammer = Hammer(replace(self._job, work=0.0), self.guard, self.log)
        stuck = [key for key in keys if hammer.ask(key) not in ("answer", "unknown")]
        if stuck:
            raise AssertionError(f"keys that cannot be called one lease after the end: {stuck}")
        return self.log.read()

    def lookup(self, key: str) -> Record | None:
        return self.guard.lookup(OPERATION, key)

    def overwritten(self, lines: list[Line]) -> list[str]:
        """Return the finished records that were not written by their newest owner."""
        newest: dict[str, int] = {}
        for line in lines:
            newest[line.key] = max(newest.get(line.key, 0), line.token)
        wrong = []
        for key, token in newest.items():
            record = self.lookup(key)
            if record is None or record.state is not State.DONE:
                continue
            writer = self._writer(key)
            if not record.token == writer == token:
                wrong.append(
                    f"{key}: written by {writer}, its record says {record.token}, the newest owner was {token}"
                )
        return wrong

    def _writer(self, key: str) -> int | None:
        """Return the token in the stored answer, which is that of its writer."""
        try:
            answer = self.guard.run(OPERATION, key=key, call=lambda: {"writer": None})
        except SemelError:
            return None
        writer: int | None = answer["writer"]
        return writer

    def _is_held(self, key: str) -> bool:
        record = self.lookup(key)
        return record is not None and record.state is State.RUNNING
