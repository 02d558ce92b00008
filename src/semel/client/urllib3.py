"""urllib3: a pool manager that adds keys and retries with them.

::

    http = IdempotencyPoolManager(journal="calls.db")
    response = http.request("POST", "https://pay.example/charges", json={"amount": 10})
    response.idempotency.outcome
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final
from urllib.parse import urljoin

from semel.client.flow import (
    HEADER,
    METHODS,
    Answer,
    Receipt,
    Reply,
    Settings,
    lost,
    new_key,
    whole_body,
)
from semel.client.journal import Entry, Journal, JournalReport
from semel.client.retry import Retry, origin_of
from semel.client.sync import ClientCore
from semel.errors import MissingDependency, NoAnswer
from semel.observe.events import EventHooks

try:
    import urllib3
    from urllib3 import exceptions
except ImportError as error:
    raise MissingDependency("urllib3", "urllib3") from error

__all__ = ["IdempotencyPoolManager"]

NOT_SENT: Final = (
    exceptions.ConnectTimeoutError, exceptions.ProxyError, exceptions.EmptyPoolError, exceptions.ClosedPoolError
)  # fmt: skip
BODY_HEADERS: Final = ("content-encoding", "content-language", "content-length", "content-type", "transfer-encoding")


class Urllib3NoAnswer(NoAnswer, exceptions.HTTPError):
    """A NoAnswer that ``except urllib3.exceptions.HTTPError`` catches too."""


class IdempotencyPoolManager(urllib3.PoolManager):
    """Gives each POST and PATCH a key, and sends it again with the same key until the outcome is known.

    A request that has a key keeps it. The response says what happened in ``response.idempotency``; without a response
    NoAnswer is raised. The setting ``retries`` of urllib3 then counts only redirects: one layer retries.
    """

    def __init__(
        self,
        num_pools: int = 10,
        headers: Mapping[str, str] | None = None,
        *,
        retry: Retry | None = None,
        journal: Journal | str | os.PathLike[str] | None = None,
        methods: Collection[str] = METHODS,
        header: str = HEADER,
        quote_keys: bool = False,
        new_key: Callable[[], str] = new_key,
        hosts: Collection[str] = (),
        on_event: EventHooks | None = None,
        **connection_pool_kw: Any,
    ) -> None:
        """
        :param connection_pool_kw: further settings of ``urllib3.PoolManager``.

        The other parameters are those of ``semel.client.httpx.IdempotencyTransport``.
        """
        super().__init__(num_pools, headers, **connection_pool_kw)
        settings = Settings(retry or Retry(), methods, header, quote_keys, new_key, hosts, on_event)
        self._core = ClientCore(settings, journal)

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        core = self._core
        headers = urllib3.HTTPHeaderDict(options.get("headers", self.headers))
        intent = core.settings.intent(method, url, headers)
        if intent is None:
            return super().urlopen(method, url, redirect, **options)
        body = intent.body = whole_body(options.get("body"))
        core.settings.complete(intent, headers)
        once = {**options, "headers": headers, "body": body or None, "retries": False, "preload_content": True}
        inner = super().urlopen

        def send() -> Reply:
            try:
                response = inner(method, url, False, **once)
            except exceptions.HTTPError as error:
                return lost(intent, error, NOT_SENT, (exceptions.LocationValueError,))
            return Answer(response.status, response.headers, lambda: response.data, response)

        response: urllib3.BaseHTTPResponse
        receipt, response = core.call(intent, send, Urllib3NoAnswer)
        location = redirect and response.get_redirect_location()
        if location:
            followed = self._follow(
                method, url, location, response, {**options, "headers": headers, "body": body or None}
            )
            if followed is not None:
                return followed
        if not options.get("preload_content", True):
            response = _unread(response)
        response.idempotency = receipt  # type: ignore[attr-defined]
        return response

    def _follow(
        self, method: str, url: str, location: str, response: urllib3.BaseHTTPResponse, options: dict[str, Any]
    ) -> urllib3.BaseHTTPResponse | None:
        """Follow a redirect by the rules of ``PoolManager``, which would not come back here for the key.

        Returns None if ``retries`` says that the response is not followed, but returned.
        """
        retries = options.get("retries")
        if not isinstance(retries, urllib3.Retry):
            retries = urllib3.Retry.from_int(retries, redirect=True)
        target = urljoin(url, location)
        headers = options["headers"]
        unwanted: list[str] = []
        if response.status == 303:
            method, options["body"] = "GET", None
            unwanted += BODY_HEADERS
        if origin_of(target) != origin_of(url):
            unwanted += retries.remove_headers_on_redirect
        for name in unwanted:
            headers.pop(name, None)
        try:
            options["retries"] = retries.increment(method, url, response=response)
        except exceptions.MaxRetryError:
            if retries.raise_on_redirect:
                raise
            return None
        return self.urlopen(method, target, True, **options)

    def resume(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        progress: Callable[[JournalReport], object] | None = None,
    ) -> JournalReport:
        """Send again what the journal holds and no living process waits for. Returns what became of it.

        :param headers: to be sent with each request, besides those of this manager: secrets are not in the journal.
        :param progress: called with the report after each request, and before its entry is removed: write it down there
            if your program must not lose it in a crash.
        """

        def send(entry: Entry, stored: dict[str, str]) -> Receipt | None:
            sent = {**self.headers, **(headers or {}), **stored}
            response: Any = self.request(entry.method, entry.url, headers=sent, body=entry.body)
            receipt: Receipt = response.idempotency
            return receipt

        return self._core.resume(send, progress)

    def close(self) -> None:
        """Close the connections and the journal."""
        self.clear()
        self._core.close()


def _unread(response: urllib3.BaseHTTPResponse) -> urllib3.BaseHTTPResponse:
    """The same response, for a caller that wants to read the body itself. It is decoded already."""
    headers = urllib3.HTTPHeaderDict(response.headers)
    headers.pop("Content-Encoding", None)
    headers.pop("Transfer-Encoding", None)
    headers["Content-Length"] = str(len(response.data))
    return urllib3.HTTPResponse(
        io.BytesIO(response.data),
        headers,
        response.status,
        response.version,
        reason=response.reason,
        preload_content=False,
        request_url=response.url,
    )
