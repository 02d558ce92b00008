"""The ASGI middleware. It surrounds the application. Decorated endpoints make the claim, just before the handler.

So authentication, rate limits and validation come first, and refuse requests without a claim. If the endpoints of an
application cannot be decorated, ``routes=`` names their rules, and the claim is made here, at the edge.

A request without a key claims nothing, so it gets no task and no buffer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from semel.engine.aio import AsyncGuard
from semel.engine.drive.waiting import EAGER, start_task
from semel.errors import ConfigurationError, StoreError
from semel.http.asgi.body import App, Receive, Scope, Send
from semel.http.asgi.responder import ASGIResponder
from semel.http.contract.endpoint import Lifecycle
from semel.http.contract.exchange import KEY_HEADER
from semel.http.contract.middleware import Middleware
from semel.http.contract.routes import Endpoint, RouteFinder, RouteTable
from semel.http.contract.rules import MAX_REQUEST_BODY, SAFE_METHODS

__all__ = ["ASGIMiddleware", "ASGIResponder", "current", "current_responder"]

TenantResolver: TypeAlias = Callable[[Any], "str | Awaitable[str | None] | None"]

_SAFE: Final = object()
"""Marks a GET or the like: its endpoint runs as if it were not declared."""
current: ContextVar[ASGIResponder | object | None] = ContextVar("semel_responder", default=None)
_log = logging.getLogger("semel.http")


def current_responder() -> ASGIResponder | None:
    """Return the responder of the current request; None for a method that is never claimed, such as GET.

    Raises ConfigurationError if the middleware is not installed.
    """
    responder = current.get()
    if responder is None:
        raise ConfigurationError(
            "this endpoint is declared, but the middleware is not installed: "
            "install(app, guard=…, tenant=…) in FastAPI and Starlette, plugins=[SemelPlugin(guard=…, tenant=…)] in "
            "Litestar, ASGIMiddleware(app, guard=…, tenant=…) elsewhere"
        )
    return responder if isinstance(responder, ASGIResponder) else None


class ASGIMiddleware(Middleware[App, AsyncGuard]):
    """Protects any ASGI application: ``app = ASGIMiddleware(app, guard=guard, tenant=…, routes=…)``."""

    def __init__(
        self,
        app: App,
        *,
        guard: AsyncGuard,
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
        :param tenant: a function of the request, here the ASGI scope, that returns its tenant, which scopes the keys.
            It is called after authentication, and may be async.
        :param routes: rules of endpoints that are not decorated: ``{"POST /orders/{id}": idempotent()}``.
        :param docs: the URL of a page that explains the errors; they link to it.
        :param max_request_body: the longest request body in bytes; a longer one is refused with 413.
        :param header: the name of the header that has the key.
        :param request: makes the framework's own request from the scope, for ``tenant``.
        :param endpoints: lists the application's endpoints, for the report at start-up.
        :param find_route: finds the route of a request in the framework's own table, for hosts and events.
        """
        super().__init__(
            app, guard, AsyncGuard, tenant=tenant, routes=routes, docs=docs, max_request_body=max_request_body,
            header=header,
            request=request, endpoints=endpoints, find_route=find_route,
        )  # fmt: skip
        self._left: set[asyncio.Task[None]] = set()
        """Handlers that run on without a client. The event loop holds only weak references to tasks."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._begin_lifespan(receive, send)
            await self.app(scope, receive, send)
            return
        if not self._reported:  # the server has no lifespan
            self.report()
        method = scope["method"].upper()  # ASGI wants it so, but not every server does it
        if method in SAFE_METHODS:
            token = current.set(_SAFE)
            try:
                await self.app(scope, receive, send)
            finally:
                current.reset(token)
            return
        rule = None
        if self.routes.rules:
            rule = self.routes.rules.get((method, scope["path"]))  # the usual case of a find
            if rule is None:
                rule = self.find_rule(method, scope["path"], scope.get("root_path", ""))
        responder = ASGIResponder(self, scope, receive, send)
        body = responder.body
        token = current.set(responder)
        try:
            if body is None:
                await responder.respond_unkeyed(rule)
                return
            if rule is not None:
                claimed = False
                try:
                    claimed = await responder.drive(responder.life.claim(rule))
                finally:
                    if body.held is not None and not claimed:
                        body.close()
                if not claimed:
                    await responder.send_answer()
                    return
            # Run it in a task of its own: if the client disconnects and the server cancels us, the handler still
            # finishes, and its answer is stored for the retry. A bare future is cheaper than asyncio.shield().
            loop, work = responder.loop, responder.run_application(rule, body)
            task = start_task(work, loop) if EAGER else loop.create_task(work)
            if task.done():  # it never waited
                task.result()
                return
            responder.over = loop.create_future()
            try:
                await responder.over
            except asyncio.CancelledError:
                if not task.done():
                    self._leave(task, responder.life)
                raise
        finally:
            current.reset(token)

    async def _begin_lifespan(self, receive: Receive, send: Send) -> None:
        """Start, and tell the server if that fails."""
        try:
            await self.start()
        except ConfigurationError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            raise

    async def start(self) -> None:
        """Prepare for requests, when the application starts. Raises if a route is misconfigured, or tables are missing.

        A guard that an earlier run of the application has closed is opened again. A store that is away is no reason not
        to start: requests are refused until it is back.
        """
        if not self._reported:
            self.report()
        self.guard.open()
        try:
            await self.guard.check()
        except ConfigurationError:
            await self.guard.close()  # nothing runs that would close it later
            raise
        except StoreError as error:
            _log.warning("the application starts, but its store cannot be used: %s", error)

    async def await_tenant(self, found: Any) -> str:
        """Return the tenant that ``tenant=`` has found, or promises if it is async. Raises if there is none."""
        tenant: str | None = await found if inspect.isawaitable(found) else found
        if not tenant:
            raise ConfigurationError("tenant= gave nothing for this request: it must come after authentication")
        return tenant

    def _leave(self, task: asyncio.Task[None], life: Lifecycle[Any]) -> None:
        """Let a handler run to its end although nobody waits for it any more. Before the claim, cancel it."""
        if life.attempt is None and not life.runs_again:
            life.over = True
            task.cancel()
        self._left.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._left.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a handler failed after its client had gone", exc_info=task.exception())
