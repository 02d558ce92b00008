"""A Django request under the ASGI responder: it is given messages, and those of its answer become a response again."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

from semel.engine.aio import AsyncGuard
from semel.errors import ConfigurationError
from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.rules import SAFE_METHODS, Rule
from semel.http.django.asgi_exchange import Exchange, rewindable
from semel.http.django.configuration import Configuration
from semel.http.django.handling import Handling, in_hand
from semel.stores.aio_guard import AsyncSemel
from semel.stores.guard import Semel

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

    from semel.http.asgi.messages import Scope, Send

__all__ = ["UnderASGI"]


class UnderASGI:
    """Stands between Django's handler and the views, for ``AsyncSemel``, or ``Semel`` with its store in threads."""

    def __init__(
        self, get_response: Callable[[HttpRequest], Awaitable[HttpResponseBase]], configuration: Configuration
    ) -> None:
        self._get_response = get_response
        self._configuration = configuration
        self._idempotency: ASGIMiddleware | None = None
        self._rules: list[Rule | None] = []
        if isinstance(configuration.guard, AsyncSemel):
            self._idempotency = self._made(configuration.guard)
        elif not isinstance(configuration.guard, Semel):
            raise ConfigurationError(f"SEMEL's GUARD is no Semel or AsyncSemel: {configuration.guard!r}")

    def _made(self, guard: AsyncGuard) -> ASGIMiddleware:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the middleware has warned of a missing tenant already
            made = ASGIMiddleware(
                self._application,
                guard=guard,
                tenant=self._configuration.tenant and _tenant,
                docs=self._configuration.docs,
                max_request_body=self._configuration.max_request_body,
            )
        made.keep(*self._rules)
        return made

    def expect(self, rules: list[Rule | None]) -> None:
        """These are the rules of the project's views."""
        self._rules = rules
        if self._idempotency is not None:
            self._idempotency.keep(*rules)

    def _of_this_loop(self) -> ASGIMiddleware:
        guard = self._configuration.guard
        if isinstance(guard, Semel):
            twin = guard.in_this_loop()
            if self._idempotency is None or self._idempotency.guard is not twin:
                self._idempotency = self._made(twin)
        assert self._idempotency is not None
        return self._idempotency

    async def respond(self, request: HttpRequest) -> HttpResponseBase:
        if "HTTP_IDEMPOTENCY_KEY" in request.META:
            rewindable(request)
        exchange = Exchange(Handling(request, self._configuration, in_loop=True))
        query = request.META["QUERY_STRING"].encode()  # which the test client's scope has as text
        scope = {**request.scope, "method": request.method, "query_string": query, "semel.exchange": exchange}
        token = in_hand.set(exchange.handling)
        try:
            running = self._of_this_loop()(scope, exchange.receive, exchange.take)
            if request.method not in SAFE_METHODS:
                return await exchange.answered(running)
            await running
            return exchange.handling.response
        finally:
            in_hand.reset(token)

    async def _application(self, scope: Scope, receive: Any, send: Send) -> None:
        exchange: Exchange = scope["semel.exchange"]
        handling = exchange.handling
        if handling.begins_again():
            handling.request._stream = BytesIO((await receive())["body"])
        response = handling.response = await self._get_response(handling.request)
        await exchange.give(response, send)


def _tenant(scope: Scope) -> str | None:
    exchange: Exchange = scope["semel.exchange"]
    return exchange.handling.tenant
