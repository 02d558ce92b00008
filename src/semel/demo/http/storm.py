"""A storm over HTTP: clients send requests while workers are killed; then a calm, a last round, and the verdict.

The evidence is what the clients saw and the rows of the service. Each payment has its own customer, so a second row of
the same payment is found whatever its id is.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from semel.demo.http.client import DECLINED, Clients
from semel.demo.http.service import Service
from semel.demo.payments.data import QUERIES
from semel.demo.screen import Stopping
from semel.demo.verdict import StormVerdict, unsettled
from semel.errors import StoreError
from semel.sql.program import Program, Rows, Statement

__all__ = ["HTTPStorm"]

TICK: Final = 0.1
LOOK: Final = 0.5
"""Seconds between two reads of the service's tables."""
KILL_EVERY: Final = 1.5
"""Seconds between kills, on average. Requests that ask for a crash kill workers too."""
ENDING: Final = 60.0
"""Seconds for clients to finish. They give up a payment after half of that."""
OPERATION: Final = "POST /payments"
TENANT: Final = "alice"


class HTTPStorm:
    """One storm. It is also what the screen shows."""

    def __init__(
        self,
        service: Service,
        *,
        seconds: float,
        seed: int,
        pace: float,
        kill_every: float = KILL_EVERY,
        number: int = 1,
    ) -> None:
        self.title = f"semel demo · storm {number} over HTTP · {service.store.partition(':')[0]} · seed {seed}"
        self.phase = "storm"
        self.seconds = seconds
        self.effects = 0
        self._service = service
        self._books = service.books
        self._run = f"storm-{secrets.token_hex(4)}"
        self._dice = random.Random(seed)
        self._kill_every = kill_every
        self._clients = Clients(service.url, self._run, seed, pace=pace)
        self._start = time.monotonic()
        self._look_at = 0.0
        self._executions: Counter[str] = Counter()
        self._before = (service.workers.kills, service.workers.crashes)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def kills(self) -> int:
        return self._service.workers.kills - self._before[0]

    def numbers(self) -> list[tuple[str, int]]:
        counts = self._clients.seen.counts
        return [
            ("payments", len(self._clients.seen.begun)),
            ("requests", counts["asked"]),
            ("rows", self.effects),
            ("replays", counts["replay"]),
            ("refused", counts["refused"]),
            ("kills", self.kills),
            ("take-overs", self._executions["taken_over"]),
            ("found done", self._executions["found"]),
        ]

    def run(self, stopping: Stopping, show: Callable[[HTTPStorm], None]) -> StormVerdict:
        """Run until the time is over or ``stopping`` is set; then calm, a last round, and the verdict."""
        clients = _Loop(self._clients.storm())
        next_kill = self._start + min(self._kill_every, self.seconds / 4)
        while self.elapsed < self.seconds and not stopping.is_set() and clients.is_alive():
            self._service.tend()
            if time.monotonic() >= next_kill:
                self._service.workers.kill_one(self._dice)
                next_kill = time.monotonic() + self._kill_every * (0.5 + self._dice.random())
            self._look(show)
            stopping.wait(TICK)
        self.seconds = min(self.seconds, self.elapsed)  # it may have been stopped
        self.phase = "calm"
        self._clients.stop()
        self._wait(clients, show)
        self.phase = "finish"
        self._wait(_Loop(self._clients.finish()), show)
        return self._judge()

    def _wait(self, clients: _Loop, show: Callable[[HTTPStorm], None]) -> None:
        end = time.monotonic() + ENDING
        while clients.is_alive() and time.monotonic() < end:
            self._service.tend()
            self._look(show)
            time.sleep(TICK)
        if clients.error is not None:
            raise clients.error

    def _look(self, show: Callable[[HTTPStorm], None]) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK
            try:
                self.effects = self._books.run(_rows("payments_count", self._run))[0][0]
                self._executions = _counted(self._books.run(_rows("executions_of", self._run)))
            except StoreError:
                pass  # the screen shows older figures
        show(self)

    def last_lines(self) -> str:
        """The end of what the service's processes printed."""
        return self._service.workers.last_lines()

    def _judge(self) -> StormVerdict:
        seconds, seen = self.elapsed, self._clients.seen
        rows = self._books.run(_rows("payments_of", self._run))
        executions = _counted(self._books.run(_rows("executions_of", self._run)))
        per_customer = Counter(customer for customer, _, _ in rows)
        made = {customer: {"id": id, "amount": amount} for customer, id, amount in rows}
        lost, mismatched = set(seen.begun.keys() - seen.answers.keys()), set(seen.mismatched)
        for number, (status, body) in seen.answers.items():
            customer = seen.begun[number].customer
            if (status == DECLINED) == (customer in made):
                lost.add(number)  # acknowledged without a row, or declined with one
            elif status != DECLINED and not _matches(body, made[customer]):
                mismatched.add(number)
        return StormVerdict(
            operations=len(seen.begun),
            calls=seen.counts["asked"],
            attempts=executions["run"],
            effects=len(rows),
            declined=sum(status == DECLINED for status, _ in seen.answers.values()),
            replays=seen.counts["replay"],
            takeovers=executions["taken_over"],
            recovered=executions["found"],
            refused=seen.counts["refused"],
            failures=seen.counts["broken"] + seen.counts["hung_up"],
            store_errors=seen.counts["failed"],
            kills=self.kills,
            crashes=self._service.workers.crashes - self._before[1] + seen.strange.total(),
            duplicates=sum(count > 1 for count in per_customer.values()),
            lost=len(lost | mismatched),
            mismatched=len(mismatched),
            unsettled=unsettled(
                self._service.store, OPERATION, (order.key for order in self._clients.seen.begun.values()), TENANT
            ),
            seconds=seconds,
        )


class _Loop(threading.Thread):
    """Runs a coroutine in an event loop of its own. It ends with the process, if not before."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        super().__init__(name="demo-clients", daemon=True)
        self._work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            asyncio.run(self._work)
        except BaseException as error:
            self.error = error


def _rows(query: str, beginning: str) -> Program[Rows]:
    statement: Statement = QUERIES[query](beginning=f"{beginning}-", length=len(beginning) + 1)
    return (yield statement)


def _counted(rows: Rows) -> Counter[str]:
    found: Counter[str] = Counter()
    for what, attempt, count in rows:
        found[what] += count
        if what == "run" and attempt > 1:
            found["taken_over"] += count
    return found


def _matches(body: bytes, made: dict[str, Any]) -> bool:
    """Whether the answer matches this row."""
    try:
        content = json.loads(body)
    except ValueError:
        return False
    return {name: content.get(name) for name in made} == made
