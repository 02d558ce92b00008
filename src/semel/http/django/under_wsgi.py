"""A Django request under the WSGI responder, which gets an environ, and whose answer becomes a response again."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from django.core.handlers.wsgi import LimitedStream

from semel.errors import ConfigurationError
from semel.http.contract.rules import Rule
from semel.http.django.configuration import Configuration
from semel.http.django.handling import (
    Handling,
    current_handling,
    parsed_before,
    response_lines,
    rewrite_response,
    stream_response,
)
from semel.http.django.urls import DjangoRoutes
from semel.http.wsgi.answers import LetThrough, ThenRaised
from semel.http.wsgi.body import RequestBody
from semel.http.wsgi.middleware import WSGIMiddleware
from semel.stores.guard import Semel

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

__all__ = ["UnderWSGI"]

_INPUT: Final = "wsgi.input"
_log = logging.getLogger("semel.http")


class UnderWSGI:
    """Stands between Django's handler and the views under WSGI, for ``Semel``."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase], configuration: Configuration) -> None:
        self._get_response = get_response
        self._configuration = configuration
        if not isinstance(configuration.guard, Semel):
            raise ConfigurationError("WSGI is sync: SEMEL's GUARD is a Semel there. A Semel serves ASGI as well")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # IdempotencyMiddleware has warned of a missing tenant already
            self._idempotency = WSGIMiddleware(
                self._application,
                guard=configuration.guard,
                tenant=configuration.tenant and _tenant,
                docs=configuration.docs,
                max_request_body=configuration.max_request_body,
                header=configuration.key_header.title,
                find_route=DjangoRoutes(),
            )

    def expect(self, rules: list[Rule | None]) -> None:
        """Prepare for the rules of the project's views."""
        self._idempotency.keep(*rules)

    def respond(self, request: HttpRequest) -> HttpResponseBase:
        handling = Handling(request, self._configuration, in_loop=False)
        server = _Server()
        token = current_handling.set(handling)
        try:
            body = self._idempotency(_environ(request), server.start_response)
            if isinstance(body, _Untouched):
                return handling.response
            if isinstance(body, LetThrough) and handling.response.streaming:
                return stream_response(handling.response, server.lines, body)
            return rewrite_response(handling.response, server.status, server.lines, _content(body))
        finally:
            current_handling.reset(token)

    def _application(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        handling = current_handling.get()
        assert handling is not None
        request = handling.request
        handling.begins_again()
        if isinstance(environ.get(_INPUT), RequestBody) and not request._read_started:
            request._stream = LimitedStream(environ[_INPUT], _length(environ))
        response = handling.response = self._get_response(request)
        start_response(f"{response.status_code} {response.reason_phrase}", response_lines(response))
        return _Untouched(response if response.streaming else [response.content])


class _Server:
    """The server's side of ``start_response``."""

    def __init__(self) -> None:
        self.status = 0
        self.lines: list[tuple[str, str]] = []

    def start_response(self, status: str, lines: list[tuple[str, str]], exc_info: Any = None, /) -> Any:
        self.status = int(status[:3])
        self.lines = lines
        return None  # nothing of Django's calls write()


class _Untouched:
    """The content of a response. If it comes back as it is, no claim was made, and the response itself is returned."""

    def __init__(self, content: Iterable[bytes]) -> None:
        self._content = content

    def __iter__(self) -> Any:
        return iter(self._content)


class _Gone:
    """The body of a request that a middleware outside of us has parsed and not kept."""

    def read(self, size: int = -1) -> bytes:
        raise parsed_before()


def _environ(request: HttpRequest) -> dict[str, Any]:
    """Return the environ as the server gave it: Django has decoded the path, and moved the body if it was read."""
    environ = dict(request.META)
    environ["REQUEST_METHOD"] = request.method
    for name in ("SCRIPT_NAME", "PATH_INFO"):
        environ[name] = environ.get(name, "").encode().decode("latin-1")
    environ.setdefault(_INPUT, BytesIO())
    if request._read_started and _length(environ):
        environ[_INPUT] = BytesIO(request._body) if hasattr(request, "_body") else _Gone()
    return environ


def _length(environ: dict[str, Any]) -> int:
    try:
        return max(0, int(environ.get("CONTENT_LENGTH") or 0))
    except ValueError:
        return 0


def _tenant(environ: dict[str, Any]) -> str | None:
    handling = current_handling.get()
    return None if handling is None else handling.tenant


def _content(body: Iterable[bytes]) -> bytes:
    chunks: list[bytes] = []
    try:
        chunks.extend(body)
    except Exception:
        if not isinstance(body, ThenRaised):
            raise
        _log.exception("a streamed answer broke, which is an answer where the route has effects outside")
    return b"".join(chunks)
