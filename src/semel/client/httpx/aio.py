# Twin: sync.py is generated from this file by make twins.
# Twin: handle_async_request -> handle_request
# Twin: aread -> read
"""The transport for ``httpx.AsyncClient``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Self

from semel.client.aio import AsyncClientCore
from semel.client.flow import HEADER, METHODS, Receipt, Reply, Settings, new_key, not_replayable
from semel.client.httpx.translate import HTTPXNoAnswer, answer, lost_attempt
from semel.client.journal import Entry, Journal, JournalReport
from semel.client.retry import Retry
from semel.errors import MissingDependency
from semel.observe.events import EventHooks

try:
    import httpx
except ImportError as error:
    raise MissingDependency("httpx", "httpx") from error


class AsyncIdempotencyTransport(httpx.AsyncBaseTransport):
    """Gives each POST and PATCH a key, and sends it again with the same key until the outcome is known.

    ``httpx.AsyncClient(transport=AsyncIdempotencyTransport())``. A request that has a key keeps it. The response says
    what happened in ``response.extensions["idempotency"]``; without a response NoAnswer is raised.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
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
        """
        :param transport: what sends the requests, such as ``httpx.AsyncHTTPTransport(verify=…)``.
        :param retry: how often and for how long a request is sent again; see ``Retry``.
        :param journal: a path, or a ``Journal``: keys survive a crash, and ``resume`` finishes what was in flight.
        :param methods: the methods that get a key.
        :param header: the name that the server knows, such as ``"PayPal-Request-Id"``.
        :param quote_keys: send the key as a quoted string, as in the draft standard.
        :param new_key: makes a key; a UUID by default.
        :param hosts: servers such as ``"orders.internal"`` that get the derived key and the lineage of the operation
            that makes the request; see ``outgoing_call``.
        :param on_event: a hook, or a list of hooks, called with ``CallRetried``, ``CallResumed``, ``CallEnded`` and
            ``CallUnknown``.
        """
        self._transport = transport or httpx.AsyncHTTPTransport()
        settings = Settings(retry or Retry(), methods, header, quote_keys, new_key, hosts, on_event)
        self._core = AsyncClientCore(settings, journal)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        core, headers = self._core, request.headers
        intent = core.settings.intent(request.method, str(request.url), headers)
        if intent is None:
            return await self._transport.handle_async_request(request)
        if not isinstance(request.stream, httpx.ByteStream) and "Content-Length" not in headers:
            raise not_replayable("a stream of unknown length")
        intent.body = await request.aread()
        core.settings.complete(intent, headers)

        async def send() -> Reply:
            try:
                response = await self._transport.handle_async_request(request)
                stream = response.stream
                # sync: assert isinstance(stream, httpx.SyncByteStream)
                assert isinstance(stream, httpx.AsyncByteStream)
                try:
                    # sync: content = b"".join(stream)
                    content = b"".join([part async for part in stream])
                finally:
                    await stream.aclose()
            except httpx.TransportError as error:
                return lost_attempt(intent, error)
            return answer(response, content)

        response: httpx.Response
        receipt, response = await core.call(intent, send, HTTPXNoAnswer)
        response.extensions["idempotency"] = receipt
        return response

    async def resume(
        self,
        client: httpx.AsyncClient | None = None,
        *,
        progress: Callable[[JournalReport], object] | None = None,
    ) -> JournalReport:
        """Send again what the journal holds and no living process waits for. Returns what became of it.

        :param client: the client with this transport. Its headers, cookies and ``auth`` are sent: secrets are not in
            the journal. A redirect on the same server is followed, whatever the client's own setting.
        :param progress: called with the report after each request, and before its entry is removed: write it down there
            if your program must not lose it in a crash.
        """
        through = client or httpx.AsyncClient(transport=self)

        async def send(entry: Entry, headers: dict[str, str]) -> Receipt | None:
            request = through.build_request(entry.method, entry.url, headers=headers, content=entry.body)
            response = await through.send(request, follow_redirects=True)
            return response.extensions.get("idempotency")

        return await self._core.resume(send, progress)

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._transport.__aexit__(exc_type, exc_value, traceback)
        await self._core.close()

    async def aclose(self) -> None:
        await self._transport.aclose()
        await self._core.close()
