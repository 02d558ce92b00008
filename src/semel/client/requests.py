"""requests: an adapter that adds keys and retries with them.

::

    session.mount("https://", IdempotencyAdapter(journal="calls.db"))
    response = session.post("https://pay.example/charges", json={"amount": 10})
    response.idempotency.outcome
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from semel.client.flow import (
    HEADER,
    METHODS,
    Answer,
    Intent,
    Lost,
    Receipt,
    Reply,
    Settings,
    lost,
    new_key,
    not_replayable,
    whole_body,
)
from semel.client.journal import Entry, Journal, JournalReport
from semel.client.retry import Retry
from semel.client.sync import ClientCore
from semel.errors import MissingDependency, NoAnswer
from semel.observe.events import EventHooks

try:
    import requests
    from requests.adapters import BaseAdapter, HTTPAdapter
    from urllib3.exceptions import NewConnectionError
except ImportError as error:
    raise MissingDependency("requests", "requests") from error

__all__ = ["IdempotencyAdapter"]

NOT_SENT: Final = (requests.ConnectTimeout, requests.exceptions.ProxyError)


class RequestsNoAnswer(NoAnswer, requests.ConnectionError, requests.Timeout):
    """A NoAnswer that ``except requests.ConnectionError`` and ``except requests.Timeout`` catch too."""


class IdempotencyAdapter(BaseAdapter):
    """Gives each POST and PATCH a key, and sends it again with the same key until the outcome is known.

    ``session.mount("https://", IdempotencyAdapter())``. A request that has a key keeps it. The response says what
    happened in ``response.idempotency``; without a response NoAnswer is raised.
    """

    def __init__(
        self,
        adapter: BaseAdapter | None = None,
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
        :param adapter: what sends the requests; an ``HTTPAdapter`` without retries by default.

        The other parameters are those of ``semel.client.httpx.IdempotencyTransport``.
        """
        super().__init__()
        self._adapter = adapter or HTTPAdapter()
        settings = Settings(retry or Retry(), methods, header, quote_keys, new_key, hosts, on_event)
        self._core = ClientCore(settings, journal)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: bool | str = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        core, headers = self._core, request.headers
        options: dict[str, Any] = {"timeout": timeout, "verify": verify, "cert": cert, "proxies": proxies}
        intent = core.settings.intent(request.method or "", request.url or "", headers)
        if intent is None:
            return self._adapter.send(request, stream=stream, **options)
        intent.body = _content(request)
        if request.body is not None:  # an empty body is not the same as none: it would be sent in chunks
            request.body = intent.body
        core.settings.complete(intent, headers)

        def send() -> Reply:
            try:
                response = self._adapter.send(request, stream=True, **options)
                response.content  # noqa: B018 reads all of it, and keeps it
            except requests.RequestException as error:
                return _lost(intent, error)
            return Answer(response.status_code, response.headers, lambda: response.content, response)

        receipt, answered = core.call(intent, send, RequestsNoAnswer)
        answered.idempotency = receipt
        answered.connection = self  # by which requests sends the answer to an authentication challenge
        response: requests.Response = answered
        return response

    def resume(
        self,
        session: requests.Session | None = None,
        *,
        progress: Callable[[JournalReport], object] | None = None,
    ) -> JournalReport:
        """Send again what the journal holds and no living process waits for. Returns what became of it.

        :param session: the session with this adapter. Its headers, cookies and ``auth`` are sent: secrets are not in
            the journal.
        :param progress: called with the report after each request, and before its entry is removed: write it down there
            if your program must not lose it in a crash.
        """
        if session is None:
            session = requests.Session()
            session.mount("http://", self)
            session.mount("https://", self)
        through = session

        def send(entry: Entry, headers: dict[str, str]) -> Receipt | None:
            response = through.request(entry.method, entry.url, headers=headers, data=entry.body)
            return vars(response).get("idempotency")

        return self._core.resume(send, progress)

    def close(self) -> None:
        self._adapter.close()
        self._core.close()


def _content(request: requests.PreparedRequest) -> bytes:
    """The whole body, which may be a file."""
    body: Any = request.body
    if hasattr(body, "read") and "Content-Length" not in request.headers:
        raise not_replayable("a stream of unknown length")
    return whole_body(body)


def _lost(intent: Intent, error: requests.RequestException) -> Lost:
    attempt = lost(intent, error, NOT_SENT, (ValueError,))  # which is about a URL or a header that cannot be sent
    cause: Any = error.args[0] if error.args else None
    refused = isinstance(getattr(cause, "reason", None), NewConnectionError)
    return attempt._replace(sent=False) if refused else attempt
