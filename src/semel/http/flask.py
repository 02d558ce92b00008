"""Flask: ``install`` protects an app, and ``@idempotent()`` declares a view, below the decorator of its route.

::

    install(app, guard=guard, tenant=lambda request: g.user.id)

    @app.post("/payments")
    @idempotent(ttl="24h")
    def pay(op: Operation): ...

The claim is made just before the view runs. ``before_request`` functions run first: a request that they refuse is not
claimed, and a replay is authorised like any other request.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

from semel.errors import ConfigurationError, MissingDependency
from semel.http.contract.conditional import check_match, etag
from semel.http.contract.endpoint import Framework, RunAgain
from semel.http.contract.exchange import KEY_HEADER
from semel.http.contract.routes import (
    Endpoint,
    MatchedRoute,
    RouteTable,
    check_declarable,
    declared_rule,
    mark_exempt,
    mark_replaced,
    with_braces,
)
from semel.http.contract.rules import MAX_REQUEST_BODY, Decorators, Exempt, Rule
from semel.http.drive.sync import make_endpoint
from semel.http.handlers import find_handle, type_hints, with_connection
from semel.http.wsgi.middleware import Environ, WSGIMiddleware, WSGIResponder, current_responder
from semel.stores.guard import Semel

try:
    import flask
    from werkzeug.exceptions import HTTPException
except ImportError as error:
    raise MissingDependency("flask", "flask") from error

if TYPE_CHECKING:
    from flask import Flask, Request
    from flask.sansio.app import App

__all__ = [
    "check_match", "conditional", "endpoints", "etag", "exempt", "idempotent", "install", "natural",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
TenantResolver: TypeAlias = "Callable[[Request], str | None]"
NAME: Final = "semel"


def install(
    app: Flask,
    *,
    guard: Semel,
    tenant: TenantResolver | None = None,
    routes: RouteTable | None = None,
    docs: str | None = None,
    max_request_body: int = MAX_REQUEST_BODY,
    header: str = KEY_HEADER.title,
) -> None:
    """Protect the app. Call it once, in the application factory if there is one.

    :param tenant: a function of the request that returns its tenant, which scopes the keys. It is called after the
        ``before_request`` functions.
    :param routes: rules of views that are not decorated: ``{"POST /orders/{id}": idempotent()}``. They are claimed
        before Flask sees the request, and so before ``before_request`` functions.
    :param docs: the URL of a page that explains the errors; they link to it.
    :param max_request_body: the longest request body in bytes; a longer one is refused with 413, as is one above
        Flask's own ``MAX_CONTENT_LENGTH``.
    :param header: the name of the header that has the key.
    """

    def request(environ: Environ) -> Request:
        # A route in routes= is claimed before Flask sees the request: there is no context yet, or that of another
        # request, whose view has made this one.
        seen = flask.has_request_context() and (
            flask.request.environ is environ or flask.request.environ["wsgi.input"] is environ["wsgi.input"]
        )
        return flask.request if seen else app.request_class(environ)

    if NAME in app.extensions:
        raise ConfigurationError("install() was called for this app already: one guard for one app")
    middleware = WSGIMiddleware(
        app.wsgi_app, guard=guard, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
        header=header,
        request=request, endpoints=lambda: endpoints(app), find_route=WerkzeugRoutes(app, request),
    )  # fmt: skip
    app.extensions[NAME] = middleware
    app.wsgi_app = middleware  # type: ignore[method-assign]


def _protect(view: F, rule: Rule) -> F:
    if isinstance(rule, Exempt):
        return mark_exempt(view, rule)
    check_declarable(view)
    view = with_connection(view, rule, awaited=False)
    handle = find_handle(view, type_hints(view), awaits=False)  # the guard of a Flask app is sync
    handler = _run_async(view) if inspect.iscoroutinefunction(view) else view
    endpoint = functools.wraps(view)(make_endpoint(handler, rule, handle, _FRAMEWORK, _find_responder))
    endpoint.__semel_rule__ = rule  # type: ignore[attr-defined]
    mark_replaced(view)
    return cast(F, endpoint)


def _run_async(view: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function that has the app run an ``async def`` view, as Flask runs others."""

    def handler(*args: Any, **kwargs: Any) -> Any:
        return flask.current_app.ensure_sync(view)(*args, **kwargs)

    return handler


def _find_responder() -> WSGIResponder | None:
    responder = current_responder()
    if responder is not None:
        responder.max_request_body = flask.request.max_content_length
    return responder


def _abort(status: int) -> Exception:
    try:
        flask.abort(status)
    except HTTPException as error:
        return error


_FRAMEWORK: Final = Framework(
    blank=lambda: flask.Response(status=204),
    abort=_abort,  # for teardown functions
    run_again=RunAgain,  # no Exception: error handlers make no answer of it
)


_declare = Decorators(_protect)
idempotent, conditional = _declare.idempotent, _declare.conditional
natural, exempt = _declare.natural, _declare.exempt


def endpoints(app: App) -> list[Endpoint]:
    """Return all routes of the app, with the rules that they are declared with."""
    return [
        Endpoint(
            method,
            with_braces(route.rule),
            _rule_of(app.view_functions[route.endpoint], method),
            route.endpoint,
            _host_of(route),
        )
        for route in app.url_map.iter_rules()
        if route.endpoint in app.view_functions
        for method in sorted(route.methods or ())
    ]


class WerkzeugRoutes:
    """Finds the route of a request in the table of Werkzeug, which Flask and Quart have."""

    def __init__(self, app: Any, request: Callable[[Any], Any]) -> None:
        """:param request: makes the framework's own request from the environ or scope."""
        self._app = app
        self._request = request

    def binds_hosts(self) -> bool:
        return any(_host_of(rule) for rule in self._app.url_map.iter_rules())

    def __call__(self, environment: Any) -> MatchedRoute:
        request = self._request(environment)
        rule = request.url_rule
        if rule is None:  # at the edge, before the framework has looked for it
            try:
                rule, _ = self._app.create_url_adapter(request).match(return_rule=True)
            except HTTPException:
                return MatchedRoute()
        pattern = _host_of(rule)
        return MatchedRoute(request.host.lower() if pattern else "", pattern + with_braces(rule.rule))


def _host_of(rule: Any) -> str:
    """Return the pattern of the host or subdomain that a rule is bound to; empty if it serves all hosts."""
    if rule.map.host_matching:
        pattern = rule.host or ""
    else:
        pattern = f"{rule.subdomain}." if rule.subdomain and rule.subdomain != rule.map.default_subdomain else ""
    return with_braces(pattern)


def _rule_of(view: Any, method: str) -> Rule | None:
    """Return the rule of a view. A class of views may be declared as a whole or by its methods."""
    by_class = getattr(view, "view_class", None)
    return declared_rule(view) or (declared_rule(getattr(by_class, method.lower(), None)) if by_class else None)
