"""The types of ASGI, and the body of a request: read ahead for the fingerprint, kept, passed on to the application."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import BodyTooLarge

if TYPE_CHECKING:
    from semel.http.contract.endpoint import Lifecycle

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

FILES: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""Messages by which the server sends a file that the application never reads: nothing could be captured."""


def without_files(scope: Scope) -> None:
    """Hide these extensions from the application, so that it sends the bytes themselves."""
    if not FILES.isdisjoint(scope["extensions"] or ()):
        scope["extensions"] = {name: value for name, value in scope["extensions"].items() if name not in FILES}


IN_MEMORY: Final = 1024 * 1024
CHUNK: Final = 256 * 1024


class HeldBody:
    """A FIFO of bytes, in memory up to a size and in a temporary file above it. Empty chunks count: they end a body."""

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._in_memory = in_memory
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._file: IO[bytes] | None = None
        self._written = 0
        self._read = 0

    def __bool__(self) -> bool:
        """Whether there is more to take."""
        return bool(self._chunks) or self._read < self._written

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= self._in_memory:
            self._chunks.append(chunk)
            return
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 (closed with the request)
        self._file.write(chunk)
        self._written += len(chunk)

    def take(self) -> bytes:
        """Remove and return the next chunk."""
        if self._chunks:
            return self._chunks.popleft()
        assert self._file is not None
        self._file.seek(self._read)
        chunk = self._file.read(CHUNK)
        self._read += len(chunk)
        if self._read == self._written:
            self._file.close()
        return chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._read = self._written


class BodyReader:
    """Stands between the server's ``receive`` and the application's."""

    source: Receive
    """The server's ``receive``."""
    life: Lifecycle[Any]
    held: HeldBody | None = None
    """A body that came in several messages or is large, for the application."""
    _message: Message | None = None
    """A body that came as one message, for the application."""
    _disconnect: Message | None = None
    """The server's message that the client has disconnected."""
    _settled: asyncio.Event | None = None
    _early: Message | None = None
    """The server's first message, if it was received before ``read_all`` is called."""

    def begin_with(self, message: Message) -> None:
        """Take the server's first message, which was received already."""
        if self.life.exchange.complete:
            self._message = message
        else:
            self._early = message

    async def receive(self) -> Message:
        """The ``receive`` that the application is called with."""
        if self._message is not None:
            whole, self._message = self._message, None
            return whole
        if self.held is not None:
            body = self.held.take()
            more = bool(self.held)
            if not more:
                self.held = None
            return {"type": "http.request", "body": body, "more_body": more}
        message = self._disconnect
        if message is None:
            message = await self.source()
            if message["type"] == "http.request":
                self.life.exchange.feed(message.get("body", b""), message.get("more_body", False))
            elif message["type"] == "http.disconnect":
                self._disconnect = message
        if message["type"] == "http.disconnect" and (self.life.attempt is not None or self.life.claiming):
            # An application that learns of it would stop half way. It learns of it once its answer is stored, or once
            # the claim has found that there is nothing to run.
            if self._settled is None:  # one for all who wait: an application may call receive() twice at once
                self._settled = asyncio.Event()
                self.life.on_settled = self._settled.set
            await self._settled.wait()
        return message

    async def read_all(self) -> bool:
        """Read what the application has not read yet and keep it. Returns False if the client left before the end.

        Raises BodyTooLarge for a body above the rule's ``max_request_body``: before it is read, if its length is
        announced.
        """
        rule = self.life.rule
        assert rule is not None
        longest = rule.max_request_body
        assert longest is not None  # the middleware's, if the route has none
        exchange = self.life.exchange
        if exchange.size > longest or (not exchange.complete and exchange.announced_length > longest):
            raise BodyTooLarge
        receive = self.source
        while not exchange.complete:
            message, self._early = self._early or await receive(), None
            if message["type"] == "http.disconnect":
                self._disconnect = message
                return False
            if message["type"] != "http.request":
                continue
            exchange.feed(message.get("body", b""), message.get("more_body", False))
            if exchange.size > longest:
                self.close()
                self.held = None
                raise BodyTooLarge
            if self.held is None:
                if not message.get("more_body", False) and exchange.size <= IN_MEMORY:
                    self._message = message
                    break
                self.held = HeldBody()
            self.held.add(message.get("body", b""))
        return True

    def rewind(self, body: bytes) -> None:
        """Let the application read this body, as if the request had come again."""
        self._message = {"type": "http.request", "body": body, "more_body": False}
        self.held = self._settled = self.life.on_settled = None

    def close(self) -> None:
        if self.held is not None:
            self.held.close()
