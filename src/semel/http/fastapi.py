"""FastAPI and Starlette: ``install`` protects an app, and ``@idempotent()`` declares an endpoint, below its route.

::

    install(app, guard=guard, tenant=lambda request: request.user.id)

    @app.post("/payments", status_code=201)
    @idempotent(ttl="24h")
    async def pay(payment: Payment, op: AsyncOperation): ...

The claim is made after the dependencies and the validation of the body, just before the function runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import MissingDependency, TransactionConflict
from semel.http.asgi.endpoints import protect
from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.endpoint import Framework
from semel.http.contract.middleware import check_installation
from semel.http.contract.routes import Endpoint, RouteTable, declared_rule
from semel.http.contract.rules import MAX_REQUEST_BODY, Decorators, Rule
from semel.http.describe import document
from semel.stores.aio_guard import AsyncSemel

try:
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Mount, Route
except ImportError as error:
    raise MissingDependency("starlette", "fastapi") from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = [
    "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "install", "natural",
]  # fmt: skip

TenantResolver: TypeAlias = Callable[[Request], "str | Awaitable[str | None] | None"]


def install(
    app: Starlette,
    *,
    guard: AsyncSemel,
    tenant: TenantResolver | None = None,
    routes: RouteTable | None = None,
    docs: str | None = None,
    max_request_body: int = MAX_REQUEST_BODY,
) -> None:
    """Protect the app, and describe its declared endpoints in the OpenAPI document that FastAPI generates.

    :param tenant: a function of the request that returns its tenant, which scopes the keys. It is called after the
        dependencies, and may be async.
    :param routes: rules of endpoints that are not decorated: ``{"POST /orders/{id}": idempotent()}``. They are claimed
        in the middleware, before the dependencies.
    :param docs: the URL of a page that explains the errors; they link to it.
    :param max_request_body: the longest request body in bytes; a longer one is refused with 413.
    """
    check_installation(guard, AsyncSemel, tenant, max_request_body)  # Starlette makes the middleware later
    app.add_middleware(
        ASGIMiddleware, guard=guard, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
        request=Request, endpoints=lambda: endpoints(app),
    )  # fmt: skip
    if hasattr(app, "openapi"):
        _describe(app, guard, docs)


def _protect(endpoint: Any, rule: Rule) -> Any:
    return protect(endpoint, rule, _FRAMEWORK, run_in_threadpool)


_FRAMEWORK: Final = Framework(
    blank=lambda: Response(status_code=204),
    abort=HTTPException,
    # A plain Exception: dependencies roll back in "except Exception".
    run_again=lambda: HTTPException(TransactionConflict.status),
)


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


def endpoints(app: Starlette) -> list[Endpoint]:
    """Return all routes of the app, with the rules that they are declared with."""
    return _collect(app.routes, "")


def _collect(routes: list[BaseRoute], prefix: str) -> list[Endpoint]:
    result: list[Endpoint] = []
    for route in routes:
        if isinstance(route, Mount):
            result += _collect(route.routes, prefix + route.path)
        elif isinstance(route, Route):
            result += _endpoints_of(route, prefix + route.path_format)
        elif hasattr(route, "effective_route_contexts"):  # a router of FastAPI's, included but not unfolded
            for inner in route.effective_route_contexts():
                plain = inner.starlette_route
                result += (
                    _endpoints_of(inner, prefix + inner.path_format) if plain is None else _collect([plain], prefix)
                )
    return result


def _endpoints_of(route: Route, path: str) -> list[Endpoint]:
    endpoint = route.endpoint
    methods = sorted(route.methods or ())
    if isinstance(endpoint, type):  # an HTTPEndpoint: a method of the class for each of the protocol
        methods = [name.upper() for name in dir(endpoint) if name.upper() in _METHODS]
        return [Endpoint(m, path, declared_rule(getattr(endpoint, m.lower())), route.name) for m in methods]
    return [Endpoint(method, path, declared_rule(endpoint), route.name) for method in methods]


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def _describe(app: Any, guard: AsyncSemel, docs: str | None) -> None:
    """Have ``app.openapi()`` describe the declared endpoints, whenever FastAPI builds the document anew."""
    build = app.openapi
    known: dict[str, Any] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal known
        built: dict[str, Any] = build()
        if built is not known:
            app.openapi_schema = known = document(built, endpoints(app), guard=guard, docs=docs)
            return known
        return built

    app.openapi = openapi
