"""Mistakes in the set-up: loud, early, and never a silent pass."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from semel import (
    AsyncMemoryStore,
    AsyncOperation,
    AsyncSemel,
    ConfigurationError,
    MemoryStore,
    Operation,
    PolicyError,
    Semel,
)
from semel.http.asgi import ASGIMiddleware
from semel.http.asgi.endpoints import protect
from semel.http.contract.endpoint import Framework
from semel.http.contract.routes import Routes
from semel.http.fastapi import idempotent
from tests.http.asking import Counting, ask, at_the_edge, body_of, scope_of, whose


def test_a_declared_endpoint_without_the_middleware_is_an_error_and_does_not_run() -> None:
    runs = []

    @idempotent()
    async def pay(request: Request) -> Response:
        runs.append(1)
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    with pytest.raises(ConfigurationError, match="middleware is not installed"):
        asyncio.run(ask(app))
    assert runs == []


def test_one_request_is_claimed_once() -> None:
    @idempotent()
    async def pay(request: Request) -> Response:
        return PlainTextResponse("")

    app = at_the_edge(Starlette(routes=[Route("/pay", pay, methods=["POST"])]))
    with pytest.raises(ConfigurationError, match="claimed already"):
        asyncio.run(ask(app))


def test_no_tenant_is_a_loud_warning_unless_the_guard_has_one() -> None:
    with pytest.warns(UserWarning, match="tenant= is missing"):
        ASGIMiddleware(Counting(), guard=AsyncSemel(AsyncMemoryStore()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ASGIMiddleware(Counting(), guard=AsyncSemel(AsyncMemoryStore(), tenant="shop"))


@pytest.mark.parametrize(
    ("resolver", "error"),
    [
        (lambda scope: scope["user"], KeyError),
        (lambda scope: None, ConfigurationError),
        (lambda scope: "", ConfigurationError),
        (lambda scope: "t" * 256, ConfigurationError),
        (lambda scope: 1.5, ConfigurationError),
    ],
)
def test_a_tenant_that_cannot_be_told_is_the_services_error_and_nothing_runs(resolver: Any, error: Any) -> None:
    app = Counting()
    guarded = ASGIMiddleware(
        app, guard=AsyncSemel(AsyncMemoryStore()), tenant=resolver, routes={"POST /pay": idempotent()}
    )
    with pytest.raises(error):
        asyncio.run(ask(guarded))
    assert app.runs == 0


def test_a_tenant_may_be_awaited() -> None:
    async def resolver(scope: Any) -> str:
        return "bob"

    guard = AsyncSemel(AsyncMemoryStore())
    guarded = ASGIMiddleware(Counting(), guard=guard, tenant=resolver, routes={"POST /pay": idempotent()})

    async def run() -> None:
        await ask(guarded)
        assert await guard.lookup("POST /pay", "k", tenant="bob") is not None

    asyncio.run(run())


def test_a_sync_guard_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        ASGIMiddleware(Counting(), guard=Semel(MemoryStore()), tenant=whose)  # type: ignore[arg-type]


def test_rules_for_methods_that_change_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="GET /pay"):
        ASGIMiddleware(
            Counting(), guard=AsyncSemel(AsyncMemoryStore()), tenant=whose, routes={"GET /pay": idempotent()}
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"reused_status": 418},
        {"scope": "planet"},
        {"replay_headers": frozenset({"Set-Cookie"})},
        {"replay_headers": frozenset({b"etag"})},
        {"replay_headers": frozenset({"e tag"})},
        {"replay_marker": "date"},
        {"max_stored_body": -1},
        {"include": ("a",), "exclude": ("b",)},
        {"ttl": "soon"},
        {"retries": 3},
        {"key_format": "telephone"},
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_when_it_is_declared(settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        idempotent(**settings)


def test_names_of_header_lines_are_taken_in_any_case() -> None:
    rule = idempotent(replay_headers=frozenset({"ETag", "Location"}), replay_marker="X-Again")
    assert rule == idempotent(replay_headers=frozenset({"etag", "location"}), replay_marker="x-again")
    assert rule.replay_header_names == {b"etag", b"location"}
    assert rule.replay_marker_name == b"x-again"


def test_a_generator_and_the_wrong_handle_are_refused_when_declared() -> None:
    with pytest.raises(PolicyError, match="generator"):

        @idempotent()
        async def stream() -> Any:
            yield 1

    with pytest.raises(PolicyError, match="AsyncOperation"):

        @idempotent()
        async def pay(op: Operation) -> None: ...

    with pytest.raises(PolicyError, match="annotate op with Operation"):

        @idempotent()
        def pay_in_thread(op: AsyncOperation) -> None: ...


def test_a_sync_endpoint_called_in_the_event_loop_is_an_error_and_no_deadlock() -> None:
    def pay() -> None: ...

    # For a framework that calls a plain def in a thread by itself.
    declared = protect(pay, idempotent(), Framework(lambda: None, RuntimeError, RuntimeError))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        declared()

    guarded = ASGIMiddleware(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose)
    with pytest.raises(ConfigurationError, match="event loop"):
        asyncio.run(ask(guarded))


def test_a_path_may_have_parts_and_a_literal_one_wins() -> None:
    refund, special, put = idempotent(required=False), idempotent(external_effects=True), idempotent(keep_body=False)
    routes = Routes(
        {
            "POST /orders/{id}/refund": refund,
            "POST /orders/special/refund": special,
            "PUT /orders/{id}.json": put,
        }
    )
    assert routes.find("POST", "/orders/7/refund") is refund
    assert routes.find("POST", "/orders/special/refund") is special
    assert routes.find("PUT", "/orders/7.json") is put
    for method, path in [
        ("PUT", "/orders/7/refund"),
        ("POST", "/orders//refund"),
        ("POST", "/orders/7/8/refund"),
        ("POST", "/orders/7/refund/"),
        ("POST", "/orders/7/refund\n"),
        ("PUT", "/orders/7xjson"),
    ]:
        assert routes.find(method, path) is None


@pytest.mark.parametrize("route", ["GET /pay", "post /pay", "POST pay"])
def test_a_route_that_would_never_be_found_is_refused(route: str) -> None:
    with pytest.raises(ConfigurationError):
        Routes({route: idempotent()})


def test_requests_to_a_path_with_parts_are_operations_of_their_own() -> None:
    app = Counting()
    guarded = ASGIMiddleware(
        app, guard=AsyncSemel(AsyncMemoryStore()), tenant=whose, routes={"POST /orders/{id}": idempotent()}
    )

    async def run() -> None:
        for path in ("/orders/1", "/orders/1", "/orders/2"):
            assert (await ask(guarded, scope_of(path)))[0]["status"] == 200

    asyncio.run(run())
    assert app.runs == 2


def test_the_tenant_is_asked_for_before_the_body_is_read() -> None:
    async def receive() -> Any:
        raise AssertionError("the body of an anonymous request was read")

    async def send(message: Any) -> None:
        raise AssertionError("nothing is answered")

    guarded = ASGIMiddleware(
        Counting(),
        guard=AsyncSemel(AsyncMemoryStore()),
        tenant=lambda scope: None,
        routes={"POST /pay": idempotent()},
    )

    with pytest.raises(ConfigurationError, match="after authentication"):
        asyncio.run(guarded(scope_of(), receive, send))


def test_a_method_in_lower_case_is_the_same_method() -> None:
    counting = Counting()
    guarded = at_the_edge(counting)

    async def main() -> list[bytes]:
        return [body_of(await ask(guarded, scope_of(method=method))) for method in ("post", "POST", "get")]

    assert asyncio.run(main()) == [b"run 1", b"run 1", b"run 2"]
