"""``IdempotencyMiddleware``: the last entry of ``MIDDLEWARE``, so that all others see a replay like any answer.

Under WSGI the WSGI responder gets an environ, and its answer becomes a response again. The ASGI responder speaks
messages: ``DjangoExchange`` gives it the request's body as the server would send it, and turns the messages of its
answer into a response.

When the client hangs up, Django cancels the request. Under ASGI a declared view runs to its end all the same, and only
then is the request over: until then its body, its thread and its database connections stay.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.core.handlers.wsgi import LimitedStream

from semel.engine.guard import Guard
from semel.engine.sync import SyncGuard
from semel.errors import ConfigurationError, StoreError
from semel.http.asgi.body import CHUNK
from semel.http.asgi.middleware import ASGIMiddleware
from semel.http.contract.routes import Middleware, report
from semel.http.contract.rules import SAFE_METHODS, Rule
from semel.http.django.handling import (
    NO_TENANT,
    Configuration,
    Handling,
    configuration,
    current_handling,
    parsed_before,
    response_lines,
    rewrite_response,
    stream_response,
)
from semel.http.django.urls import DjangoRoutes, endpoints
from semel.http.wsgi.answers import LetThrough, ThenRaised
from semel.http.wsgi.body import RequestBody, content_length
from semel.http.wsgi.middleware import WSGIMiddleware
from semel.stores.aio_guard import AsyncSemel
from semel.stores.guard import Semel

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

    from semel.http.asgi.body import Message, Scope, Send

M = TypeVar("M", bound=Middleware[Any, Any, Any])
GetResponse: TypeAlias = "Callable[[HttpRequest], Any]"
_INPUT: Final = "wsgi.input"
_AHEAD: Final = 1
"""Messages of an answer that wait for the client."""
_log = logging.getLogger("semel.http")


class IdempotencyMiddleware:
    """Runs sync under WSGI and async under ASGI, as Django requires."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        config = configuration()
        if isinstance(config.guard, SyncGuard):  # an async one asks when its first request comes
            try:
                config.guard.check()
            except StoreError as error:
                _log.warning("the application starts, but its store cannot be used: %s", error)
        if config.tenant is None and not config.guard.tenant:
            warnings.warn(NO_TENANT, stacklevel=2)
        listed = endpoints() if hasattr(settings, "ROOT_URLCONF") else []
        report(listed)
        rules = [each.rule for each in listed]
        self._under: UnderASGI | UnderWSGI
        if iscoroutinefunction(get_response):
            self._under = UnderASGI(get_response, config, rules)
            markcoroutinefunction(self)
        else:
            self._under = UnderWSGI(get_response, config, rules)

    def __call__(self, request: HttpRequest) -> Any:
        under = self._under
        if isinstance(under, UnderWSGI) and isinstance(request, ASGIRequest):
            raise ConfigurationError(
                "under ASGI, IdempotencyMiddleware must come after all middlewares that are sync only: put it last"
            )
        return under.respond(request)


def _make_middleware(
    kind: Callable[..., M], application: Any, guard: Guard, config: Configuration, rules: list[Rule | None]
) -> M:
    """Make the WSGI or ASGI middleware around the views.

    :param rules: the rules of the project's views.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # IdempotencyMiddleware has warned of a missing tenant already
        middleware = kind(
            application, guard=guard, tenant=config.tenant and _tenant, docs=config.docs,
            max_request_body=config.max_request_body, header=config.key_header.title, find_route=DjangoRoutes(),
        )  # fmt: skip
    middleware.keep(*rules)
    return middleware


def _tenant(environment: object) -> str | None:
    handling = current_handling.get()
    return None if handling is None else handling.tenant


# -- under WSGI


class UnderWSGI:
    """Stands between Django's handler and the views under WSGI, for ``Semel``."""

    def __init__(self, get_response: GetResponse, config: Configuration, rules: list[Rule | None]) -> None:
        self._get_response = get_response
        self._configuration = config
        if not isinstance(config.guard, Semel):
            raise ConfigurationError("WSGI is sync, so SEMEL's GUARD must be a Semel. A Semel serves ASGI as well")
        self._idempotency = _make_middleware(WSGIMiddleware, self._application, config.guard, config, rules)

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
            request._stream = LimitedStream(environ[_INPUT], content_length(environ) or 0)
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
    if request._read_started and content_length(environ):
        environ[_INPUT] = BytesIO(request._body) if hasattr(request, "_body") else _Gone()
    return environ


def _content(body: Iterable[bytes]) -> bytes:
    chunks: list[bytes] = []
    try:
        chunks.extend(body)
    except Exception:
        if not isinstance(body, ThenRaised):
            raise
        _log.exception("a streamed answer failed. The error is stored as the answer, as the rule of the route demands")
    return b"".join(chunks)


# -- under ASGI


class UnderASGI:
    """Stands between Django's handler and the views under ASGI.

    For ``AsyncSemel``, or for ``Semel``, whose store then runs in threads.
    """

    def __init__(self, get_response: GetResponse, config: Configuration, rules: list[Rule | None]) -> None:
        self._get_response = get_response
        self._configuration = config
        self._rules = rules
        self._idempotency: ASGIMiddleware | None = None
        if isinstance(config.guard, AsyncSemel):
            self._idempotency = self._around(config.guard)
        elif not isinstance(config.guard, Semel):
            raise ConfigurationError(f"SEMEL's GUARD is no Semel or AsyncSemel: {config.guard!r}")

    def _around(self, guard: Guard) -> ASGIMiddleware:
        return _make_middleware(ASGIMiddleware, self._application, guard, self._configuration, self._rules)

    def _middleware_of_loop(self) -> ASGIMiddleware:
        guard = self._configuration.guard
        if isinstance(guard, Semel):
            guard = guard.in_this_loop()
        idempotency = self._idempotency  # read once: the loop of another thread may replace it by its own
        if idempotency is None or idempotency.guard is not guard:
            idempotency = self._idempotency = self._around(guard)
        return idempotency

    async def respond(self, request: HttpRequest) -> HttpResponseBase:
        if self._configuration.has_key(request):
            _make_rewindable(request)
        exchange = DjangoExchange(Handling(request, self._configuration, in_loop=True))
        query = request.META["QUERY_STRING"].encode()  # which the test client's scope has as text
        scope = {**request.scope, "method": request.method, "query_string": query, "semel.exchange": exchange}
        token = current_handling.set(exchange.handling)
        try:
            responder = self._middleware_of_loop()(scope, exchange.receive, exchange.send)
            if request.method not in SAFE_METHODS:
                return await exchange.run(responder)
            await responder
            return exchange.handling.response
        finally:
            current_handling.reset(token)

    async def _application(self, scope: Scope, receive: Any, send: Send) -> None:
        exchange: DjangoExchange = scope["semel.exchange"]
        handling = exchange.handling
        if handling.begins_again():
            handling.request._stream = BytesIO((await receive())["body"])
        response = handling.response = await self._get_response(handling.request)
        await exchange.send_response(response, send)


class DjangoExchange:
    """One request: the server's side of ``receive`` and ``send``, and Django's side of both."""

    def __init__(self, handling: Handling) -> None:
        self.handling = handling
        self._body = _chunks(handling.request)
        self._start: Message | None = None
        self._untouched = False
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_AHEAD)
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        chunk = next(self._body, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def send_response(self, response: HttpResponseBase, send: Send) -> None:
        """Send Django's response as messages.

        If the first one comes back as it is, the request was not claimed, and the response itself is returned.
        """
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response_lines(response)]
        self._start = {"type": "http.response.start", "status": response.status_code, "headers": lines}
        await send(self._start)
        if self._untouched:
            return
        if not response.streaming:
            await send({"type": "http.response.body", "body": response.content, "more_body": False})
            return
        async with aclosing(aiter(response)) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(self, message: Message) -> None:
        """The ``send`` of the server."""
        if message is self._start:
            self._untouched = True
        elif not self._gone:
            await self._messages.put(message)

    async def run(self, responder: Awaitable[None]) -> HttpResponseBase:
        """Run the responder until it has an answer. Returns the answer as a response."""
        self._task = asyncio.ensure_future(self._run(responder))
        handled = False
        try:
            start = await self._messages.get()
            if start is None:
                await self._task  # raises its error
                return self.handling.response
            first = await self._messages.get()
            if first is None:
                await self._task
                raise ConnectionError("the answer ended before it was complete")
            response = self.handling.response
            lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
            if first.get("more_body"):
                handled = True
                return self._freed_if_unread(stream_response(response, lines, self._rest(first)))
            answer = rewrite_response(response, start["status"], lines, first.get("body", b""))
            await self._task
            return answer
        finally:
            if not handled:
                await self._finish()

    async def _run(self, responder: Awaitable[None]) -> None:
        try:
            await responder
        finally:
            if not self._gone:
                await self._messages.put(None)

    async def _rest(self, message: Message | None) -> AsyncIterator[bytes]:
        """The body of an answer that is let through."""
        assert self._task is not None
        try:
            while message is not None:
                yield message.get("body", b"")
                message = await self._messages.get()
            await self._task
        finally:
            await self._finish()

    def _freed_if_unread(self, response: HttpResponseBase) -> HttpResponseBase:
        """Let the view go on if nobody ever reads this response, because another one took its place."""
        loop = asyncio.get_running_loop()

        def unread() -> None:
            with suppress(RuntimeError):  # the loop is closed, and the task gone with it
                loop.call_soon_threadsafe(self._discard)

        response._resource_closers.append(unread)
        weakref.finalize(response, unread).atexit = False
        return response

    def _discard(self) -> None:
        self._gone = True
        while not self._messages.empty():
            self._messages.get_nowait()

    async def _finish(self) -> None:
        """End the task if nobody reads its answer. A declared view runs to its end, any other one is cancelled."""
        task = self._task
        assert task is not None
        if task.done():
            return
        self._discard()
        if not self.handling.declared:
            task.cancel()
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # the server does not wait either: the responder lets the handler finish
        if not task.cancelled() and task.exception() is not None:
            _log.error("a view failed after its client had gone", exc_info=task.exception())


def _make_rewindable(request: HttpRequest) -> None:
    """Copy the body of Django's test client, which cannot be read twice. That of a server is a file."""
    if not (request._read_started or request._stream.seekable()):
        request._stream = BytesIO(request._stream.read())


def _chunks(request: HttpRequest) -> Iterator[bytes]:
    """Yield the whole body, whatever was read of it, and restore the position."""
    if hasattr(request, "_body"):
        yield request._body
        return
    stream = request._stream
    if stream.closed or not stream.seekable():
        raise parsed_before()
    at = stream.tell()
    stream.seek(0)
    while chunk := stream.read(CHUNK):
        yield chunk
    stream.seek(at)
