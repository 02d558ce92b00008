"""What a caller may ask for, in each framework: so many live keys (429), and so long a body (413)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import flask
import pytest

from tests.http.django_project import Project  # first: REST framework wants settings when it is imported

from rest_framework.decorators import api_view  # isort: skip
from rest_framework.response import Response as RESTResponse  # isort: skip
from rest_framework.views import APIView  # isort: skip

from django.http import HttpResponse
from django.urls import path
from django.views import View
from litestar import Litestar, post
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, PolicyError, Semel
from semel.core.quota import Quota
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http.asgi import ASGIMiddleware
from semel.http.contract.rules import MAX_REQUEST_BODY, idempotent
from semel.http.wsgi import WSGIMiddleware
from tests.http.asking import Counting, ask, body_of, scope_of, whose

QUOTA = Quota(live_keys=2)
Told = tuple[int, dict[str, str], bytes]
Asks = Callable[[list[str], bytes], list[Told]]


def over_asgi(app: Any) -> Asks:
    async def run(keys: list[str], body: bytes) -> list[Told]:
        answers = []
        for key in keys:
            scope = scope_of(key=key, raw_path=b"/pay", root_path="", scheme="http", http_version="1.1",
                             server=("test", 80), client=("test", 1))  # fmt: skip
            sent = await ask(app, scope, body)
            lines = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
            answers.append((sent[0]["status"], lines, body_of(sent)))
        return answers

    return lambda keys, body: asyncio.run(run(keys, body))


def async_guard() -> AsyncSemel:
    return AsyncSemel(AsyncMemoryStore(), quota=QUOTA)


def asgi(longest: int) -> Asks:
    routes = {"POST /pay": idempotent()}
    return over_asgi(
        ASGIMiddleware(Counting(), guard=async_guard(), tenant=whose, routes=routes, max_request_body=longest)
    )


def starlette(longest: int) -> Asks:
    @for_fastapi.idempotent()
    def pay(request: Any) -> Response:
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    for_fastapi.install(app, guard=async_guard(), tenant=whose, max_request_body=longest)
    return over_asgi(app)


def starlette_that_reads_first(longest: int) -> Asks:
    """By the time of the claim the body is through."""

    @for_fastapi.idempotent()
    async def pay(request: Request) -> Response:
        return PlainTextResponse("")

    async def read(request: Request) -> Response:
        await request.body()
        return await pay(request)

    app = Starlette(routes=[Route("/pay", read, methods=["POST"])])
    for_fastapi.install(app, guard=async_guard(), tenant=whose, max_request_body=longest)
    return over_asgi(app)


def litestar(longest: int) -> Asks:
    @post("/pay", status_code=200)
    @for_litestar.idempotent()
    async def pay() -> str:
        return ""

    plugin = for_litestar.SemelPlugin(guard=async_guard(), tenant=whose, max_request_body=longest)
    return over_asgi(Litestar([pay], plugins=[plugin]))


def of_flask(longest: int) -> Asks:
    app = flask.Flask("shop")
    for_flask.install(app, guard=Semel(MemoryStore(), quota=QUOTA), tenant=whose, max_request_body=longest)
    app.post("/pay")(for_flask.idempotent()(lambda: ""))

    def asks(keys: list[str], body: bytes) -> list[Told]:
        client = app.test_client()
        answers = [client.post("/pay", headers={"Idempotency-Key": key}, data=body) for key in keys]
        return [(a.status_code, {n.lower(): v for n, v in a.headers.items()}, a.data) for a in answers]

    return asks


def flask_that_reads_first(longest: int) -> Asks:
    app = flask.Flask("shop")
    for_flask.install(app, guard=Semel(MemoryStore(), quota=QUOTA), tenant=whose, max_request_body=longest)
    app.before_request(lambda: flask.request.get_data() and None)
    app.post("/pay")(for_flask.idempotent()(lambda: ""))

    def asks(keys: list[str], body: bytes) -> list[Told]:
        client = app.test_client()
        answers = [client.post("/pay", headers={"Idempotency-Key": key}, data=body) for key in keys]
        return [(a.status_code, {n.lower(): v for n, v in a.headers.items()}, a.data) for a in answers]

    return asks


def over_django(view: Any, longest: int, *, in_loop: bool = False) -> Asks:
    def asks(keys: list[str], body: bytes) -> list[Told]:
        with Project(Semel(MemoryStore(), quota=QUOTA)) as project:
            project.serve(path("pay", view), max_request_body=longest)
            client: Any = project.async_client() if in_loop else project.client()

            def send(key: str) -> Any:
                return client.post("/pay", body, content_type="text/plain", headers={"Idempotency-Key": key})

            async def send_all() -> list[Any]:
                return [await send(key) for key in keys]

            answers = asyncio.run(send_all()) if in_loop else [send(key) for key in keys]
            return [(a.status_code, {n.lower(): v for n, v in a.headers.items()}, a.content) for a in answers]

    return asks


def django(longest: int) -> Asks:
    return over_django(for_django.idempotent()(lambda request: HttpResponse("")), longest)


class Pay(View):
    @for_django.idempotent()
    def post(self, request: Any) -> HttpResponse:
        return HttpResponse("")


class AsyncPay(View):
    @for_django.idempotent()
    async def post(self, request: Any) -> HttpResponse:
        return HttpResponse("")


class RESTPay(APIView):  # type: ignore[misc]
    @for_django.idempotent()
    def post(self, request: Any) -> RESTResponse:
        return RESTResponse("")


@for_django.idempotent()
async def pay_soon(request: Any) -> HttpResponse:
    return HttpResponse("")


@for_django.idempotent()
def pay_rest(request: Any) -> RESTResponse:
    return RESTResponse("")


def django_class(longest: int) -> Asks:
    return over_django(Pay.as_view(), longest)


def django_class_on_asgi(longest: int) -> Asks:
    return over_django(Pay.as_view(), longest, in_loop=True)


def django_async_class_on_asgi(longest: int) -> Asks:
    return over_django(AsyncPay.as_view(), longest, in_loop=True)


def django_async(longest: int) -> Asks:
    return over_django(pay_soon, longest)


def django_async_on_asgi(longest: int) -> Asks:
    return over_django(pay_soon, longest, in_loop=True)


def rest_class(longest: int) -> Asks:
    return over_django(RESTPay.as_view(), longest)


def rest_function_on_asgi(longest: int) -> Asks:
    return over_django(api_view(["POST"])(pay_rest), longest, in_loop=True)


SERVICES = [
    asgi, starlette, litestar, of_flask, django, django_class, django_class_on_asgi, django_async_class_on_asgi,
    django_async, django_async_on_asgi, rest_class, rest_function_on_asgi,
]  # fmt: skip


@pytest.mark.parametrize("service", SERVICES, ids=lambda made: made.__name__)
def test_who_holds_too_many_keys_is_told_429(service: Callable[[int], Asks]) -> None:
    one, two, three, again = service(MAX_REQUEST_BODY)(["k1", "k2", "k3", "k1"], b"")
    assert [one[0], two[0], again[0]] == [200, 200, 200]
    assert again[1]["idempotent-replayed"] == "true"
    status, lines, body = three
    assert status == 429
    assert lines["content-type"] == "application/problem+json"
    assert lines["cache-control"] == "no-store"
    assert int(lines["retry-after"]) >= 1
    told = json.loads(body)
    assert (told["code"], told["retryable"]) == ("idempotency_too_many_keys", True)


@pytest.mark.parametrize(
    "service", [*SERVICES, starlette_that_reads_first, flask_that_reads_first], ids=lambda made: made.__name__
)
def test_a_body_above_the_middlewares_bound_is_told_413(service: Callable[[int], Asks]) -> None:
    asks = service(1000)
    ((status, lines, body),) = asks(["k1"], b"x" * 1001)
    assert status == 413
    assert lines["content-type"] == "application/problem+json"
    assert lines["cache-control"] == "no-store"
    assert lines["idempotency-key"] == "k1"
    told = json.loads(body)
    assert (told["code"], told["status"], told["retryable"]) == ("idempotency_body_too_large", 413, False)
    assert [answer[0] for answer in asks(["k1"], b"x" * 1000)] == [200], "the key is free"


@pytest.mark.parametrize("longest", [-1, 1.5, True, "64M"])
def test_a_bound_that_is_no_number_of_bytes_is_refused(longest: Any) -> None:
    with pytest.raises(PolicyError, match="max_request_body is a number of bytes"):
        for_fastapi.idempotent(max_request_body=longest)
    with pytest.raises(PolicyError, match="max_request_body is a number of bytes"):
        ASGIMiddleware(Counting(), guard=async_guard(), tenant=whose, max_request_body=longest)
    with pytest.raises(PolicyError, match="max_request_body is a number of bytes"):
        WSGIMiddleware(Any, guard=Semel(MemoryStore()), tenant=whose, max_request_body=longest)
    with pytest.raises(PolicyError, match="max_request_body is a number of bytes"):
        for_flask.install(flask.Flask("shop"), guard=Semel(MemoryStore()), tenant=whose, max_request_body=longest)
    with pytest.raises(PolicyError, match="max_request_body is a number of bytes"):
        for_litestar.SemelPlugin(guard=async_guard(), tenant=whose, max_request_body=longest)
    with pytest.raises(PolicyError, match="max_request_body is a number of bytes"):
        django(longest)(["k"], b"")
