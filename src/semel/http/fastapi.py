"""FastAPI and Starlette: ``@action()`` on an endpoint, below the route's own decorator.

::

    install(app, guard=guard, tenant=lambda scope: scope["user"].id)

    @app.post("/payments", status_code=201)
    @action(ttl="24h")
    async def pay(payment: Payment, op: AsyncOperation): ...

The claim is made after the dependencies and the validation of the body, just before the function runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from semel.engine.aio import AsyncSemel
from semel.errors import MissingDependency
from semel.http.asgi.endpoints import protect
from semel.http.asgi.middleware import Idempotency, TenantResolver
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.inventory import Endpoint, declared_rule, exempted
from semel.http.contract.rules import MAX_REQUEST_BODY, Action, Conditional, Exempt, Natural, Rule

try:
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Mount, Route
except ImportError as error:
    raise MissingDependency("starlette", "fastapi") from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = [
    "Action", "Conditional", "Idempotency", "Natural", "action", "check_match", "conditional", "endpoints", "etag",
    "exempt", "install", "natural",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


def install(
    app: Starlette,
    *,
    guard: AsyncSemel,
    tenant: TenantResolver | None = None,
    docs: str | None = None,
    max_request_body: int = MAX_REQUEST_BODY,
) -> None:
    """Protect the app: its middleware, and for FastAPI the key and its errors in the generated OpenAPI document.

    :param tenant: whose request it is, from the ASGI scope, after authentication; its result scopes the keys.
    :param docs: a page that explains the errors; linked from them.
    :param max_request_body: bytes of a request's body that a claim takes; a longer one is refused with 413.
    """
    app.add_middleware(Idempotency, guard=guard, tenant=tenant, docs=docs, max_request_body=max_request_body)
    if hasattr(app, "openapi"):
        from semel.http.describe.openapi import wrap_fastapi

        wrap_fastapi(app, lambda: endpoints(app), guard, docs)


def action(base: Action | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare an endpoint that needs a key and happens once for it. Settings of ``Action`` and of ``Policy``."""
    return _declare(Action.declared(base, **settings))


def conditional(base: Conditional | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare an endpoint that changes only what is as the caller knows it (If-Match): see ``check_match``."""
    return _declare(Conditional.declared(base, **settings))


def natural(base: Natural | None = None, **settings: Any) -> Callable[[F], F]:
    """Declare an endpoint whose second call changes nothing: a PUT of a whole, a DELETE. No key, no record."""
    return _declare(Natural.declared(base, **settings))


def exempt(reason: str) -> Callable[[F], F]:
    """Declare that an endpoint is left alone, and why: only the report at start-up is silenced."""
    rule = Exempt(reason)
    return lambda function: exempted(function, rule)


def _declare(rule: Rule) -> Callable[[F], F]:
    blank = lambda: Response(status_code=204)  # noqa: E731
    return lambda function: protect(function, rule, blank, HTTPException, run_in_threadpool)


def endpoints(app: Starlette) -> list[Endpoint]:
    """All routes of the app, with what they are declared to be."""
    return _found(app.routes, "")


def _found(routes: list[BaseRoute], prefix: str) -> list[Endpoint]:
    found: list[Endpoint] = []
    for route in routes:
        if isinstance(route, Mount):
            found += _found(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            found += _of(route, prefix + route.path_format)
        elif hasattr(route, "effective_route_contexts"):  # a router of FastAPI's, included but not unfolded
            for inner in route.effective_route_contexts():
                plain = inner.starlette_route
                found += _of(inner, prefix + inner.path_format) if plain is None else _found([plain], prefix)
    return found


def _of(route: Route, path: str) -> list[Endpoint]:
    endpoint = route.endpoint
    methods = sorted(route.methods or ())
    if isinstance(endpoint, type):  # an HTTPEndpoint: a method of the class for each of the protocol
        methods = [name.upper() for name in dir(endpoint) if name.upper() in _METHODS]
        return [Endpoint(m, path, declared_rule(getattr(endpoint, m.lower())), route.name) for m in methods]
    return [Endpoint(method, path, declared_rule(endpoint), route.name) for method in methods]


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
