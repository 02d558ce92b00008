"""The WSGI middleware. It surrounds the application. Decorated endpoints make the claim, just before the handler.

It has the same shape and names as ``semel.http.asgi``, for ``Semel``. All of a request happens in the thread that
serves it. If the endpoints of an application cannot be decorated, ``routes=`` names their rules, and the claim is made
here, at the edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import ConfigurationError
from semel.http.contract.exchange import KEY_HEADER
from semel.http.contract.middleware import Middleware
from semel.http.contract.routes import Endpoint, RouteFinder, RouteTable
from semel.http.contract.rules import MAX_REQUEST_BODY, SAFE_METHODS
from semel.http.wsgi.answers import Peeked
from semel.http.wsgi.lines import path_text
from semel.http.wsgi.responder import App, Environ, WSGIResponder
from semel.stores.guard import Semel

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

__all__ = ["WSGIMiddleware", "WSGIResponder", "current_responder"]

TenantResolver: TypeAlias = "Callable[[Any], str | None]"

_SAFE: Final = object()
"""Marks a GET or the like: its endpoint runs as if it were not declared."""
_current: ContextVar[WSGIResponder | object | None] = ContextVar("semel_wsgi_responder", default=None)


def current_responder() -> WSGIResponder | None:
    """Return the responder of the current request; None for a method that is never claimed, such as GET.

    Raises ConfigurationError if the middleware is not installed.
    """
    responder = _current.get()
    if responder is None:
        raise ConfigurationError(
            "this endpoint is declared, but the middleware is not installed: "
            "install(app, guard=…, tenant=…) in Flask, WSGIMiddleware(app, guard=…, tenant=…) elsewhere"
        )
    return responder if isinstance(responder, WSGIResponder) else None


class WSGIMiddleware(Middleware[App, Semel]):
    """Protects any WSGI application: ``app = WSGIMiddleware(app, guard=guard, tenant=…, routes=…)``."""

    def __init__(
        self,
        app: App,
        *,
        guard: Semel,
        tenant: TenantResolver | None = None,
        routes: RouteTable | None = None,
        docs: str | None = None,
        max_request_body: int = MAX_REQUEST_BODY,
        header: str = KEY_HEADER.title,
        request: Callable[[Any], Any] | None = None,
        endpoints: Callable[[], list[Endpoint]] | None = None,
        find_route: RouteFinder | None = None,
    ) -> None:
        """
        :param tenant: a function of the request, here the WSGI environ, that returns its tenant, which scopes the
            keys. It is called after authentication.
        :param routes: rules of endpoints that are not decorated: ``{"POST /orders/{id}": idempotent()}``.
        :param docs: the URL of a page that explains the errors; they link to it.
        :param max_request_body: the longest request body in bytes; a longer one is refused with 413.
        :param header: the name of the header that has the key.
        :param request: makes the framework's own request from the environ, for ``tenant``.
        :param endpoints: lists the application's endpoints, for the report at start-up.
        :param find_route: finds the route of a request in the framework's own table, for hosts and events.
        """
        super().__init__(
            app, guard, Semel, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
            header=header,
            request=request, endpoints=endpoints, find_route=find_route,
        )  # fmt: skip

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._reported:
            self.report()
        method = environ["REQUEST_METHOD"].upper()  # frameworks that run "post" as a POST must not run it unclaimed
        if method in SAFE_METHODS:
            token = _current.set(_SAFE)
            try:
                answer = self.app(environ, start_response)
                # A generator runs when it is iterated, and by then nothing would be known of this request.
                return Peeked(answer) if isinstance(answer, GeneratorType) else answer
            finally:
                _current.reset(token)
        responder = WSGIResponder(self, environ, start_response)
        token = _current.set(responder)
        try:
            return responder.respond(self.find_rule(method, path_text(environ), path_text(environ, "SCRIPT_NAME")))
        finally:
            _current.reset(token)
