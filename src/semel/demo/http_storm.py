"""A storm over HTTP: clients send requests while workers are killed; then a calm, a last round, and the verdict.

The evidence is what the clients saw and the rows of the service. Each payment has its own customer, so a second row of
the same payment is found whatever its id is.

The clients do what clients do: send duplicates at the same time, stop waiting and retry, come back later, always with
the same key and the same bytes.
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
from typing import Any, Final, NamedTuple

from semel.demo.evidence import unsettled
from semel.demo.payments.data import QUERIES
from semel.demo.payments.service import Service
from semel.demo.screen import Stopping, StormVerdict
from semel.errors import StoreError
from semel.sql.program import Program, Rows, Statement

TICK: Final = 0.1
LOOK: Final = 0.5
"""Seconds between two reads of the service's tables."""
KILL_EVERY: Final = 1.5
"""Seconds between kills, on average. Requests that ask for a crash kill workers too."""
GATHER: Final = 10.0
"""Seconds for the first payment to be sent."""
ENDING: Final = 60.0
"""Seconds for clients to finish. They give up a payment after half of that."""
CLIENTS: Final = 16
"""Payments in flight at the same time."""
TIMEOUT: Final = 10.0
HASTY: Final = 0.03
"""Share of requests whose client hangs up almost at once."""
HASTY_TIMEOUT: Final = 0.03
DUPLICATES: Final = 3
"""The most copies of a request that are sent at the same time."""
COMING_BACK: Final = 0.25
"""Share of clients that ask for an earlier payment."""
PATIENCE: Final = 20.0
"""Seconds after which a client gives up a payment. It then counts as lost."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 0.8
"""Seconds between two tries, at most. The storm's clients ignore Retry-After."""
AT_ONCE_AT_LAST: Final = 16
CRASHES: Final = 30
"""One in this many payments kills its worker, in turn after and before its row is written."""
DECLINED: Final = 402
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
        kill_every: float,
        number: int,
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
            ("requests", counts["calls"]),
            ("rows", self.effects),
            ("replays", counts["replays"]),
            ("refused", counts["refused"]),
            ("kills", self.kills),
            ("take-overs", self._executions["takeovers"]),
            ("found done", self._executions["recovered"]),
        ]

    def run(self, stopping: Stopping, show: Callable[[HTTPStorm], None]) -> StormVerdict:
        """Run until the time is over or ``stopping`` is set; then calm, a last round, and the verdict."""
        clients = _Loop(self._clients.storm())
        while not self._clients.seen.begun and self.elapsed < GATHER and clients.is_alive() and not stopping.is_set():
            stopping.wait(TICK)
        self._start = time.monotonic()  # the clock starts with the first payment
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
        return StormVerdict.counted(
            seen.counts + executions,
            operations=len(seen.begun),
            effects=len(rows),
            declined=sum(status == DECLINED for status, _ in seen.answers.values()),
            kills=self.kills,
            crashes=self._service.workers.crashes - self._before[1] + seen.strange.total(),
            duplicates=sum(count > 1 for count in per_customer.values()),
            lost=len(lost | mismatched),
            mismatched=len(mismatched),
            unsettled=unsettled(self._service.store, OPERATION, (order.key for order in seen.begun.values()), TENANT),
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
    """How many executions the service noted, by the names of the verdict."""
    found: Counter[str] = Counter()
    for what, attempt, count in rows:
        found["attempts" if what == "run" else "recovered"] += count
        if what == "run" and attempt > 1:
            found["takeovers"] += count
    return found


def _matches(body: bytes, made: dict[str, Any]) -> bool:
    """Whether the answer matches this row."""
    try:
        content = json.loads(body)
    except ValueError:
        return False
    return {name: content.get(name) for name in made} == made


class Order(NamedTuple):
    """One payment. Every retry sends the same bytes."""

    number: int
    key: str
    customer: str
    """Unique to this payment, so the rows of the service show how often it was made."""
    amount: int
    body: bytes


def make_order(run: str, number: int, seed: int) -> Order:
    """The payment of this number. The seed decides what happens to it."""
    chance = random.Random(f"{seed}/{number}")
    fate = chance.random()
    simulate: dict[str, Any] = {"delay_ms": chance.randrange(30)}
    if number % CRASHES == 17:
        simulate["crash"] = "after" if number % (2 * CRASHES) == 17 else "before"
    elif fate < 0.08:
        simulate["status"] = DECLINED
    elif fate < 0.10:
        simulate["delay_ms"] = 2500  # longer than a lease, so it must be renewed
    elif fate < 0.15:
        simulate["stream"] = True
    elif fate < 0.18:
        simulate["body_bytes"] = 50_000
    amount = 100 + number * 37 % 900
    customer = f"{run}-{number}"
    content = {"amount": amount, "currency": "EUR", "customer": customer, "simulate": simulate}
    return Order(number, f"{run}-{number}", customer, amount, json.dumps(content).encode())


class Seen:
    """What all clients saw, together."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """calls, first, replays, refused (409), store_errors (5xx), failures (no answer, or not in time)."""
        self.begun: dict[int, Order] = {}
        self.answers: dict[int, tuple[int, bytes]] = {}
        """Status and body of the first answer for each payment."""
        self.mismatched: set[int] = set()
        """Payments with two different answers."""
        self.strange: Counter[int] = Counter()
        """Unexpected statuses."""

    def answered(self, order: Order, status: int, body: bytes, replayed: bool) -> None:
        self.counts["replays" if replayed else "first"] += 1
        if self.answers.setdefault(order.number, (status, body)) != (status, body):
            self.mismatched.add(order.number)


class Clients:
    """All clients of a storm. They run in their own event loop; ``stop`` may be called from any thread."""

    def __init__(self, url: str, run: str, seed: int, *, pace: float) -> None:
        """:param pace: new payments each second, at most."""
        self.seen = Seen()
        self._url = url
        self._run = run
        self._seed = seed
        self._pace = pace
        self._numbers = 0
        self._stopping = False
        self._dice = random.Random(seed)

    def stop(self) -> None:
        """Start no new payments, and finish those that were started. No client hangs up from now on."""
        self._stopping = True

    async def storm(self) -> None:
        """Send payments until ``stop``."""
        async with self._connect() as http:
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))

    async def finish(self) -> None:
        """Request every payment once more, like clients that come back later."""
        orders = list(self.seen.begun.values())

        async def take(http: Any) -> None:
            while orders:
                await self._ask(http, orders.pop())

        async with self._connect() as http:
            await asyncio.gather(*(take(http) for _ in range(AT_ONCE_AT_LAST)))

    def _connect(self) -> Any:
        import httpx

        headers = {"Authorization": "Bearer sk_alice", "Content-Type": "application/json"}
        limits = httpx.Limits(max_connections=CLIENTS * DUPLICATES, max_keepalive_connections=CLIENTS)
        return httpx.AsyncClient(base_url=self._url, headers=headers, limits=limits, timeout=TIMEOUT, trust_env=False)

    async def _client(self, http: Any) -> None:
        while not self._stopping:
            if self.seen.begun and self._dice.random() < COMING_BACK:
                await self._ask(http, self._dice.choice(list(self.seen.begun.values())[-200:]))
            else:
                order = make_order(self._run, self._numbers, self._seed)
                self._numbers += 1
                self.seen.begun[order.number] = order
                copies = self._dice.randint(1, DUPLICATES)
                await asyncio.gather(*(self._ask(http, order) for _ in range(copies)))
            await asyncio.sleep(2 * CLIENTS / self._pace * self._dice.random())

    async def _ask(self, http: Any, order: Order) -> None:
        """Retry with the same key until there is a final answer."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE
        pause = FIRST_PAUSE
        while loop.time() < give_up:
            if await self._try(http, order):
                return
            await asyncio.sleep(pause * self._dice.random())
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try(self, http: Any, order: Order) -> bool:
        import httpx

        hasty = not self._stopping and self._dice.random() < HASTY
        counts = self.seen.counts
        counts["calls"] += 1
        try:
            answer = await http.post(
                "/payments", content=order.body, headers={"Idempotency-Key": order.key},
                timeout=HASTY_TIMEOUT if hasty else TIMEOUT,
            )  # fmt: skip
        except httpx.TransportError:  # the worker was killed, before or after the payment; or the client hung up
            counts["failures"] += 1
            return False
        status: int = answer.status_code
        if status in (201, DECLINED):
            self.seen.answered(order, status, answer.content, "Idempotent-Replayed" in answer.headers)
            return True
        if status == 409:
            counts["refused"] += 1
        elif status >= 500:
            counts["store_errors"] += 1
        else:
            self.seen.strange[status] += 1
        return False
