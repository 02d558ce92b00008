"""An ASGI answer on its way out: held back until it is stored, and then let go; or another one said in its place.

It is stored within the application's own ``send``: what an application does after its answer, such as a background
task, must find it stored and sent, for it may take long, or end the process.
"""

from __future__ import annotations

from collections.abc import Iterable

from semel.engine.drive.attempts import AsyncAttempt
from semel.http.asgi.messages import FILES, Message, Receive, Scope, Send
from semel.http.asgi.rerun import Rerunning
from semel.http.contract.capture import Capture, cut_off
from semel.http.contract.exchange import SETTLED
from semel.http.contract.rerun import RunAgain
from semel.http.contract.rules import Natural

__all__ = ["Outgoing", "is_lost"]


def is_lost(attempt: AsyncAttempt) -> bool:
    return attempt.lease is not None and attempt.lease.lost


class Outgoing(Rerunning):
    """The answer of one request; base of the ``Responder``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        Rerunning.__init__(self, scope, receive)  # super() would cost as much as all of this
        self._send = send
        self._answered = False
        self._begun = False
        """Whether an answer that is not captured, or not held back, has gone out."""
        self._natural: Natural | None = None
        self._start: Message | None = None
        self._capture: Capture | None = None

    async def send(self, message: Message) -> None:
        """What the application writes its answer to."""
        kind = message["type"]
        if self._silent:
            return
        if self._answer is not None:
            if kind == "http.response.start" and not self._answered:
                await self._say(message.get("headers", ()))
            return
        capture = self._capture
        if capture is None:
            if kind == "http.response.start":
                natural = self._natural
                if natural is not None and natural.settled(self._scope["method"], message["status"]):
                    self._answer = SETTLED
                    await self._say(message.get("headers", ()))
                    return
                self._begun = True
            await self._send(message)
        elif kind == "http.response.start":
            self._start = message
            capture.start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body":
            was_open, body = capture.overflowed, message.get("body", b"")
            kept = capture.add(body)
            more = message.get("more_body", False)
            if not kept and not was_open:
                if more:
                    self._begun = True
                    await self._pass(self._first(capture))
                body = capture.taken()
            if not more:
                last = {"type": kind, "body": capture.body if kept else body, "more_body": False}
                await self._finish(capture, last, was_open)
            elif not kept:
                await self._pass({"type": kind, "body": body, "more_body": True})
        elif kind in FILES:
            capture.overflowed = True
            await self._finish(capture, message)
        else:
            await self._pass(message)

    async def _finish(self, capture: Capture, last: Message, begun: bool = False) -> None:
        """The answer is whole: store it, and only then let it go, or its end."""
        attempt, rule = self.attempt, self._rule
        assert attempt is not None
        assert rule is not None
        stored = capture.stored()
        if rule.stores(capture.status):
            await self._settle(attempt.complete(stored))
        else:
            await self._settle(attempt.lost() if is_lost(attempt) else attempt.decline(stored))
        if self._silent:
            raise RunAgain
        if self._answer is None:
            send = self._send
            if not begun:
                await send(self._first(capture))
            await send(last)
        elif begun:
            raise cut_off()
        else:
            await self._say()

    def _first(self, capture: Capture) -> Message:
        """What a first answer begins with."""
        assert self._start is not None
        exchange = self._exchange or self.exchange
        headers = exchange.exposed(exchange.first(capture.headers), self._rule)
        return {**self._start, "headers": headers}

    async def _pass(self, message: Message) -> None:
        """Send a part of an answer. A server may say that the client has gone; that must not stop the handler."""
        try:
            await self._send(message)
        except OSError:
            if self.attempt is None:
                raise

    async def _say(self, carrier: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the answer that is known, in the place of the one that ``carrier`` are the lines of."""
        answer, rule = self._answer, self._rule
        if answer is None or self._answered:
            return
        self._answered = True
        if self._begun:
            raise cut_off()
        lines = self.exchange.exposed(self.exchange.carried(answer.headers, carrier, rule), rule)
        send = self._send
        await send({"type": "http.response.start", "status": answer.status, "headers": lines})
        await send({"type": "http.response.body", "body": answer.body, "more_body": False})
