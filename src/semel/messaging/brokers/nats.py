"""NATS JetStream, by nats-py. Needs ``semel[nats]``.

A message is published with ``Nats-Msg-Id``, so JetStream drops a repeat within the duplicate window of its stream. The
streams of JetStream are not created here: how long they keep messages, and how many copies there are, is up to you.

One message may fail while a later one succeeds (a stream may be full for a moment), so messages of one stream are not
sent before the last one is confirmed. Messages of different streams are sent together.

JetStream hands messages to whichever subscriber of a consumer asks next, and what was not acknowledged comes again
after other messages. An ordered source therefore has one message under way at a time, in all processes together. To
share work, give every part of the streams a subject and a consumer of its own, or use ``ordered=False``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from functools import cache, partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from semel.core.messaging.messages import Message, attributes, oversize, read_message, size_of
from semel.core.policy import Duration, seconds
from semel.engine.background import BackgroundTask
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers.options import flag, number, read_url
from semel.messaging.brokers.sending import LATE
from semel.messaging.ports import BrokerDown, Capabilities, Delivery, Refused, Result, Sent, TryAgain
from semel.stores.settings import require

if TYPE_CHECKING:
    from nats.aio.client import Client as NATS
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

R = TypeVar("R")
LARGEST: Final = 1_000_000
"""The default of NATS is 1 MiB, which includes what separates the headers."""
DEDUP_WINDOW: Final = 120.0
"""The default of a stream."""
CONNECT_TIMEOUT: Final = 5.0
ACK_WAIT: Final = 30.0
ACK_TIMEOUT: Final = 10
AT_ONCE: Final = 500
"""How many messages are sent before their confirmations are awaited."""
_REFUSED: Final = frozenset({10054, 10060})
"""Codes of JetStream: the message is too large for the stream; the subject belongs to another stream."""
_STREAM_NAMES: Final = "$JS.API.STREAM.NAMES"
_DENIED: Final[dict[str, Any]] = {}
"""What stands for the error if the user may not publish to a subject: there is no reply then."""
_VIOLATION: Final = re.compile('permissions violation for publish to "(.*)"')
"""The error that the server sends instead. nats-py changes it to lower case."""


class NATSBroker:
    """Publishes to JetStream."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        subject: str = "",
        stream: str = "",
        largest: int = LARGEST,
        dedup_window: Duration = DEDUP_WINDOW,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        **options: Any,
    ) -> None:
        """
        :param servers: one URL of a server, or several: ``nats://host:4222``.
        :param subject: the subject for messages without a destination.
        :param stream: the JetStream stream that must have the subjects. By default any stream may.
        :param dedup_window: the duplicate window of the stream, as it was created.
        :param largest: the most bytes that a message may have.
        :param connect_timeout: how long it may take to connect.
        :param options: passed on to nats-py: ``user_credentials``, ``tls``, and so on.
        """
        self._client = _Client(servers, seconds(connect_timeout, "connect_timeout"), options)
        self._subject = subject
        self._expected = {"Nats-Expected-Stream": stream} if stream else {}
        self.capabilities = Capabilities(
            name="NATS JetStream",
            ordered=True,
            pipelines=False,
            largest=largest,
            dedup_window=seconds(dedup_window, "dedup_window"),
        )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``nats://host:4222/subject``; options: ``stream``, ``largest``, ``dedup_window``, ``tls``."""
        servers, subject, options = _read_url(url, {"stream": str, "largest": number, "dedup_window": seconds})
        return cls(servers, subject=subject, **options)

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        results: list[Result] = [LATE] * len(messages)
        for start in range(0, len(messages), AT_ONCE):
            if monotonic() >= deadline:
                break
            some = messages[start : start + AT_ONCE]
            results[start : start + len(some)] = await self._send(some, deadline)
        return results

    async def close(self) -> None:
        await self._client.close()

    async def _send(self, messages: Sequence[Message], deadline: float) -> list[Result]:
        from nats import errors

        opened = await self._open(deadline)
        if isinstance(opened, BrokerDown):
            return [opened] * len(messages)
        results: dict[int, Result] = {}
        waiting: dict[asyncio.Future[Any], int] = {}
        try:
            for at, message in enumerate(messages):
                subject = message.destination or self._subject
                headers = {**attributes(message), "Nats-Msg-Id": message.broker_id, **self._expected}
                if (refused := self._refuses(message, subject, headers)) is not None:
                    results[at] = refused
                    continue
                try:
                    waiting[await self._client.publish(subject, message.data, headers)] = at
                except (errors.BadSubjectError, errors.BadHeaderError) as error:
                    results[at] = Refused(f"NATS cannot send this message: {_why(error)}")
            if waiting:
                await self._client.wait(asyncio.wait(waiting, timeout=max(0.0, deadline - monotonic())))
        except (errors.Error, BrokerUnavailable):  # the connection broke
            pass
        reasons: dict[str, Result] = {}
        for future, at in waiting.items():
            if not future.done():
                continue
            if (reply := future.result()) is not None:
                results[at] = _result(reply)
                continue
            subject = messages[at].destination or self._subject
            if subject not in reasons:
                reasons[subject] = await self._explain(subject, deadline)
            results[at] = reasons[subject]
        unknown: Result = TryAgain("NATS did not answer in time")
        if len(results) < len(messages):
            was_lost = self._client.lost.is_set()
            await self._client.drop()  # nothing may be sent any more
            if was_lost:  # perhaps only the connection
                again = await self._open(deadline)
                unknown = again if isinstance(again, BrokerDown) else TryAgain("the connection to NATS was lost")
        return [results.get(at, unknown) for at in range(len(messages))]

    async def _open(self, deadline: float) -> JetStreamContext | BrokerDown:
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                return await self._client.open()
        except (BrokerUnavailable, TimeoutError) as error:
            return BrokerDown(str(error) or "NATS did not answer before the deadline")

    async def _explain(self, subject: str, deadline: float) -> Result:
        """Nobody took a message. Find out whether there is no stream, or whether it has no leader at the moment."""
        from nats import errors

        question = json.dumps({"subject": subject}).encode()
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                reply = await self._client.wait(await self._client.publish(_STREAM_NAMES, question, {}))
        except (errors.Error, BrokerUnavailable, TimeoutError) as failure:
            return BrokerDown(f"JetStream does not answer: {_why(failure)}")
        if reply is None:
            return BrokerDown("JetStream does not answer, or is not enabled")
        error = reply.get("error")
        if error is _DENIED:  # not BrokerDown: all messages would wait for one with a wrong destination
            return TryAgain(f"no stream took it; the user needs the permission to ask {_STREAM_NAMES} for the reason")
        if error is not None:
            return BrokerDown(f"JetStream does not answer, or is not enabled: {error.get('description')}")
        if not reply.get("streams"):
            return Refused(f"no JetStream stream has the subject {subject!r}: create one, or correct the destination")
        return TryAgain("the stream takes no messages at the moment")

    def _refuses(self, message: Message, subject: str, headers: dict[str, str]) -> Refused | None:
        if not subject:
            return Refused("the message has no destination, and the relay no default: put the subject into its URL")
        if subject.startswith(("$", "_INBOX.")) or set(subject) & set("*> ") or "" in subject.split("."):
            return Refused("this is no subject for messages")
        lines = size_of(headers, message.data) + 4 * len(headers) + 12
        if oversize(message, self.capabilities.largest) or lines > self._client.max_payload:
            largest = min(self.capabilities.largest, self._client.max_payload)
            return Refused(f"the message is too large: the most is {largest} bytes")
        return None


def _result(reply: dict[str, Any]) -> Result:
    error = reply.get("error")
    if error is None:
        return Sent()
    if error is _DENIED:
        return TryAgain("this user may not publish to the subject")
    reason = f"JetStream did not take it: {error.get('description')} ({error.get('err_code')})"
    return Refused(reason) if error.get("err_code") in _REFUSED else TryAgain(reason)


class NATSSource:
    """Consumes from JetStream, by a durable pull consumer."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        subject: str,
        durable: str,
        stream: str = "",
        ordered: bool = True,
        ack_wait: Duration = ACK_WAIT,
        max_ack_pending: int = 1000,
        retention: Duration | None = None,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        **options: Any,
    ) -> None:
        """
        :param servers: one URL of a server, or several: ``nats://host:4222``.
        :param subject: the subject of the messages. It may have wildcards.
        :param durable: the name of the consumer. It is created if need be, and begins with the oldest message.
        :param stream: the JetStream stream. By default the one that has the subject.
        :param ordered: have one message under way at a time, so that the order of every stream is kept.
        :param ack_wait: how long a process may show no sign of life before its messages are delivered again. A consumer
            that exists keeps the time that it was created with.
        :param max_ack_pending: the most messages that are under way, if the source is not ordered.
        :param retention: how long the JetStream stream keeps messages, so that an inbox that remembers less is refused.
        :param connect_timeout: how long it may take to connect.
        :param options: passed on to nats-py: ``user_credentials``, ``tls``, and so on.
        """
        if not subject or not durable:
            raise ConfigurationError(
                "a source of NATS needs a subject and a durable name: nats://host/orders?durable=billing"
            )
        self._client = _Client(servers, seconds(connect_timeout, "connect_timeout"), options)
        self._subject = subject
        self._durable = durable
        self._stream = stream or None
        self._ordered = ordered
        self._ack_wait = seconds(ack_wait, "ack_wait")
        self._max_ack_pending = 1 if ordered else max_ack_pending
        self._subscription: JetStreamContext.PullSubscription | None = None
        self._in_hand: dict[str, None] = {}
        """The reply subjects of messages that were delivered, and are neither acknowledged nor postponed."""
        self._fetched: list[Msg] = []
        """Messages that came beyond the limit of a call."""
        self._left: list[str] = []
        """The reply subjects of messages that the caller has let go of, and that JetStream does not know of yet."""
        self._owned_until = 0.0
        """Until then, JetStream keeps what this source has from other processes."""
        self._keeping = BackgroundTask("semel-nats")
        self.capabilities = Capabilities(
            name="NATS JetStream",
            ordered=ordered,
            pipelines=False,
            largest=LARGEST,
            retention=None if retention is None else seconds(retention, "retention"),
            counts_starts=True,
        )

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``nats://host:4222/subject?durable=billing``; further options: ``stream``, ``ordered``, ``ack_wait``,
        ``max_ack_pending``, ``retention``, ``tls``.
        """
        known: dict[str, Callable[[str], Any]] = {
            "durable": str, "stream": str, "ordered": flag, "ack_wait": seconds, "max_ack_pending": number,
            "retention": seconds,
        }  # fmt: skip
        servers, subject, options = _read_url(url, known)
        return cls(servers, subject=subject, **{"durable": "", **options})

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        async with self._connected():
            subscription = await self._subscribe()
            if not self._held():
                self._owned_until = monotonic() + self._ack_wait
            if not self._fetched:
                wait = self._client.wait
                with contextlib.suppress(TimeoutError):
                    self._fetched = await wait(subscription.fetch(1, timeout=max(0.02, seconds)))
                    if limit > 1 and not self._ordered:  # some servers answer only when they have all of them
                        self._fetched += await wait(subscription.fetch(limit - 1, timeout=0.02))
        some, self._fetched = self._fetched[:limit], self._fetched[limit:]
        self._in_hand |= dict.fromkeys(msg.reply for msg in some)
        return [_delivery(msg) for msg in some]

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        async with self._connected():
            connection = (await self._client.open())._nc
            requests = (connection.request(each.handle, b"+ACK", timeout=ACK_TIMEOUT) for each in deliveries)
            await self._client.wait(asyncio.gather(*requests))
        for delivery in deliveries:
            self._in_hand.pop(delivery.handle, None)

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        async with self._connected():
            await self._tell([delivery.handle], b"-NAK " + json.dumps({"delay": max(1, int(seconds * 1e9))}).encode())
        self._in_hand.pop(delivery.handle, None)

    async def close(self) -> None:
        await self._keeping.stop(timeout=0)
        if not self._client.lost.is_set():
            with contextlib.suppress(BrokerUnavailable):  # then they come again after ``ack_wait``
                async with self._connected():
                    await self._tell(self._held(), b"-NAK")
        self._in_hand, self._fetched, self._left, self._subscription = {}, [], [], None
        await self._client.close()

    def _held(self) -> list[str]:
        return [*self._in_hand, *(msg.reply for msg in self._fetched)]

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[None, None]:
        """Raise BrokerUnavailable for an error of nats-py. The caller then lets go of all that it had."""
        from nats import errors

        try:
            yield
        except (errors.Error, TimeoutError, BrokerUnavailable) as error:
            self._left, self._in_hand, self._fetched = [*self._left, *self._held()], {}, []
            await self._client.drop()
            if isinstance(error, BrokerUnavailable):
                raise
            raise BrokerUnavailable(f"NATS did not answer: {_why(error)}") from error

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        from nats.js import api
        from nats.js.errors import NotFoundError

        jetstream = await self._client.open()
        if self._subscription is not None and self._subscription._js is jetstream:
            return self._subscription
        config = api.ConsumerConfig(
            ack_policy=api.AckPolicy.EXPLICIT, ack_wait=self._ack_wait, max_ack_pending=self._max_ack_pending
        )
        try:
            wait = self._client.wait
            subscription = await wait(jetstream.pull_subscribe(self._subject, self._durable, self._stream, config))
            info = await wait(subscription.consumer_info())
        except NotFoundError as error:
            raise ConfigurationError(f"no JetStream stream has the subject {self._subject!r}: create one") from error
        if self._ordered and info.config.max_ack_pending != 1:
            raise ConfigurationError(
                f"the consumer {self._durable!r} exists and lets {info.config.max_ack_pending} messages be under way: "
                "it keeps no order: use another durable name, or ordered=False"
            )
        # The consumer may have been created with other times than those of this source.
        self._ack_wait = min(info.config.backoff or [info.config.ack_wait or self._ack_wait])
        # Give back what the caller has let go of. It would come again only after ``ack_wait``, and an ordered source
        # would stand still until then. After that time another process may have it.
        if monotonic() < self._owned_until:
            await self._tell(self._left, b"-NAK")
        self._left, self._subscription = [], subscription
        self._keeping.start(self._keep_alive)
        return subscription

    async def _keep_alive(self) -> None:
        """Tell JetStream that the messages are being worked on, so that handlers may take their time.

        It does not wait until the server has read that. Giving up the connection to a slow server would lose the
        messages that are on their way here, until they come again after ``ack_wait``.
        """
        from nats import errors

        while True:
            await asyncio.sleep(self._ack_wait / 3)
            renewed = monotonic()
            if (held := self._held()) and not self._client.lost.is_set():
                with contextlib.suppress(BrokerUnavailable, errors.Error):
                    await self._send(held, b"+WPI")
                    self._owned_until = renewed + self._ack_wait

    async def _send(self, handles: Iterable[str], what: bytes) -> NATS:
        connection: NATS = (await self._client.open())._nc
        for handle in handles:
            await connection.publish(handle, what)
        return connection

    async def _tell(self, handles: Collection[str], what: bytes) -> None:
        """Send it, and wait until the server has read it."""
        if handles:
            connection = await self._send(handles, what)
            await self._client.wait(connection.flush(ACK_TIMEOUT))


def _delivery(msg: Msg) -> Delivery:
    headers = {name: text for name, text in (msg.headers or {}).items() if not name.startswith("Nats-")}
    return Delivery(read_message(headers, msg.data, msg.subject), msg.metadata.num_delivered, msg.reply)


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__


class _Client:
    """One connection. It is opened when it is needed, and thrown away when it breaks.

    nats-py could reconnect by itself, but would then send what was left in its buffer, long after the deadline.
    """

    def __init__(self, servers: str | Sequence[str], timeout: float, options: dict[str, Any]) -> None:
        require("nats", "nats", "nats-py")
        self._servers = [servers] if isinstance(servers, str) else list(servers)
        self._timeout = timeout
        self._options = options
        self._connection: NATS | None = None
        self._jetstream: JetStreamContext | None = None
        self._opening = asyncio.Lock()
        self._inbox = ""
        self._numbers = count(1)
        self._replies: dict[str, tuple[str, asyncio.Future[Any]]] = {}
        """The subject and the answer of each message that is under way, by the subject of its reply."""
        self.lost = asyncio.Event()
        """Set when the connection is broken, or not open yet."""
        self.lost.set()
        self.max_payload = 0

    async def open(self) -> JetStreamContext:
        """Return the open connection. Raises BrokerUnavailable."""
        from nats import errors

        async with self._opening:
            if self._jetstream is None or self.lost.is_set():
                await self.drop()
                self._connection = await self._connect()
                self.max_payload = self._connection.max_payload
                self._inbox = self._connection.new_inbox()
                try:
                    await self._connection.subscribe(f"{self._inbox}.*", cb=self._replied)
                except errors.Error as error:
                    raise BrokerUnavailable(f"the connection to NATS was lost: {_why(error)}") from error
                self._jetstream = self._connection.jetstream()
            return self._jetstream

    async def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> asyncio.Future[Any]:
        """Send a message. The future resolves to the answer of JetStream, or to None if nobody was there to answer.

        ``JetStreamContext.publish_async`` never resolves if the answer is an error.
        """
        if self._connection is None:
            raise BrokerUnavailable("the connection to NATS was closed")
        reply = f"{self._inbox}.{next(self._numbers)}"
        future = asyncio.get_running_loop().create_future()
        self._replies[reply] = subject, future
        await self._connection.publish(subject, data, reply, headers)
        return future

    async def wait(self, answer: Awaitable[R]) -> R:
        """Wait for an answer. Raises BrokerUnavailable as soon as the connection is lost, while nats-py waits on."""
        task, lost = asyncio.ensure_future(answer), asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():  # nats-py cancels some of those who wait
                return task.result()
            raise BrokerUnavailable("the connection to NATS was lost")
        finally:
            task.cancel()
            lost.cancel()
            await asyncio.gather(task, lost, return_exceptions=True)

    async def _replied(self, msg: Msg) -> None:
        _, future = self._replies.pop(msg.subject, ("", None))
        if future is not None and not future.done():
            status = (msg.headers or {}).get("Status")
            future.set_result(None if status == "503" else json.loads(msg.data))

    def _hear(self, errors: list[Exception], error: Exception) -> None:
        """Remember an error of the server. One of them is the answer to messages that this user may not send."""
        errors[:] = [error]
        if (denied := _VIOLATION.search(str(error))) is None:
            return
        for reply, (subject, future) in list(self._replies.items()):
            if subject.lower() == denied[1] and not future.done():
                future.set_result({"error": _DENIED})
                del self._replies[reply]

    async def close(self) -> None:
        """Close the connection. The next call may come from another event loop, as that of ``Relay.drain`` does."""
        await self.drop()
        self._opening = asyncio.Lock()

    async def drop(self) -> None:
        """Give up the connection. The next call opens a new one."""
        connection, self._connection, self._jetstream = self._connection, None, None
        self._replies.clear()
        self.lost.set()
        if connection is not None:
            with contextlib.suppress(Exception):  # it waits for a server that may not read any more
                async with asyncio.timeout(1.0):
                    await connection.close()
            _abandon(connection)

    async def _connect(self) -> NATS:
        from nats import errors
        from nats.aio.client import Client

        reasons = []
        for server in list(self._servers):
            lost = asyncio.Event()
            seen: list[Exception] = []
            connection = Client()
            connection.msg_class = _message_class()
            try:
                async with asyncio.timeout(self._timeout):
                    await connection.connect(
                        server,
                        name="semel",
                        allow_reconnect=False,
                        max_reconnect_attempts=1,  # of the first connection: 0 would be without end
                        reconnect_time_wait=0,
                        connect_timeout=math.ceil(self._timeout),
                        error_cb=_calls(partial(self._hear, seen)),
                        closed_cb=_calls(lost.set),
                        **self._options,
                    )
            except asyncio.CancelledError:
                _abandon(connection)
                raise
            except (errors.Error, OSError, TimeoutError) as error:
                _abandon(connection)
                reasons.append(f"{urlsplit(server).hostname}: {_why(seen[-1] if seen else error)}")
                self._servers = [*self._servers[1:], server]  # the next one first
            else:
                self.lost = lost
                return connection
        raise BrokerUnavailable(f"NATS cannot be reached: {'; '.join(reasons)}")


@cache
def _message_class() -> type[Msg]:
    """Return nats-py's class of messages, without headers that nats-py would take for a status of the server.

    A producer may send a header ``Status``. nats-py drops such a message or fails, each time that it comes.
    """
    from nats.aio.msg import Msg

    class JetStreamMessage(Msg):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            if self.headers and "Status" in self.headers and self.reply.startswith("$JS.ACK."):
                self.headers["status"] = self.headers.pop("Status")

    return JetStreamMessage


def _abandon(connection: NATS) -> None:
    """Close the socket. ``Client.close`` does not if the server has not answered, or does not read any more."""
    if connection._transport is not None:
        connection._transport.close()  # type: ignore[no-untyped-call]


def _calls(call: Callable[..., object]) -> Callable[..., Awaitable[None]]:
    async def callback(*arguments: Any) -> None:
        call(*arguments)

    return callback


def _read_url(url: str, known: dict[str, Callable[[str], Any]]) -> tuple[list[str], str, dict[str, Any]]:
    """Return the servers, the subject and the options of ``nats://user:password@host,host/subject?option=…``."""
    location, subject, options = read_url(url, {**known, "tls": flag})
    credentials, at, hosts = location.rpartition("@")
    scheme = "tls" if options.pop("tls", False) else "nats"
    if not hosts:
        raise ConfigurationError("the URL of NATS names no server: write nats://host:4222/subject")
    return [f"{scheme}://{credentials}{at}{host}" for host in hosts.split(",")], subject, options
