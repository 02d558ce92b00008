"""One storm: worker processes that are killed and replaced, then everything begun is finished, then the verdict.

The workers die with this process, however it ends: each reads its standard input, which closes when we do.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from semel.cli.demo.ledger import Ledger
from semel.cli.demo.rows import Rows
from semel.cli.demo.sightings import Tally
from semel.cli.demo.till import OPERATION, key_of
from semel.cli.demo.verdict import Verdict, judge
from semel.core.states import State
from semel.engine.sync import Semel
from semel.errors import StoreError
from semel.stores.urls import open_store

__all__ = ["Storm"]

TICK: Final = 0.1
"""Seconds between two looks, each of which is shown."""
THREADS: Final = 4
RATE: Final = 100.0
"""New payments each second; what the clients do not get to is never asked for, and not counted."""
KILL_EVERY: Final = 0.7
"""Seconds, on average, between the kills from here; workers die at chosen places besides."""
GATHER: Final = 10.0
"""Seconds that the first workers have to start."""
CALM: Final = 10.0
"""Seconds that the workers have to end what they are doing."""
FINISH: Final = 30.0
"""Seconds that the finishing worker has."""


class Storm:
    """Run once. It is its own view for the screen."""

    def __init__(
        self,
        folder: Path,
        store: str,
        *,
        seconds: float,
        workers: int,
        seed: int,
        mode: str = "leased",
        sabotage: str = "",
        number: int = 1,
    ) -> None:
        scheme = urlsplit(store).scheme
        self.title = (
            f"semel demo · storm {number} · {mode} · {scheme} · {workers} workers × {THREADS} clients · seed {seed}"
        )
        self.phase = "storm"
        self.kills = 0
        self.effects = 0
        self.seconds = seconds
        self._folder = folder
        self._store = store
        self._workers = workers
        self._seed = seed
        self._mode = mode
        self._sabotage = sabotage
        self._run = secrets.token_hex(4)
        self._dice = random.Random(seed)
        self._began = time.time()
        self._start = time.monotonic()
        self._numbers = 0
        self._crashes = 0
        self._running: list[subprocess.Popen[bytes]] = []
        self.tally = Tally(folder)
        self._ledger: Ledger | Rows = Ledger(str(folder / "ledger.db"))
        if mode == "transactional":
            self._ledger.close()
            self._ledger = rows = Rows(store, self._run)
            rows.prepare()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def numbers(self) -> list[tuple[str, int]]:
        counts = self.tally.counts
        return [
            ("operations", len(self.tally.answers)),
            ("attempts", counts["attempt"]),
            ("effects", self.effects),
            ("replays", counts["replay"]),
            ("refused", counts["refused"]),
            ("kills", self.kills),
            ("take-overs", counts["taken_over"]),
            ("recovered", counts["recovered"]),
        ]

    def run(self, stopping: threading.Event, show: Callable[[Storm], None]) -> Verdict:
        """The storm, until its time is over or ``stopping`` is set; then calm, finish, verdict."""
        try:
            self._rage(stopping, show)
            self._calm(show)
            self._finish(show)
            return self._judge()
        finally:
            self._end()
            self._ledger.close()

    def _rage(self, stopping: threading.Event, show: Callable[[Storm], None]) -> None:
        self._gather(stopping, show)
        end = self._start + self.seconds
        next_kill = self._start + min(KILL_EVERY, self.seconds / 4)
        while time.monotonic() < end and not stopping.is_set():
            self._reap()
            while len(self._running) < self._workers:
                self._spawn(finishing=False)
            if time.monotonic() >= next_kill:
                self._dice.choice(self._running).kill()
                next_kill = time.monotonic() + KILL_EVERY * (0.5 + self._dice.random())
            self._look(show)
            stopping.wait(TICK)

    def _gather(self, stopping: threading.Event, show: Callable[[Storm], None]) -> None:
        """The clock starts when the first client has asked for something."""
        end = self._start + GATHER
        while len(self._running) < self._workers:
            self._spawn(finishing=False)
        while not self.tally.begun and time.monotonic() < end and not stopping.is_set():
            self._look(show)
            stopping.wait(TICK / 2)
        self._start = time.monotonic()

    def _calm(self, show: Callable[[Storm], None]) -> None:
        """No more kills; the workers end what they are doing."""
        self.phase = "calm"
        for worker in self._running:
            self._tell(worker)
        self._wait(CALM, show)

    def _finish(self, show: Callable[[Storm], None]) -> None:
        """Clients that come back later: every payment that was begun is asked for once more."""
        self.phase = "finish"
        self._look(show)
        unfinished = self.tally.begun - self.tally.answers.keys()
        (self._folder / "finish.json").write_text(
            json.dumps([*sorted(self.tally.begun - unfinished), *sorted(unfinished)])
        )
        self._spawn(finishing=True)
        self._wait(FINISH, show)

    def _judge(self) -> Verdict:
        seconds = self.elapsed
        self.tally.update()
        with Semel(open_store(self._store), sweep_every=None) as guard:

            def is_done(payment: int) -> bool:
                try:
                    record = guard.lookup(OPERATION, key_of(self._run, payment))
                except StoreError:
                    return False
                return record is not None and record.state is State.DONE

            return judge(
                self.tally, self._ledger.effects(), self.kills, self._crashes, seconds, is_done,
                steps=self._mode == "steps",
            )  # fmt: skip

    def _spawn(self, *, finishing: bool) -> None:
        self._numbers += 1
        config: dict[str, Any] = {
            "folder": str(self._folder),
            "store": self._store,
            "run": self._run,
            "number": self._numbers,
            "seed": self._seed,
            "threads": THREADS,
            "began": self._began,
            "rate": RATE,
            "finishing": finishing,
            "sabotage": self._sabotage,
            "mode": self._mode,
        }
        command = [sys.executable, "-m", "semel.cli.demo.worker", json.dumps(config)]
        with (self._folder / "workers.log").open("ab") as log:
            # Out of our process group: Ctrl-C is for us, and we end the workers when their work is in order.
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, bufsize=0, process_group=0
            )
        self._running.append(worker)

    def _tell(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died a moment ago
            worker.stdin.write(b"stop\n")

    def _reap(self) -> None:
        for worker in self._running[:]:
            code = worker.poll()
            if code is not None:
                self._running.remove(worker)
                assert worker.stdin is not None
                worker.stdin.close()
                self.kills += code < 0
                self._crashes += code > 0

    def _wait(self, seconds: float, show: Callable[[Storm], None]) -> None:
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            self._reap()
            self._look(show)
            time.sleep(TICK / 2)
        self._end()

    def _look(self, show: Callable[[Storm], None]) -> None:
        self.tally.update()
        self.effects = self._ledger.count()
        show(self)

    def _end(self) -> None:
        """No worker outlives the storm."""
        for worker in self._running:
            worker.kill()
        for worker in self._running:
            worker.wait()
        self._reap()
