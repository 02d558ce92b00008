"""Compressed answers: a replay is in a coding that its client accepts, and says what it varies by."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import flask
import pytest
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.core.encoding.snapshot import StoredResponse
from semel.http.contract import exchange as exchanges
from semel.http.contract.exchange import Exchange
from semel.http.contract.rules import idempotent
from semel.http.fastapi import idempotent as declared
from semel.http.fastapi import install
from semel.http.flask import idempotent as declared_in_flask
from semel.http.flask import install as install_in_flask
from tests.http.asking import ask, body_of, header, scope_of, whose

TEXT = b"paid, and paid again" * 100


def replay(lines: list[tuple[bytes, bytes]], body: bytes, *accepted: bytes, omitted: bool = False) -> Any:
    asked = Exchange("POST", "/pay", b"", [(b"Accept-Encoding", each) for each in accepted])
    _, headers, content, _ = asked.replay(StoredResponse(200, lines, body, omitted), idempotent())
    return dict(headers).get(b"content-encoding"), content, dict(headers)[b"content-length"]


VARY = (b"vary", b"Origin, accept-encoding")


@pytest.mark.parametrize("accepted", [(b"gzip",), (b"br, GZIP;q=0.5",), (b"br", b"gzip"), (b"*",), (b"*;q=0.1",)])
def test_a_client_that_accepts_the_coding_gets_the_stored_bytes(accepted: tuple[bytes, ...]) -> None:
    body = gzip.compress(TEXT)
    assert replay([(b"content-encoding", b"gzip"), VARY], body, *accepted)[:2] == (b"gzip", body)


@pytest.mark.parametrize("accepted", [(), (b"",), (b"identity",), (b"br",), (b"gzip;q=0",), (b"gzip; q=0.00, br",)])
@pytest.mark.parametrize(
    ("coding", "pack"),
    [(b"gzip", gzip.compress), (b"x-gzip", gzip.compress), (b"deflate", zlib.compress)],
)
def test_any_other_client_gets_what_it_decompresses_to(accepted: tuple[bytes, ...], coding: bytes, pack: Any) -> None:
    found = replay([(b"content-encoding", coding), VARY], pack(TEXT), *accepted)
    assert found == (None, TEXT, b"%d" % len(TEXT))


def test_codings_on_top_of_each_other_are_taken_off_in_their_order() -> None:
    body = gzip.compress(zlib.compress(TEXT))
    assert replay([(b"content-encoding", b"deflate, gzip"), VARY], body)[:2] == (None, TEXT)
    assert replay([(b"content-encoding", b"deflate"), (b"content-encoding", b"gzip"), VARY], body)[:2] == (None, TEXT)


@pytest.mark.parametrize("vary", [[], [(b"vary", b"Origin")]])
def test_an_answer_that_has_one_coding_for_all_clients_is_replayed_as_it_was(vary: Any) -> None:
    body = gzip.compress(TEXT)
    assert replay([(b"content-encoding", b"gzip"), *vary], body)[:2] == (b"gzip", body)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"br", b"brotli"),
        (b"gzip", b"no gzip at all"),
        (b"gzip", gzip.compress(TEXT, mtime=0)[:-9]),
        (b"zstd, gzip", b"x"),
    ],
)
def test_what_cannot_be_decompressed_is_sent_as_it_is(coding: bytes, body: bytes) -> None:
    assert replay([(b"content-encoding", coding), VARY], body)[:2] == (coding, body)


def test_what_would_be_too_large_is_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "DECOMPRESSED_LIMIT", len(TEXT) - 1)
    body = gzip.compress(TEXT)
    assert replay([(b"content-encoding", b"gzip"), VARY], body)[:2] == (b"gzip", body)


def test_a_body_that_is_not_stored_has_no_coding() -> None:
    assert replay([(b"content-encoding", b"gzip"), VARY], b"", b"gzip", omitted=True) == (None, b"", b"0")


# -- in frameworks


def scope(**headers: str) -> dict[str, Any]:
    made = scope_of()
    made["headers"] += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return made


def test_a_middleware_inside_of_ours_compresses_for_the_client_that_asks() -> None:
    @declared()
    async def pay(request: Any) -> Response:
        return PlainTextResponse(TEXT)

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app.add_middleware(GZipMiddleware)
    app.add_middleware(CORSMiddleware, allow_origins=["https://a.example"])
    install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    async def main() -> list[Any]:
        return [
            await ask(app, scope(accept_encoding="gzip")),
            await ask(app, scope(accept_encoding="gzip")),
            await ask(app, scope()),
            await ask(app, scope(accept_encoding="gzip", origin="https://a.example")),
        ]

    first, again, plain, scripted = asyncio.run(main())
    assert header(first, b"content-encoding") == header(again, b"content-encoding") == [b"gzip"]
    assert body_of(again) == body_of(first) != TEXT
    assert gzip.decompress(body_of(first)) == body_of(plain) == TEXT
    assert header(plain, b"content-encoding") == []
    for sent in (first, again, plain):
        assert b"Accept-Encoding" in b", ".join(header(sent, b"vary"))
    assert {b"Origin", b"Accept-Encoding"} <= set(b", ".join(header(scripted, b"vary")).split(b", "))


def test_a_flask_view_that_varies_says_so_on_its_replay() -> None:
    app = flask.Flask("shop")
    install_in_flask(app, guard=Semel(MemoryStore()), tenant=whose)

    @app.post("/pay")
    @declared_in_flask()
    def pay() -> flask.Response:
        if "gzip" not in flask.request.headers.get("Accept-Encoding", ""):
            return flask.Response(TEXT, headers={"Vary": "Accept-Encoding"})
        return flask.Response(gzip.compress(TEXT), headers={"Vary": "Accept-Encoding", "Content-Encoding": "gzip"})

    client, key = app.test_client(), {"Idempotency-Key": "k"}
    client.post("/pay", headers={**key, "Accept-Encoding": "gzip"})
    plain = client.post("/pay", headers=key)
    assert (plain.data, plain.headers["Vary"], plain.headers.get("Content-Encoding")) == (TEXT, "Accept-Encoding", None)
    assert plain.headers["Idempotent-Replayed"] == "true"
