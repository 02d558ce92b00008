"""Calls that an operation makes: a derived key and the lineage with no code at the call site, and only to named hosts.

The hosts are real servers, each on a port of its own. They record what reaches them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
import requests

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.client.aiohttp import IdempotencyClientMiddleware
from semel.client.httpx import AsyncIdempotencyTransport, IdempotencyTransport
from semel.client.requests import IdempotencyAdapter
from semel.client.retry import Retry
from semel.client.urllib3 import IdempotencyPoolManager

LINEAGE = ("Idempotency-Root", "Idempotency-Parent")
RETRY = Retry(attempts=1)


class Host(ThreadingHTTPServer):
    """Answers 201; a path that starts with ``/to/`` is redirected to ``target``; ``/lost`` gets no answer once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.name}"
        self.target = ""
        self.seen: list[Message] = []
        self.losses = 0

    @property
    def keys(self) -> list[str | None]:
        return [headers["Idempotency-Key"] for headers in self.seen]


class Handler(BaseHTTPRequestHandler):
    server: Host

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append(self.headers)
        if self.server.losses:
            self.server.losses -= 1
            self.close_connection = True
            return
        self.send_response(307 if self.path.startswith("/to/") else 201)
        if self.path.startswith("/to/"):
            self.send_header("Location", self.server.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with Host() as ours, Host() as theirs:
        ours.target = theirs.url + "/pay"
        threads = [threading.Thread(target=each.serve_forever, args=(0.01,)) for each in (ours, theirs)]
        for thread in threads:
            thread.start()
        yield ours, theirs
        ours.shutdown()
        theirs.shutdown()
        for thread in threads:
            thread.join()


Sends = Callable[[list[str], list[tuple[str, bytes]], str], list[Any]]
"""With these hosts named, run an operation that sends these requests, under this key. Returns answers or errors."""


class Stop(Exception):
    """Ends an attempt after its calls, so that the next one runs again."""


def collect(send: Callable[[str, bytes], Any], calls: list[tuple[str, bytes]]) -> list[Any]:
    found = []
    for url, body in calls:
        try:
            found.append(send(url, body))
        except Exception as error:
            found.append(error)
    return found


def run_sync(send: Callable[[str, bytes], Any], calls: list[tuple[str, bytes]], key: str) -> list[Any]:
    found: list[Any] = []

    def body() -> None:
        found.extend(collect(send, calls))
        raise Stop

    with Semel(MemoryStore()) as guard, pytest.raises(Stop):
        guard.run("op", key=key, call=body)
    return found


def by_httpx(named: list[str], calls: list[tuple[str, bytes]], key: str) -> list[Any]:
    transport = IdempotencyTransport(retry=RETRY, hosts=named)
    with httpx.Client(transport=transport, follow_redirects=True, trust_env=False) as client:
        return run_sync(lambda url, body: client.post(url, content=body).status_code, calls, key)


def by_requests(named: list[str], calls: list[tuple[str, bytes]], key: str) -> list[Any]:
    with requests.Session() as session:
        session.mount("http://", IdempotencyAdapter(retry=RETRY, hosts=named))
        return run_sync(lambda url, body: session.post(url, data=body).status_code, calls, key)


def by_urllib3(named: list[str], calls: list[tuple[str, bytes]], key: str) -> list[Any]:
    manager = IdempotencyPoolManager(retry=RETRY, hosts=named)
    with manager:
        return run_sync(lambda url, body: manager.request("POST", url, body=body).status, calls, key)


def run_async(
    opening: Callable[[], Any], send: Callable[[Any, str, bytes], Any], calls: list[tuple[str, bytes]], key: str
) -> list[Any]:
    found: list[Any] = []

    async def main() -> None:
        async with opening() as client:

            async def body() -> None:
                for url, content in calls:
                    try:
                        found.append(await send(client, url, content))
                    except Exception as error:
                        found.append(error)
                raise Stop

            guard = AsyncSemel(AsyncMemoryStore())
            with pytest.raises(Stop):
                await guard.run("op", key=key, call=body)
            await guard.close()

    asyncio.run(main())
    return found


def by_async_httpx(named: list[str], calls: list[tuple[str, bytes]], key: str) -> list[Any]:
    async def send(client: Any, url: str, body: bytes) -> Any:
        return (await client.post(url, content=body)).status_code

    transport = AsyncIdempotencyTransport(retry=RETRY, hosts=named)
    return run_async(
        lambda: httpx.AsyncClient(transport=transport, follow_redirects=True, trust_env=False), send, calls, key
    )


def by_aiohttp(named: list[str], calls: list[tuple[str, bytes]], key: str) -> list[Any]:
    async def send(session: Any, url: str, body: bytes) -> Any:
        async with session.post(url, data=body) as response:
            return response.status

    middleware = IdempotencyClientMiddleware(retry=RETRY, hosts=named)
    return run_async(lambda: aiohttp.ClientSession(middlewares=[middleware]), send, calls, key)


CLIENTS = [by_httpx, by_async_httpx, by_requests, by_aiohttp, by_urllib3]


@pytest.mark.parametrize("client", CLIENTS)
def test_equal_calls_have_keys_of_their_own_that_every_attempt_sends_again(
    hosts: tuple[Host, Host], client: Sends
) -> None:
    ours, _ = hosts
    calls = [
        (ours.url + "/pay", b"1"),
        (ours.url + "/pay", b"1"),
        (ours.url + "/pay", b"2"),
        (ours.url + "/mail", b"1"),
    ]
    assert client([ours.name], calls, "order-1") == [201] * 4
    first = ours.keys
    assert len(set(first)) == 4
    assert {headers[name] for headers in ours.seen for name in LINEAGE} == {"order-1"}
    ours.seen.clear()
    client([ours.name], calls[::-1], "order-1")  # another process takes over, in another order
    assert set(ours.keys) == set(first)
    ours.seen.clear()
    client([ours.name], calls, "order-2")
    assert not set(ours.keys) & set(first)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_third_host_gets_nothing_of_the_operation_not_even_by_a_redirect(
    hosts: tuple[Host, Host], client: Sends
) -> None:
    ours, theirs = hosts
    direct = [(theirs.url + "/pay", b"x")]
    assert client([ours.name], direct, "order-1") == [201]
    assert client([], [(ours.url + "/pay", b"x")], "order-1") == [201]
    strangers = [*theirs.seen, *ours.seen]
    ours.seen.clear()
    theirs.seen.clear()
    assert client([ours.name], [(ours.url + "/to/them", b"x")], "order-1") == [201]
    derived = ours.keys
    assert len(derived) == 1
    assert ours.seen[0]["Idempotency-Root"] == "order-1"
    assert theirs.keys == [None]
    for headers in (*strangers, *theirs.seen):
        assert headers["Idempotency-Key"] not in derived
        assert "order-1" not in str(headers)
        assert not {name.lower() for name in headers} & {"idempotency-root", "idempotency-parent", "traceparent"}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_program_that_sends_an_equal_call_again_after_no_answer_sends_the_same_key(
    hosts: tuple[Host, Host], client: Sends
) -> None:
    ours, _ = hosts
    ours.losses = 1
    call = (ours.url + "/pay", b"x")
    lost, again, another = client([ours.name], [call, call, call], "order-1")
    assert isinstance(lost, Exception)
    assert (again, another) == (201, 201)
    assert ours.keys[0] == ours.keys[1] != ours.keys[2]


def test_the_hosts_are_those_of_the_setting(hosts: tuple[Host, Host]) -> None:
    ours, _ = hosts
    port = urlsplit(ours.url).port
    by_httpx([f"127.0.0.1:{(port or 0) + 1}"], [(ours.url, b"")], "order-1")
    assert ours.seen[0]["Idempotency-Root"] is None
