"""Kafka: the conformance suite on a real broker, and what is Kafka's own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import aiosqlite
import confluent_kafka
import pytest
from confluent_kafka import Consumer

from semel import AsyncSQLiteStore, SQLiteStore
from semel.core.messaging.messages import Message
from semel.errors import BrokerUnavailable
from semel.messaging import AsyncInbox, Inbox
from semel.messaging.brokers import kafka as kafka_module
from semel.messaging.brokers.kafka import KafkaBroker, KafkaSource
from semel.messaging.ports import Delivery, Refused, Result, Sent, TryAgain
from semel.stores import sqlite
from semel.testing import brokers
from tests.servers import KafkaServer, ServerPool
from tests.servers.freezing import freeze
from tests.servers.plugin import obtain

pytestmark = [pytest.mark.kafka, pytest.mark.server]
QUICK = "session.timeout.ms=6000&heartbeat.interval.ms=500"
SHORT = "session.timeout.ms=2000&heartbeat.interval.ms=300"
"""For a consumer that is to lose its partitions."""


@pytest.fixture(scope="module")
def mortal_kafka(servers: ServerPool) -> Iterator[KafkaServer]:
    """A server that the tests of this file kill."""
    server = cast(KafkaServer, obtain(servers.private, "kafka"))
    try:
        yield server
    finally:
        server.stop()


class Switch:
    """Kills a server, and brings it back."""

    def __init__(self, server: KafkaServer) -> None:
        self.stop = server.crash
        self.start = server.return_


class OnKafka:
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest) -> str:
        name = "mortal_kafka" if "outage" in request.fixturenames else "kafka"
        server: KafkaServer = request.getfixturevalue(name)
        return server.topic()

    @pytest.fixture
    def outage(self, mortal_kafka: KafkaServer) -> Switch:
        return Switch(mortal_kafka)

    @pytest.fixture
    def open_broker(self, url: str) -> Callable[[], KafkaBroker]:
        return lambda: KafkaBroker.from_url(url)

    @pytest.fixture
    def open_source(self, url: str) -> Callable[[], KafkaSource]:
        return lambda: KafkaSource.from_url(f"{url}?group=tests&{QUICK}")


class TestKafkaBroker(OnKafka, brokers.BrokerSuite):
    """The suite, on the session's server."""


class TestKafkaSource(OnKafka, brokers.SourceSuite):
    """The suite, on the session's server."""


def publish(broker: KafkaBroker, messages: list[Message], seconds: float = 15) -> Coroutine[Any, Any, Sequence[Result]]:
    return broker.publish(messages, time.monotonic() + seconds)


async def receive(source: KafkaSource, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await source.receive(count - len(found), 1)
    return found


async def sequences(url: str, count: int) -> list[int]:
    source = KafkaSource.from_url(f"{url}?group=readers&{QUICK}")
    try:
        return [each.message.sequence for each in await receive(source, count)]
    finally:
        await source.close()


def test_stream_and_attributes_are_key_and_headers(kafka: KafkaServer) -> None:
    """As other consumers see them."""
    url = kafka.topic()
    asyncio.run(_publish_one(url, brokers.new_message(id="m1", stream="order-1", sequence=4, headers={"note": "x"})))
    servers, topic = url.removeprefix("kafka://").split("/")
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "plain", "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        record = consumer.poll(30)
        assert record is not None
        headers = dict(record.headers() or [])
        assert record.key() == b"order-1"
        assert headers["ce-id"] == b"m1"
        assert headers["ce-sequence"] == b"4"
        assert headers["note"] == b"x"
    finally:
        consumer.close()


def test_a_header_whose_name_is_no_text_does_not_end_a_consumer(kafka: KafkaServer) -> None:
    """Each consumer of the partition ended with a SystemError, or crashed once Python had optimized its code."""
    url = kafka.topic(partitions=1)
    servers, topic = url.removeprefix("kafka://").split("/")

    async def fill() -> None:
        broker = KafkaBroker.from_url(url)
        assert await publish(broker, [brokers.new_message(id="m") for _ in range(100)]) == [Sent()] * 100
        await broker.close()

    for _ in range(2):
        _produce_in_c(servers, topic, b"na\xffme")
        asyncio.run(fill())
    script = [sys.executable, "-c", _CONSUMES, f"{url}?group=g&{QUICK}"]
    consumer = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert consumer.stdout == ("-" + 100 * "m") * 2, consumer.stderr


_CONSUMES = """
import asyncio, sys
from semel.messaging.brokers.kafka import KafkaSource
async def main():
    source, found = KafkaSource.from_url(sys.argv[1]), []
    while len(found) < 202:
        found += await source.receive(10, 1)
    print("".join(each.message.id or "-" for each in found), end="")
    await source.close()
asyncio.run(main())
"""


def _produce_in_c(servers: str, topic: str, header: bytes) -> None:
    """Send a message with a header that no client in Python can send."""
    [path] = Path(confluent_kafka.__file__).parent.parent.glob("confluent_kafka.libs/librdkafka*")
    library = ctypes.CDLL(str(path))
    library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
    settings, why = ctypes.c_void_p(library.rd_kafka_conf_new()), ctypes.create_string_buffer(500)
    for name, text in ((b"bootstrap.servers", servers.encode()), (b"log_level", b"0")):
        assert library.rd_kafka_conf_set(settings, name, text, why, 500) == 0, why.value
    client = ctypes.c_void_p(library.rd_kafka_new(0, settings, why, ctypes.c_size_t(500)))
    of_topic, of_value, of_flags, of_header, end, copy = 1, 4, 7, 9, 0, 2
    fields = (of_topic, topic.encode(), of_value, b"{}", ctypes.c_size_t(2), of_flags, copy)
    assert library.rd_kafka_producev(client, *fields, of_header, header, b"x", ctypes.c_ssize_t(1), end) == 0
    assert library.rd_kafka_flush(client, 20_000) == 0
    library.rd_kafka_destroy(client)


async def _publish_one(url: str, message: Message) -> None:
    broker = KafkaBroker.from_url(url)
    assert await publish(broker, [message]) == [Sent()]
    await broker.close()


@pytest.mark.parametrize("batch", [1, 10_000])
def test_one_message_that_is_too_large_for_its_topic_is_refused_alone(kafka: KafkaServer, batch: int) -> None:
    """Kafka rejects the producer's whole batch, and the library would go on with the next one."""
    url = kafka.topic(partitions=1, max_message_bytes=20_000)

    async def main() -> None:
        broker = KafkaBroker.from_url(f"{url}?batch.num.messages={batch}")
        sizes = [10, 10, 30_000, 10, 10]
        messages = [brokers.new_message(stream="a", sequence=n, data=b"x" * size) for n, size in enumerate(sizes, 1)]
        other = brokers.new_message(stream="b", sequence=9)
        results = await publish(broker, [*messages, other])
        kinds = [type(result) for result in results]
        assert kinds == [Sent, Sent, Refused, TryAgain, TryAgain, Sent]
        assert await publish(broker, messages[3:]) == [Sent(), Sent()]
        await broker.close()
        assert await sequences(url, 5) == [1, 2, 9, 4, 5]

    asyncio.run(main())


def test_a_topic_that_rejects_its_messages_fails_no_other_topic(kafka: KafkaServer) -> None:
    """The producer stops at a message that is rejected, with all that it has not sent."""
    compacted = kafka.topic(partitions=1, cleanup_policy="compact").rpartition("/")[2]  # it wants a key
    url = kafka.topic(partitions=1)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        for _ in range(2):
            wrong = [brokers.new_message(destination=compacted) for _ in range(2)]
            right = [brokers.new_message(stream="a", sequence=at) for at in range(1, 11)]
            results = await publish(broker, [wrong[0], *right, wrong[1]])
            assert [type(result) for result in results] == [Refused, *[Sent] * 10, Refused]
        await broker.close()

    asyncio.run(main())


def test_a_topic_that_cannot_exist_is_refused_alone(kafka: KafkaServer) -> None:
    async def main() -> None:
        broker = KafkaBroker.from_url(kafka.topic())
        wrong = brokers.new_message(destination="no such topic!", stream="a", sequence=1)
        behind = brokers.new_message(stream="a", sequence=2)
        results = await publish(broker, [wrong, brokers.new_message(), behind])
        assert [type(result) for result in results] == [Refused, Sent, TryAgain]
        await broker.close()
        homeless = KafkaBroker.from_url(kafka.url)
        [result] = await publish(homeless, [brokers.new_message()])
        assert type(result) is Refused

    asyncio.run(main())


def test_two_calls_at_once_are_each_told_what_became_of_their_own(kafka: KafkaServer) -> None:
    url = kafka.topic(partitions=1, max_message_bytes=20_000)

    async def main() -> None:
        broker = KafkaBroker.from_url(f"{url}?batch.num.messages=1")
        large = brokers.new_message(stream="large", data=b"x" * 30_000)
        calls = [brokers.new_streams(streams=5, each=50) for _ in range(4)]
        refused, *found = await asyncio.gather(publish(broker, [large]), *(publish(broker, call) for call in calls))
        assert [type(result) for result in refused] == [Refused]
        sent = sum(type(result) is Sent for results in found for result in results)
        await broker.close()
        assert len(await sequences(url, sent)) >= sent

    asyncio.run(main())


def test_what_a_server_has_confirmed_before_it_is_paused_is_sent_and_the_rest_is_not(mortal_kafka: KafkaServer) -> None:
    """Kafka reports only failures: what has none when nothing is under way any more is stored."""
    url = mortal_kafka.topic(partitions=1)
    count = 10_000

    def pause_in_between(broker: KafkaBroker) -> None:
        under_way: list[int] = []
        end = time.monotonic() + 30
        while not (under_way and under_way[-1] < 0.8 * count < max(under_way)):
            assert time.monotonic() < end
            if (producer := broker._producer) is not None:
                under_way.append(len(producer.client))
        freeze(mortal_kafka.pid)

    async def main() -> None:
        broker = KafkaBroker.from_url(f"{url}?batch.num.messages=10&max.in.flight.requests.per.connection=1")
        messages = brokers.new_streams(streams=1, each=count)
        pausing = asyncio.create_task(asyncio.to_thread(pause_in_between, broker))
        try:
            results = await publish(broker, messages, seconds=8)
            await pausing
        finally:
            os.kill(mortal_kafka.pid or 0, signal.SIGCONT)
        kinds = [type(result) for result in results]
        sent = kinds.count(Sent)
        assert 0 < sent < count, "it was paused too late or too early to prove anything"
        assert kinds == [Sent] * sent + [TryAgain] * (count - sent)
        await broker.close()
        assert (await sequences(url, sent))[:sent] == [*range(1, sent + 1)]

    asyncio.run(main())


def test_a_paused_server_does_not_hold_up_publish(mortal_kafka: KafkaServer) -> None:
    async def main() -> None:
        url = mortal_kafka.topic()
        broker = KafkaBroker.from_url(url)
        messages = brokers.new_streams(streams=1, each=3)
        assert await publish(broker, messages[:1]) == [Sent()]
        freeze(mortal_kafka.pid)
        try:
            began = time.monotonic()
            results = await publish(broker, messages[1:], seconds=1)
            assert time.monotonic() - began < 10
            assert [type(result) for result in results] == [TryAgain] * 2
        finally:
            os.kill(mortal_kafka.pid or 0, signal.SIGCONT)
        async with asyncio.timeout(60):
            while await publish(broker, messages[1:]) != [Sent()] * 2:
                pass
        await broker.close()
        found = await sequences(url, 3)
        assert [number for at, number in enumerate(found) if number not in found[:at]] == [1, 2, 3][: len(set(found))]

    asyncio.run(main())


def test_a_paused_server_does_not_hold_up_an_acknowledgement(
    mortal_kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka alone waits for the length of a session."""
    url = mortal_kafka.topic()
    monkeypatch.setattr(kafka_module, "ACK_TIMEOUT", 0.5)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        await publish(broker, [message := brokers.new_message()])
        await broker.close()
        source = KafkaSource.from_url(f"{url}?group=g&session.timeout.ms=30000")
        held = await receive(source, 1)
        freeze(mortal_kafka.pid)
        try:
            began = time.monotonic()
            with pytest.raises(BrokerUnavailable, match="did not answer"):
                await source.acknowledge(held)
            assert time.monotonic() - began < 10
        finally:
            os.kill(mortal_kafka.pid or 0, signal.SIGCONT)
        await source.close()
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        for each in await source.receive(1, 2):  # nobody knows whether Kafka has heard it
            assert each.message.id == message.id
        await source.close()

    asyncio.run(main())


def test_after_an_error_what_is_not_acknowledged_is_delivered_again(
    mortal_kafka: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has let go of all that it had. It does not postpone it."""
    url = mortal_kafka.topic(partitions=1)
    monkeypatch.setattr(kafka_module, "ACK_TIMEOUT", 0.5)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        await publish(broker, messages := brokers.new_streams(streams=1, each=3))
        await broker.close()
        source = KafkaSource.from_url(f"{url}?group=g&session.timeout.ms=30000")
        held = await receive(source, 3)
        freeze(mortal_kafka.pid)
        try:
            with pytest.raises(BrokerUnavailable):
                await source.acknowledge(held[:1])
        finally:
            os.kill(mortal_kafka.pid or 0, signal.SIGCONT)
        again = await receive(source, 2)
        assert [each.message.id for each in again] == [each.id for each in messages[1:]]
        await source.acknowledge(again)
        await source.close()

    asyncio.run(main())


def test_what_was_read_ahead_is_forgotten_when_its_partition_comes_back(kafka: KafkaServer) -> None:
    """It would be delivered before the messages that precede it, which are read again, and so their offsets be lost."""
    url = kafka.topic(partitions=1)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        await publish(broker, brokers.new_streams(streams=1, each=20))
        await broker.close()
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        held = await receive(source, 1)
        async with asyncio.timeout(30):
            while len(source._early) < 5:
                held += await source.receive(1, 1)
                await source.acknowledge(held[-2:-1])  # the others come meanwhile
        consumer = source._consumer

        class Rebalanced:
            """Gets its partition again while it waits for the answer to a commit."""

            def __getattr__(self, name: str) -> Any:
                return getattr(consumer, name)

            def consume(self, *arguments: Any) -> Any:
                source._on_assign(consumer, consumer.assignment())
                return consumer.consume(*arguments)

        next_one = held[-1].message.sequence + 1
        source._consumer = Rebalanced()
        await source.acknowledge(held[-1:])
        source._consumer = consumer
        assert next_one not in [int(dict(each.headers())["ce-sequence"]) for each in source._early]
        await source.close()

    asyncio.run(main())


def test_what_comes_while_an_offset_is_committed_keeps_its_order(kafka: KafkaServer) -> None:
    url = kafka.topic(partitions=1)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        await publish(broker, brokers.new_streams(streams=1, each=30))
        await broker.close()
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        seen: list[int] = []
        async with asyncio.timeout(30):
            while len(seen) < 30:
                for each in await source.receive(1, 1):
                    if each.message.sequence % 7 or each.message.sequence in tried:
                        await source.acknowledge([each])  # the others come meanwhile
                        seen.append(each.message.sequence)
                    else:
                        tried.add(each.message.sequence)
                        await source.postpone(each, 0.0)
        assert seen == sorted(seen)
        await source.close()

    tried: set[int] = set()
    asyncio.run(main())
    assert tried == {7, 14, 21, 28}


def test_partitions_move_to_a_second_consumer_and_nothing_is_lost(kafka: KafkaServer) -> None:
    url = kafka.topic()

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        messages = brokers.new_streams(streams=12, each=3)
        assert await publish(broker, messages) == [Sent()] * len(messages)
        await broker.close()
        first, second = (KafkaSource.from_url(f"{url}?group=shared&{QUICK}") for _ in range(2))
        held = await receive(first, len(messages))
        moved: list[Delivery] = []
        async with asyncio.timeout(30):
            while not moved:  # the second one has joined when it gets what the first one holds
                assert list(await first.receive(10, 0.05)) == []
                moved += await second.receive(100, 0.2)
        async with asyncio.timeout(30):
            while True:
                moved += (some := await second.receive(100, 1))
                assert list(await first.receive(10, 0.05)) == []
                if not some:
                    break
        lost = {each.message.id for each in moved}
        assert 0 < len(lost) < len(messages)
        await first.acknowledge(held)  # those that moved are no longer its own
        await first.close()
        await second.close()
        again = KafkaSource.from_url(f"{url}?group=shared&{QUICK}")
        assert {each.message.id for each in await receive(again, len(lost))} == lost
        await again.acknowledge([])
        await again.close()

    asyncio.run(main())


def test_a_consumer_that_kafka_has_ended_is_replaced(kafka: KafkaServer) -> None:
    """librdkafka reports a fatal error once. The consumer would then be silent for ever."""
    url = kafka.topic(partitions=1)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        assert await publish(broker, brokers.new_streams(streams=1, each=1)) == [Sent()]
        await broker.close()
        first, second = (KafkaSource.from_url(f"{url}?group=shared&group.instance.id=one&{QUICK}") for _ in range(2))
        (held,) = await receive(first, 1)
        assert await receive(second, 1)  # under the same name, so Kafka refuses the first one
        with pytest.raises(BrokerUnavailable, match="Kafka has ended this consumer"):
            await first.receive(10, 30)
        await second.close()
        assert [each.message.id for each in await receive(first, 1)] == [held.message.id]
        await first.close()

    asyncio.run(main())


def test_an_offset_is_committed_when_all_before_it_are_acknowledged(kafka: KafkaServer) -> None:
    url = kafka.topic(partitions=1)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        await publish(broker, brokers.new_streams(streams=1, each=3))
        await broker.close()
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        one, two, three = await receive(source, 3)
        await source.acknowledge([two, three])
        await source.close()
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        held = await receive(source, 3)
        assert [each.message.sequence for each in held] == [1, 2, 3]
        await source.acknowledge([held[1]])
        await source.postpone(held[0], 0.0)
        [again] = await receive(source, 1)  # two is acknowledged, and three is in the caller's hands
        assert again.message.sequence == 1
        await source.acknowledge([again, held[2], one])
        await source.close()
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        assert list(await source.receive(1, 2)) == []
        await source.close()

    asyncio.run(main())


def test_what_a_cancelled_call_received_is_delivered_again(kafka: KafkaServer) -> None:
    url = kafka.topic()

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        source = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        await publish(broker, [brokers.new_message()])
        await source.acknowledge(await receive(source, 1))
        message = brokers.new_message()
        assert await publish(broker, [message]) == [Sent()]
        waiting = asyncio.ensure_future(source.receive(10, 5))
        await asyncio.sleep(0)
        waiting.cancel()  # its thread goes on, and receives the message
        [delivery] = await receive(source, 1)
        assert delivery.message.id == message.id
        await broker.close()
        await source.close()

    asyncio.run(main())


HOLDS = """
import contextlib, os, signal, sqlite3, sys
from semel import SQLiteStore
from semel.messaging import Inbox
from semel.messaging.brokers.kafka import KafkaSource

class Dying(KafkaSource):
    async def acknowledge(self, deliveries):
        os.kill(os.getpid(), signal.SIGKILL)

@Inbox(SQLiteStore(sys.argv[2])).handler(
    "ledger", connect=lambda: contextlib.closing(sqlite3.connect(sys.argv[2])), store_offsets=True, batch=3
)
def apply(message, connection):
    connection.execute("INSERT INTO applied VALUES ('first', ?)", (message.id,))

apply.drain(Dying.from_url(sys.argv[1]), idle=30)
"""
"""A consumer that is killed after three commits, and before it has told Kafka."""


@pytest.mark.process
def test_a_consumer_goes_on_at_the_offset_that_its_effects_committed(kafka: KafkaServer, tmp_path: Path) -> None:
    url, database = kafka.topic(partitions=1), str(tmp_path / "books.db")
    sqlite.migrate(database)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE applied (who text, id text)")
    messages = brokers.new_streams(streams=1, each=8)

    async def send() -> None:
        broker = KafkaBroker.from_url(url)
        assert await publish(broker, messages) == [Sent()] * len(messages)
        await broker.close()

    asyncio.run(send())
    command = [sys.executable, "-c", HOLDS, f"{url}?group=g&{SHORT}", database]
    assert subprocess.run(command, timeout=90, check=False).returncode == -signal.SIGKILL
    store = SQLiteStore(database)

    @Inbox(store).handler("ledger", connect=lambda: closing(sqlite3.connect(database)), store_offsets=True)
    def apply(message: Message, connection: Any) -> None:
        connection.execute("INSERT INTO applied VALUES ('second', ?)", (message.id,))
        if message.id == messages[-1].id:
            apply.stop()

    # As soon as Kafka has noticed that the first one is dead. What that one applied is not even delivered.
    apply.run(KafkaSource.from_url(f"{url}?group=g&{QUICK}"))
    assert (apply.report.applied, apply.report.repeated) == (5, 0)
    store.close()
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute("SELECT who, id FROM applied ORDER BY rowid").fetchall()
    assert found == [("first" if at < 3 else "second", each.id) for at, each in enumerate(messages)]


def test_a_partition_that_moves_takes_its_stored_offset_along(kafka: KafkaServer, tmp_path: Path) -> None:
    """The first consumer has messages in hand when their partition moves. It applies them late, or not at all."""
    url, database = kafka.topic(partitions=2), str(tmp_path / "books.db")
    sqlite.migrate(database)
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE applied (id text, stream text, sequence integer)")
    messages = brokers.new_streams(streams=12, each=5)

    async def main() -> None:
        broker = KafkaBroker.from_url(url)
        assert await publish(broker, messages) == [Sent()] * len(messages)
        await broker.close()
        store = AsyncSQLiteStore(database)
        began, go_on = asyncio.Event(), asyncio.Event()

        def consumer(waits: bool) -> Any:
            @AsyncInbox(store).handler(
                "ledger", connect=lambda: aiosqlite.connect(database), ordered=True, store_offsets=True, batch=1000
            )
            async def apply(message: Message, connection: Any) -> None:
                if waits:
                    began.set()
                    await go_on.wait()
                row = (message.id, message.stream, message.sequence)
                await connection.execute("INSERT INTO applied VALUES (?, ?, ?)", row)

            return apply

        # The first one is silent for too long: Kafka takes its partitions away, and it does not know.
        slow, quick = consumer(True), consumer(False)
        first = asyncio.ensure_future(
            slow.run(KafkaSource.from_url(f"{url}?group=g&{SHORT}&max.poll.interval.ms=2000"))
        )
        await asyncio.wait_for(began.wait(), 30)
        second = KafkaSource.from_url(f"{url}?group=g&{QUICK}")
        moved = asyncio.ensure_future(quick.run(second))
        async with asyncio.timeout(60):
            while not second._partitions:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        go_on.set()
        async with asyncio.timeout(60):
            while slow.report.applied + quick.report.applied < len(messages):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for each in (slow, quick):
            each.stop()
        await asyncio.gather(first, moved)
        assert slow.report.dead == quick.report.dead == 0
        await store.close()

    asyncio.run(main())
    with closing(sqlite3.connect(database)) as connection:
        found = connection.execute("SELECT id, stream, sequence FROM applied ORDER BY rowid").fetchall()
        (total,) = connection.execute(
            "SELECT sum(sequence) FROM semel_inbox_stream WHERE consumer = '~ledger'"
        ).fetchone()
    assert sorted(id for id, _, _ in found) == sorted(each.id for each in messages)
    assert total == len(messages)
    for stream in {stream for _, stream, _ in found}:
        assert [sequence for _, of, sequence in found if of == stream] == [1, 2, 3, 4, 5]
