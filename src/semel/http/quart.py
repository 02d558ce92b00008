"""Quart: ``install`` protects an app, and ``@idempotent()`` declares a view, below the decorator of its route.

::

    install(app, guard=guard, tenant=lambda request: g.user.id)

    @app.post("/payments")
    @idempotent(ttl="24h")
    async def pay(op: AsyncOperation): ...

The claim is made just before the view runs. ``before_request`` functions run first: a request that they refuse is not
claimed, and a replay is authorised like any other request.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from semel.errors import ConfigurationError, MissingDependency, TransactionConflict
from semel.http.asgi.body import Scope
from semel.http.asgi.endpoints import protect
from semel.http.asgi.middleware import ASGIMiddleware, current_responder
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.endpoint import Framework
from semel.http.contract.exchange import KEY_HEADER
from semel.http.contract.routes import RouteTable
from semel.http.contract.rules import MAX_REQUEST_BODY, Decorators, Exempt, Rule
from semel.stores.aio_guard import AsyncSemel

try:
    import quart
    from quart.utils import run_sync
    from werkzeug.datastructures import Headers
    from werkzeug.exceptions import HTTPException, abort

    from semel.http.flask import WerkzeugRoutes, endpoints  # Quart has Flask's table of routes
except ImportError as error:
    raise MissingDependency("quart", "quart") from error

if TYPE_CHECKING:
    from quart import Quart, Request

__all__ = [
    "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "install", "natural",
]  # fmt: skip

TenantResolver: TypeAlias = "Callable[[Request], str | Awaitable[str | None] | None]"
NAME: Final = "semel"


def install(
    app: Quart,
    *,
    guard: AsyncSemel,
    tenant: TenantResolver | None = None,
    routes: RouteTable | None = None,
    docs: str | None = None,
    max_request_body: int = MAX_REQUEST_BODY,
    header: str = KEY_HEADER.title,
) -> None:
    """Protect the app. Call it once, in the application factory if there is one.

    :param tenant: a function of the request that returns its tenant, which scopes the keys. It is called after the
        ``before_request`` functions, and may be async.
    :param routes: rules of views that are not decorated: ``{"POST /orders/{id}": idempotent()}``.
    :param docs: the URL of a page that explains the errors; they link to it.
    :param max_request_body: the longest request body in bytes; a longer one is refused with 413, as is one above
        Quart's own ``MAX_CONTENT_LENGTH``.
    :param header: the name of the header that has the key.
    """

    def request(scope: Scope) -> Request:
        # A route in routes= is claimed before Quart sees the request: there is no context yet, or that of another
        # request, whose view has made this one.
        seen = quart.has_request_context() and (
            quart.request.scope is scope or quart.request.scope["headers"] is scope["headers"]
        )
        return quart.request if seen else _make_request(app, scope)

    if NAME in app.extensions:
        raise ConfigurationError("install() was called for this app already: one guard for one app")
    application: Any = app.asgi_app  # its types are those of asgiref, ours are plain mappings
    middleware = ASGIMiddleware(
        application, guard=guard, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
        header=header,
        request=request, endpoints=lambda: endpoints(app), find_route=WerkzeugRoutes(app, request),
    )  # fmt: skip
    app.extensions[NAME] = middleware
    setattr(app, "asgi_app", middleware)  # noqa: B010 (mypy: a method, if Quart is there)


def _make_request(app: Quart, scope: Scope) -> Request:
    headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])

    async def no_push(path: str, headers: Headers) -> None: ...

    return app.request_class(
        scope["method"], scope["scheme"], scope["path"], scope["query_string"], headers, scope.get("root_path", ""),
        scope["http_version"], scope=cast(Any, scope), send_push_promise=no_push,
    )  # fmt: skip


def _protect(view: Any, rule: Rule) -> Any:
    endpoint = protect(view, rule, _FRAMEWORK, lambda function, *args, **kwargs: run_sync(function)(*args, **kwargs))
    if isinstance(rule, Exempt):
        return endpoint

    @functools.wraps(endpoint)
    async def read_first(*args: Any, **kwargs: Any) -> Any:
        # Quart reads the body in a task of its own. The claim reads what is left of it, and two must not read at once.
        responder = current_responder()
        if responder is not None and responder.has_key:
            await quart.request.get_data()
        return await endpoint(*args, **kwargs)

    return read_first


def _abort(status: int) -> Exception:
    try:
        abort(status)
    except HTTPException as error:
        return error


_FRAMEWORK: Final = Framework(
    blank=lambda: quart.Response(b"", status=204),
    abort=_abort,
    run_again=lambda: _abort(TransactionConflict.status),
)

_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt
