"""Fault tests with real processes: workers on one store are killed, or paused past their lease and resumed.

::

    with Workers("sqlite:////tmp/app.db", folder, policy="at_most_once") as workers:
        workers.spawn(3)
        …                                   # workers.kill(one), workers.pause(one), workers.resume(one)
        workers.stop()
        lines = workers.finish()
    assert not verdicts(lines)

The store is a URL, or ``package.module:function`` that returns a store, so a third party can test its own. Needs POSIX
signals. A worker is ``python -m semel.testing.faults``: threads that call one operation on shared keys, until the
parent asks it to stop or dies.

The evidence is the effect log, a plain file in which the workers record what they did. Semel never reads it. Every line
is one ``write`` to a file opened for appending, so a process that is killed leaves only whole lines. Times are those of
the monotonic clock, which all processes of a machine share. Each check of the log returns a list of violations, which
is empty if all is well.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

from semel.core.call import NOT_DONE, Recovered, Verdict
from semel.core.ops import Record
from semel.core.states import State
from semel.demo.processes import end_with_parent, read_settings, run_threads, start_worker, tell
from semel.engine.operation import INJECTED, Operation, OperationHandle, current_operation
from semel.engine.ports import Store
from semel.errors import InProgress, LeaseLost, OutcomeUnknown, SemelError, StoreError
from semel.stores.guard import Semel
from semel.stores.urls import open_store

STOP_SECONDS: Final = 60.0
"""Seconds that workers have to end by themselves before they are killed."""
OPERATION: Final = "hammer"
HammerPolicy: TypeAlias = Literal["retry", "recover", "at_most_once"]
_POLICIES: Final[dict[str, dict[str, Any]]] = {
    "retry": {"on_abandoned": "retry"},
    "recover": {},
    "at_most_once": {"guarantee": "at_most_once"},
}


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
        self._process = start_worker("semel.testing.faults", asdict(job), errors)
        self.pid = self._process.pid
        self.paused = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def tell_to_stop(self) -> None:
        """Ask the worker to finish its calls and to exit."""
        tell(self._process, "stop")

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


# -- the effect log


@dataclass(frozen=True)
class Line:
    """One event.

    ``what`` is ``begin`` (a handler began), ``recover`` (a recover hook began), ``effect``, ``end`` (the handler is
    about to return), ``answer``, ``lost`` (LeaseLost), ``unknown`` (OutcomeUnknown), ``refused`` (InProgress) or
    ``store`` (StoreError).
    """

    what: str
    key: str
    pid: int
    at: float
    token: int = 0
    """The token of the attempt; 0 if the line is not about an attempt of this process."""
    attempt: int = 0
    lease_end: float = 0.0
    """The end of the attempt's lease, as far as the attempt knew when it wrote the line."""
    note: str = ""
    """The answer as JSON, or the text of an error."""

    @property
    def alive(self) -> bool:
        """Whether the attempt certainly held its lease at that moment."""
        return self.at < self.lease_end


class EffectLog:
    """A file of lines that many processes write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: Line) -> None:
        os.write(self._file, json.dumps(asdict(line), separators=(",", ":")).encode() + b"\n")

    def read(self) -> list[Line]:
        """Return all whole lines so far."""
        text = self.path.read_bytes()
        return [Line(**json.loads(line)) for line in text[: text.rfind(b"\n") + 1].splitlines()]

    def write_effect(self, line: Line) -> bool:
        """Write an effect, unless an owner with a newer token has called ``look``. Returns whether it was written."""
        with self._alone():
            if any(seen.what == "recover" and seen.token > line.token for seen in self._of(line.key)):
                return False
            self.write(line)
            return True

    def look(self, line: Line) -> Line | None:
        """Return the effect of this key, or None. From now on, refuse owners with an older token. For recover hooks."""
        with self._alone():
            self.write(line)
            return next((seen for seen in self._of(line.key) if seen.what == "effect"), None)

    def close(self) -> None:
        os.close(self._file)

    def _of(self, key: str) -> Iterator[Line]:
        wanted = f'"key":{json.dumps(key)},'.encode()
        for line in self.path.read_bytes().splitlines():
            if wanted in line:
                yield Line(**json.loads(line))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # flock belongs to the open file, so open it again: otherwise two threads of one process would share the lock.
        file = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def effects(lines: Iterable[Line]) -> Mapping[str, list[Line]]:
    """Return the effects of each key."""
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == "effect":
            found[line.key].append(line)
    return found


def answered_twice(lines: Iterable[Line]) -> list[str]:
    """Return the keys whose callers got different answers, which means that a finished record has changed."""
    answers: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line.what == "answer":
            answers[line.key].add(line.note)
    return [f"{key}: {sorted(notes)}" for key, notes in answers.items() if len(notes) > 1]


def overlapping(lines: Iterable[Line]) -> list[str]:
    """Return the attempts that ran at the same time while both held a lease, or with the same token."""
    wrong = []
    for key, attempts in _attempts(lines).items():
        tokens = sorted(attempts)
        for token in tokens:
            if len({line.pid for line in attempts[token]}) > 1:
                wrong.append(f"{key}: two processes got token {token}")
        for older, newer in pairwise(tokens):
            last_held = max((line.at for line in attempts[older] if line.alive), default=0.0)
            start = min(line.at for line in attempts[newer])
            if start < last_held:
                wrong.append(f"{key}: {newer} began {last_held - start:.3f} s before the lease of {older} had ended")
    return wrong


def unexcused(lines: Iterable[Line], hurt: Collection[int]) -> list[str]:
    """Return the keys with several effects although an earlier attempt was neither killed, paused nor late.

    :param hurt: the processes that were killed or paused.
    """
    lines = list(lines)
    attempts = _attempts(lines)
    wrong = []
    for key, done in effects(lines).items():
        for effect in sorted(done, key=lambda line: line.token)[:-1]:
            of_it = attempts[key][effect.token]
            late = max(line.at for line in of_it) >= max(line.lease_end for line in of_it)
            if effect.pid not in hurt and not late:
                wrong.append(
                    f"{key}: done again after attempt {effect.token}, which was neither killed, paused nor late"
                )
    return wrong


def verdicts(lines: Iterable[Line]) -> list[str]:
    """Return what must never happen, under any policy and any fault: overlapping attempts and differing answers."""
    lines = list(lines)
    return overlapping(lines) + answered_twice(lines)


def _attempts(lines: Iterable[Line]) -> dict[str, dict[int, list[Line]]]:
    found: dict[str, dict[int, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line.token:
            found[line.key][line.token].append(line)
    return found


# -- a worker


class TooLate(Exception):
    """The effect was refused, because a newer owner has already looked for it."""


@dataclass(frozen=True)
class Job:
    """The task of a worker. It is passed as JSON through standard input: a URL may hold a password."""

    store: str
    """A store URL, or ``package.module:function`` that returns a store."""
    log: str
    policy: HammerPolicy
    lease: float
    work: float
    """Seconds that a handler takes, half of them before its effect and half after."""
    threads: int
    began: float
    """The start on the wall clock. All workers derive the current keys from it, so they use the same ones."""
    rate: float
    """New keys per second."""
    hot: int
    """How many keys are in use at a time."""
    seed: int
    only: str = ""
    """Call this one key once, and end."""


def open_job_store(where: str) -> Store:
    module, colon, function = where.partition(":")
    if colon and "/" not in function and "." in module:
        store: Store = getattr(import_module(module), function)()
        return store
    return open_store(where)


class Hammer:
    """The operation, its handler and its callers."""

    def __init__(self, job: Job, guard: Semel, log: EffectLog) -> None:
        self._job = job
        self._log = log
        self._mine = threading.local()
        recover: dict[str, Any] = {"recover": self.recover} if job.policy == "recover" else {}
        settings: dict[str, Any] = {"operation": OPERATION, "key": "key", "lease": job.lease, **_POLICIES[job.policy]}
        self._operation = guard.once(**settings, **recover)(self.handle)

    def handle(self, key: str, op: Operation = INJECTED) -> dict[str, Any]:
        """Do half of the work, the effect, and the other half. The answer contains the token of its writer."""
        self._note("begin", key, op)
        time.sleep(self._job.work / 2)
        if self._job.policy == "recover":
            if not self._log.write_effect(self._line("effect", key, op)):
                raise TooLate(key)
        else:
            self._note("effect", key, op)
        time.sleep(self._job.work / 2)
        self._note("end", key, op)
        return {"key": key, "writer": op.token}

    def recover(self, key: str) -> Recovered[dict[str, Any]] | Verdict:
        op = current_operation()
        assert op is not None
        self._mine.op = op
        found = self._log.look(self._line("recover", key, op))
        return NOT_DONE if found is None else Recovered({"key": key, "writer": op.token})

    def ask(self, key: str) -> str:
        """Call the operation once. Returns the result as the ``what`` of its line in the log."""
        self._mine.op = None
        what, note = "answer", ""
        try:
            note = json.dumps(self._operation(key), sort_keys=True)
        except InProgress:
            what = "refused"
        except OutcomeUnknown as error:
            what, note = "unknown", str(error)
        except (LeaseLost, TooLate) as error:
            what, note = "lost", str(error)
        except StoreError as error:
            what, note = "store", f"{type(error).__name__}: {error}"
        self._note(what, key, self._mine.op, note)
        return what

    def storm(self, stopping: threading.Event, dice: random.Random) -> None:
        """Call the current keys, and older ones that killed or paused workers left, until ``stopping`` is set."""
        old = self._job.hot + int(self._job.rate * self._job.lease * 3)
        while not stopping.is_set():
            newest = int((time.time() - self._job.began) * self._job.rate)
            self.ask(str(max(0, newest - dice.randrange(old if dice.random() < 0.5 else self._job.hot))))
            time.sleep(0.01 * dice.random())

    def _note(self, what: str, key: str, op: OperationHandle | None, note: str = "") -> None:
        self._log.write(self._line(what, key, op, note))

    def _line(self, what: str, key: str, op: OperationHandle | None, note: str = "") -> Line:
        if op is None:
            return Line(what, key, os.getpid(), time.monotonic(), note=note)
        self._mine.op = op
        lease = op._lease
        now = time.monotonic()
        ends = lease.ends if lease is not None and not lease.lost else 0.0
        return Line(what, key, os.getpid(), now, op.token, op.attempt, ends, note)


def main() -> None:
    job = Job(**read_settings())
    stopping = threading.Event()
    end_with_parent(stopping.set)
    with Semel(open_job_store(job.store), sweep_every=None) as guard:
        hammer = Hammer(job, guard, EffectLog(Path(job.log)))
        if job.only:
            hammer.ask(job.only)
        else:
            work = partial(hammer.storm, stopping)
            run_threads(work, [f"{job.seed}/{i}" for i in range(job.threads)])


if __name__ == "__main__":
    main()
