"""The program of the worker processes of ``semel.testing.faults``: threads that call one operation on shared keys.

``python -m semel.testing.hammer`` reads its job as a line of JSON from its standard input. It runs until it reads
another line, or until the input closes because the parent died. Everything it does is written to the effect log, which
Semel never reads. The test's own process uses the same class to finish the keys that the workers left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from semel.core.call import NOT_DONE, Recovered, Verdict
from semel.engine.operation import INJECTED, Operation, OperationHandle, current_operation
from semel.engine.ports import Store
from semel.errors import InProgress, LeaseLost, OutcomeUnknown, StoreError
from semel.stores.guard import Semel
from semel.stores.urls import open_store
from semel.testing.effects import EffectLog, Line

__all__ = ["OPERATION", "Hammer", "HammerPolicy", "Job", "open_job_store"]

OPERATION: Final = "hammer"
CRASHED: Final = 70
"""The exit code of a worker in which a caller met an unexpected error."""
HammerPolicy: TypeAlias = Literal["retry", "recover", "at_most_once"]
_POLICIES: Final[dict[str, dict[str, Any]]] = {
    "retry": {"on_abandoned": "retry"},
    "recover": {},
    "at_most_once": {"guarantee": "at_most_once"},
}


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


def main() -> int:
    job = Job(**json.loads(sys.stdin.readline()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping = threading.Event()
    threading.excepthook = _crash
    threading.Thread(target=_listen, args=(stopping,), daemon=True).start()
    log = EffectLog(Path(job.log))
    with Semel(open_job_store(job.store), sweep_every=None) as guard:
        hammer = Hammer(job, guard, log)
        if job.only:
            hammer.ask(job.only)
            return 0
        dice = [random.Random(f"{job.seed}/{i}") for i in range(job.threads)]
        threads = [threading.Thread(target=hammer.storm, args=(stopping, each)) for each in dice]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return 0


def _crash(args: threading.ExceptHookArgs) -> None:
    """Report an unexpected error of a thread by the exit code. Otherwise the worker would only seem idle."""
    traceback.print_exception(args.exc_value)
    os._exit(CRASHED)


def _listen(stopping: threading.Event) -> None:
    for _ in sys.stdin:
        stopping.set()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
