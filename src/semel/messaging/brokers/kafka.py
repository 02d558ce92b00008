"""Kafka. A message's key is its stream, its headers are the attributes of the message. Needs ``semel[kafka]``.

The producer is idempotent, so a batch that is sent again by the library is stored once, and in order. It stops at the
first message that Kafka rejects (``enable.gapless.guarantee``), because what follows in a stream must not overtake it;
the next call opens a new producer. What is not confirmed at the deadline is purged. If that was on its way to Kafka
already, it may still be stored, and the next try stores it twice.

A source commits the offset of the first message that is not acknowledged. Kafka keeps no list of what is acknowledged
behind it: after a crash, these messages are delivered again. A message that is postponed makes the rest of its
partition wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any, Final, Self, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.messaging.messages import Message, attributes, light, read_message
from semel.core.policy import Duration, seconds
from semel.core.values import value
from semel.errors import BrokerUnavailable, ConfigurationError, StoreError
from semel.messaging.brokers.options import number, split_options
from semel.messaging.brokers.sending import FOLLOWS, LATE, send_in_waves, too_large
from semel.messaging.ports import BrokerDown, Capabilities, Delivery, Refused, Result, Sent, TryAgain
from semel.stores.settings import require

R = TypeVar("R")
LARGEST: Final = 990_000
OVERHEAD: Final = 10_000
"""What Kafka's own limit leaves for the key, and for the frame of a message."""
SLICE: Final = 0.1
"""Seconds that a call of the consumer may hold up another one."""
ACK_TIMEOUT: Final = 10.0
FLUSH_TIMEOUT: Final = 5.0
PURGE_TIMEOUT: Final = 0.5
"""Seconds until messages that were purged are reported."""
_headers_of: Final = methodcaller("headers")
"""Raises SystemError if the name of a header is not UTF-8, which Kafka does not check. The library forgets to raise an
error. ``record.headers()`` would not always notice that, and the process would crash when it reads the name."""
_log: Final = logging.getLogger("semel.kafka")
_log.addFilter(lambda record: "CONFWARN" not in record.getMessage())  # we know that the guarantee is "experimental"


class KafkaBroker:
    """Publishes to Kafka."""

    def __init__(
        self, servers: str, *, topic: str = "", largest: int = LARGEST, settings: Mapping[str, Any] | None = None
    ) -> None:
        """
        :param servers: the first brokers to ask: ``host:9092,host:9092``.
        :param topic: for messages without a destination.
        :param largest: the most bytes that a message may have. A larger value than the default needs a larger
            ``message.max.bytes`` of Kafka, or ``max.message.bytes`` of the topic, too.
        :param settings: further settings of librdkafka, such as ``{"security.protocol": "SSL"}``.
        """
        self._library = require("confluent_kafka", "kafka", "confluent-kafka")
        self._topic = topic
        self._settings = {
            **_settings(servers),
            "linger.ms": 1,
            "partitioner": "murmur2_random",  # as Java's clients do, so that all agree on the partition of a key
            "topic.metadata.propagation.max.ms": 5000,
            **(settings or {}),
            "enable.idempotence": True,
            "enable.gapless.guarantee": True,
            "delivery.report.only.error": True,  # reporting a message takes longer than sending it
            "message.timeout.ms": 0,  # publish has a deadline; this one would drop a message and send the next
            "message.max.bytes": largest + OVERHEAD,
        }
        if settings:
            _check_settings(self._library, self._library.Producer, self._settings)
        self._producer: _Producer | None = None
        self.capabilities = Capabilities(name="Kafka", ordered=True, pipelines=True, largest=largest)
        self._light = light(largest)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``kafka://host:9092,host:9092/topic``. Options: ``largest``, and all settings of librdkafka."""
        servers, topic, options, settings = _read_url(url, {"largest": number})
        return cls(servers, topic=topic, settings=settings, **options)

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        return await send_in_waves(messages, self._place, self._refuse, partial(self._send, deadline=deadline))

    async def close(self) -> None:
        if (producer := self._producer) is not None:
            self._discard(producer)
            await asyncio.to_thread(producer.join)

    def _place(self, message: Message) -> str:
        return message.destination or self._topic

    def _refuse(self, message: Message) -> Refused | None:
        if len(message.data) <= self._light and (message.destination or self._topic):
            return None  # the usual case, in a hurry
        if not self._place(message):
            return Refused(
                "the message has no destination, and the broker's URL names no topic: kafka://host:9092/topic"
            )
        return too_large(message, self.capabilities.largest)

    async def _send(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        if time.monotonic() >= deadline:
            return [LATE] * len(messages)
        if self._producer is None:
            self._producer = _Producer(self._library, self._settings)
        producer = self._producer
        outages = producer.outages
        reports: list[Any] = [None] * len(messages)
        try:
            self._produce(producer, messages, reports)
            complete = await producer.idle(deadline - time.monotonic())
            if not complete:
                self._discard(producer)
                # What is purged is reported as well. Then the others are known to be stored.
                complete = await producer.idle(PURGE_TIMEOUT)
            if not (complete and producer.certain):
                reports = [_MISSING if report is None else report for report in reports]
        except BaseException:
            self._discard(producer)
            raise
        stored = sum(report is None for report in reports)
        if stored and producer.outages == outages:
            producer.down = ""
        if producer.failed or (stored < len(reports) and any(map(self._is_fatal, reports))):
            self._discard(producer)
        if stored == len(reports):
            return [_SENT] * stored
        results: Sequence[Result] = [self._result(report, producer) for report in reports]
        if _TOO_LARGE in results and len(messages) > 1:
            results = await self._send_alone(messages, results, deadline)
        if _STOPPED in results and any(result is not _STOPPED for result in results):
            results = await self._send_rest(messages, results, deadline)
        return results

    async def _send_alone(
        self, messages: Sequence[Message], results: Sequence[Result], deadline: float
    ) -> Sequence[Result]:
        """Send again, one by one, what Kafka called too large.

        If a message is too large for its topic, Kafka refuses the whole batch of the producer, and does not say which
        one it was.
        """
        failed: set[str] = set()
        found: list[Result] = []
        for message, result in zip(messages, results, strict=True):
            if message.stream in failed:
                found.append(FOLLOWS)
            else:
                found += await self._send([message], deadline) if result is _TOO_LARGE else [result]
            if type(found[-1]) is not Sent:
                failed |= {message.stream} - {""}
        return found

    async def _send_rest(
        self, messages: Sequence[Message], results: Sequence[Result], deadline: float
    ) -> Sequence[Result]:
        """Send what the producer did not, because it has stopped at another message. Other topics must not fail when
        one of them rejects its messages."""
        found, failed, rest = list(results), set[str](), list[int]()
        for at, message in enumerate(messages):
            if results[at] is _STOPPED and message.stream not in failed:
                rest.append(at)
            elif type(results[at]) is not Sent:
                failed |= {message.stream} - {""}
        for at, result in zip(rest, await self._send([messages[at] for at in rest], deadline), strict=True):
            found[at] = result
        return found

    def _produce(self, producer: _Producer, messages: Sequence[Message], reports: list[Any]) -> None:
        """Hand the messages to the library, which sends them in its own threads, and puts its errors in ``reports``."""

        def failed_at(at: int, error: Any, _message: Any) -> None:
            reports[at] = error

        produce, topic, failed = producer.client.produce, self._topic, set[str]()
        for at, message in enumerate(messages):
            stream = message.stream
            if failed and stream in failed:
                reports[at] = FOLLOWS
                continue
            try:
                produce(
                    message.destination or topic, message.data, stream or None, headers=attributes(message),
                    on_delivery=partial(failed_at, at),
                )  # fmt: skip
            except BufferError:
                reports[at] = TryAgain("the producer's queue is full")
                failed |= {stream} - {""}
            except self._library.KafkaException as error:
                reports[at] = error.args[0]
                failed |= {stream} - {""}

    def _discard(self, producer: _Producer) -> None:
        """Send nothing more with this producer. The next call opens a new one."""
        producer.stop()
        if self._producer is producer:
            self._producer = None

    def _is_fatal(self, report: Any) -> bool:
        """Whether the producer sends nothing more after this. It says so itself, but a moment later."""
        kinds = self._library.KafkaError
        return isinstance(report, kinds) and report.code() not in (kinds._UNKNOWN_TOPIC, kinds._INVALID_ARG)

    def _result(self, report: Any, producer: _Producer) -> Result:
        """What became of a message: a KafkaError, None if it was stored, or a Result if it was not handed over."""
        kinds = self._library.KafkaError
        if report is None:
            return _SENT
        if not isinstance(report, kinds):
            return BrokerDown(producer.down) if report is _MISSING and producer.down else report
        code, reason = report.code(), report.str()
        if code == kinds.MSG_SIZE_TOO_LARGE:
            return _TOO_LARGE
        if code in (
            *(kinds._UNKNOWN_TOPIC, kinds.UNKNOWN_TOPIC_OR_PART, kinds.TOPIC_EXCEPTION, kinds._INVALID_ARG),
            *(kinds.INVALID_MSG, kinds.INVALID_MSG_SIZE, kinds.INVALID_RECORD, kinds.POLICY_VIOLATION),
        ):
            return Refused(reason)
        if producer.down:
            return BrokerDown(producer.down)
        return _STOPPED if code in (kinds._PURGE_QUEUE, kinds._PURGE_INFLIGHT, kinds._FATAL) else TryAgain(reason)


_SENT: Final = Sent()
_TOO_LARGE: Final = Refused("the message is too large for the topic")
_STOPPED: Final = TryAgain("the producer has stopped at another message")
_MISSING: Final = TryAgain("Kafka did not confirm the message before the deadline")


class _Producer:
    """A producer of the library, and the thread that hears its reports."""

    def __init__(self, library: Any, settings: Mapping[str, Any]) -> None:
        self.down = ""
        """Why no broker can be reached."""
        self.outages = 0
        """How often librdkafka has reported that."""
        self.failed = False
        """Whether the library uses this producer no more."""
        self.certain = True
        """False if a report may have been missed."""
        self._waiting: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()
        self._kinds = library.KafkaError
        self._exception = library.KafkaException
        self._stopping = False
        self.client = library.Producer({**settings, "error_cb": self._hear}, logger=_log)
        self._thread = threading.Thread(target=self._serve, name="semel-kafka", daemon=True)
        self._thread.start()

    async def idle(self, seconds: float) -> bool:
        """Wait until all messages are confirmed, or have failed. Returns False if that takes longer."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append(future)
        self._tell_idle()
        await asyncio.wait([future], timeout=max(0.0, seconds))
        return future.done()

    def _tell_idle(self) -> None:
        """Wake the waiting callers if no message is under way: librdkafka counts a message until it has reported it."""
        with self._lock:  # a caller waits only after it has handed its messages over
            if not self._waiting or len(self.client):
                return
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            with suppress(RuntimeError):  # its loop has been closed
                future.get_loop().call_soon_threadsafe(_finish, future)

    def stop(self) -> None:
        """Forget what is not confirmed yet. Returns at once."""
        if not self._stopping:
            self._stopping = True
            self.client.purge(blocking=False)

    def join(self) -> None:
        self._thread.join()

    def _hear(self, error: Any) -> None:
        if error.code() in (self._kinds._ALL_BROKERS_DOWN, self._kinds._AUTHENTICATION, self._kinds._SSL):
            self.down = f"Kafka cannot be reached: {error.str()}"
            self.outages += 1

    def _serve(self) -> None:
        while not self._stopping:
            self._report()
        end = time.monotonic() + FLUSH_TIMEOUT
        # Not by flush(): when it has an error to raise, it goes on to call Python with that error set.
        while len(self.client) and time.monotonic() < end:
            self._report()

    def _report(self) -> None:
        try:
            self.client.poll(SLICE)
        except Exception as error:
            self.certain &= isinstance(error, self._exception)
            if not self.failed:
                self.failed = True
                self.client.purge(blocking=False)  # what it has not sent would wait for ever
                _log.warning("the producer is replaced: %s", error)
            else:
                time.sleep(SLICE)
        self._tell_idle()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class KafkaSource:
    """Consumes topics, as a member of a consumer group."""

    def __init__(
        self,
        servers: str,
        *,
        topic: str,
        group: str,
        retention: Duration | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        :param topic: the topic, or several with commas between them.
        :param group: the consumer group. A new one begins with the oldest messages.
        :param retention: how long the topic keeps messages, so that an inbox that remembers less is refused.
        :param settings: further settings of librdkafka, such as ``{"security.protocol": "SSL"}``.
        """
        self._library = require("confluent_kafka", "kafka", "confluent-kafka")
        if not topic or not group:
            raise ConfigurationError(
                "a source of Kafka needs a topic and a group: kafka://host:9092/topic?group=billing"
            )
        self._topics = topic.split(",")
        self._settings = {
            **_settings(servers),
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": "cooperative-sticky",
            "topic.metadata.refresh.interval.ms": 10_000,
            **(settings or {}),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "error_cb": self._on_error,
            "on_commit": self._on_commit,
        }
        if settings:
            _check_settings(self._library, self._library.Consumer, self._settings)
        self._consumer: Any = None
        self._early: list[Any] = []
        """Records that arrived while a commit was awaited."""
        self._commits: dict[frozenset[tuple[str, int, int]], Any] = {}
        """Commits that are awaited, and their errors. The answer to one that timed out is ignored."""
        self._thread: ThreadPoolExecutor | None = None
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._lock = threading.Lock()
        """Partitions come and go in the thread of the consumer."""
        self._down = ""
        self.capabilities = Capabilities(
            name="Kafka",
            ordered=True,
            pipelines=True,
            largest=LARGEST,
            retention=None if retention is None else seconds(retention, "retention"),
            seeks=True,
        )
        self._stored: Callable[[Sequence[str]], Mapping[str, int]] | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Open ``kafka://host:9092/topic?group=billing``. Options: ``retention``, and all settings of librdkafka."""
        servers, topic, options, settings = _read_url(url, {"group": str, "retention": seconds})
        return cls(servers, topic=topic, settings=settings, **{"group": "", **options})

    def begin_at(self, stored: Callable[[Sequence[str]], Mapping[str, int]]) -> None:
        self._stored = stored

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        until = time.monotonic() + seconds
        found: list[Delivery] = []
        while not found:
            polling = asyncio.ensure_future(self._call(self._poll, limit, until))
            try:
                found = await asyncio.shield(polling)
            except asyncio.CancelledError:
                polling.add_done_callback(self._give_back)
                raise
            if time.monotonic() >= until:
                break
        if not found and self._down:
            await self._ask(self._check, 1.0)
        return found

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        changed: dict[tuple[str, int], _Partition] = {}
        with self._lock:
            for delivery in deliveries:
                handle: _Handle = delivery.handle
                if self._partitions.get(handle.place) is handle.partition:
                    handle.partition.finish(handle.offset)
                    changed[handle.place] = handle.partition
            commits = {place: first for place, each in changed.items() if (first := each.first_open()) > each.committed}
        if commits:
            await self._ask(self._commit, commits)

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        handle: _Handle = delivery.handle
        with self._lock:
            if self._partitions.get(handle.place) is not handle.partition:
                return
            handle.partition.postpone(handle.offset, time.monotonic() + seconds)
        await self._call(self._pause, handle.place)

    async def close(self) -> None:
        if self._thread is not None:
            await self._call(self._leave)
            self._thread.shutdown()
            self._thread = None

    async def _ask(self, call: Callable[[R], None], argument: R) -> None:
        """Make a call that raises BrokerUnavailable. The caller of this source then lets go of all that it had."""
        try:
            await self._call(call, argument)
        except BrokerUnavailable:
            with self._lock:
                for partition in self._partitions.values():
                    partition.postpone_all()
            raise

    def _give_back(self, polling: asyncio.Future[list[Delivery]]) -> None:
        """Deliver again what nobody has received, because the caller was cancelled."""
        if not polling.cancelled() and polling.exception() is None:
            with self._lock:
                for delivery in polling.result():
                    delivery.handle.partition.postpone(delivery.handle.offset, 0.0)

    # -- in the consumer's thread ----------------------------------------------------------------------------------

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="semel-kafka")
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def _poll(self, limit: int, until: float) -> list[Delivery]:
        if self._consumer is None:
            self._consumer = self._library.Consumer(self._settings, logger=_log)
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
            )
        pause = self._resume()
        records, self._early = self._early[:limit], self._early[limit:]
        if not records:
            first = self._consumer.poll(max(0.0, min(until - time.monotonic(), SLICE, pause)))
            if first is None:
                return []
            # consume() waits until it has all of them, so it is only asked for what is there.
            records = [first, *(self._consumer.consume(limit - 1, 0) if limit > 1 else [])]
        for error in (record.error() for record in records):
            if error is not None and error.code() == self._library.KafkaError._FATAL:
                self._leave()  # the library uses this consumer no more; the next poll opens another one
                raise BrokerUnavailable(f"Kafka has ended this consumer: {error.str()}")
        with self._lock:
            return [found for record in records if (found := self._delivery(record)) is not None]

    def _delivery(self, record: Any) -> Delivery | None:
        if (error := record.error()) is not None:
            _log.warning("Kafka: %s", error.str())
            return None
        place = record.topic(), record.partition()
        partition = self._partitions.get(place)
        if partition is None or not partition.take(record.offset()):
            return None
        self._down = ""
        pairs: Any = ()  # without them it has no id, so a consumer gives it up, instead of dying each time it comes
        try:
            pairs = _headers_of(record) or ()
        except SystemError:
            _log.warning("Kafka: the headers at offset %d of %s cannot be read", record.offset(), _name(*place))
        headers = {name: (text or b"").decode(errors="replace") for name, text in pairs}
        message = read_message(headers, record.value() or b"", record.topic())
        handle = _Handle(place, record.offset(), partition)
        return Delivery(message, 0, handle, _name(*place), record.offset())

    def _resume(self) -> float:
        """Start again the partitions whose pause is over. Returns in how many seconds the next one is."""
        now, next_one = time.monotonic(), SLICE
        with self._lock:
            paused = [each for each in self._partitions.items() if each[1].postponed]
        for place, partition in paused:
            if partition.resume_at > now:
                next_one = min(next_one, partition.resume_at - now)
                continue
            position = self._library.TopicPartition(*place, partition.rewind())
            self._forget_early([position])
            with suppress(self._library.KafkaException):  # the partition has just moved to another consumer
                self._consumer.seek(position)
                self._consumer.resume([position])
        return next_one

    def _pause(self, place: tuple[str, int]) -> None:
        """Stop fetching a partition whose messages cannot be delivered now."""
        with suppress(self._library.KafkaException):
            self._consumer.pause([self._library.TopicPartition(*place)])

    def _commit(self, commits: Mapping[tuple[str, int], int]) -> None:
        positions = [self._library.TopicPartition(*place, offset) for place, offset in commits.items()]
        awaited = frozenset((*place, offset) for place, offset in commits.items())
        until, wait = time.monotonic() + ACK_TIMEOUT, 0.001
        self._commits = {awaited: (unanswered := object())}
        try:
            # The library's own wait would last as long as a session while nobody leads the group.
            self._consumer.commit(offsets=positions, asynchronous=True)
            while self._commits[awaited] is unanswered:
                if time.monotonic() > until:
                    raise BrokerUnavailable("Kafka did not answer to an acknowledgement")
                # This calls _on_commit, and after a rebalance _on_assign, which replaces the list: no += in one step.
                records = self._consumer.consume(1000, wait)
                self._early += records
                wait = min(2 * wait, SLICE)
            if (error := self._commits[awaited]) is not None:
                raise self._library.KafkaException(error)
        except self._library.KafkaException as error:
            raise BrokerUnavailable(f"Kafka did not take the acknowledgement: {error.args[0].str()}") from error

    def _on_commit(self, error: Any, positions: Sequence[Any]) -> None:
        answered = frozenset((each.topic, each.partition, each.offset) for each in positions)
        if answered in self._commits:
            self._commits[answered] = error
        with self._lock:
            for each in positions:
                if each.error is None and error is None and (place := (each.topic, each.partition)) in self._partitions:
                    self._partitions[place].committed = each.offset

    def _forget_early(self, positions: Sequence[Any]) -> None:
        """Forget what is read again, or by another consumer: it would come before what precedes it."""
        places = {(each.topic, each.partition) for each in positions}
        self._early = [record for record in self._early if (record.topic(), record.partition()) not in places]

    def _check(self, timeout: float) -> None:
        """Raise BrokerUnavailable if Kafka cannot be reached."""
        try:
            self._consumer.list_topics(self._topics[0], timeout=timeout)
        except self._library.KafkaException as error:
            raise BrokerUnavailable(f"Kafka cannot be reached: {error.args[0].str()}") from error
        self._down = ""

    def _leave(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        self._early = []
        with self._lock:
            self._partitions.clear()

    def _on_error(self, error: Any) -> None:
        if error.code() == self._library.KafkaError._ALL_BROKERS_DOWN:
            self._down = error.str()

    def _on_assign(self, consumer: Any, positions: Sequence[Any]) -> None:
        self._forget_early(positions)
        if self._stored is not None and positions:
            positions = self._seek(consumer, positions, self._stored)
        with self._lock:
            for position in positions:
                self._partitions[position.topic, position.partition] = _Partition()

    def _seek(
        self, consumer: Any, positions: Sequence[Any], stored: Callable[[Sequence[str]], Mapping[str, int]]
    ) -> Sequence[Any]:
        """Begin at the offset in the database, or at Kafka's if that is later: a message that is given up moves only
        Kafka's. If one of the two cannot be read, the other is used. Neither skips a message that was not applied.
        """
        offsets: Mapping[str, int] = {}
        with suppress(StoreError):
            offsets = stored([_name(each.topic, each.partition) for each in positions])
        with suppress(self._library.KafkaException):
            positions = consumer.committed(positions, timeout=ACK_TIMEOUT)
        for each in positions:
            each.offset = max(each.offset, offsets.get(_name(each.topic, each.partition), each.offset))
        cooperative = "cooperative" in self._settings["partition.assignment.strategy"]
        (consumer.incremental_assign if cooperative else consumer.assign)(positions)
        return positions

    def _on_revoke(self, _consumer: Any, positions: Sequence[Any]) -> None:
        """Another consumer gets these partitions. It begins with what was not acknowledged here."""
        with self._lock:
            for position in positions:
                self._partitions.pop((position.topic, position.partition), None)


class _Partition:
    """What is known of a partition, from its assignment on. Offsets may have gaps."""

    def __init__(self) -> None:
        self.committed = -1
        self.postponed: set[int] = set()
        self.resume_at = 0.0
        self._held: set[int] = set()
        """Delivered, and neither acknowledged nor postponed."""
        self._waiting: set[int] = set()
        """Postponed, and to be read again."""
        self._done: set[int] = set()
        """Acknowledged, behind one that is not."""
        self._next = 0

    def take(self, offset: int) -> bool:
        """Deliver a message, unless it was delivered already. The consumer reads again from a postponed one on."""
        if self.postponed or offset in self._held or offset in self._done:
            return False
        self._waiting.discard(offset)
        self._held.add(offset)
        self._next = max(self._next, offset + 1)
        return True

    def finish(self, offset: int) -> None:
        if offset in self._held:
            self._held.discard(offset)
            self._done.add(offset)

    def first_open(self) -> int:
        """The offset of the first message that is not acknowledged. All before it are."""
        first = min(self._held | self._waiting | self.postponed, default=self._next)
        self._done = {offset for offset in self._done if offset > first}
        return first

    def postpone(self, offset: int, until: float) -> None:
        if offset in self._held:
            self._held.discard(offset)
            self.postponed.add(offset)
            self.resume_at = max(self.resume_at, until)

    def postpone_all(self) -> None:
        """Deliver again, at once, whatever the caller has."""
        for offset in tuple(self._held):
            self.postpone(offset, 0.0)

    def rewind(self) -> int:
        """The pause is over. Returns where to read on."""
        first = min(self.postponed)
        self._waiting |= self.postponed
        self.postponed, self.resume_at = set(), 0.0
        return first


def _name(topic: str, partition: int) -> str:
    """The name of a partition, as the inbox stores it."""
    return f"{topic}/{partition}"


@value
class _Handle:
    place: tuple[str, int]
    offset: int
    partition: _Partition


def _settings(servers: str) -> dict[str, Any]:
    """The settings of producers and consumers."""
    if not servers:
        raise ConfigurationError("a Kafka broker's URL names its servers: kafka://host:9092/topic")
    return {
        "bootstrap.servers": servers,
        "client.id": "semel",
        "reconnect.backoff.max.ms": 1000,
        "log_level": 2,  # otherwise it logs each try to connect; relay and consumer report an outage once
    }


def _check_settings(library: Any, client: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for settings that librdkafka refuses. It reads them only when it makes a client."""
    try:
        client({name: value for name, value in settings.items() if name != "bootstrap.servers"}, logger=_log)
    except library.KafkaException as error:
        raise ConfigurationError(f"librdkafka refuses a setting: {error.args[0].str()}") from None


def _read_url(url: str, known: Mapping[str, Callable[[str], Any]]) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """Return servers, topic, our options and the settings of librdkafka, whose names have a dot."""
    plain, options = split_options(url, known)
    parts = urlsplit(plain)
    settings = dict(parse_qsl(parts.query))
    if any("." not in name for name in settings):
        raise ConfigurationError(
            f"a Kafka URL has an unknown option: there are {', '.join(known)}, and librdkafka's, such as client.id"
        )
    if "@" in parts.netloc:
        raise ConfigurationError("a Kafka URL takes user and password as ?sasl.username=…&sasl.password=…")
    return parts.netloc, unquote(parts.path.removeprefix("/")), options, settings
