"""An ASGI request on its way in: what the application reads, and what was read ahead of it for the fingerprint."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from semel.errors import BodyTooLarge
from semel.http.asgi.held_body import IN_MEMORY, HeldBody
from semel.http.asgi.messages import Message, Receive

if TYPE_CHECKING:
    from semel.engine.drive.attempts import AsyncAttempt
    from semel.http.contract.exchange import Exchange

__all__ = ["Incoming"]


class Incoming:
    """The messages of one request; base of the ``Responder``."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._exchange: Exchange | None = None
        self._whole: Message | None = None
        """A body that came in one message, as it came."""
        self._held: HeldBody | None = None
        self._taken = 0
        """Bytes of the body that have come."""
        self._body_done = False
        """Whether the body has come to its end."""
        self._gone: Message | None = None
        """The message that the client hung up, when it came."""
        self._settled: asyncio.Event | None = None
        self.attempt: AsyncAttempt | None = None

    @property
    def exchange(self) -> Exchange:
        raise NotImplementedError

    async def receive(self) -> Message:
        """What the application reads its request from."""
        if self._whole is not None:
            whole, self._whole = self._whole, None
            return whole
        if self._held is not None:
            body = self._held.take()
            more = bool(self._held)
            if not more:
                self._held = None
            return {"type": "http.request", "body": body, "more_body": more}
        message = self._gone
        if message is None:
            message = await self._receive()
            self._saw(message)
        if message["type"] == "http.disconnect" and self.attempt is not None:
            # An application that hears of it would stop half way. It hears when its answer is stored.
            if self._settled is None:
                self._settled = asyncio.Event()
            await self._settled.wait()
        return message

    async def _read_to_its_end(self, longest: int) -> bool:
        """Read what the application has not read, and keep it for it. False: the client left before the end.

        Raises BodyTooLarge: where the length is announced, before anything is read.
        """
        if self._taken > longest or (not self._body_done and (self._exchange or self.exchange).announced() > longest):
            raise BodyTooLarge
        receive = self._receive
        while not self._body_done:
            message = await receive()
            self._saw(message)
            if message["type"] == "http.disconnect":
                return False
            if self._taken > longest:
                self._close()
                self._held = None
                raise BodyTooLarge
            if self._held is None:
                if not message.get("more_body", False) and self._taken <= IN_MEMORY:
                    self._whole = message
                    break
                self._held = HeldBody()
            self._held.add(message.get("body", b""))
        return True

    def _read_again(self, body: bytes) -> None:
        """Have the application read the whole body once more, as if the request had come again."""
        self._whole = {"type": "http.request", "body": body, "more_body": False}
        self._held = self._settled = None

    def _tell_settled(self) -> None:
        """The answer is stored: the application may hear that nobody waits for it."""
        if self._settled is not None:
            self._settled.set()

    def _close(self) -> None:
        if self._held is not None:
            self._held.close()

    def _saw(self, message: Message) -> None:
        """Take note of what came."""
        if message["type"] == "http.request":
            body = message.get("body", b"")
            if body:
                self._taken += len(body)
                (self._exchange or self.exchange).fed(body)
            self._body_done = not message.get("more_body", False)
        elif message["type"] == "http.disconnect":
            self._gone = message
