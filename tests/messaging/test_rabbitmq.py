"""RabbitMQ: the conformance suite on a real node, and what is RabbitMQ's own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, cast

import aio_pika
import pytest

from semel.core.messaging.messages import Message
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers.rabbitmq import RabbitMQBroker, RabbitMQSource
from semel.messaging.ports import BrokerDown, Delivery, Refused, Result, Sent, TryAgain
from semel.testing import brokers
from tests.servers import RabbitMQServer, ServerPool
from tests.servers.freezing import freeze
from tests.servers.plugin import obtain

pytestmark = [pytest.mark.rabbitmq, pytest.mark.server]


@pytest.fixture(scope="module")
def mortal_rabbitmq(servers: ServerPool) -> Iterator[RabbitMQServer]:
    """A server that the tests of this file kill."""
    server = cast(RabbitMQServer, obtain(servers.private, "rabbitmq"))
    try:
        yield server
    finally:
        server.stop()


class Switch:
    """Kills a server, and brings it back."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.stop = server.crash
        self.start = server.return_


class OnRabbitMQ:
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest) -> str:
        if "outage" in request.fixturenames:
            # A single node of RabbitMQ 3 finds no leader for its quorum queues any more if it was killed.
            mortal: RabbitMQServer = request.getfixturevalue("mortal_rabbitmq")
            return f"{mortal.queue('classic')}&type=classic"
        server: RabbitMQServer = request.getfixturevalue("rabbitmq")
        return server.queue()

    @pytest.fixture
    def outage(self, mortal_rabbitmq: RabbitMQServer) -> Switch:
        return Switch(mortal_rabbitmq)

    @pytest.fixture
    def open_broker(self, url: str) -> Callable[[], RabbitMQBroker]:
        return lambda: RabbitMQBroker.from_url(url)

    @pytest.fixture
    def open_source(self, url: str) -> Callable[[], RabbitMQSource]:
        return lambda: RabbitMQSource.from_url(url)


class TestRabbitMQBroker(OnRabbitMQ, brokers.BrokerSuite):
    """The suite, on the session's server."""


class TestRabbitMQSource(OnRabbitMQ, brokers.SourceSuite):
    """The suite, on the session's server."""


def publish(
    broker: RabbitMQBroker, messages: list[Message], seconds: float = 15
) -> Coroutine[Any, Any, Sequence[Result]]:
    return broker.publish(messages, time.monotonic() + seconds)


async def receive(source: RabbitMQSource, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await source.receive(count - len(found), 1)
    return found


def name_of(url: str) -> str:
    return url.partition("queue=")[2]


def kinds(results: Sequence[Result]) -> list[type[Result]]:
    return [type(result) for result in results]


def test_a_message_is_persistent_and_its_attributes_are_headers(rabbitmq: RabbitMQServer) -> None:
    """As other consumers see them."""
    url = rabbitmq.queue("classic")

    async def main() -> None:
        broker = RabbitMQBroker.from_url(url)
        sent = brokers.new_message(id="m1", stream="order-1", sequence=4, redrives=1, headers={"note": "x"})
        assert await publish(broker, [sent]) == [Sent()]
        await broker.close()
        async with await aio_pika.connect(rabbitmq.url) as connection:
            queue = await (await connection.channel()).get_queue(name_of(url))
            found = await queue.get(no_ack=True)
            assert found is not None
            assert found.message_id == "m1:1"
            assert found.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
            assert found.content_type == "application/json"
            wanted = {"ce-id": "m1", "ce-stream": "order-1", "ce-sequence": "4", "note": "x"}
            assert wanted.items() <= found.headers.items()

    asyncio.run(main())


def test_what_is_wrong_with_a_url_is_said_in_words(rabbitmq: RabbitMQServer) -> None:
    address = rabbitmq.url.partition("@")[2].rstrip("/")

    async def main(url: str) -> Sequence[Result]:
        broker, source = RabbitMQBroker.from_url(url), RabbitMQSource.from_url(url)
        results = await publish(broker, [brokers.new_message()])
        with pytest.raises(BrokerUnavailable) as raised:
            await source.receive(1, 1)
        assert results == [BrokerDown(str(raised.value))]
        await broker.close()
        return results

    for url, said in (
        (f"amqp://guest:wrong@{address}/?queue=q", "RabbitMQ refuses the user or the password of the URL"),
        (f"amqp://guest:guest@{address}/nowhere?queue=q", "RabbitMQ does not open the virtual host of the URL"),
    ):
        (result,) = asyncio.run(main(url))
        assert isinstance(result, BrokerDown)
        assert result.reason.startswith(said)


def test_a_message_that_no_queue_gets_is_refused_alone(rabbitmq: RabbitMQServer) -> None:
    """RabbitMQ confirms it, and closes the channel if there is no exchange of that name."""
    url = rabbitmq.queue("classic")

    async def main() -> None:
        async with await aio_pika.connect(rabbitmq.url) as connection:
            channel = await connection.channel()
            events = await channel.declare_exchange("events", aio_pika.ExchangeType.TOPIC)
            await (await channel.get_queue(name_of(url))).bind(events, "order.*")
        broker = RabbitMQBroker.from_url(url)
        destinations = (
            "no-such-queue",
            "no-such-exchange/key",
            "events/order.paid",
            "events/other",
            "",
            "/" + name_of(url),
        )
        results = await publish(broker, [brokers.new_message(destination=each) for each in destinations])
        assert kinds(results) == [Refused, Refused, Sent, Refused, Sent, Sent]
        assert results[3] == Refused("RabbitMQ has no queue for the routing key 'other' of the exchange 'events'")
        await broker.close()
        broker = RabbitMQBroker.from_url(f"{rabbitmq.url}?exchange=events")
        by_type = [brokers.new_message(type="order.paid"), brokers.new_message(type="bill.paid")]
        by_key = [brokers.new_message(destination="order.sent"), brokers.new_message(destination="sent")]
        assert kinds(await publish(broker, by_type + by_key)) == [Sent, Refused, Sent, Refused]
        await broker.close()
        homeless = RabbitMQBroker.from_url(rabbitmq.url)
        assert kinds(await publish(homeless, [brokers.new_message()])) == [Refused]

    asyncio.run(main())


def test_a_name_that_is_too_long_for_amqp_is_refused_alone(rabbitmq: RabbitMQServer) -> None:
    """A destination has up to 255 characters, and AMQP counts bytes."""
    url = rabbitmq.queue("classic")

    async def main() -> None:
        broker = RabbitMQBroker.from_url(url)
        destinations = ("ü" * 200, "ü" * 200 + "/key", "exchange/" + "ü" * 200, "")
        results = await publish(broker, [brokers.new_message(destination=each) for each in destinations])
        assert kinds(results) == [Refused, Refused, Refused, Sent]
        await broker.close()
        with pytest.raises(ConfigurationError, match="255 bytes"):
            RabbitMQBroker(rabbitmq.url, exchange="ü" * 200)

    asyncio.run(main())


def test_a_queue_that_is_full_takes_the_next_message_later(rabbitmq: RabbitMQServer) -> None:
    """That is why messages of a stream are not pipelined."""
    url = rabbitmq.queue("classic", x_max_length=1, x_overflow="reject-publish")

    async def main() -> None:
        broker, source = RabbitMQBroker.from_url(url), RabbitMQSource.from_url(f"{url}&type=classic")
        first, second, third = brokers.new_streams(streams=1, each=3)
        assert await publish(broker, [first]) == [Sent()]
        assert kinds(await publish(broker, [second])) == [TryAgain]
        await source.acknowledge(await receive(source, 1))
        assert await publish(broker, [third]) == [Sent()]
        assert not broker.capabilities.pipelines
        await broker.close()
        await source.close()

    asyncio.run(main())


def test_an_alarm_of_the_server_and_a_paused_server_are_noticed_by_the_deadline(
    mortal_rabbitmq: RabbitMQServer,
) -> None:
    url = mortal_rabbitmq.queue("classic")

    async def main() -> None:
        broker = RabbitMQBroker.from_url(url)
        messages = brokers.new_streams(streams=1, each=3)
        assert await publish(broker, messages[:1]) == [Sent()]
        await asyncio.to_thread(mortal_rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1")
        await publish(broker, [brokers.new_message()], seconds=0.5)  # then RabbitMQ blocks the connection
        for _ in range(2):
            began = time.monotonic()
            assert kinds(await publish(broker, [brokers.new_message()], seconds=1)) == [BrokerDown]
            assert time.monotonic() - began < 10
        await asyncio.to_thread(mortal_rabbitmq.ctl, "set_vm_memory_high_watermark", "absolute", "1GB")
        async with asyncio.timeout(30):
            while await publish(broker, messages[1:2]) != [Sent()]:
                pass
        freeze(mortal_rabbitmq.pid)
        try:
            began = time.monotonic()
            assert kinds(await publish(broker, messages[2:], seconds=1)) == [TryAgain]
            assert time.monotonic() - began < 10
        finally:
            os.kill(mortal_rabbitmq.pid or 0, signal.SIGCONT)
        async with asyncio.timeout(30):
            while await publish(broker, messages[2:]) != [Sent()]:
                pass
        await broker.close()

    asyncio.run(main())


@pytest.mark.parametrize("type", ["quorum", "classic"])
def test_an_ordered_source_is_the_only_consumer_of_its_queue(rabbitmq: RabbitMQServer, type: str) -> None:
    url = f"{rabbitmq.queue(type)}&type={type}&prefetch=1"

    async def main() -> None:
        broker = RabbitMQBroker.from_url(url)
        for message in brokers.new_streams(streams=1, each=3):
            assert await publish(broker, [message]) == [Sent()]
        await broker.close()
        first, second = (RabbitMQSource.from_url(url) for _ in range(2))
        held = await receive(first, 1)
        assert list(await second.receive(10, 0.5)) == []
        await first.acknowledge(held)
        await first.close()
        [delivery] = await receive(second, 1)
        assert delivery.message.sequence == 2
        await second.close()

    asyncio.run(main())


def test_a_quorum_queue_for_many_consumers_is_refused_or_shared(rabbitmq: RabbitMQServer) -> None:
    url = rabbitmq.queue(x_single_active_consumer=False)
    with pytest.raises(ConfigurationError, match="x-single-active-consumer"):
        asyncio.run(_look(RabbitMQSource.from_url(url)))

    async def main() -> None:
        broker = RabbitMQBroker.from_url(url)
        assert await publish(broker, [brokers.new_message(), brokers.new_message()]) == [Sent()] * 2
        await broker.close()
        sharing = [RabbitMQSource.from_url(f"{url}&ordered=no&prefetch=1") for _ in range(2)]
        for source in sharing:
            assert len(await receive(source, 1)) == 1
        for source in sharing:
            await source.close()

    asyncio.run(main())


def test_a_postponed_message_holds_up_its_own_stream_only(rabbitmq: RabbitMQServer) -> None:
    url = rabbitmq.queue()

    async def main() -> None:
        broker, source = RabbitMQBroker.from_url(url), RabbitMQSource.from_url(url)
        for stream, sequence in (("a", 1), ("b", 1), ("a", 2), ("", 0), ("b", 2)):
            assert await publish(broker, [brokers.new_message(stream=stream, sequence=sequence)]) == [Sent()]
        await broker.close()
        [first] = await receive(source, 1)
        await source.postpone(first, 60)
        others = await receive(source, 3)
        assert [(each.message.stream, each.message.sequence) for each in others] == [("b", 1), ("", 0), ("b", 2)]
        assert list(await source.receive(10, 0.1)) == []
        await source.close()

    asyncio.run(main())


def test_what_follows_a_postponed_message_does_not_count_a_start(rabbitmq: RabbitMQServer) -> None:
    url = rabbitmq.queue()

    async def main() -> None:
        broker, source = RabbitMQBroker.from_url(url), RabbitMQSource.from_url(url)
        for sequence in (1, 2):
            assert await publish(broker, [brokers.new_message(stream="a", sequence=sequence)]) == [Sent()]
        await broker.close()
        for starts in (1, 2, 3):
            one, two = await receive(source, 2)
            assert (one.starts, two.starts) == (starts, 1)
            await source.postpone(one, 0.1)
            await source.postpone(two, 0.1)
        await source.close()

    asyncio.run(main())


def test_a_source_goes_on_when_its_queue_was_deleted(rabbitmq: RabbitMQServer) -> None:
    url = rabbitmq.queue()

    async def main() -> None:
        broker, source = RabbitMQBroker.from_url(url), RabbitMQSource.from_url(url)
        assert await publish(broker, [brokers.new_message()]) == [Sent()]
        held = await receive(source, 1)
        async with await aio_pika.connect(rabbitmq.url) as connection:
            await (await connection.channel()).queue_delete(name_of(url))
        async with asyncio.timeout(30):
            message = brokers.new_message()
            while await publish(broker, [message]) != [Sent()]:  # refused, until the source has made the queue again
                assert list(await source.receive(1, 0.1)) == []
        [found] = await receive(source, 1)
        assert found.message.id == message.id
        await source.acknowledge([*held, found])
        await source.postpone(held[0], 0.0)
        assert list(await source.receive(1, 0.1)) == []
        await broker.close()
        await source.close()

    asyncio.run(main())


def test_a_count_that_a_producer_made_up_does_not_keep_a_message_back(rabbitmq: RabbitMQServer) -> None:
    """It was neither delivered nor given back, and nobody was told."""
    url = rabbitmq.queue()

    async def main() -> None:
        connection = await aio_pika.connect(url)
        channel = await connection.channel()
        for at, count in enumerate(("soon", None, [1], -3)):
            odd = aio_pika.Message(b"{}", message_id=str(at), headers={"x-delivery-count": count})
            await channel.default_exchange.publish(odd, name_of(url))
        await connection.close()
        source = RabbitMQSource.from_url(url)
        found = await receive(source, 4)
        assert [(each.message.id, each.starts) for each in found] == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]
        await source.acknowledge(found)
        await source.close()

    asyncio.run(main())


def test_what_arrives_while_a_source_closes_is_forgotten(rabbitmq: RabbitMQServer) -> None:
    """A source closes after an error, too. What it still held then came before the messages that precede it."""
    url = rabbitmq.queue()

    async def main() -> None:
        broker, source = RabbitMQBroker.from_url(url), RabbitMQSource.from_url(url)
        for message in brokers.new_streams(streams=1, each=100):
            assert await publish(broker, [message]) == [Sent()]
        await broker.close()
        [first] = await receive(source, 1)  # the others are on their way
        await source.close()
        assert source._buffer == []
        [again] = await receive(source, 1)
        assert again.message.id == first.message.id
        await source.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"x_delivery_limit": 3}, True),
        ({"x_delivery_limit": 3, "x_dead_letter_exchange": "dead", "x_max_length": 9}, False),
        ({}, False),
    ],
)
def test_a_queue_that_drops_messages_is_warned_of(
    rabbitmq: RabbitMQServer, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], warned: bool
) -> None:
    source = RabbitMQSource.from_url(rabbitmq.queue(**arguments))
    asyncio.run(_look(source))
    assert ("drops a message that it has delivered 3 times" in caplog.text) is warned


@pytest.mark.parametrize(("type", "said"), [("quorum", ""), ("classic", "&type=classic")])
def test_a_queue_of_another_type_is_refused(rabbitmq: RabbitMQServer, type: str, said: str) -> None:
    url = rabbitmq.queue("classic" if type == "quorum" else "quorum") + said
    with pytest.raises(ConfigurationError, match=rf"add \?type={'classic' if type == 'quorum' else 'quorum'}"):
        asyncio.run(_look(RabbitMQSource.from_url(url)))


async def _look(source: RabbitMQSource) -> None:
    try:
        assert list(await source.receive(1, 0.05)) == []
    finally:
        await source.close()


def test_a_connection_that_could_not_be_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise aio-pika does it when it is collected, and prints a warning if that thread has no event loop."""
    connections: list[aio_pika.Connection] = []
    connect = aio_pika.Connection.connect

    async def noted(connection: aio_pika.Connection, timeout: Any = None) -> None:
        connections.append(connection)
        await connect(connection, timeout)

    monkeypatch.setattr(aio_pika.Connection, "connect", noted)

    async def main() -> None:
        broker = RabbitMQBroker.from_url("amqp://127.0.0.1:1/?queue=q")
        (result,) = await broker.publish([Message("m1", "paid", b"")], time.monotonic() + 5)
        assert isinstance(result, BrokerDown)
        assert [connection.is_closed for connection in connections] == [True]
        await broker.close()

    asyncio.run(main())
