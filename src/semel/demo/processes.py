"""Worker processes: started, killed on purpose, replaced, and stopped; and how a worker follows its parent.

A worker reads its standard input. The first line has its settings as JSON: the store's URL may hold a password, which
others could read among the arguments of a process. The next line asks it to finish. End of file means that the parent
died, and the worker ends too: no worker outlives its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

TICK: Final = 0.05
CRASHED: Final = 70
"""The exit code of a worker in which a thread met an unexpected error."""


def start_worker(
    module: str, settings: dict[str, Any], log: Path, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``python -m module``. What it prints is appended to ``log``.

    The worker has a process group of its own: Ctrl-C reaches only the parent, which lets the workers finish.
    """
    with log.open("ab") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=output, stderr=output, bufsize=0,
            process_group=0, pass_fds=pass_fds,
        )  # fmt: skip
    tell(worker, json.dumps(settings))
    return worker


def tell(worker: subprocess.Popen[bytes], line: str) -> None:
    """Write a line to the worker's standard input: its settings first, then a word that asks it to finish."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died a moment ago
        worker.stdin.write(line.encode() + b"\n")


class WorkerPool:
    """The running workers of one module, and how those before them ended."""

    def __init__(self, module: str, log: Path, pass_fds: Sequence[int] = ()) -> None:
        """
        :param module: run as ``python -m module``.
        :param log: the file that gets what the workers print.
        :param pass_fds: file descriptors that the workers inherit.
        """
        self.kills = 0
        """Workers that a signal ended, from here or by their own hand."""
        self.crashes = 0
        """Workers that exited with an error."""
        self._module = module
        self._log = log
        self._pass_fds = tuple(pass_fds)
        self.running: list[subprocess.Popen[bytes]] = []

    def __len__(self) -> int:
        return len(self.running)

    def start(self, settings: dict[str, Any]) -> None:
        """Start one worker."""
        self.running.append(start_worker(self._module, settings, self._log, self._pass_fds))

    def kill_one(self, dice: random.Random) -> None:
        """Kill one without a warning, as the kernel would."""
        if self.running:
            dice.choice(self.running).kill()

    def reap(self) -> None:
        """Forget the workers that have ended, and count how they ended."""
        for worker in self.running[:]:
            code = worker.poll()
            if code is not None:
                self.running.remove(worker)
                assert worker.stdin is not None
                worker.stdin.close()
                self.kills += code < 0
                self.crashes += code > 0

    def ask_to_finish(self) -> None:
        """Ask all workers to finish what they are doing and exit."""
        for worker in self.running:
            tell(worker, "stop")

    def wait(self, seconds: float, watch: Callable[[], None] | None = None) -> None:
        """Wait for all workers to exit, and kill those that are left after this many seconds."""
        end = time.monotonic() + seconds
        while self.running and time.monotonic() < end:
            self.reap()
            if watch is not None:
                watch()
            time.sleep(TICK)
        self.kill_all()

    def kill_all(self) -> None:
        for worker in self.running:
            worker.kill()
        for worker in self.running:
            worker.wait()
        self.reap()

    def last_lines(self, count: int = 20) -> str:
        """The end of what the workers printed."""
        lines = self._log.read_text(errors="replace").splitlines()[-count:] if self._log.exists() else []
        return "\n".join(lines) or "(nothing was printed)"


# -- in a worker


def read_settings() -> dict[str, Any]:
    """Read the settings that the parent has written. From now on the parent decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    return settings


def end_with_parent(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the parent asks for it, and exit at once if the parent dies."""

    def listen() -> None:
        for _ in sys.stdin:
            stop()
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()


def run_threads(work: Callable[[random.Random], None], seeds: Iterable[str]) -> None:
    """Run ``work`` in a thread for each seed, with dice of its own. Returns when all have ended.

    An unexpected error ends the process with the exit code CRASHED. Otherwise the worker would only seem idle.
    """

    def run(seed: str) -> None:
        try:
            work(random.Random(seed))
        except BaseException:
            traceback.print_exc()
            os._exit(CRASHED)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
