"""A storm straight on the store: processes call a protected function beside a ledger.

Workers are killed and replaced, then everything that was started is finished, then the verdict follows.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from semel.demo.evidence import Ledger, Rows, Totals, unsettled
from semel.demo.processes import WorkerPool
from semel.demo.screen import Stopping, StormVerdict
from semel.demo.worker import OPERATION, key_of

TICK: Final = 0.1
"""Seconds between two updates of the screen."""
THREADS: Final = 4
RATE: Final = 100.0
"""New payments each second. Payments that no client gets to are not counted."""
KILL_EVERY: Final = 0.7
"""Seconds between kills, on average. Workers also kill themselves at chosen places."""
GATHER: Final = 10.0
"""Seconds for the first workers to start."""
CALM: Final = 10.0
"""Seconds for the workers to finish."""
FINISH: Final = 30.0
"""Seconds for the last worker, which finishes everything."""


class Storm:
    """One storm. It is also what the screen shows."""

    def __init__(
        self,
        folder: Path,
        store: str,
        *,
        seconds: float,
        workers: int,
        seed: int,
        mode: str,
        sabotage: str,
        number: int,
    ) -> None:
        scheme = urlsplit(store).scheme
        self.title = (
            f"semel demo · storm {number} · {mode} · {scheme} · {workers} workers × {THREADS} clients · seed {seed}"
        )
        self.phase = "storm"
        self.effects = 0
        self.seconds = seconds
        self._folder = folder
        self._store = store
        self._workers = workers
        self._run = secrets.token_hex(4)
        self._dice = random.Random(seed)
        self._start = time.monotonic()
        self._numbers = 0
        self._settings = {
            "folder": str(folder), "store": store, "run": self._run, "seed": seed, "threads": THREADS,
            "began": time.time(), "rate": RATE, "sabotage": sabotage, "mode": mode,
        }  # fmt: skip
        self._pool = WorkerPool("semel.demo.worker", folder / "workers.log")
        self.tally = Totals(folder)
        self._ledger: Ledger | Rows = Ledger(str(folder / "ledger.db"))
        if mode == "transactional":
            self._ledger.close()
            self._ledger = rows = Rows(store, self._run)
            rows.prepare()

    @property
    def kills(self) -> int:
        return self._pool.kills

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def numbers(self) -> list[tuple[str, int]]:
        counts = self.tally.counts
        return [
            ("operations", len(self.tally.answers)),
            ("attempts", counts["attempts"]),
            ("effects", self.effects),
            ("replays", counts["replays"]),
            ("refused", counts["refused"]),
            ("kills", self.kills),
            ("take-overs", counts["takeovers"]),
            ("recovered", counts["recovered"]),
        ]

    def run(self, stopping: Stopping, show: Callable[[Storm], None]) -> StormVerdict:
        """Run until the time is over or ``stopping`` is set; then calm, finish and judge."""
        try:
            self._rage(stopping, show)
            self._calm(show)
            self._finish(show)
            return self._judge()
        finally:
            self._pool.kill_all()
            self._ledger.close()

    def _rage(self, stopping: Stopping, show: Callable[[Storm], None]) -> None:
        self._gather(stopping, show)
        end = self._start + self.seconds
        next_kill = self._start + min(KILL_EVERY, self.seconds / 4)
        while time.monotonic() < end and not stopping.is_set():
            self._pool.reap()
            while len(self._pool) < self._workers:
                self._spawn(finishing=False)
            if time.monotonic() >= next_kill:
                self._pool.kill_one(self._dice)
                next_kill = time.monotonic() + KILL_EVERY * (0.5 + self._dice.random())
            self._look(show)
            stopping.wait(TICK)

    def _gather(self, stopping: Stopping, show: Callable[[Storm], None]) -> None:
        """Wait for the first call of a client; the clock starts then."""
        end = self._start + GATHER
        while len(self._pool) < self._workers:
            self._spawn(finishing=False)
        while not self.tally.begun and time.monotonic() < end and not stopping.is_set():
            self._look(show)
            stopping.wait(TICK / 2)
        self._start = time.monotonic()

    def _calm(self, show: Callable[[Storm], None]) -> None:
        """Stop killing, and let the workers finish."""
        self.seconds = min(self.seconds, self.elapsed)  # it may have been stopped
        self.phase = "calm"
        self._pool.ask_to_finish()
        self._pool.wait(CALM, lambda: self._look(show))

    def _finish(self, show: Callable[[Storm], None]) -> None:
        """Request every payment once more, like clients that come back later."""
        self.phase = "finish"
        self._look(show)
        unfinished = self.tally.begun - self.tally.answers.keys()
        (self._folder / "finish.json").write_text(
            json.dumps([*sorted(self.tally.begun - unfinished), *sorted(unfinished)])
        )
        self._spawn(finishing=True)
        self._pool.wait(FINISH, lambda: self._look(show))

    def _judge(self) -> StormVerdict:
        """Compare the ledger with what the clients saw."""
        seconds, tally = self.elapsed, self.tally
        tally.update()
        effects = self._ledger.effects()
        per_effect = Counter((effect.payment, effect.what) for effect in effects)
        charged = {
            effect.payment: {"payment": effect.payment, "amount": effect.amount, "receipt": effect.receipt}
            for effect in effects
            if effect.what == "charge"
        }
        shipped = {effect.payment: effect.receipt for effect in effects if effect.what == "ship"}
        for payment in charged.keys() & shipped.keys():
            charged[payment]["parcel"] = shipped[payment]
        unfinished = tally.begun - tally.answers.keys()
        without_line = tally.answers.keys() - charged.keys()
        mismatched = tally.mismatched | {
            payment for payment in tally.answers.keys() & charged.keys() if tally.answer(payment) != charged[payment]
        }
        return StormVerdict.counted(
            tally.counts,
            operations=len(tally.begun),
            effects=len(effects),
            kills=self.kills,
            crashes=self._pool.crashes,
            duplicates=len({payment for (payment, _), count in per_effect.items() if count > 1}),
            lost=len(unfinished | without_line | mismatched),
            mismatched=len(mismatched),
            unsettled=unsettled(self._store, OPERATION, (key_of(self._run, payment) for payment in tally.begun)),
            repeated=tally.repeated(),
            disordered=sum(
                payment not in charged or receipt < charged[payment]["receipt"] for payment, receipt in shipped.items()
            ),
            seconds=seconds,
        )

    def last_lines(self) -> str:
        """The end of what the workers printed."""
        return self._pool.last_lines()

    def _spawn(self, *, finishing: bool) -> None:
        self._numbers += 1
        self._pool.start({**self._settings, "number": self._numbers, "finishing": finishing})

    def _look(self, show: Callable[[Storm], None]) -> None:
        self.tally.update()
        self.effects = self._ledger.count()
        show(self)
