"""The types of ASGI, and the body of a request: read ahead for the fingerprint, kept, passed on to the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from tempfile import SpooledTemporaryFile
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import BodyTooLarge
from semel.http.contract.rules import IN_MEMORY

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


CHUNK: Final = 256 * 1024
"""Bytes of a body that is held that the application receives at once."""


class BodyReader:
    """Stands between the server's ``receive`` and the application's."""

    source: Receive
    """The server's ``receive``."""
    life: Lifecycle[Any]
    held: IO[bytes] | None = None
    """A body that came in several messages or is large, for the application."""
    _left = 0
    """Bytes of it that the application has not received yet."""
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
            body = self.held.read(CHUNK)
            self._left -= len(body)
            if not self._left:
                self.close()
            return {"type": "http.request", "body": body, "more_body": self._left > 0}
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
                self.close()  # half a body must not pass for a whole one
                return False
            if message["type"] != "http.request":
                continue
            exchange.feed(message.get("body", b""), message.get("more_body", False))
            if exchange.size > longest:
                self.close()
                raise BodyTooLarge
            if self.held is None:
                if not message.get("more_body", False) and exchange.size <= IN_MEMORY:
                    self._message = message
                    return True
                self.held = SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 (closed with the request)
            self.held.write(message.get("body", b""))
        if self.held is not None:
            self._left = self.held.tell()
            self.held.seek(0)
        return True

    def rewind(self, body: bytes) -> None:
        """Let the application read this body, as if the request had come again."""
        self._message = {"type": "http.request", "body": body, "more_body": False}
        self.held = self._settled = self.life.on_settled = None

    def close(self) -> None:
        """Drop the body that is held."""
        if self.held is not None:
            self.held.close()
            self.held = None
