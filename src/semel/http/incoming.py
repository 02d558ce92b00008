"""An ASGI request on its way in: what the application reads, and what was read ahead of it for the fingerprint."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from semel.http.asgi_messages import Message, Receive
from semel.http.held_body import HeldBody

if TYPE_CHECKING:
    from semel.engine.attempts import AsyncAttempt
    from semel.http.exchange import Exchange

__all__ = ["Incoming"]


class Incoming:
    """The messages of one request; base of the ``Responder``."""

    attempt: AsyncAttempt | None

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._held: HeldBody | None = None
        self._body_done = False
        """Whether the body has come to its end."""
        self._gone: Message | None = None
        """The message that the client hung up, when it came."""
        self._settled: asyncio.Event | None = None

    @property
    def exchange(self) -> Exchange:
        raise NotImplementedError

    async def receive(self) -> Message:
        """What the application reads its request from."""
        if self._held is not None:
            body = self._held.take()
            more = bool(self._held)
            if not more:
                self._held = None
            return {"type": "http.request", "body": body, "more_body": more}
        message = self._gone or await self._take()
        if message["type"] == "http.disconnect" and self.attempt is not None:
            # An application that hears of it would stop half way. It hears when its answer is stored.
            if self._settled is None:
                self._settled = asyncio.Event()
            await self._settled.wait()
        return message

    async def _read_to_its_end(self) -> bool:
        """Read what the application has not read, and keep it for it. False: the client left before the end."""
        while not self._body_done:
            message = await self._take()
            if message["type"] == "http.disconnect":
                return False
            if self._held is None:
                self._held = HeldBody()
            self._held.add(message.get("body", b""))
        return True

    def _tell_settled(self) -> None:
        """The answer is stored: the application may hear that nobody waits for it."""
        if self._settled is not None:
            self._settled.set()

    def _close(self) -> None:
        if self._held is not None:
            self._held.close()

    async def _take(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            body = message.get("body", b"")
            if body:
                self.exchange.fed(body)
            self._body_done = not message.get("more_body", False)
        elif message["type"] == "http.disconnect":
            self._gone = message
        return message
