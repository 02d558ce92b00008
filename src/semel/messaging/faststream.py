"""The inbox inside FastStream. Needs ``semel[faststream]``.

::

    router = RabbitRouter(middlewares=[InboxMiddleware(inbox, "ledger", connect=pool.connection)])

    @router.subscriber("orders")
    async def book(order: dict, connection: Annotated[Any, Context()]) -> None: ...

FastStream receives, parses and calls the subscriber. Everything else is done by a consumer of the inbox, for which each
message is a source with one delivery: the transaction, the acknowledgement after the commit, pauses and dead letters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semel.core.messaging.messages import Message, read_message
from semel.core.policy import Duration
from semel.errors import BrokerUnavailable, ConfigurationError, MissingDependency
from semel.messaging.aio_inbox import LONGEST_PAUSE, PAUSE, TRIES, AsyncInbox
from semel.messaging.ports import Capabilities, Delivery
from semel.observe import events

try:
    from faststream import AckPolicy, BaseMiddleware
    from faststream.exceptions import AckMessage, HandlerException, NackMessage
except ImportError as error:
    raise MissingDependency("faststream", "faststream") from error

if TYPE_CHECKING:
    from faststream import ContextRepo, StreamMessage

__all__ = ["InboxMiddleware"]


class InboxMiddleware:
    """Makes a subscriber apply every message once. A middleware of a router, or of a broker, with one subscriber.

    The subscriber gets the connection from FastStream's context, under the name ``connection``. What it writes there
    commits together with the message's id, and then the message is acknowledged. A repeat is acknowledged, and the
    subscriber is not called. If the subscriber raises, the message is delivered again after a pause, or it goes to the
    dead letters. The middleware acknowledges by itself, whatever the ``ack_policy`` is; only ACK_FIRST is refused.
    """

    def __init__(
        self,
        inbox: AsyncInbox,
        consumer: str,
        *,
        connect: Callable[[], Any],
        message_id: Callable[[StreamMessage[Any]], str] | None = None,
        destination: str = "",
        tries: int = TRIES,
        pause: Duration = PAUSE,
        longest_pause: Duration = LONGEST_PAUSE,
        on_event: events.EventHooks | None = None,
    ) -> None:
        """
        :param consumer: as in ``inbox.handler``, as are ``connect``, ``tries``, the pauses and ``on_event``.
        :param message_id: returns what identifies a message in every delivery. Defaults to the header ``ce-id``, which
            relays send. FastStream's own ``message_id`` may be made up anew for each delivery.
        :param destination: where a relay sends a dead letter that is redriven. Defaults to the relay's default.
        """
        self._message_id = message_id
        self._destination = destination
        self._subscriber: object = None
        self._call: ContextVar[Callable[[object], Any]] = ContextVar("semel_faststream")

        @inbox.handler(
            consumer, connect=connect, tries=tries, pause=pause, longest_pause=longest_pause, on_event=on_event, batch=1
        )
        async def apply(message: Message, connection: object) -> None:
            await self._call.get()(connection)

        self._consumer = apply

    def __call__(self, msg: Any, /, *, context: ContextRepo) -> _Scope:
        """FastStream calls this for each message."""
        return _Scope(msg, context=context, inbox=self)

    async def apply(self, call: Callable[[object], Any], msg: StreamMessage[Any], subscriber: Any) -> Any:
        """Call the subscriber unless the message was applied before. Returns its result, or raises what FastStream
        knows as the end of the message: there is no result to publish then.
        """
        self._subscriber = self._subscriber or subscriber
        if subscriber.ack_policy is AckPolicy.ACK_FIRST:
            raise ConfigurationError("messages are acknowledged before they are applied: use AckPolicy.MANUAL")
        if subscriber is not self._subscriber or msg.batch_headers:
            await asyncio.sleep(1)  # it is delivered again at once
            await msg.nack()
            raise ConfigurationError(
                "an InboxMiddleware is for one subscriber, of single messages: a message that two of them receive "
                "would be applied by one of them only. Give each subscriber a router with a middleware of its own"
            )
        result: Any = None

        async def run(connection: object) -> None:
            nonlocal result
            try:
                result = await call(connection)
            except HandlerException as decision:  # of the subscriber: to acknowledge, or not
                raise _Decided(decision) from decision

        outer = self._call.set(run)
        try:
            report = await self._consumer.drain(_OneDelivery(self._read(msg), msg), idle=0)
        except _Decided as decided:
            raise decided.decision from None
        finally:
            self._call.reset(outer)
        if report.applied:
            return result
        raise AckMessage if report.repeated or report.dead else NackMessage

    def _read(self, msg: StreamMessage[Any]) -> Message:
        headers = {name: _text(value) for name, value in msg.headers.items()}
        body = msg.body if isinstance(msg.body, bytes) else b""
        message = read_message({"content-type": msg.content_type or "", **headers}, body, self._destination)
        return message if self._message_id is None else replace(message, id=self._message_id(msg))


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


class _Scope(BaseMiddleware[Any, Any]):
    """The middleware for one message."""

    def __init__(self, msg: Any, /, *, context: ContextRepo, inbox: InboxMiddleware) -> None:
        super().__init__(msg, context=context)
        self._inbox = inbox

    async def consume_scope(self, call_next: Callable[[Any], Any], msg: StreamMessage[Any]) -> Any:
        async def call(connection: object) -> Any:
            with self.context.scope("connection", connection):
                return await call_next(msg)

        return await self._inbox.apply(call, msg, self.context.get_local("handler_"))


class _Decided(BaseException):
    """The subscriber has raised one of FastStream's own exceptions. The transaction is rolled back."""

    def __init__(self, decision: HandlerException) -> None:
        self.decision = decision


class _OneDelivery:
    """A source with one message, which FastStream has received."""

    capabilities = Capabilities(name="FastStream", ordered=False, pipelines=False, largest=1 << 30)

    def __init__(self, message: Message, msg: StreamMessage[Any]) -> None:
        self._left: list[Delivery] = [Delivery(message, 0, None)]
        self._msg = msg

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        found, self._left = self._left, []
        return found

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        await self._tell(self._msg.ack)

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        await asyncio.sleep(seconds)  # few brokers can wait by themselves
        await self._tell(self._msg.nack)

    async def close(self) -> None:
        """FastStream owns the connection."""

    async def _tell(self, tell: Callable[[], Any]) -> None:
        try:
            await tell()
        except Exception as error:
            raise BrokerUnavailable(f"the outcome of a message did not reach the broker: {error!r}") from error
