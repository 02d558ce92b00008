"""An ASGI application asked in this process, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
)
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import Idempotent
from semel.http.fastapi import idempotent

App = Callable[[Any, Any, Any], Awaitable[None]]


def whose(scope: Any) -> str:
    return "alice"


def scope_of(path: str = "/pay", key: str | None = "k", method: str = "POST", **more: Any) -> dict[str, Any]:
    headers = [] if key is None else [(b"idempotency-key", key.encode())]
    return {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, **more}


async def ask(app: App, scope: dict[str, Any] | None = None, *bodies: bytes) -> list[dict[str, Any]]:
    """The messages that the application sends for one request."""
    waiting = [{"type": "http.request", "body": body, "more_body": True} for body in bodies[:-1]]
    waiting.append({"type": "http.request", "body": bodies[-1] if bodies else b"", "more_body": False})
    sent: list[dict[str, Any]] = []
    answered = asyncio.Event()

    async def receive() -> Any:
        if waiting:
            return waiting.pop(0)
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            answered.set()

    await app(scope or scope_of(), receive, send)
    return sent


def body_of(sent: list[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")


def header(sent: list[dict[str, Any]], name: bytes) -> list[bytes]:
    return [value for line, value in sent[0]["headers"] if line == name]


class Counting:
    """A handler in plain ASGI that answers with how often it ran."""

    def __init__(self, *after: dict[str, Any], start: dict[str, Any] | None = None) -> None:
        self.runs = 0
        self.after = after
        self.start = start or {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": [], **self.start})
        await send({"type": "http.response.body", "body": b"run %d" % self.runs, "more_body": False})
        for message in self.after:
            await send(message)


def at_the_edge(app: App, guard: AsyncSemel | None = None, rule: Idempotent | None = None) -> ASGIMiddleware:
    routes = {"POST /pay": rule or idempotent()}
    return ASGIMiddleware(app, guard=guard or AsyncSemel(AsyncMemoryStore()), tenant=whose, routes=routes)
