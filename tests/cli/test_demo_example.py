"""examples/payments: the file is served as its page says, and does what the page says of each request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "payments"
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("example")
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(FOLDER), "app:app", "--port", "0"]
    env = {**os.environ, "PAYMENTS_DB": str(folder / "payments.db")}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    end, url = time.monotonic() + 30, None
    while url is None:
        line = process.stderr.readline()
        assert line, "it does not start"
        assert time.monotonic() < end
        url = re.search(r"running on (http://[\d.:]+)", line)
    with httpx.Client(base_url=url[1], headers={"Authorization": "Bearer sk_alice"}, trust_env=False) as client:
        yield client
    process.terminate()
    process.communicate(timeout=20)


ORDER = {"amount": 1250, "currency": "EUR", "customer": "ada"}


def test_a_payment_happens_once(shop: httpx.Client) -> None:
    key = {"Idempotency-Key": "order-1001"}
    first, again = (shop.post("/payments", json=ORDER, headers=key) for _ in range(2))
    assert (first.status_code, again.status_code, again.content) == (201, 201, first.content)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert [each["id"] for each in shop.get("/payments").json()].count(first.json()["id"]) == 1
    assert shop.post("/payments", json={**ORDER, "amount": 1}, headers=key).status_code == 422
    assert shop.post("/payments", json=ORDER).status_code == 400
    assert shop.post("/payments", json=ORDER, headers={**key, "Authorization": "Bearer sk_eve"}).status_code == 401
    bob = {**key, "Authorization": "Bearer sk_bob"}
    assert shop.post("/payments", json=ORDER, headers=bob).json()["id"] != first.json()["id"]


def test_the_other_writes_are_what_they_are_declared_to_be(shop: httpx.Client) -> None:
    made = shop.post("/payments", json=ORDER, headers={"Idempotency-Key": "order-1002"}).json()["id"]
    where = f"/payments/{made}"
    tag = shop.get(where).headers["ETag"]
    assert shop.patch(where, json={"customer": "bea"}).status_code == 428
    assert shop.patch(where, json={"customer": "bea"}, headers={"If-Match": '"99"'}).status_code == 412
    retried = {"If-Match": tag, "Idempotency-Key": "change-1"}
    answers = [shop.patch(where, json={"customer": "bea"}, headers=retried) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json() == shop.get(where).json()
    back = {"payment": made, "amount": 1000}
    refunds = [shop.post("/refunds", json=back, headers={"Idempotency-Key": key}) for key in ("r1", "r1", "r2")]
    assert [answer.status_code for answer in refunds] == [201, 201, 409]
    assert shop.get(where).json()["refunded"] == 1000
    assert [shop.put("/customers/c1", json={"name": "Ada"}).json() for _ in range(2)] == [
        {"id": "c1", "name": "Ada"}
    ] * 2
    assert [shop.delete(where).status_code for _ in range(2)] == [204, 204]
    assert shop.get(where).status_code == 404


def test_its_document_says_so(shop: httpx.Client) -> None:
    paths = shop.get("/openapi.json").json()["paths"]
    classes = {
        (method, path): operation["x-idempotency"]["class"]
        for path, item in paths.items()
        for method, operation in item.items()
        if "x-idempotency" in operation
    }
    assert classes == {
        ("post", "/payments"): "action",
        ("patch", "/payments/{id}"): "conditional",
        ("delete", "/payments/{id}"): "natural",
        ("post", "/refunds"): "action",
        ("put", "/customers/{id}"): "natural",
    }
