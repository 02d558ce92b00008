"""``install`` is the same in every framework with an application object: ``guard=``, ``tenant=``, ``routes=``."""

from __future__ import annotations

import asyncio
from typing import Any

import flask
import pytest
from fastapi import FastAPI
from litestar import Litestar
from litestar import Request as LitestarRequest
from litestar import post as litestar_post
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, ConfigurationError, MemoryStore, Semel
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http.litestar import SemelPlugin
from semel.http.litestar import idempotent as litestar_idempotent
from tests.http.asking import ask, header, scope_of

KEY = {"Idempotency-Key": "k"}
ALICE = (b"x-user", b"alice")


class Seen:
    """A ``tenant=`` that remembers what it was called with."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def __call__(self, request: Any) -> str:
        self.requests.append(request)
        return str(request.headers["X-User"])


def starlette_app() -> Starlette:
    async def pay(request: Request) -> PlainTextResponse:
        return PlainTextResponse("paid")

    return Starlette(routes=[Route("/pay", pay, methods=["POST"])])


def fastapi_app() -> FastAPI:
    app = FastAPI()

    @app.post("/pay")
    async def pay() -> str:
        return "paid"

    return app


def flask_app() -> flask.Flask:
    app = flask.Flask("shop")
    app.post("/pay")(lambda: "paid")
    return app


def asked_twice(app: Any) -> list[list[bytes]]:
    """Whether each of two equal requests of alice was answered by a replay."""

    async def run() -> list[list[bytes]]:
        scope = scope_of("/pay")
        scope["headers"] = [*scope["headers"], ALICE]
        answers = [await ask(app, dict(scope)) for _ in range(2)]
        return [header(answer, b"idempotent-replayed") for answer in answers]

    return asyncio.run(run())


@pytest.mark.parametrize("app", [starlette_app(), fastapi_app()], ids=["starlette", "fastapi"])
def test_endpoints_that_are_not_decorated_are_protected_by_routes(app: Starlette) -> None:
    guard, seen = AsyncSemel(AsyncMemoryStore()), Seen()
    for_fastapi.install(app, guard=guard, tenant=seen, routes={"POST /pay": for_fastapi.idempotent(ttl="7d")})
    assert asked_twice(app) == [[], [b"true"]]
    assert all(isinstance(request, Request) for request in seen.requests)
    assert len(seen.requests) == 2


def test_views_of_flask_that_are_not_decorated_are_protected_by_routes() -> None:
    seen, app = Seen(), flask_app()
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=seen, routes={"POST /pay": for_flask.idempotent()})
    client = app.test_client()
    answers = [client.post("/pay", headers={**KEY, "X-User": "alice"}) for _ in range(2)]
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true"]
    assert all(isinstance(request, flask.Request) for request in seen.requests)
    assert len(seen.requests) == 2


def test_the_tenant_of_litestar_is_found_from_its_own_request() -> None:
    seen = Seen()

    @litestar_post("/pay")
    @litestar_idempotent()
    async def pay() -> str:
        return "paid"

    plugin = SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), tenant=seen)
    app = Litestar([pay], plugins=[plugin], openapi_config=None)
    assert asked_twice(app) == [[], [b"true"]]
    assert all(isinstance(request, LitestarRequest) for request in seen.requests)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"guard": Semel(MemoryStore())}, "guard= takes an AsyncSemel here, not Semel"),
        ({"tenant": "alice"}, "tenant= is a function of the request"),
    ],
)
def test_a_mistake_is_found_when_it_is_installed(settings: dict[str, Any], complaint: str) -> None:
    """Starlette makes its middlewares at the first request, which would be late."""
    given = {"guard": AsyncSemel(AsyncMemoryStore()), "tenant": Seen(), **settings}
    with pytest.raises(ConfigurationError, match=complaint):
        for_fastapi.install(FastAPI(), **given)
