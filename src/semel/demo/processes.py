"""The demo's worker processes: started, killed on purpose, replaced, and stopped.

A worker reads its standard input. The first line has its settings as JSON: the store's URL may hold a password, which
others could read among the arguments of a process. The next line asks it to finish. End of file means that the parent
died, and the worker ends too: no worker outlives the demo, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["WorkerPool"]

TICK: Final = 0.05


class WorkerPool:
    """The running workers of one module, and how those before them ended."""

    def __init__(self, module: str, log: Path, pass_fds: Sequence[int] = ()) -> None:
        """
        :param module: run as ``python -m module``.
        :param log: the file that gets what the workers print.
        :param pass_fds: file descriptors that the workers inherit.
        """
        self.kills = 0
        """WorkerPool that a signal ended, from here or by their own hand."""
        self.crashes = 0
        """WorkerPool that exited with an error."""
        self._module = module
        self._log = log
        self._pass_fds = tuple(pass_fds)
        self.running: list[subprocess.Popen[bytes]] = []

    def __len__(self) -> int:
        return len(self.running)

    def start(self, settings: dict[str, Any]) -> None:
        """Start one worker."""
        command = [sys.executable, "-m", self._module]
        with self._log.open("ab") as log:
            # In a process group of its own: Ctrl-C reaches only the parent, which lets the workers finish.
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, bufsize=0, process_group=0,
                pass_fds=self._pass_fds,
            )  # fmt: skip
        self.running.append(worker)
        self._write(worker, json.dumps(settings))

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
            self._write(worker, "stop")

    def _write(self, worker: subprocess.Popen[bytes], line: str) -> None:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died a moment ago
            worker.stdin.write(line.encode() + b"\n")

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
