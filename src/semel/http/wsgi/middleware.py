"""WSGI: a middleware that prepares and captures at the edge; the claim is made at the endpoint, before the handler.

The same shape and names as ``semel.http.asgi``, for ``Semel``. All of a request happens in the thread that serves it.
For an application whose endpoints cannot be decorated, ``routes=`` names the rules and the claim is made here, at the
edge. A request without a key can claim nothing, so it costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from types import GeneratorType
from typing import TYPE_CHECKING, Final, TypeAlias

from semel.engine.sync import Semel
from semel.errors import ConfigurationError
from semel.http.contract.middleware import Middleware
from semel.http.contract.rules import MAX_REQUEST_BODY, SAFE_METHODS, Rule
from semel.http.wsgi.answers import Peeked
from semel.http.wsgi.lines import path_text
from semel.http.wsgi.responder import App, Environ, Responder

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

__all__ = ["Idempotency", "Responder", "current_responder"]

TenantResolver: TypeAlias = "Callable[[Environ], str | None]"

_SAFE: Final = object()
"""The request in hand is a GET or the like: its endpoint runs as if it were not declared."""
_current: ContextVar[Responder | object | None] = ContextVar("semel_wsgi_responder", default=None)


def current_responder() -> Responder | None:
    """The responder of the request in hand, for the decorators; None for a method that is never claimed."""
    responder = _current.get()
    if responder is None:
        raise ConfigurationError(
            "this endpoint is declared to happen once, and the Idempotency middleware is not installed: "
            "SemelFlask(app, guard=…, tenant=…) in Flask, Idempotency(application, guard=…, tenant=…) elsewhere"
        )
    return responder if isinstance(responder, Responder) else None


class Idempotency(Middleware[App, Semel]):
    """``application = Idempotency(application, guard=guard, tenant=…)``"""

    def __init__(
        self,
        app: App,
        *,
        guard: Semel,
        tenant: TenantResolver | None = None,
        routes: Mapping[tuple[str, str], Rule] | None = None,
        docs: str | None = None,
        max_request_body: int = MAX_REQUEST_BODY,
    ) -> None:
        """
        :param tenant: whose request it is, from the WSGI environ, after authentication; its result scopes the keys.
        :param routes: rules by (method, path) that are claimed here, for endpoints that are not decorated; a path may
            have parts, like ``/orders/{id}``.
        :param docs: a page that explains the errors; linked from them.
        :param max_request_body: bytes of a request's body that a claim takes; a longer one is refused with 413.
        """
        super().__init__(app, guard, Semel, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if not self._reported:
            self.report()
        if environ["REQUEST_METHOD"] in SAFE_METHODS:
            token = _current.set(_SAFE)
            try:
                answer = self.app(environ, start_response)
                # A generator runs when it is iterated, and by then nothing would be known of this request.
                return Peeked(answer) if isinstance(answer, GeneratorType) else answer
            finally:
                _current.reset(token)
        responder = Responder(self, environ, start_response)
        token = _current.set(responder)
        try:
            return responder.respond(
                self.declared(environ["REQUEST_METHOD"], path_text(environ), path_text(environ, "SCRIPT_NAME"))
            )
        finally:
            _current.reset(token)
