"""ASGI: a middleware that prepares and captures at the edge; the claim is made at the endpoint, before the handler.

So authentication, rate limits and validation come first, and turn requests away without a claim. For an application
whose endpoints cannot be decorated, ``routes=`` names the rules and the claim is made here, at the edge.

A request without a key can claim nothing, so it costs next to nothing: no task, no buffer, no hash.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from semel.engine.aio import AsyncSemel
from semel.errors import ConfigurationError
from semel.http.asgi.messages import App, Receive, Scope, Send
from semel.http.asgi.responder import Responder
from semel.http.contract.middleware import Middleware
from semel.http.contract.rules import MAX_REQUEST_BODY, SAFE_METHODS, Rule

__all__ = ["Idempotency", "Responder", "current_responder"]

TenantResolver: TypeAlias = Callable[[Scope], "str | Awaitable[str | None] | None"]

_SAFE: Final = object()
"""The request in hand is a GET or the like: its endpoint runs as if it were not declared."""
_current: ContextVar[Responder | object | None] = ContextVar("semel_responder", default=None)
_log = logging.getLogger("semel.http")


def current_responder() -> Responder | None:
    """The responder of the request in hand, for the decorators; None for a method that is never claimed."""
    responder = _current.get()
    if responder is None:
        raise ConfigurationError(
            "this endpoint is declared to happen once, and the Idempotency middleware is not installed: "
            "install(app, guard=…, tenant=…) in FastAPI and Starlette, plugins=[SemelPlugin(guard=…, tenant=…)] in "
            "Litestar, Idempotency(app, guard=…, tenant=…) elsewhere"
        )
    return responder if isinstance(responder, Responder) else None


class Idempotency(Middleware[App, AsyncSemel]):
    """``app.add_middleware(Idempotency, guard=guard, tenant=…)``"""

    def __init__(
        self,
        app: App,
        *,
        guard: AsyncSemel,
        tenant: TenantResolver | None = None,
        routes: Mapping[tuple[str, str], Rule] | None = None,
        docs: str | None = None,
        max_request_body: int = MAX_REQUEST_BODY,
    ) -> None:
        """
        :param tenant: whose request it is, from the ASGI scope, after authentication; its result scopes the keys.
        :param routes: rules by (method, path) that are claimed here, for endpoints that are not decorated; a path may
            have parts, like ``/orders/{id}``.
        :param docs: a page that explains the errors; linked from them.
        :param max_request_body: bytes of a request's body that a claim takes; a longer one is refused with 413.
        """
        super().__init__(
            app, guard, AsyncSemel, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body
        )
        self._left: set[asyncio.Task[None]] = set()
        """Handlers that finish without a client; the event loop itself would let go of them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._reported:
            await self._look(scope, receive, send)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] in SAFE_METHODS:
            token = _current.set(_SAFE)
            try:
                await self.app(scope, receive, send)
            finally:
                _current.reset(token)
            return
        rule = None
        if self.routes.rules:
            rule = self.declared(scope["method"], scope["path"], scope.get("root_path", ""))
        responder = Responder(self, scope, receive, send)
        token = _current.set(responder)
        try:
            await responder.respond(rule)
        finally:
            _current.reset(token)

    async def _look(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Report on the routes. Of a mistake among them the server hears at start-up, and else at each request."""
        try:
            self._list(scope)
        except ConfigurationError as error:
            if scope["type"] == "lifespan":
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise

    def _list(self, scope: Scope) -> None:
        """The first scope of a Starlette application knows it, and by then all of its routes are there."""
        app = scope.get("app")
        starlette = sys.modules.get("starlette.applications")
        if self.known is None and starlette is not None and isinstance(app, starlette.Starlette):
            from semel.http.fastapi import endpoints

            self.known = lambda: endpoints(app)
        self.report()

    def whose(self, scope: Scope) -> str | Awaitable[str] | None:
        """The tenant of a request; None: the guard's own. To be awaited where the resolver is async."""
        if self.tenant is None:
            return None
        found = self.tenant(scope)
        return found if type(found) is str and found else self._awaited(found)

    async def _awaited(self, found: Any) -> str:
        tenant: str | None = await found if inspect.isawaitable(found) else found
        if not tenant:
            raise ConfigurationError("tenant= gave nothing for this request: it must come after authentication")
        return tenant

    def leave(self, task: asyncio.Task[None]) -> None:
        """Let a handler finish that nobody waits for any more."""
        self._left.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._left.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a handler failed after its client had gone", exc_info=task.exception())
