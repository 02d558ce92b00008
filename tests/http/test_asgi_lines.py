"""What is read of a request in one look, and what an application is given of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel
from semel.http.asgi import ASGIMiddleware
from semel.http.asgi import body as asgi_body
from semel.http.fastapi import idempotent
from tests.http.asking import Counting, ask, at_the_edge, body_of, header, scope_of, whose


def lined(*lines: tuple[bytes, bytes]) -> dict[str, Any]:
    scope = scope_of()
    scope["headers"] += lines
    return scope


def test_a_content_type_counts_in_whatever_case_its_name_came() -> None:
    app = at_the_edge(Counting())

    async def run() -> None:
        assert (await ask(app, lined((b"Content-Type", b"text/plain"))))[0]["status"] == 200
        assert header(await ask(app, lined((b"content-type", b"text/plain"))), b"idempotent-replayed") == [b"true"]
        assert (await ask(app, lined((b"CONTENT-TYPE", b"text/html"))))[0]["status"] == 422
        assert (await ask(app, lined()))[0]["status"] == 422

    asyncio.run(run())


def test_a_length_that_is_too_much_is_refused_before_the_body_is_read() -> None:
    guard = AsyncSemel(AsyncMemoryStore())
    app = ASGIMiddleware(Counting(), guard=guard, tenant=whose, routes={"POST /pay": idempotent(max_request_body=3)})

    async def unread() -> Any:
        raise AssertionError("nothing is to be read")

    async def run() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await app(lined((b"Content-Length", b"4")), unread, send)
        assert sent[0]["status"] == 413

    asyncio.run(run())


@pytest.mark.parametrize("name", [b"origin", b"Origin"])
def test_a_script_may_read_our_lines(name: bytes) -> None:
    sent = asyncio.run(ask(at_the_edge(Counting()), lined((name, b"https://shop.example"))))
    assert b"Idempotency-Key" in header(sent, b"access-control-expose-headers")[0]


def test_what_an_application_says_in_our_place_is_left_out() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        lines = [(b"Idempotency-Key", b"another"), (b"Idempotent-Replayed", b"true"), (b"Content-Type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": lines})
        await send({"type": "http.response.body", "body": b"paid"})

    guarded = at_the_edge(app)

    async def run() -> None:
        first, again = await ask(guarded), await ask(guarded)
        assert first[0]["headers"] == [(b"content-type", b"text/plain"), (b"idempotency-key", b"k")]
        assert header(again, b"idempotency-key") == [b"k"]
        assert header(again, b"idempotent-replayed") == [b"true"]

    asyncio.run(run())


@pytest.mark.parametrize(("sent", "echoed"), [(b"k", b"k"), (b'"k"', b"k"), (b" k\t", b"k"), (b'"k l"', b'"k l"')])
def test_a_key_is_echoed_bare_where_it_can_be(sent: bytes, echoed: bytes) -> None:
    scope = scope_of(key=None)
    scope["headers"] = [(b"idempotency-key", sent)]
    assert header(asyncio.run(ask(at_the_edge(Counting()), scope)), b"idempotency-key") == [echoed]


@pytest.mark.parametrize("pieces", [(b"abcdef",), (b"abc", b"", b"def"), (b"", b"abcdef", b"")])
@pytest.mark.parametrize("chunk", [100, 4])
@pytest.mark.parametrize("in_memory", [100, 6, 5, 0])
def test_the_application_reads_the_body_that_came(
    pieces: tuple[bytes, ...], in_memory: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi_body, "IN_MEMORY", in_memory)
    monkeypatch.setattr(asgi_body, "CHUNK", chunk)

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    guarded = at_the_edge(echo)

    async def run() -> None:
        assert body_of(await ask(guarded, scope_of(), *pieces)) == b"abcdef"
        assert header(await ask(guarded, scope_of(), b"abcdef"), b"idempotent-replayed") == [b"true"]

    asyncio.run(run())
