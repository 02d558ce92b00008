"""What people get wrong when they install us, and what a deployment changes under their feet: told, never a bypass."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Iterable
from typing import Any

import flask
import pytest
from fastapi import FastAPI
from flask.views import MethodView
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, ConfigurationError, MemoryStore, PolicyError, Semel
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http.asgi import middleware as asgi
from semel.http.contract.conditional import current_preconditions
from semel.http.contract.routes import MOST_RULES
from semel.http.contract.rules import conditional, idempotent
from semel.http.wsgi import middleware as wsgi
from tests.http.asking import Counting, ask, at_the_edge, body_of, header, scope_of, whose

GLUES = [for_fastapi, for_flask, for_django, for_litestar]
KEY = {"Idempotency-Key": "k"}


def environ(path: str = "/pay", method: str = "POST", **more: Any) -> dict[str, Any]:
    return {
        "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": path, "wsgi.input": io.BytesIO(),
        "HTTP_IDEMPOTENCY_KEY": "k", **more,
    }  # fmt: skip


def serve(app: Any, asked: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    lines: list[tuple[str, str]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
        lines.extend(headers)

    return b"".join(app(asked, start_response)), dict(lines)


class CountingWSGI:
    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.runs += 1
        start_response("200 OK", [])
        return [b"run %d" % self.runs]


def at_the_edge_of(app: Any, guard: Semel | None = None) -> wsgi.WSGIMiddleware:
    routes = {"POST /pay": idempotent()}
    return wsgi.WSGIMiddleware(app, guard=guard or Semel(MemoryStore()), tenant=whose, routes=routes)


# -- decorators


@pytest.mark.parametrize("glue", GLUES, ids=lambda glue: glue.__name__.rpartition(".")[2])
class TestDecorators:
    def test_two_rules_for_one_endpoint_are_refused_when_they_are_declared(self, glue: Any) -> None:
        def pay(request: Any) -> None: ...

        once = glue.idempotent()(pay)
        with pytest.raises(PolicyError, match=r"pay is declared @idempotent\(\) already"):
            glue.conditional()(once)
        with pytest.raises(PolicyError, match=r"pay is declared @exempt\(\) already"):
            glue.idempotent()(glue.exempt("a test")(pay))

    def test_a_class_is_refused_when_it_is_declared(self, glue: Any) -> None:
        with pytest.raises(PolicyError, match="decorate the method, such as post"):
            glue.idempotent()(type("Payments", (), {}))


def test_a_decorator_above_the_routes_is_an_error_at_each_request_and_nothing_runs() -> None:
    """FastAPI has registered the bare function by then: it would run unprotected."""
    runs: list[int] = []
    app = FastAPI()
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    @for_fastapi.idempotent()
    @app.post("/pay")
    async def pay() -> None:
        runs.append(1)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"pay is declared, but its route.*decorator of the route on top"):
            asyncio.run(ask(app))
    assert runs == []


def test_a_server_that_tells_of_its_start_hears_of_it_then() -> None:
    """A server takes an application that only raises for one that has no start-up, and serves it all the same."""
    app = FastAPI()
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    @for_fastapi.idempotent()
    @app.post("/pay")
    async def pay() -> None: ...

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(ConfigurationError, match="pay is declared, but its route"):
        asyncio.run(app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send))
    assert [message["type"] for message in sent] == ["lifespan.startup.failed"]
    assert "decorator of the route on top" in sent[0]["message"]


def test_a_decorator_above_the_routes_is_an_error_in_flask_as_well() -> None:
    runs: list[int] = []
    app = flask.Flask("shop")
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=whose)

    @for_flask.idempotent()
    @app.post("/pay")
    def pay() -> str:
        runs.append(1)
        return ""

    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"pay is declared, but its route.*decorator of the route on top"):
            app.test_client().post("/pay", headers=KEY)
    assert runs == []


def test_a_function_may_have_a_route_without_protection_where_it_says_so() -> None:
    runs: list[int] = []

    async def pay(request: Any) -> Response:
        runs.append(1)
        return PlainTextResponse("")

    once = for_fastapi.idempotent()(pay)
    for_fastapi.exempt("the old version has no keys")(pay)
    app = Starlette(routes=[Route("/pay", once, methods=["POST"]), Route("/old", pay, methods=["POST"])])
    for_fastapi.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)

    async def run() -> None:
        for path in ("/pay", "/pay", "/old", "/old"):
            await ask(app, scope_of(path))

    asyncio.run(run())
    assert len(runs) == 3


def test_an_action_that_only_answers_to_get_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Payments(HTTPEndpoint):
        @for_fastapi.idempotent()
        async def get(self, request: Any) -> Response:
            return PlainTextResponse("")

    class Orders(MethodView):
        decorators = (for_flask.idempotent(),)

        def get(self) -> str:
            return ""

    def both() -> str:
        return ""

    starlette = Starlette(routes=[Route("/pay", Payments)])
    for_fastapi.install(starlette, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    app = flask.Flask("shop")
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=whose)
    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    app.add_url_rule("/both", view_func=for_flask.idempotent()(both), methods=["GET", "POST"])
    with caplog.at_level(logging.WARNING):
        asyncio.run(ask(starlette, scope_of(method="GET")))
        app.test_client().get("/orders")
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" is declared")[0] for line in told] == ["GET /pay (Payments)", "GET /orders (orders)"]


# -- more than one middleware


def test_two_middlewares_that_claim_the_same_request_are_an_error_and_nothing_runs() -> None:
    """The second would find the first one's claim, and turn the request away for ever."""
    guard, app = AsyncSemel(AsyncMemoryStore()), Counting()
    with pytest.raises(ConfigurationError, match="one middleware of Semel"):
        asyncio.run(ask(at_the_edge(at_the_edge(app, guard), guard)))
    sync_guard, sync_app = Semel(MemoryStore()), CountingWSGI()
    with pytest.raises(ConfigurationError, match="one middleware of Semel"):
        serve(at_the_edge_of(at_the_edge_of(sync_app, sync_guard), sync_guard), environ())
    assert (app.runs, sync_app.runs) == (0, 0)


def test_a_request_that_a_handler_makes_within_the_process_is_one_of_its_own() -> None:
    app = Counting()
    inner = at_the_edge(app)

    async def outside(scope: Any, receive: Any, send: Any) -> None:
        for message in await ask(inner):
            await send(message)

    async def run() -> None:
        outer = at_the_edge(outside)
        scope = scope_of()
        first, again = await ask(outer, scope), await ask(outer, scope)
        assert body_of(first) == body_of(again) == b"run 1"
        assert header(again, b"idempotent-replayed") == [b"true"]

    asyncio.run(run())
    sync_app = CountingWSGI()
    sync_inner = at_the_edge_of(sync_app)

    def sync_outside(environ_: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [serve(sync_inner, environ())[0]]

    sync_outer, asked = at_the_edge_of(sync_outside), environ()
    assert [serve(sync_outer, asked)[0] for _ in range(2)] == [b"run 1"] * 2
    assert (app.runs, sync_app.runs) == (1, 1)


# -- where an application is mounted


@pytest.mark.parametrize(("root", "path"), [("", "/pay"), ("/api", "/api/pay"), ("/caf\xe9", "/caf\xe9/pay")])
def test_a_table_of_routes_holds_wherever_the_application_is_mounted(root: str, path: str) -> None:
    """A server's --root-path, or SCRIPT_NAME, must not turn protection off."""

    async def run() -> list[Any]:
        app = at_the_edge(Counting())
        return [await ask(app, scope_of(path, root_path=root)) for _ in range(2)]

    first, again = asyncio.run(run())
    assert body_of(first) == body_of(again) == b"run 1"
    assert header(again, b"idempotent-replayed") == [b"true"]
    app = at_the_edge_of(CountingWSGI())
    disguised = root.encode().decode("latin-1")
    answers = [serve(app, environ(SCRIPT_NAME=disguised)) for _ in range(2)]
    assert [body for body, _ in answers] == [b"run 1"] * 2
    assert answers[1][1]["idempotent-replayed"] == "true"


def test_below_two_mounts_the_same_path_is_two_operations_and_a_likeness_is_none() -> None:
    async def run() -> None:
        app = at_the_edge(Counting())
        assert body_of(await ask(app, scope_of("/a/pay", root_path="/a"))) == b"run 1"
        assert body_of(await ask(app, scope_of("/b/pay", root_path="/b"))) == b"run 2"
        assert header(await ask(app, scope_of("/ab/pay", root_path="/a")), b"idempotency-key") == []

    asyncio.run(run())


# -- what stays behind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_rules_that_are_made_for_each_request_are_not_kept(kind: str) -> None:
    around: Any = (
        asgi.ASGIMiddleware(Counting(), guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
        if kind == "asgi"
        else wsgi.WSGIMiddleware(CountingWSGI(), guard=Semel(MemoryStore()), tenant=whose)
    )
    for _ in range(2 * MOST_RULES + 1):
        assert around.rule(idempotent()).policy == around.guard.policy
    assert len(around.rules) <= MOST_RULES


def test_the_preconditions_of_a_request_do_not_stay_in_the_context_that_it_was_served_in() -> None:
    async def run() -> None:
        app = at_the_edge(Counting(), rule=conditional())
        scope = scope_of(key=None)
        scope["headers"].append((b"if-match", b'"1"'))
        assert body_of(await ask(app, scope)) == b"run 1"
        with pytest.raises(ConfigurationError, match="check_match"):
            current_preconditions()

    asyncio.run(run())


def test_a_get_of_an_application_that_is_a_generator_knows_its_middleware() -> None:
    """Its first line runs when the answer is iterated, and that is after the middleware has returned."""
    rule = idempotent()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        responder = wsgi.current_responder()
        start_response("200 OK", [])
        yield b"not claimed" if responder is None or responder.claim(rule) else b""

    served = wsgi.WSGIMiddleware(app, guard=Semel(MemoryStore()), tenant=whose)
    assert serve(served, environ(method="GET"))[0] == b"not claimed"
