"""A quota of live keys: 429 for the caller that holds too many, in each framework; keys that are there still work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import flask
import pytest
from django.http import HttpResponse
from django.urls import path
from litestar import Litestar, post
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.core.quota import Quota
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from tests.http.asking import Counting, ask, at_the_edge, body_of, scope_of, whose
from tests.http.django_project import Project

QUOTA = Quota(live_keys=2)
Told = tuple[int, dict[str, str], bytes]
Asks = Callable[[list[str]], list[Told]]


def over_asgi(app: Any) -> Asks:
    async def run(keys: list[str]) -> list[Told]:
        answers = []
        for key in keys:
            scope = scope_of(key=key, raw_path=b"/pay", root_path="", scheme="http", http_version="1.1",
                             server=("test", 80), client=("test", 1))  # fmt: skip
            sent = await ask(app, scope)
            lines = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
            answers.append((sent[0]["status"], lines, body_of(sent)))
        return answers

    return lambda keys: asyncio.run(run(keys))


def async_guard() -> AsyncSemel:
    return AsyncSemel(AsyncMemoryStore(), quota=QUOTA)


def asgi() -> Asks:
    return over_asgi(at_the_edge(Counting(), async_guard()))


def starlette() -> Asks:
    @for_fastapi.action()
    def pay(request: Any) -> Response:
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    for_fastapi.install(app, guard=async_guard(), tenant=whose)
    return over_asgi(app)


def litestar() -> Asks:
    @post("/pay", status_code=200)
    @for_litestar.action()
    async def pay() -> str:
        return ""

    return over_asgi(Litestar([pay], plugins=[for_litestar.SemelPlugin(guard=async_guard(), tenant=whose)]))


def of_flask() -> Asks:
    app = flask.Flask("shop")
    for_flask.SemelFlask(app, guard=Semel(MemoryStore(), quota=QUOTA), tenant=whose)
    app.post("/pay")(for_flask.action()(lambda: ""))

    def asks(keys: list[str]) -> list[Told]:
        client = app.test_client()
        answers = [client.post("/pay", headers={"Idempotency-Key": key}) for key in keys]
        return [(a.status_code, {n.lower(): v for n, v in a.headers.items()}, a.data) for a in answers]

    return asks


def django() -> Asks:
    def asks(keys: list[str]) -> list[Told]:
        with Project(Semel(MemoryStore(), quota=QUOTA)) as project:
            project.serve(path("pay", for_django.action()(lambda request: HttpResponse(""))))
            client = project.client()
            answers = [client.post("/pay", headers={"Idempotency-Key": key}) for key in keys]
            return [(a.status_code, {n.lower(): v for n, v in a.headers.items()}, a.content) for a in answers]

    return asks


@pytest.mark.parametrize("service", [asgi, starlette, litestar, of_flask, django], ids=lambda made: made.__name__)
def test_who_holds_too_many_keys_is_told_429(service: Callable[[], Asks]) -> None:
    one, two, three, again = service()(["k1", "k2", "k3", "k1"])
    assert [one[0], two[0], again[0]] == [200, 200, 200]
    assert again[1]["idempotent-replayed"] == "true"
    status, lines, body = three
    assert status == 429
    assert lines["content-type"] == "application/problem+json"
    assert lines["cache-control"] == "no-store"
    assert int(lines["retry-after"]) >= 1
    told = json.loads(body)
    assert (told["code"], told["retryable"]) == ("idempotency_too_many_keys", True)
