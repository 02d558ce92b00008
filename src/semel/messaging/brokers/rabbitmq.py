"""RabbitMQ. The attributes of a message are its headers, and ``message_id`` is its id. Needs ``semel[rabbitmq]``.

A destination is the name of a queue, or ``exchange/routing key``. Messages are persistent and ``mandatory``: RabbitMQ
confirms a message that no queue gets, so a message that comes back is refused.

A queue that is full rejects a message and takes the next one, and a message for a queue that is just being created is
lost while the next one is not. The messages of a stream are therefore not pipelined: the relay waits for the
confirmation of each before it sends the next of its stream.

A source does not return a postponed message to the queue, where others would overtake it. It keeps it, with those that
follow in its stream, and delivers it again. If the source dies, RabbitMQ delivers what was not acknowledged to another.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final, Literal, Self

from semel.core.messaging.messages import Message, attributes, read_message, size_of
from semel.core.values import value
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers.options import flag, number, parse_url, split_options
from semel.messaging.brokers.sending import LATE, too_large
from semel.messaging.ports import BrokerDown, Capabilities, Delivery, Refused, Result, Sent, TryAgain
from semel.stores.settings import require

LARGEST: Final = 16 << 20
"""RabbitMQ takes more, but holds each message in memory."""
LARGEST_HEADERS: Final = 100_000
"""They have to fit into one frame, of 128 kB."""
LONGEST_NAME: Final = 255
PREFETCH: Final = 1000
CONNECT_TIMEOUT: Final = 5.0
RETRY: Final = 0.2
"""Seconds until a source tries again to become the only consumer of its queue."""
_OWN_HEADERS: Final = re.compile("x-(death|first-death-.*|last-death-.*|delivery-count|acquired-count)")
"""Headers that RabbitMQ adds to a message."""
_DIFFERENT: Final = re.compile(r"inequivalent arg '([^']+)'(?:.* current is the value '([^']*)' of type '(\w+)')?")
"""What RabbitMQ answers if a queue has other arguments than those it was declared with."""
_BROKER_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {"queue": str, "exchange": str, "largest": number}
_SOURCE_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "queue": str, "type": str, "ordered": flag, "prefetch": number,
}  # fmt: skip
_LIBRARY_OPTIONS: Final = (
    *("heartbeat", "timeout", "name", "auth"),
    *("cafile", "capath", "cadata", "certfile", "keyfile", "no_verify_ssl"),
)
"""Options of a URL that aio-pika reads. It ignores others, so one URL may serve a broker and a source."""
_SINGLE: Final = "x-single-active-consumer"
_log: Final = logging.getLogger("semel.rabbitmq")


class RabbitMQBroker:
    """Publishes to RabbitMQ."""

    def __init__(self, url: str, *, queue: str = "", exchange: str = "", largest: int = LARGEST) -> None:
        """
        :param url: ``amqp://user:password@host/vhost``.
        :param queue: for messages without a destination.
        :param exchange: publish to this exchange instead. A destination is then the routing key; a message without one
            has its type as routing key.
        :param largest: the most bytes that a message may have.
        """
        if queue and exchange:
            raise ConfigurationError("RabbitMQ: name a queue or an exchange for the messages, not both")
        if len(f"{queue}{exchange}".encode()) > LONGEST_NAME:
            raise ConfigurationError(f"the name of a queue or exchange has at most {LONGEST_NAME} bytes in AMQP")
        self._library = require("aio_pika", "rabbitmq", "aio-pika")
        self._url = _checked(url)
        self._queue = queue
        self._exchange = exchange
        self._connection: Any = None
        self._channel: Any = None
        self._exchanges: set[str] = set()
        """Those that are known to exist."""
        self._opening = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self.capabilities = Capabilities(name="RabbitMQ", ordered=True, pipelines=False, largest=largest)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``amqp://user:password@host/vhost?queue=orders``, or ``…?exchange=events``. Option: ``largest``."""
        url, options = split_options(url, _BROKER_OPTIONS, (*_LIBRARY_OPTIONS, *_SOURCE_OPTIONS))
        return cls(url, **options)

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        results: list[Result | None] = [self._refuse(message) for message in messages]
        waiting = [message for message, result in zip(messages, results, strict=True) if result is None]
        sent = iter(await self._send(waiting, deadline) if waiting else ())
        return [next(sent) if result is None else result for result in results]

    async def close(self) -> None:
        self._drop()
        # The next call may come from another event loop, as that of the next ``Relay.drain`` does.
        self._opening = asyncio.Lock()
        if self._closing:
            await asyncio.wait(self._closing)

    def _refuse(self, message: Message) -> Refused | None:
        exchange, key = self._place(message)
        headers = attributes(message)
        if not exchange and not key:
            return Refused("the message has no destination, and the broker's URL names no queue: …?queue=orders")
        if any(len(name.encode()) > LONGEST_NAME for name in (exchange, key, *headers)):
            return Refused(f"an exchange, a routing key and a header's name have at most {LONGEST_NAME} bytes in AMQP")
        if (size := size_of(headers, b"")) > LARGEST_HEADERS:
            return Refused(f"the headers have {size} bytes, and the most is {LARGEST_HEADERS}")
        return too_large(message, self.capabilities.largest)

    def _place(self, message: Message) -> tuple[str, str]:
        """The exchange and the routing key. To the exchange without a name, that is the name of a queue."""
        if self._exchange:
            return self._exchange, message.destination or message.type
        exchange, slash, key = message.destination.partition("/")
        return (exchange, key) if slash else ("", message.destination or self._queue)

    async def _send(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        if time.monotonic() >= deadline:
            return [LATE] * len(messages)
        try:
            async with self._opening, asyncio.timeout(deadline - time.monotonic()):
                channel = await self._open({self._place(message)[0] for message in messages})
        except self._library.exceptions.CONNECTION_EXCEPTIONS as error:
            blocked = await self._is_blocked()
            self._drop()
            return [blocked or BrokerDown(_describe_outage(error))] * len(messages)
        wire = await channel.get_underlay_channel()
        sending = [asyncio.ensure_future(self._send_one(wire, message)) for message in messages]
        try:
            await asyncio.wait(sending, timeout=max(0.0, deadline - time.monotonic()))
        finally:
            late = [each for each in sending if not each.done()]
            for each in late:
                each.cancel()
            blocked = await self._is_blocked() if late else None
            if late or not _is_open(channel):
                self._drop()
        missing = blocked or TryAgain("RabbitMQ did not confirm the message before the deadline")
        return [missing if each in late else each.result() for each in sending]

    async def _send_one(self, wire: Any, message: Message) -> Result:
        """Send a message by aiormq, below aio-pika, which need not wait for the socket each time."""
        errors = self._library.exceptions
        name, key = self._place(message)
        if name not in self._exchanges:
            return Refused(f"there is no exchange {name!r}")
        broker_id, content_type = message.broker_id, message.content_type
        sent = self._library.Message(
            message.data,
            headers=attributes(message),
            message_id=broker_id if len(broker_id.encode()) <= LONGEST_NAME else None,
            content_type=content_type if content_type.isascii() else None,
            delivery_mode=self._library.DeliveryMode.PERSISTENT,
        )
        try:
            await wire.basic_publish(
                sent.body, exchange=name, routing_key=key, properties=sent.properties, mandatory=True, wait=False
            )
        except errors.PublishError:
            return Refused(f"RabbitMQ has no queue for the routing key {key!r} of the exchange {name!r}")
        except errors.DeliveryError:
            return TryAgain("RabbitMQ did not take the message: its queue is full, or has failed")
        except errors.CONNECTION_EXCEPTIONS as error:
            if not _is_alive(self._connection) or not isinstance(error, errors.AMQPChannelError):
                return BrokerDown(f"the connection to RabbitMQ is lost: {error!r}")
            return TryAgain(f"RabbitMQ has closed the channel: {error!r}")
        return Sent()

    async def _open(self, exchanges: set[str]) -> Any:
        """Connect if need be, and find out which of the exchanges exist: publishing to another closes the channel."""
        if not _is_alive(self._connection):
            self._connection = await _connect(self._library, self._url)
            self._channel = None
        if not _is_open(self._channel):
            self._channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
            self._exchanges = {""}
        for name in exchanges - self._exchanges:
            probe = await self._connection.channel()
            with suppress(self._library.exceptions.ChannelNotFoundEntity):
                await probe.get_exchange(name)
                await probe.close()
                self._exchanges.add(name)
        await _wire(self._connection).ready()
        return self._channel

    async def _is_blocked(self) -> BrokerDown | None:
        """Whether RabbitMQ takes no messages at all, because its memory or disk is full."""
        if not _is_alive(self._connection):
            return None
        try:
            async with asyncio.timeout(0):
                await _wire(self._connection).ready()
        except TimeoutError:
            return BrokerDown("RabbitMQ has blocked all publishers, because its memory or disk is full")
        return None

    def _drop(self) -> None:
        """Give up the connection, with what is not sent yet. The next call opens a new one."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            closing = asyncio.ensure_future(_close(connection))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class RabbitMQSource:
    """Consumes a queue."""

    def __init__(
        self,
        url: str,
        *,
        queue: str,
        type: Literal["quorum", "classic"] = "quorum",
        ordered: bool = True,
        prefetch: int = PREFETCH,
    ) -> None:
        """
        :param queue: the queue. It is created if it does not exist, durable and with a single active consumer if the
            source is ordered.
        :param type: what kind of queue it is. Only quorum queues count how often they delivered a message, so that a
            message that kills its consumer is found.
        :param ordered: be the only consumer of the queue, so that the order of every stream is kept. Others wait until
            this one is gone. A quorum queue needs ``x-single-active-consumer`` for that. With False, all consumers
            share the work.
        :param prefetch: the most messages that may be received and not acknowledged, including postponed ones.
        """
        self._library = require("aio_pika", "rabbitmq", "aio-pika")
        if not queue:
            raise ConfigurationError("a source of RabbitMQ needs a queue: amqp://user:password@host/vhost?queue=orders")
        if type not in ("quorum", "classic"):
            raise ConfigurationError("the type of a queue is quorum or classic")
        self._url = _checked(url)
        self._queue = queue
        self._type = type
        self._ordered = ordered
        self._prefetch = prefetch
        self._connection: Any = None
        self._channel: Any = None
        self._forget()
        self.capabilities = Capabilities(
            name="RabbitMQ", ordered=ordered, pipelines=False, largest=LARGEST, counts_starts=type == "quorum"
        )

    def _forget(self) -> None:
        self._arrived = asyncio.Event()
        self._lost = False
        self._buffer: list[tuple[int, Delivery]] = []
        """What is not delivered yet, in the order of the queue: of the delivery tags."""
        self._held: set[int] = set()
        """The tags of what is delivered, and neither acknowledged nor postponed."""
        self._due: dict[str, float] = {}
        """When a postponed message, and what follows in its stream, may be delivered again."""

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``amqp://user:password@host/vhost?queue=orders``. Options: ``type``, ``ordered``, ``prefetch``."""
        url, options = split_options(url, _SOURCE_OPTIONS, (*_LIBRARY_OPTIONS, *_BROKER_OPTIONS))
        return cls(url, **{"queue": "", **options})

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        until = time.monotonic() + seconds
        try:
            while True:
                if not self._consumes():
                    await self._open(min(CONNECT_TIMEOUT, max(1.0, seconds)))
                found, next_due = self._take(limit)
                if found or time.monotonic() >= until:
                    return found
                self._arrived.clear()
                pause = min(until, next_due, time.monotonic() + (RETRY if self._channel is None else 60))
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, pause - time.monotonic())):
                        await self._arrived.wait()
        except self._library.exceptions.CONNECTION_EXCEPTIONS as error:
            await self.close()
            raise BrokerUnavailable(_describe_outage(error)) from error

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        handles: list[_Ticket] = [delivery.handle for delivery in deliveries]
        if not handles:
            return
        try:
            if not self._consumes():
                raise ConnectionError("the connection is lost")
            tags = [each.tag for each in handles if each.channel is self._channel and each.tag in self._held]
            self._held.difference_update(tags)
            channel = await self._channel.get_underlay_channel()
            for tag in tags:
                await channel.basic_ack(tag, wait=False)
            # Acknowledgements have no answer. RabbitMQ answers this when it has read them.
            await self._channel.set_qos(self._prefetch, timeout=CONNECT_TIMEOUT)
        except self._library.exceptions.CONNECTION_EXCEPTIONS as error:
            await self.close()
            raise BrokerUnavailable(f"RabbitMQ did not get the acknowledgement: {error!r}") from error

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        ticket: _Ticket = delivery.handle
        if ticket.channel is not self._channel or ticket.tag not in self._held:
            return  # the connection was lost, and the message has come back to the queue
        self._held.discard(ticket.tag)
        line, now = _line(delivery), time.monotonic()
        due = self._due.get(line, 0.0)
        # What follows a postponed message was not tried, so it does not count as a start.
        counts = delivery.starts > 0 and due <= now
        self._due[line] = max(due, now + seconds)
        again = Delivery(delivery.message, delivery.starts + counts, ticket)
        insort(self._buffer, (ticket.tag, again), key=lambda each: each[0])
        self._arrived.set()

    async def close(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        self._forget()
        if connection is not None:
            await _close(connection)

    def _consumes(self) -> bool:
        return _is_alive(self._connection) and _is_open(self._channel) and not self._lost

    async def _open(self, timeout: float) -> None:
        """Connect and consume. If another consumer has the queue for itself, there is no channel afterwards."""
        await self.close()
        async with asyncio.timeout(timeout):
            self._connection = await _connect(self._library, self._url)
            exclusive = await self._check_queue()
            channel = await self._connection.channel(publisher_confirms=False)
            await channel.set_qos(self._prefetch)
            wire = await channel.get_underlay_channel()
            wire.on_consumer_cancel_callbacks.add(self._on_cancel)
            self._channel = channel
            queue = await channel.get_queue(self._queue, ensure=False)
            try:
                await queue.consume(partial(self._on_message, channel), exclusive=exclusive)
            except self._library.exceptions.ChannelClosed as error:
                self._channel = None
                if "exclusive" not in str(error):
                    raise

    async def _on_cancel(self, _frame: Any) -> None:
        """RabbitMQ has ended the consumer, because the queue was deleted, or its node has stopped."""
        self._lost = True
        self._arrived.set()

    async def _on_message(self, channel: Any, incoming: Any) -> None:
        if channel is not self._channel:
            return  # it is being closed, and RabbitMQ delivers the message again
        headers: Mapping[str, Any] = incoming.headers
        starts = 1 + _count(headers.get("x-delivery-count")) if self.capabilities.counts_starts else 0
        texts = {"ce-id": incoming.message_id or "", "content-type": incoming.content_type or ""}
        texts |= {name: _text(text) for name, text in headers.items() if not _OWN_HEADERS.fullmatch(name)}
        ticket = _Ticket(channel, incoming.delivery_tag)
        message = read_message(texts, incoming.body, self._queue)
        self._buffer.append((ticket.tag, Delivery(message, starts, ticket)))
        self._arrived.set()

    def _take(self, limit: int) -> tuple[list[Delivery], float]:
        """Take up to ``limit`` messages that may be delivered now. Returns also when the next one may be."""
        now, next_due = time.monotonic(), float("inf")
        taken, left = list[Delivery](), list[tuple[int, Delivery]]()
        for tag, delivery in self._buffer:
            due = self._due.get(_line(delivery), 0.0)
            if due > now or len(taken) == limit:
                next_due = min(next_due, due)
                left.append((tag, delivery))
            else:
                taken.append(delivery)
                self._held.add(tag)
        self._buffer = left
        self._due = {line: due for line, due in self._due.items() if due > now}
        return taken, next_due

    async def _check_queue(self) -> bool:
        """Return whether the consumer has to be exclusive to be the only one.

        Raises ConfigurationError if the queue is of another type, or cannot have only one consumer.
        """
        arguments = await self._declare()
        type, single = arguments.get("x-queue-type", "classic"), arguments.get(_SINGLE) is True
        if type != self._type:
            raise ConfigurationError(
                f"the queue {self._queue!r} is a {type} queue: add ?type={type} to the URL of the source"
            )
        if self._ordered and not single and type == "quorum":
            raise ConfigurationError(
                f"two consumers of the queue {self._queue!r} could work on one stream at the same time: create it with "
                f"{_SINGLE}, or add ?ordered=no to the URL of the source"
            )
        version = str(_wire(self._connection).server_properties.get("version", ""))
        limit = arguments.get("x-delivery-limit", 20 if version[:1] > "3" else None)
        if type == "quorum" and limit is not None and "x-dead-letter-exchange" not in arguments:
            _log.warning(
                "the queue %r drops a message that it has delivered %s times: give it a dead-letter exchange, unless a "
                "policy does", self._queue, limit,
            )  # fmt: skip
        return self._ordered and not single

    async def _declare(self) -> dict[str, Any]:
        """Create the queue if it does not exist. Returns its arguments: RabbitMQ names one that differs at a time."""
        errors = self._library.exceptions
        arguments: dict[str, Any] = {"x-queue-type": "quorum"} if self._type == "quorum" else {}
        if self._ordered:
            arguments[_SINGLE] = True
        for _ in range(20):
            channel = await self._connection.channel()
            try:
                await channel.declare_queue(self._queue, durable=True, arguments=arguments)
                await channel.close()
                break
            except errors.ChannelPreconditionFailed as error:
                name, text, kind = ((found := _DIFFERENT.search(str(error))) and found.groups()) or ("", None, None)
                if text is not None:
                    arguments[name] = text if kind == "longstr" else text == "true" if kind == "bool" else int(text)
                elif arguments.pop(name, None) is None:
                    break  # something else differs
            except errors.ChannelClosed:  # this user may not declare it; consuming shows whether it exists
                break
        return arguments


@value
class _Ticket:
    channel: Any
    tag: int


def _line(delivery: Delivery) -> str:
    """What a postponed message holds up: its stream, or only itself."""
    return f"stream {delivery.message.stream}" if delivery.message.stream else f"tag {delivery.handle.tag}"


def _count(header: Any) -> int:
    """How often RabbitMQ delivered a message before. It does not set the header the first time, so a producer can."""
    return header if type(header) is int and header > 0 else 0


def _text(text: Any) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def _checked(url: str) -> str:
    """Return the URL if it names a server. Otherwise aio-pika would raise ValueError at each call."""
    parts = parse_url(url)
    try:
        usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or too large
        usable = False
    if not usable:
        raise ConfigurationError("the URL of RabbitMQ names a host, and a port from 1 to 65535: amqp://host:5672/vhost")
    return url


async def _connect(library: Any, url: str) -> Any:
    return await library.connect(
        url,
        timeout=CONNECT_TIMEOUT,
        client_properties={"connection_name": "semel"},
        connection_class=_connection_class(library),
    )


@cache
def _connection_class(library: Any) -> type[Any]:
    """Return the library's class, with connections that are closed if they could not be opened.

    The library closes such a connection when it is collected, and prints a warning if that happens in a thread without
    an event loop.
    """

    class Connection(library.Connection):  # type: ignore[misc]
        async def connect(self, timeout: Any = None) -> None:
            try:
                await super().connect(timeout)
            except BaseException:
                await self.close()
                raise

    return Connection


def _describe_outage(error: BaseException) -> str:
    """Why no connection can be opened."""
    kind, text = type(error).__name__, ", ".join(map(str, error.args))
    if kind == "ProbableAuthenticationError":
        return f"RabbitMQ refuses the user or the password of the URL: {text}"
    if kind == "InvalidFrameError" and "Connection.OpenOk" in text and "Connection.Close" in text:
        # The library does not say what RabbitMQ has answered.
        return (
            "RabbitMQ does not open the virtual host of the URL: create it, let the user use it, or correct the URL "
            "(amqp://host/vhost; without a path it is the virtual host /)"
        )
    return f"RabbitMQ cannot be reached: {text or kind}"


def _is_alive(connection: Any) -> bool:
    """Whether the connection works. One that was lost does not count itself as closed."""
    return connection is not None and connection.transport is not None and not _wire(connection).is_closed


def _is_open(channel: Any) -> bool:
    return channel is not None and not channel.is_closed


def _wire(connection: Any) -> Any:
    """The connection of aiormq, the library on which aio-pika is built."""
    return connection.transport.connection


async def _close(connection: Any) -> None:
    with suppress(Exception):
        async with asyncio.timeout(CONNECT_TIMEOUT):
            await connection.close()
