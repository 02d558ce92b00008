"""One face for the clients of all HTTP libraries, and a server on a socket that answers by a script."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import aiohttp
import httpx
import requests
import urllib3

from semel.client import JournalReport, Receipt, Retry
from semel.client.aiohttp import IdempotencyClientMiddleware
from semel.client.httpx import AsyncIdempotencyTransport, IdempotencyTransport
from semel.client.requests import IdempotencyAdapter
from semel.client.urllib3 import IdempotencyPoolManager

T = TypeVar("T")
QUICK = Retry(base=0, cap=0, quota=None)
"""Retries without waits, for tests."""


class Response(NamedTuple):
    status: int
    body: bytes
    receipt: Receipt | None


class Client(Protocol):
    """What every test does with a client. Settings are those of the library's client."""

    def __init__(self, *, headers: dict[str, str] | None = None, timeout: float = 5, **settings: Any) -> None: ...

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Response: ...

    def resume(self) -> JournalReport: ...

    def close(self) -> None: ...


class HttpxClient:
    general: type[Exception] = httpx.TransportError

    def __init__(self, *, headers: dict[str, str] | None = None, timeout: float = 5, **settings: Any) -> None:
        self.transport = IdempotencyTransport(**{"retry": QUICK, **settings})
        self.client = httpx.Client(transport=self.transport, headers=headers, timeout=timeout)

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Response:
        found = self.client.request(method, url, content=body, headers=headers, follow_redirects=follow)
        return Response(found.status_code, found.content, found.extensions.get("idempotency"))

    def resume(self) -> JournalReport:
        return self.transport.resume(self.client)

    def close(self) -> None:
        self.client.close()


class Loop:
    """Runs coroutines, one at a time."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.closed = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine, context=contextvars.copy_context())  # the operation that calls, if any

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self.closed:
            self.closed = True
            self.runner.run(last())
            self.runner.close()


class AsyncHttpxClient:
    general: type[Exception] = httpx.TransportError

    def __init__(self, *, headers: dict[str, str] | None = None, timeout: float = 5, **settings: Any) -> None:
        self.loop = Loop()
        self.transport = AsyncIdempotencyTransport(**{"retry": QUICK, **settings})
        self.client = httpx.AsyncClient(transport=self.transport, headers=headers, timeout=timeout)

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Response:
        if not isinstance(body, (bytes, str, type(None))):
            body = _chunks(body)
        sending = self.client.request(method, url, content=body, headers=headers, follow_redirects=follow)
        found = self.loop.run(sending)
        return Response(found.status_code, found.content, found.extensions.get("idempotency"))

    def resume(self) -> JournalReport:
        return self.loop.run(self.transport.resume(self.client))

    def close(self) -> None:
        self.loop.close(self.client.aclose)


async def _chunks(body: Any) -> Any:
    for chunk in body:
        yield chunk


class RequestsClient:
    general: type[Exception] = requests.RequestException

    def __init__(self, *, headers: dict[str, str] | None = None, timeout: float = 5, **settings: Any) -> None:
        self.adapter = IdempotencyAdapter(**{"retry": QUICK, **settings})
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers.update(headers or {})
        self.session.mount("http://", self.adapter)
        self.timeout = timeout

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Response:
        found: Any = self.session.request(
            method, url, data=body, headers=headers, allow_redirects=follow, timeout=self.timeout
        )
        return Response(found.status_code, found.content, vars(found).get("idempotency"))

    def resume(self) -> JournalReport:
        return self.adapter.resume(self.session)

    def close(self) -> None:
        self.session.close()


class AiohttpClient:
    general: type[Exception] = aiohttp.ClientError

    def __init__(self, *, headers: dict[str, str] | None = None, timeout: float = 5, **settings: Any) -> None:
        self.loop = Loop()
        self.middleware = IdempotencyClientMiddleware(**{"retry": QUICK, **settings})
        limits = aiohttp.ClientTimeout(sock_read=timeout)

        async def session() -> aiohttp.ClientSession:
            return aiohttp.ClientSession(middlewares=[self.middleware], headers=headers, timeout=limits)

        self.session = self.loop.run(session())

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Response:
        if not isinstance(body, (bytes, str, type(None))) and not hasattr(body, "read"):
            body = _chunks(body)

        async def send() -> Response:
            async with self.session.request(method, url, data=body, headers=headers, allow_redirects=follow) as found:
                return Response(found.status, await found.read(), vars(found).get("idempotency"))

        return self.loop.run(send())

    def resume(self) -> JournalReport:
        return self.loop.run(self.middleware.resume(self.session))

    def close(self) -> None:
        async def close() -> None:
            await self.session.close()
            await self.middleware.close()

        self.loop.close(close)


class Urllib3Client:
    general: type[Exception] = urllib3.exceptions.HTTPError

    def __init__(self, *, headers: dict[str, str] | None = None, timeout: float = 5, **settings: Any) -> None:
        self.http = IdempotencyPoolManager(headers=headers, timeout=timeout, **{"retry": QUICK, **settings})

    def send(
        self, method: str, url: str, body: Any = None, headers: dict[str, str] | None = None, follow: bool = True
    ) -> Response:
        sent = {**self.http.headers, **(headers or {})}
        found = self.http.request(method, url, body=body, headers=sent, redirect=follow)
        return Response(found.status, found.data, vars(found).get("idempotency"))

    def resume(self) -> JournalReport:
        return self.http.resume()

    def close(self) -> None:
        self.http.close()


CLIENTS: dict[str, Any] = {
    "httpx": HttpxClient,
    "httpx-async": AsyncHttpxClient,
    "requests": RequestsClient,
    "aiohttp": AiohttpClient,
    "urllib3": Urllib3Client,
}


@dataclass
class Seen:
    """A request as the server has read it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str | None:
        return self.headers.get("idempotency-key")


def http(status: int, body: bytes = b"", **headers: str) -> bytes:
    """A whole answer. Underscores in the names of headers become dashes."""
    lines = [f"HTTP/1.1 {status} Reason", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def problem(status: int, retryable: bool, **headers: str) -> bytes:
    body = json.dumps({"retryable": retryable, "status": status}).encode()
    return http(status, body, Content_Type="application/problem+json", **headers)


OK = http(201, b'{"charged": 10}', Content_Type="application/json")
HANG_UP = b""
"""Read the request, then close the connection."""
TRUNCATED = OK[:-4]
Answering = bytes | Callable[[Seen], bytes]


@dataclass
class Server:
    """Answers each request with the next line of its script, over real sockets; the last line is repeated."""

    script: list[Answering] = field(default_factory=lambda: [OK])
    seen: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def keys(self) -> list[str | None]:
        return [seen.key for seen in self.seen]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            try:
                while line := file.readline():
                    method, path, _ = line.decode().split()
                    headers = {}
                    while (line := file.readline().strip()) != b"":
                        name, _, text = line.decode().partition(":")
                        headers[name.lower()] = text.strip()
                    seen = Seen(method, path, headers, file.read(int(headers.get("content-length", 0))))
                    self.seen.append(seen)
                    answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                    data = answer if isinstance(answer, bytes) else answer(seen)
                    if data:
                        connection.sendall(data)
                    if not data or data is TRUNCATED:
                        return
            except (OSError, ValueError):
                return
            finally:
                self.open.discard(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self.listener.close()
        for connection in list(self.open):
            connection.close()
