"""Libraries that retry for any request: what they do about a service with keys, as they come and as our page sets them.

The page is docs/how-to/write-a-client.md. The first answer is lost, the second says that the first request still runs,
the third is the replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import httpx
import pytest
import requests
import urllib3
from requests.adapters import HTTPAdapter

from tests.client.clients import HANG_UP, Server, http, problem

HEADERS = {"Idempotency-Key": "pay-7", "Content-Type": "application/json"}
BODY = b'{"amount": 10}'
STATUSES = {408, 409, 425, 429, 500, 502, 503, 504}
NOTHING = -1
"""No answer at all: the library raised."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server([HANG_UP, problem(409, True, Retry_After="0"), http(201, Idempotent_Replayed="true")])
    yield server
    server.close()


def with_urllib3(url: str, tuned: bool) -> int:
    retry = urllib3.Retry(5, allowed_methods={"POST"}, status_forcelist=STATUSES) if tuned else urllib3.Retry(5)
    with urllib3.PoolManager(retries=retry) as client:
        try:
            return client.request("POST", url, body=BODY, headers=HEADERS).status
        except urllib3.exceptions.HTTPError:
            return NOTHING


def with_requests(url: str, tuned: bool) -> int:
    retry = urllib3.Retry(5, allowed_methods={"POST"}, status_forcelist=STATUSES) if tuned else urllib3.Retry(5)
    with requests.Session() as client:
        client.trust_env = False
        client.mount("http://", HTTPAdapter(max_retries=retry))
        try:
            return client.post(url, data=BODY, headers=HEADERS).status_code
        except requests.RequestException:
            return NOTHING


def with_httpx_retries(url: str, tuned: bool) -> int:
    httpx_retries = pytest.importorskip("httpx_retries")
    settings: dict[str, Any] = {"allowed_methods": ["POST"], "status_forcelist": STATUSES} if tuned else {}
    transport = httpx_retries.RetryTransport(retry=httpx_retries.Retry(total=5, **settings))
    with httpx.Client(transport=transport) as client:
        try:
            return client.post(url, content=BODY, headers=HEADERS).status_code
        except httpx.TransportError:
            return NOTHING


def with_aiohttp_retry(url: str, tuned: bool) -> int:
    aiohttp_retry = pytest.importorskip("aiohttp_retry")
    settings: dict[str, Any] = {}
    if tuned:
        settings = {"methods": {"POST"}, "statuses": STATUSES, "exceptions": {aiohttp.ClientError, TimeoutError}}

    async def main() -> int:
        options = aiohttp_retry.ExponentialRetry(attempts=5, start_timeout=0.001, **settings)
        async with aiohttp_retry.RetryClient(retry_options=options) as client:
            try:
                async with client.post(url, data=BODY, headers=HEADERS) as response:
                    return int(response.status)
            except aiohttp.ClientError:
                return NOTHING

    return asyncio.run(main())


def with_tenacity(url: str, tuned: bool) -> int:
    tenacity = pytest.importorskip("tenacity")
    retried = tenacity.retry_if_exception_type(httpx.TransportError)
    if tuned:
        retried |= tenacity.retry_if_result(lambda answer: answer.status_code in STATUSES)

    with httpx.Client() as client:

        @tenacity.retry(  # type: ignore[untyped-decorator]
            retry=retried,
            wait=tenacity.wait_random_exponential(multiplier=0.001, max=0.01),
            stop=tenacity.stop_after_attempt(8),
            retry_error_callback=lambda state: state.outcome.result(),
        )
        def send() -> httpx.Response:
            return client.post(url, content=BODY, headers=HEADERS)

        return int(send().status_code)


LIBRARIES: dict[str, tuple[Callable[[str, bool], int], int]] = {
    "urllib3": (with_urllib3, NOTHING),
    "requests": (with_requests, NOTHING),
    "httpx-retries": (with_httpx_retries, NOTHING),
    "aiohttp-retry": (with_aiohttp_retry, NOTHING),
    "tenacity": (with_tenacity, 409),
}
"""Each with what it ends in as it comes."""


@pytest.mark.parametrize("library", LIBRARIES)
def test_as_it_comes_it_reports_a_failure_although_the_payment_exists(server: Server, library: str) -> None:
    call, ends_in = LIBRARIES[library]
    assert call(server.url, False) == ends_in


@pytest.mark.parametrize("library", LIBRARIES)
def test_with_the_settings_of_our_page_it_gets_the_answer(server: Server, library: str) -> None:
    call, _ = LIBRARIES[library]
    assert call(server.url, True) == 201
    assert server.keys == ["pay-7"] * 3
    assert [seen.body for seen in server.seen] == [BODY] * 3
