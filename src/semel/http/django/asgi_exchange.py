"""One Django request in ASGI messages: its body as the server would send it, its answer as the server would get it.

When the client hangs up, Django cancels the request. A declared view is left to finish, and only then is the request
over: until then its body, its thread and its database connections stay.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import aclosing, suppress
from io import BytesIO
from typing import TYPE_CHECKING, Final

from semel.http.django.answers import lines_of, rewritten, streamed
from semel.http.django.handling import Handling, parsed_before

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase

    from semel.http.asgi.messages import Message, Send

__all__ = ["Exchange", "rewindable"]

_STEP: Final = 256 * 1024
_AHEAD: Final = 1
"""Messages of an answer that wait for the client."""
_log = logging.getLogger("semel.http")


class Exchange:
    """One request: the server's side of receive and send, and Django's side of both."""

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

    async def give(self, response: HttpResponseBase, send: Send) -> None:
        """Say Django's response in messages; unless the first one goes straight through: then it is meant itself."""
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines_of(response)]
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

    async def take(self, message: Message) -> None:
        """A message for the server."""
        if message is self._start:
            self._untouched = True
        elif not self._gone:
            await self._messages.put(message)

    async def answered(self, exchange: Awaitable[None]) -> HttpResponseBase:
        """Run it, up to its answer."""
        self._task = asyncio.ensure_future(self._run(exchange))
        handled = False
        try:
            start = await self._messages.get()
            if start is None:
                await self._task  # for its error
                return self.handling.response
            first = await self._messages.get()
            if first is None:
                await self._task
                raise ConnectionError("the answer ended before it was whole")
            response = self.handling.response
            lines = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
            if first.get("more_body"):
                handled = True
                return self._kept(streamed(response, lines, self._rest(first)))
            answer = rewritten(response, start["status"], lines, first.get("body", b""))
            await self._task
            return answer
        finally:
            if not handled:
                await self._over()

    async def _run(self, exchange: Awaitable[None]) -> None:
        try:
            await exchange
        finally:
            if not self._gone:
                await self._messages.put(None)

    async def _rest(self, message: Message | None) -> AsyncIterator[bytes]:
        """An answer that is let through."""
        assert self._task is not None
        try:
            while message is not None:
                yield message.get("body", b"")
                message = await self._messages.get()
            await self._task
        finally:
            await self._over()

    def _kept(self, response: HttpResponseBase) -> HttpResponseBase:
        """A response that nobody begins to read, because another took its place, must not hold the view for ever."""
        loop = asyncio.get_running_loop()

        def unread() -> None:
            with suppress(RuntimeError):  # the loop is closed, and the task gone with it
                loop.call_soon_threadsafe(self._let_go)

        response._resource_closers.append(unread)
        weakref.finalize(response, unread).atexit = False
        return response

    def _let_go(self) -> None:
        self._gone = True
        while not self._messages.empty():
            self._messages.get_nowait()

    async def _over(self) -> None:
        """Nobody reads on. A declared view is run to its end all the same; any other is stopped."""
        task = self._task
        assert task is not None
        if task.done():
            return
        self._let_go()
        if not self.handling.declared:
            task.cancel()
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # when the server does not wait for it either, the responder knows what to do
        if not task.cancelled() and task.exception() is not None:
            _log.error("a view failed after its client had gone", exc_info=task.exception())


def rewindable(request: HttpRequest) -> None:
    """Servers' bodies are files; those of Django's test client are not, so what it sends is kept."""
    if not (request._read_started or request._stream.seekable()):
        request._stream = BytesIO(request._stream.read())


def _chunks(request: HttpRequest) -> Iterator[bytes]:
    """The body, whatever was read of it; and then it stands where it stood."""
    if hasattr(request, "_body"):
        yield request._body
        return
    stream = request._stream
    if stream.closed or not stream.seekable():
        raise parsed_before()
    at = stream.tell()
    stream.seek(0)
    while chunk := stream.read(_STEP):
        yield chunk
    stream.seek(at)
