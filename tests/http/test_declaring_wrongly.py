"""A declaration or an installation that cannot be meant is refused when it is made, in words that say what to write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import flask
import pytest
from fastapi import FastAPI
from litestar import Litestar, post

from semel import AsyncMemoryStore, AsyncSemel, ConfigurationError, MemoryStore, Policy, PolicyError, Semel
from semel.http import asgi as asgi_room
from semel.http import django as for_django
from semel.http import fastapi as for_fastapi
from semel.http import flask as for_flask
from semel.http import litestar as for_litestar
from semel.http.asgi import middleware as asgi
from semel.http.contract.rules import Conditional, Idempotent, conditional, idempotent, natural
from semel.http.wsgi import middleware as wsgi
from tests.http.asking import ask, body_of, scope_of

GLUES = [for_fastapi, for_flask, for_django, for_litestar]


def view() -> str:
    return "done"


async def application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("never called")


def around_asgi(**settings: Any) -> object:
    return asgi.ASGIMiddleware(application, guard=AsyncSemel(AsyncMemoryStore()), **settings)


def around_wsgi(**settings: Any) -> object:
    return wsgi.WSGIMiddleware(lambda environ, start_response: [], guard=Semel(MemoryStore()), **settings)


def in_flask(**settings: Any) -> object:
    return for_flask.install(flask.Flask("shop"), guard=Semel(MemoryStore()), **settings)


def in_fastapi(**settings: Any) -> object:
    return for_fastapi.install(FastAPI(), guard=AsyncSemel(AsyncMemoryStore()), **settings)


def in_litestar(**settings: Any) -> object:
    return for_litestar.SemelPlugin(guard=AsyncSemel(AsyncMemoryStore()), **settings)


@pytest.mark.parametrize("glue", GLUES)
@pytest.mark.parametrize("name", ["idempotent", "conditional", "natural"])
def test_forgotten_brackets_are_named(glue: ModuleType, name: str) -> None:
    with pytest.raises(PolicyError, match=rf"write @{name}\(\), with the brackets"):
        getattr(glue, name)(view)


@pytest.mark.parametrize("glue", GLUES)
def test_a_natural_route_is_declared_from_its_own_settings_and_rules(glue: ModuleType) -> None:
    with pytest.raises(PolicyError, match="unknown setting ttl; there are: absent"):
        glue.natural(ttl="7d")
    with pytest.raises(PolicyError, match=r"natural\(\) starts from another natural\(\), not from idempotent\(\)$"):
        glue.natural(idempotent())
    glue.natural(natural(absent=frozenset({410})))


@pytest.mark.parametrize("glue", GLUES)
def test_an_exemption_without_a_reason_is_refused_before_it_decorates_anything(glue: ModuleType) -> None:
    for reason in (view, "", "  "):
        with pytest.raises(PolicyError, match=r'@exempt\("it only reads"\)'):
            glue.exempt(reason)


@pytest.mark.parametrize("base", [idempotent(), Idempotent, {"ttl": "7d"}])
def test_the_rules_to_start_from_are_of_the_same_kind(base: Any) -> None:
    with pytest.raises(PolicyError, match=r"conditional\(\) starts from another conditional\(\), not from"):
        conditional(base)


def test_rules_to_start_from_may_be_of_a_narrower_kind() -> None:
    assert isinstance(idempotent(conditional(), ttl="7d"), Conditional)


@pytest.mark.parametrize("name", ["tll", "kind"])
def test_an_unknown_setting_lists_those_of_the_route_and_those_of_the_policy(name: str) -> None:
    with pytest.raises(
        PolicyError,
        match=f"unknown setting {name}; there are: allow_decorators_below, .*exclude, .*key_format.*, scope, ttl$",
    ):
        idempotent(**{name: "7d"})


def test_a_route_has_no_arguments_that_could_be_kept() -> None:
    for wrong in (lambda: idempotent(resumable=True), lambda: idempotent(policy=Policy(resumable=True))):
        with pytest.raises(PolicyError, match=r"resumable= is a setting of @guard\.once"):
            wrong()


@pytest.mark.parametrize("install", [around_asgi, around_wsgi, in_fastapi, in_flask, in_litestar])
def test_a_tenant_that_cannot_be_asked_is_refused_at_once(install: Callable[..., object]) -> None:
    with pytest.raises(ConfigurationError, match=r"tenant= is a function .* not 'alice'.*Semel\(store, tenant=…\)"):
        install(tenant="alice")


@pytest.mark.parametrize("install", [around_asgi, around_wsgi])
@pytest.mark.parametrize(
    ("routes", "complaint"),
    [
        (["/orders"], r"not \['/orders'\]"),
        ({"/orders": idempotent()}, "'/orders' is no method and path"),
        ({("POST", "/orders"): idempotent()}, "is no method and path"),
        ({"POST /orders": Idempotent}, "the rule of POST /orders is <class"),
        ({"POST /orders": "action"}, "the rule of POST /orders is 'action'"),
    ],
)
def test_a_table_of_another_shape_shows_the_right_one(
    install: Callable[..., object], routes: Any, complaint: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf'like \{{"POST /orders": idempotent\(\)\}}.*{complaint}'):
        install(tenant=lambda request: "alice", routes=routes)


def test_a_forgotten_plugin_is_named_as_the_framework_calls_it() -> None:
    @post("/pay")
    @for_litestar.idempotent()
    async def pay() -> str:
        raise AssertionError("never runs")

    app = Litestar([pay], openapi_config=None, debug=True, logging_config=None)
    sent = asyncio.run(ask(app, scope_of("/pay", raw_path=b"/pay")))
    assert b"plugins=[SemelPlugin(" in body_of(sent)


def test_a_forgotten_extension_is_named_as_the_framework_calls_it() -> None:
    app = flask.Flask("shop")
    app.testing = True
    app.post("/pay")(for_flask.idempotent()(view))
    with pytest.raises(ConfigurationError, match=r"install\(app, guard=…, tenant=…\) in Flask"):
        app.test_client().post("/pay")


@pytest.mark.parametrize("name", ["idempotent", "conditional", "natural"])
def test_a_rule_for_routes_says_where_the_decorator_is(name: str) -> None:
    with pytest.raises(PolicyError, match=f"{name} is for routes= here: .* such as semel.http.fastapi"):
        getattr(asgi_room, name)()(view)
