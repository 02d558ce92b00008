"""The demo's payments service for tests: processes on a socket, with a store and business rows of their own."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from semel.demo.payments.service import Service

ALICE = {"Authorization": "Bearer sk_alice"}
BOB = {"Authorization": "Bearer sk_bob"}
_numbers = itertools.count(1)


class Payments:
    """The running service and a client of it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.url = service.url
        # A worker may be killed at any moment: no connection is used twice.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(base_url=service.url, timeout=30, limits=limits, trust_env=False)

    def ask(
        self, method: str, path: str, json: Any = None, *, key: str | None = None, **headers: str
    ) -> httpx.Response:
        lines = {**ALICE, **{name.replace("_", "-"): value for name, value in headers.items()}}
        if key is not None:
            lines["Idempotency-Key"] = key
        return self.client.request(method, path, json=json, headers=lines)

    def pay(self, key: str | None = None, **content: Any) -> httpx.Response:
        return self.ask("POST", "/payments", order(**content), key=key or new_key())

    def until_answered(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """As a client does whose worker dies: the same request again, until there is an answer."""
        end = time.monotonic() + 60
        while True:
            self.service.tend()
            try:
                answer = send()
                if answer.status_code != 409:
                    return answer
            except httpx.TransportError:
                pass
            assert time.monotonic() < end, self.service.workers.last_lines()
            time.sleep(0.05)

    def stats(self) -> dict[str, int]:
        found: dict[str, int] = self.client.get("/stats").json()
        return found


def order(**content: Any) -> dict[str, Any]:
    return {"amount": 1250, "currency": "EUR", "customer": "ada", **content}


def new_key() -> str:
    return str(uuid.uuid4())


@contextmanager
def serving(folder: Path, store: str | None = None, *, workers: int = 1, mistake: str = "") -> Iterator[Payments]:
    home = folder / f"payments-{next(_numbers)}"
    home.mkdir()
    with Service(home, store, workers=workers, port=0, mistake=mistake) as service:
        payments = Payments(service)
        yield payments
        payments.client.close()
