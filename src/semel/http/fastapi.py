"""FastAPI and Starlette: ``install`` protects an app, and ``@idempotent()`` declares an endpoint, below its route.

::

    install(app, guard=guard, tenant=lambda request: request.user.id)

    @app.post("/payments", status_code=201)
    @idempotent(ttl="24h")
    async def pay(payment: Payment, op: AsyncOperation): ...

The claim is made after the dependencies and the validation of the body, just before the function runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import MissingDependency, TransactionConflict
from semel.http.asgi.body import Scope
from semel.http.asgi.endpoints import protect
from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.endpoint import Framework
from semel.http.contract.exchange import KEY_HEADER
from semel.http.contract.routes import Endpoint, MatchedRoute, RouteTable, check_installation, declared_rule
from semel.http.contract.rules import MAX_REQUEST_BODY, Decorators, Rule
from semel.http.describe import document
from semel.stores.aio_guard import AsyncSemel

try:
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute, Host, Mount, Route
except ImportError as error:
    raise MissingDependency("starlette", "fastapi") from error

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = [
    "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "install", "natural",
]  # fmt: skip

TenantResolver: TypeAlias = Callable[[Request], "str | Awaitable[str | None] | None"]
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PART: Final = re.compile(r"\\{\w+\\}")
"""A parameter in the escaped template of a path."""
_ENDS: Final = frozenset({"commit", "begin"})
"""Names in the code of a dependency that ends a transaction: ``session.commit()``, ``async with sessions.begin()``."""


def install(
    app: Starlette,
    *,
    guard: AsyncSemel,
    tenant: TenantResolver | None = None,
    routes: RouteTable | None = None,
    docs: str | None = None,
    max_request_body: int = MAX_REQUEST_BODY,
    header: str = KEY_HEADER.title,
) -> None:
    """Protect the app, and describe its declared endpoints in the OpenAPI document that FastAPI generates.

    :param tenant: a function of the request that returns its tenant, which scopes the keys. It is called after the
        dependencies, and may be async.
    :param routes: rules of endpoints that are not decorated: ``{"POST /orders/{id}": idempotent()}``. They are claimed
        in the middleware, before the dependencies.
    :param docs: the URL of a page that explains the errors; they link to it.
    :param max_request_body: the longest request body in bytes; a longer one is refused with 413.
    :param header: the name of the header that has the key.
    """
    check_installation(guard, AsyncSemel, tenant, max_request_body, header)  # Starlette makes the middleware later
    app.add_middleware(
        ASGIMiddleware, guard=guard, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
        header=header,
        request=Request, endpoints=lambda: endpoints(app), find_route=_StarletteRoutes(app),
    )  # fmt: skip
    if hasattr(app, "openapi"):
        _describe(app, guard, docs, header)


def _protect(endpoint: Any, rule: Rule) -> Any:
    return protect(endpoint, rule, _FRAMEWORK, run_in_threadpool)


_FRAMEWORK: Final = Framework(
    blank=partial(Response, status_code=204),
    abort=HTTPException,
    # A plain Exception: dependencies roll back in "except Exception".
    run_again=lambda: HTTPException(TransactionConflict.status),
)


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


def endpoints(app: Starlette) -> list[Endpoint]:
    """Return all routes of the app, with the rules that they are declared with."""
    return [each for _, each in _collect(app.routes)]


def _collect(routes: Iterable[BaseRoute], prefix: str = "", host: str = "") -> Iterator[tuple[Any, Endpoint]]:
    """Yield each endpoint, after the function or class that serves it."""
    for route in routes:
        if isinstance(route, Mount):
            yield from _collect(route.routes, prefix + route.path, host)
        elif isinstance(route, Host):
            yield from _collect(route.routes, prefix, route.host_format)
        elif isinstance(route, Route):
            yield from _endpoints_of(route, prefix + route.path_format, host)
        elif hasattr(route, "effective_route_contexts"):  # a router of FastAPI's, included but not unfolded
            for inner in route.effective_route_contexts():
                plain = inner.starlette_route
                if plain is None:
                    yield from _endpoints_of(inner, prefix + inner.path_format, host)
                else:
                    yield from _collect([plain], prefix, host)


def _endpoints_of(route: Route, path: str, host: str) -> Iterator[tuple[Any, Endpoint]]:
    endpoint = route.endpoint
    by_class = isinstance(endpoint, type)  # an HTTPEndpoint: a method of the class for each of the protocol
    methods = [name.upper() for name in dir(endpoint) if name.upper() in _METHODS] if by_class else route.methods
    late = _late_commit(getattr(route, "dependant", None))  # FastAPI's routes have one, Starlette's do not
    for method in sorted(methods or ()):
        function = getattr(endpoint, method.lower()) if by_class else endpoint
        yield endpoint, Endpoint(method, path, declared_rule(function), route.name, host, late)


def _late_commit(dependant: Any) -> str:
    """Return the name of a dependency with ``yield`` that commits when it ends, after the answer was sent."""
    for each in () if dependant is None else dependant.dependencies:
        function = inspect.unwrap(each.call.func if isinstance(each.call, partial) else each.call)
        yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        # FastAPI before 0.121 has no scope, and ends them at another time.
        if yields and getattr(each, "scope", "function") != "function" and _ENDS & {*function.__code__.co_names}:
            return str(function.__qualname__)
        if within := _late_commit(each):
            return within
    return ""


class _StarletteRoutes:
    """Finds the route of a request by the endpoint that Starlette has chosen for it."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    @cached_property
    def _by_endpoint(self) -> dict[int, list[Endpoint]]:
        found: dict[int, list[Endpoint]] = {}
        for function, endpoint in _collect(self._app.routes):
            found.setdefault(id(function), []).append(endpoint)
        return found

    @cached_property
    def _hosts(self) -> list[re.Pattern[str]]:
        return [route.host_regex for route in _host_routes(self._app.routes)]

    def binds_hosts(self) -> bool:
        return bool(self._hosts)

    def __call__(self, scope: Scope) -> MatchedRoute:
        endpoints = self._by_endpoint.get(id(scope.get("endpoint")), [])
        host = ""
        # At the edge there is no endpoint yet. A host that a Host(…) route matches leads to that route then.
        if self._hosts and (not endpoints or any(each.host for each in endpoints)):
            with suppress(ValueError):  # a malformed host matches no route
                named = Request(scope).url.hostname or ""
                host = named if any(pattern.match(named) for pattern in self._hosts) else ""
        templates = dict.fromkeys(each.host + each.path for each in endpoints if bool(each.host) == bool(host))
        if len(templates) > 1:  # one function that serves several paths
            path = scope["path"]
            templates = {
                each: None for each in templates if re.search(_PART.sub(".+", re.escape(each)) + "$", host + path)
            }
        return MatchedRoute(host, next(iter(templates), ""))


def _host_routes(routes: Iterable[BaseRoute]) -> Iterator[Host]:
    for route in routes:
        if isinstance(route, Host):
            yield route
        if isinstance(route, (Host, Mount)):
            yield from _host_routes(route.routes)


def _describe(app: Any, guard: AsyncSemel, docs: str | None, header: str) -> None:
    """Have ``app.openapi()`` describe the declared endpoints, whenever FastAPI builds the document anew."""
    build = app.openapi
    known: dict[str, Any] | None = None

    def openapi() -> dict[str, Any]:
        nonlocal known
        built: dict[str, Any] = build()
        if built is not known:
            app.openapi_schema = known = document(
                built, [each for each in endpoints(app) if not each.host], guard=guard, docs=docs, header=header
            )
            return known
        return built

    app.openapi = openapi
