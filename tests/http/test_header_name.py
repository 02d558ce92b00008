"""The header that has the key may have another name: reading, echoing, errors and documents follow it everywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import flask
import litestar
import pytest
import quart
from django.http import HttpResponse
from django.urls import path
from fastapi import FastAPI
from litestar.config.cors import CORSConfig

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, PolicyError, Semel
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http import quart as for_quart
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import idempotent
from semel.http.describe import document
from semel.http.describe.design import design_of, find_installation
from semel.http.wsgi import WSGIMiddleware
from tests.http.asking import Counting, ask, body_of
from tests.http.django_project import Project

NAME = "X-Idempotency-Key"
Told = tuple[int, dict[str, str], bytes]
Asks = Callable[[list[dict[str, str]]], list[Told]]
"""Sends one request for each set of headers, in turn."""


def of_alice(request: Any) -> str:
    return "alice"


def lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def over_asgi(app: Any) -> Asks:
    async def run(requests: list[dict[str, str]]) -> list[Told]:
        answers = []
        for headers in requests:
            lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            scope = {
                "type": "http", "method": "POST", "path": "/pay", "raw_path": b"/pay", "root_path": "",
                "scheme": "http", "query_string": b"", "headers": lines, "http_version": "1.1", "server": ("test", 80),
                "client": ("test", 1),
            }  # fmt: skip
            sent = await ask(app, scope)
            shown = lower((name.decode(), value.decode()) for name, value in sent[0]["headers"])
            answers.append((sent[0]["status"], shown, body_of(sent)))
        return answers

    return lambda requests: asyncio.run(run(requests))


def plain_asgi() -> Asks:
    routes = {"POST /pay": idempotent()}
    guard = AsyncSemel(AsyncMemoryStore())
    return over_asgi(ASGIMiddleware(Counting(), guard=guard, tenant=of_alice, routes=routes, header=NAME))


def of_fastapi() -> Asks:
    app = FastAPI()
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=of_alice, header=NAME)

    @app.post("/pay")
    @for_fastapi.idempotent()
    async def pay() -> str:
        return "paid"

    return over_asgi(app)


def of_litestar() -> Asks:
    @litestar.post("/pay", status_code=200)
    @for_litestar.idempotent()
    async def pay() -> str:
        return "paid"

    plugin = for_litestar.SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=of_alice, header=NAME)
    app = litestar.Litestar([pay], plugins=[plugin], cors_config=CORSConfig(allow_origins=["*"]))

    return over_asgi(app)


def of_quart() -> Asks:
    app = quart.Quart("pay")
    for_quart.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=of_alice, header=NAME)

    @app.post("/pay")
    @for_quart.idempotent()
    async def pay() -> str:
        return "paid"

    async def run(requests: list[dict[str, str]]) -> list[Told]:
        client = app.test_client()
        answers = [await client.post("/pay", headers=headers) for headers in requests]
        return [(answer.status_code, lower(answer.headers.items()), await answer.get_data()) for answer in answers]

    return lambda requests: asyncio.run(run(requests))


def of_flask() -> Asks:
    app = flask.Flask("pay")
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=of_alice, header=NAME)
    app.post("/pay")(for_flask.idempotent()(lambda: "paid"))

    def asks(requests: list[dict[str, str]]) -> list[Told]:
        answers = [app.test_client().post("/pay", headers=headers) for headers in requests]
        return [(answer.status_code, lower(answer.headers.items()), answer.data) for answer in answers]

    return asks


def of_django(in_loop: bool = False) -> Asks:
    def asks(requests: list[dict[str, str]]) -> list[Told]:
        with Project(Semel(MemoryStore())) as project:
            project.serve(path("pay", for_django.idempotent()(lambda request: HttpResponse("paid"))), header=NAME)
            client: Any = project.async_client() if in_loop else project.client()

            async def send_all() -> list[Any]:
                return [await client.post("/pay", headers=headers) for headers in requests]

            if in_loop:
                answers = asyncio.run(send_all())
            else:
                answers = [client.post("/pay", headers=headers) for headers in requests]
            return [(answer.status_code, lower(answer.headers.items()), answer.content) for answer in answers]

    return asks


def of_django_on_asgi() -> Asks:
    return of_django(in_loop=True)


SERVICES = [plain_asgi, of_fastapi, of_litestar, of_quart, of_flask, of_django, of_django_on_asgi]
each_framework = pytest.mark.parametrize("service", SERVICES, ids=lambda made: made.__name__)


@each_framework
def test_the_key_is_read_from_and_echoed_in_that_header(service: Callable[[], Asks]) -> None:
    first, again, other = service()([{NAME: "k1"}, {NAME.lower(): "k1"}, {NAME: "k2", "Idempotency-Key": "k1"}])
    assert [first[0], again[0], other[0]] == [200, 200, 200]
    assert ["idempotent-replayed" in told[1] for told in (first, again, other)] == [False, True, False]
    for status, headers, _ in (first, again, other):
        assert status == 200
        assert "idempotency-key" not in headers
    assert (first[1][NAME.lower()], other[1][NAME.lower()]) == ("k1", "k2")


@each_framework
def test_errors_name_that_header(service: Callable[[], Asks]) -> None:
    missing, malformed = service()([{"Idempotency-Key": "k1"}, {NAME: '"half'}])
    for (status, _, body), code in ((missing, "idempotency_key_missing"), (malformed, "idempotency_key_invalid")):
        told = json.loads(body)
        assert (status, told["code"]) == (400, code)
        assert NAME in told["detail"]
        assert "Idempotency-Key" not in body.decode().replace(NAME, "")


@each_framework
def test_a_script_in_a_browser_may_read_it(service: Callable[[], Asks]) -> None:
    [(status, headers, _)] = service()([{NAME: "k1", "Origin": "https://shop.example"}])
    assert status == 200
    exposed = [name.strip().lower() for name in headers["access-control-expose-headers"].split(",")]
    assert NAME.lower() in exposed
    assert "idempotency-key" not in exposed


def test_two_lines_or_halves_of_one_are_refused_in_wsgi() -> None:
    [(status, _, body)] = of_flask()([{NAME: "k1, k2"}])
    assert status == 400
    assert f"Send one {NAME} header line" in json.loads(body)["detail"]


@pytest.mark.parametrize("name", ["", "X Key", "X-Key:", "Content-Type", "authorization", "Host", "IF-MATCH", 7, None])
def test_a_name_that_cannot_be_meant_is_refused_at_start_up(name: Any) -> None:
    for install in (
        lambda: ASGIMiddleware(Counting(), guard=AsyncSemel(AsyncMemoryStore()), tenant=of_alice, header=name),
        lambda: WSGIMiddleware(lambda *_: [], guard=Semel(MemoryStore()), tenant=of_alice, header=name),
        lambda: for_fastapi.install(FastAPI(), guard=AsyncSemel(AsyncMemoryStore()), tenant=of_alice, header=name),
        lambda: document({"openapi": "3.1.0", "paths": {}}, {}, header=name),
    ):
        with pytest.raises(PolicyError, match="header= is the name of the header"):
            install()


def test_documents_and_the_design_name_it() -> None:
    app = FastAPI()
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=of_alice, header=NAME)

    @app.post("/pay")
    @for_fastapi.idempotent()
    async def pay() -> str:
        return "paid"

    described = app.openapi()["paths"]["/pay"]["post"]
    [parameter] = described["parameters"]
    assert (parameter["name"], parameter["in"], parameter["required"]) == (NAME, "header", True)
    assert NAME in described["responses"]["200"]["headers"]
    design = design_of("shop", find_installation(app))
    assert design["header"] == NAME
    assert [route["key_source"] for route in design["routes"]] == [NAME]
    assert any(f"{NAME}: 8e03978e" in step["request"] for step in design["example"])
    for shown in (json.dumps(described), json.dumps(design)):
        assert "Idempotency-Key" not in shown.replace(NAME, "")
