"""The storm's HTTP clients: many payments, each with its key, retried until there is an answer.

They do what clients do: send duplicates at the same time, stop waiting and retry, come back later, always with the same
key and the same bytes. The verdict is based on what they saw, not on what Semel says.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any, Final, NamedTuple

__all__ = ["Clients", "Order", "Seen"]

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
        """asked, first, replay, refused (409), failed (5xx), broken (no answer), hung_up, refusals (402)."""
        self.begun: dict[int, Order] = {}
        self.answers: dict[int, tuple[int, bytes]] = {}
        """Status and body of the first answer for each payment."""
        self.mismatched: set[int] = set()
        """Payments with two different answers."""
        self.strange: Counter[int] = Counter()
        """Unexpected statuses."""

    def answered(self, order: Order, status: int, body: bytes, replayed: bool) -> None:
        self.counts["replay" if replayed else "first"] += 1
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
        counts["asked"] += 1
        try:
            answer = await http.post(
                "/payments", content=order.body, headers={"Idempotency-Key": order.key},
                timeout=HASTY_TIMEOUT if hasty else TIMEOUT,
            )  # fmt: skip
        except httpx.TimeoutException:
            counts["hung_up"] += 1
            return False
        except httpx.TransportError:  # the worker was killed, before or after the payment
            counts["broken"] += 1
            return False
        status: int = answer.status_code
        if status in (201, DECLINED):
            self.seen.answered(order, status, answer.content, "Idempotent-Replayed" in answer.headers)
            return True
        if status == 409:
            counts["refused"] += 1
        elif status >= 500:
            counts["failed"] += 1
        else:
            self.seen.strange[status] += 1
        return False
