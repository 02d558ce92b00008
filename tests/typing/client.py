"""The clients as a type checker sees them: ``make check`` reads this file, and nobody runs it."""

from pathlib import Path
from typing import Literal, assert_type

import aiohttp
import httpx
import requests
import urllib3

from semel import KeyRing, NoAnswer
from semel.client import RETRIED_STATUSES, Entry, Journal, JournalReport, Receipt, Retry, RetryQuota
from semel.client.aiohttp import IdempotencyClientMiddleware
from semel.client.httpx import AsyncIdempotencyTransport, IdempotencyTransport
from semel.client.requests import IdempotencyAdapter
from semel.client.urllib3 import IdempotencyPoolManager

retry = Retry(attempts=3, time="30s", base=0.1, cap=5, window="24h", statuses={*RETRIED_STATUSES, 409})
Retry(quota=None)
Retry(quota=RetryQuota(100, cost=5, refund=1))
Retry(3)  # type: ignore[call-arg]
Retry(tries=3)  # type: ignore[call-arg]


def sync(path: Path) -> None:
    transport = IdempotencyTransport(httpx.HTTPTransport(), retry=retry, journal=path, hosts=["orders.internal"])
    with httpx.Client(transport=transport) as client:
        assert_type(transport.resume(client), JournalReport)
        assert_type(transport.resume(progress=lambda report: print(len(report))), JournalReport)
    IdempotencyTransport(httpx.AsyncHTTPTransport())  # type: ignore[arg-type]
    IdempotencyTransport(header="PayPal-Request-Id", quote_keys=True, new_key=lambda: "k", methods={"PUT"})
    IdempotencyTransport(keys=True)  # type: ignore[call-arg]

    adapter = IdempotencyAdapter(journal="calls.db", retry=retry)
    session = requests.Session()
    session.mount("https://", adapter)
    assert_type(adapter.resume(session), JournalReport)

    http = IdempotencyPoolManager(10, {"Accept": "*/*"}, timeout=3, journal="calls.db")
    assert_type(http.request("POST", "http://a.example"), urllib3.BaseHTTPResponse)
    assert_type(http.resume({"Authorization": "…"}), JournalReport)


async def asynchronous() -> None:
    transport = AsyncIdempotencyTransport(journal="calls.db")
    async with httpx.AsyncClient(transport=transport) as client:
        assert_type(await transport.resume(client), JournalReport)
    middleware = IdempotencyClientMiddleware(retry=retry)
    async with aiohttp.ClientSession(middlewares=[middleware]) as session:
        assert_type(await middleware.resume(session), JournalReport)


def told(receipt: Receipt, error: NoAnswer, report: JournalReport) -> None:
    assert_type(receipt.outcome, Literal["succeeded", "rejected", "unknown"])
    assert_type(receipt.key, str)
    assert_type(error.key, str)
    assert_type(error.attempts, int)
    assert_type(report.unknown, list[Entry])


with Journal("calls.db", cipher=KeyRing({"a": b""}), headers=["X-Tenant"], max_bytes=1000) as journal:
    assert_type(journal, Journal)
    assert_type(journal.entries(), list[Entry])
    assert_type(journal.forget("k"), int)
