"""aiohttp: a client middleware that adds keys and retries with them. It needs aiohttp 3.12.4 or newer.

::

    session = aiohttp.ClientSession(middlewares=[IdempotencyClientMiddleware(journal="calls.db")])
    async with session.post("https://pay.example/charges", json={"amount": 10}) as response:
        response.idempotency.outcome
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final

from semel.client.aio import AsyncClientCore
from semel.client.flow import (
    HEADER,
    METHODS,
    Answer,
    Lost,
    Receipt,
    Reply,
    Settings,
    failure,
    lost,
    new_key,
    not_replayable,
)
from semel.client.journal import Entry, Journal, JournalReport
from semel.client.retry import Retry
from semel.errors import MissingDependency, NoAnswer
from semel.observe.events import EventHooks

try:
    import aiohttp
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse
    from yarl import URL
except ImportError as error:
    raise MissingDependency("aiohttp 3.12.4", "aiohttp") from error

__all__ = ["IdempotencyClientMiddleware"]

NOT_SENT: Final = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.ClientProxyConnectionError)


class AiohttpNoAnswer(NoAnswer, aiohttp.ServerTimeoutError):
    """A NoAnswer that ``except aiohttp.ClientConnectionError`` and ``except TimeoutError`` catch too."""


class IdempotencyClientMiddleware:
    """Gives each POST and PATCH a key, and sends it again with the same key until the outcome is known.

    A request that has a key keeps it. The response says what happened in ``response.idempotency``; without a response
    NoAnswer is raised. The session's ``total`` timeout covers all attempts together.
    """

    def __init__(
        self,
        *,
        retry: Retry | None = None,
        journal: Journal | str | os.PathLike[str] | None = None,
        methods: Collection[str] = METHODS,
        header: str = HEADER,
        quote_keys: bool = False,
        new_key: Callable[[], str] = new_key,
        hosts: Collection[str] = (),
        on_event: EventHooks | None = None,
    ) -> None:
        """The parameters are those of ``semel.client.httpx.AsyncIdempotencyTransport``."""
        settings = Settings(retry or Retry(), methods, header, quote_keys, new_key, hosts, on_event)
        self._core = AsyncClientCore(settings, journal)

    async def __call__(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        core, headers = self._core, request.headers
        # aiohttp follows a redirect without the key. Its timer is made for each call, and shared by its redirects.
        intent = core.settings.intent(request.method, str(request.url), headers, call=request._timer)
        if intent is None:
            return await handler(request)
        if request.body:
            if request.body.size is None:
                raise not_replayable("a stream of unknown length")
            intent.body = await request.body.as_bytes()
            if not isinstance(request.body, aiohttp.BytesPayload):
                await request.update_body(intent.body)
        core.settings.complete(intent, headers)
        if request.compress:  # aiohttp compresses while it sends; the body in hand is as it was given
            intent.headers = {name: text for name, text in headers.items() if name.lower() != "content-encoding"}

        attempts = 0

        async def send() -> Reply:
            nonlocal attempts
            attempts += 1
            try:
                response = await handler(request)
                content = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                # A plain TimeoutError is the end of the session's total timeout: no time is left for another attempt.
                over = type(error) is TimeoutError and error.errno is None
                return lost(intent, error, NOT_SENT, (aiohttp.InvalidURL,))._replace(over=over)
            return Answer(response.status, response.headers, lambda: content, response)

        try:
            # aiohttp cancels the task at the end of the total timeout, and tells that apart from another cancellation
            # at the end of this block.
            with request._timer:
                receipt, answered = await core.call(intent, send, AiohttpNoAnswer)
        except NoAnswer:
            raise
        except TimeoutError as error:  # in a pause, or in an attempt that was about to begin
            if not attempts:
                raise
            unknown = Receipt(intent.key, "unknown", False, attempts)
            raise failure(AiohttpNoAnswer, unknown, Lost(error, sent=True)) from error
        answered.idempotency = receipt
        response: ClientResponse = answered
        return response

    async def resume(
        self,
        session: aiohttp.ClientSession | None = None,
        *,
        progress: Callable[[JournalReport], object] | None = None,
    ) -> JournalReport:
        """Send again what the journal holds and no living process waits for. Returns what became of it.

        :param session: the session with this middleware. Its headers, cookies and ``auth`` are sent: secrets are not
            in the journal.
        :param progress: called with the report after each request, and before its entry is removed: write it down there
            if your program must not lose it in a crash.
        """
        through = session or aiohttp.ClientSession(middlewares=[self])

        async def send(entry: Entry, headers: dict[str, str]) -> Receipt | None:
            url = URL(entry.url, encoded=True)
            async with through.request(entry.method, url, headers=headers, data=entry.body or None) as response:
                return vars(response).get("idempotency")

        try:
            return await self._core.resume(send, progress)
        finally:
            if session is None:
                await through.close()

    async def close(self) -> None:
        """Close the journal, if this client has opened it. aiohttp does not close middlewares."""
        await self._core.close()
