"""Services that are not ours, as their documentation describes them, and the settings of the client that suit them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from time import time
from typing import Any

import pytest

from semel.client import RETRIED_STATUSES, Retry
from tests.client.clients import CLIENTS, HANG_UP, Seen, Server, http

QUICK: dict[str, Any] = {"base": 0, "cap": 0, "quota": None}
JSON = "application/json"


@dataclass(frozen=True)
class Profile:
    """What one service does, on the wire."""

    settings: dict[str, Any]
    """Of the client."""
    header: str = "idempotency-key"
    key: str = r"[0-9a-f-]{36}"
    """What the service accepts as the value of the header."""
    in_use: bytes = http(409)
    """While the first request runs."""
    replay: dict[str, str] = field(default_factory=dict)
    """Headers that tell a replay."""
    reused: bytes = http(422)
    """The same key with another body."""
    busy: bytes = http(429)
    """Too many requests: not executed."""
    status: int = 201
    replay_status: int = 201


PROFILES = {
    # 409 without Retry-After while the first request runs, and another body is a 400. Stripe-Should-Retry is a hint.
    "Stripe": Profile(
        {"retry": Retry(statuses={*RETRIED_STATUSES, 409}, **QUICK)},
        in_use=http(409, b'{"error": {"type": "idempotency_error"}}', Content_Type=JSON),
        replay={"Idempotent-Replayed": "true"},
        reused=http(400, b'{"error": {"type": "idempotency_error"}}', Content_Type=JSON),
        busy=http(429, Stripe_Should_Retry="true"),
        status=200,
        replay_status=200,
    ),
    # Another header; "might fail the second request" while the first runs; a repeat has the latest status, as a 200.
    "PayPal": Profile(
        {"header": "PayPal-Request-Id", "retry": Retry(statuses={*RETRIED_STATUSES, 409}, window="6h", **QUICK)},
        header="paypal-request-id",
        reused=http(422, b'{"name": "UNPROCESSABLE_ENTITY"}', Content_Type=JSON),
        replay_status=200,
    ),
    # 409 while the first request runs, 422 for another body; keys are kept for 24 hours.
    "Zuora": Profile({"retry": Retry(statuses={*RETRIED_STATUSES, 409}, window="24h", **QUICK)}),
    # 409 is final: another object has this key.
    "Increase": Profile(
        {"retry": Retry(**QUICK)},
        in_use=http(503),
        replay={"Idempotent-Replayed": "true"},
        reused=http(409, b'{"type": "idempotency_key_already_used_error"}', Content_Type=JSON),
        replay_status=200,
    ),
    # The draft standard in its strict form: the key is a quoted string.
    "the draft standard": Profile(
        {"quote_keys": True, "retry": Retry(statuses={*RETRIED_STATUSES, 409}, **QUICK)},
        key=r'"[0-9a-f-]{36}"',
        in_use=http(409, b'{"title": "outstanding"}', Content_Type="application/problem+json"),
    ),
    # A gateway in front of a service: 425 for early data, 429 with a date.
    "a gateway": Profile(
        {"retry": Retry(**QUICK)},
        in_use=http(425),
        busy=http(429, Retry_After=formatdate(time() - 60, usegmt=True)),
    ),
}


class Service:
    """Executes each key once. The answer to the first request is lost, and the next one finds it running."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.executed: dict[str, bytes] = {}
        self.requests = 0

    def __call__(self, seen: Seen) -> bytes:
        profile = self.profile
        self.requests += 1
        value = seen.headers.get(profile.header, "")
        if not re.fullmatch(profile.key, value):
            return http(400, b"no key")
        if self.requests == 1:
            return profile.busy
        if value not in self.executed:
            self.executed[value] = seen.body
            return HANG_UP
        if self.executed[value] != seen.body:
            return profile.reused
        if self.requests == 3:
            return profile.in_use
        return http(profile.replay_status, b'{"id": 7}', Content_Type=JSON, **profile.replay)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("api", PROFILES)
def test_it_works_as_configured(server: Server, name: str, api: str) -> None:
    profile = PROFILES[api]
    service = Service(profile)
    server.script = [service]
    client = CLIENTS[name](**profile.settings)
    try:
        found = client.send("POST", f"{server.url}/v1/payments", b'{"amount": 10}', {"Content-Type": JSON})
        assert (found.status, found.receipt.outcome, found.receipt.attempts) == (profile.replay_status, "succeeded", 4)
        assert found.receipt.replayed == bool(profile.replay)
        assert list(service.executed.values()) == [b'{"amount": 10}']

        (value,) = service.executed
        reused = client.send("POST", f"{server.url}/v1/payments", b'{"amount": 20}', {profile.header: value})
        assert reused.receipt.outcome == ("rejected" if reused.status in (400, 422) or api == "Increase" else "unknown")
        assert len(service.executed) == 1
    finally:
        client.close()
