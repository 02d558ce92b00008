"""NATS JetStream, on real servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import nats as nats_py
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from semel.core.messaging.messages import Message
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers.nats import ACK_TIMEOUT, NATSBroker, NATSSource
from semel.messaging.brokers.urls import open_broker, open_source
from semel.messaging.ports import BrokerDown, Delivery, Refused, Sent, TryAgain
from semel.testing.brokers import BrokerSuite, SourceSuite
from tests.servers import NATSServer
from tests.servers.freezing import freeze

HOLDS = """
import asyncio, sys, time
from semel.messaging.brokers.nats import NATSSource
async def main():
    found = await NATSSource.from_url(sys.argv[1]).receive(1, 20)
    print(found[0].message.sequence, flush=True)
    time.sleep(60)
asyncio.run(main())
"""
"""A consumer that receives a message and does nothing more."""


class CoreNATSServer(NATSServer):
    """A server without JetStream."""

    def command(self) -> list[Any]:
        return [word for word in super().command() if word != "--jetstream"]


class StrictNATSServer(NATSServer):
    """A server with a user who may only publish, to some subjects."""

    def command(self) -> list[Any]:
        relay = 'user: relay, password: relay, permissions: {publish: ["orders.>", "lost.>"], subscribe: "_INBOX.>"}'
        file = self.folder / "users.conf"
        file.write_text(f"authorization {{ users = [{{user: admin, password: admin}}, {{{relay}}}] }}")
        return [*super().command(), "--config", file]

    def url_of(self, user: str) -> str:
        return self.url.replace("//", f"//{user}:{user}@")


class NATSOutage:
    def __init__(self, server: NATSServer) -> None:
        self.stop = server.crash
        self.start = server.return_


async def create_stream(url: str, subject: str, **config: Any) -> None:
    connection = await nats_py.connect(url)
    await connection.jetstream().add_stream(name=subject.partition(".")[0], subjects=[subject], **config)
    await connection.close()


class OnNATS:
    @pytest.fixture
    def server(self, request: pytest.FixtureRequest, nats: NATSServer) -> Iterator[NATSServer]:
        if "outage" not in request.fixturenames:
            yield nats
            return
        with NATSServer() as server:
            yield server

    @pytest.fixture
    def subject(self, server: NATSServer) -> str:
        subject = server.subject()
        asyncio.run(create_stream(server.url, subject))
        return subject

    @pytest.fixture
    def outage(self, server: NATSServer) -> NATSOutage:
        return NATSOutage(server)

    @pytest.fixture
    def open_broker(self, server: NATSServer, subject: str) -> Callable[[], NATSBroker]:
        return lambda: NATSBroker(server.url, subject=subject)

    @pytest.fixture
    def open_source(self, server: NATSServer, subject: str) -> Callable[[], NATSSource]:
        return lambda: NATSSource(server.url, subject=subject, durable="tests", ordered=False)


class TestBroker(OnNATS, BrokerSuite):
    pass


class TestSource(OnNATS, SourceSuite):
    pass


def message(stream: str = "", sequence: int = 0, **fields: object) -> Message:
    return Message(**{"id": uuid4().hex, "type": "t", "data": b"{}", "stream": stream, "sequence": sequence, **fields})  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + 10


async def receive(source: NATSSource, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await source.receive(count - len(found), 1)
    return found


class TestPublishing(OnNATS):
    def test_attributes_are_headers_and_a_repeat_is_dropped_but_not_a_redrive(
        self, server: NATSServer, subject: str
    ) -> None:
        async def main() -> None:
            broker = open_broker(f"{server.url}/{subject}")
            sent = message("a", 1, id="m1", source="/shop", headers={"traceparent": "00-1"})
            for each in (sent, sent, replace(sent, redrives=1)):
                assert await broker.publish([each], soon()) == [Sent()]
            await broker.close()
            connection = await nats_py.connect(server.url)
            jetstream = connection.jetstream()
            assert (await jetstream.stream_info(subject)).state.messages == 2
            stored = [await jetstream.get_msg(subject, seq) for seq in (1, 2)]
            assert stored[0].data == b"{}"
            assert stored[0].headers == {
                "ce-specversion": "1.0", "ce-id": "m1", "ce-type": "t", "ce-source": "/shop", "ce-stream": "a",
                "ce-sequence": "1", "content-type": "application/json", "traceparent": "00-1", "Nats-Msg-Id": "m1",
            }  # fmt: skip
            assert (stored[1].headers or {})["Nats-Msg-Id"] == "m1:1"
            assert (stored[1].headers or {})["ce-id"] == "m1"
            await connection.close()

        asyncio.run(main())

    def test_a_jetstream_that_does_not_answer_is_down_before_the_deadline(self) -> None:
        """As one without a leader. The question why nobody took a message was asked for each, for five seconds."""

        async def main(url: str) -> None:
            silent = await nats_py.connect(url)
            await silent.subscribe("$JS.API.>")
            await silent.flush()
            broker = NATSBroker(url, subject="orders")
            began = time.monotonic()
            results = await broker.publish([message(str(at)) for at in range(5)], began + 2)
            assert time.monotonic() - began < 5
            assert [type(result) for result in results] == [BrokerDown] * 5, results
            await broker.close()
            await silent.close()

        with CoreNATSServer() as server:
            asyncio.run(main(server.url))

    def test_a_subject_without_a_stream_is_refused(self, server: NATSServer, subject: str) -> None:
        async def main() -> None:
            broker = NATSBroker(server.url, subject=subject)
            destinations = ("nowhere", "$JS.API.STREAM.DELETE." + subject, "a.*", "a b", "a..b", f"{subject}.", "")
            results = await broker.publish([message(destination=each) for each in destinations], soon())
            assert [type(result) for result in results] == [Refused] * 6 + [Sent], results
            assert "create one" in str(results[0])
            other = NATSBroker(server.url, subject=subject, stream="another")
            assert [type(result) for result in await other.publish([message()], soon())] == [Refused]
            await broker.close()
            await other.close()

        asyncio.run(main())

    def test_what_the_user_may_not_do_fails_one_message_and_no_other(self) -> None:
        """A subject that no stream has meant that the broker is down, and one that is forbidden took its time."""

        async def main(server: StrictNATSServer) -> None:
            await create_stream(server.url_of("admin"), "orders.>")
            broker = NATSBroker(server.url_of("relay"), subject="orders.new")
            began = time.monotonic()
            for _ in range(2):
                lost, forbidden = message(destination="lost.X"), message(destination="Forbidden")
                results = await broker.publish([lost, message(), forbidden, message()], began + 20)
                assert [type(result) for result in results] == [TryAgain, Sent, TryAgain, Sent], results
                assert "$JS.API.STREAM.NAMES" in str(results[0])
                assert "may not publish" in str(results[2])
            assert time.monotonic() - began < 10
            await broker.close()

        with StrictNATSServer() as server:
            asyncio.run(main(server))

    def test_a_stream_that_is_full_for_a_moment_is_no_reason_to_give_up(self, server: NATSServer) -> None:
        async def main() -> None:
            subject = server.subject()
            await create_stream(server.url, subject, max_msgs=1, discard="new", max_msg_size=1000)
            broker = NATSBroker(server.url, subject=subject)
            results = await broker.publish([message(data=b"x" * 2000), message(), message()], soon())
            assert [type(result) for result in results] == [Refused, Sent, TryAgain], results
            await broker.close()

        asyncio.run(main())

    def test_a_server_without_jetstream_is_down(self) -> None:
        async def main(url: str) -> None:
            broker = NATSBroker(url, subject="orders")
            (result,) = await broker.publish([message()], soon())
            assert isinstance(result, BrokerDown), result
            await broker.close()

        with CoreNATSServer() as server:
            asyncio.run(main(server.url))

    def test_a_server_that_does_not_answer_is_left_at_the_deadline(self, private_nats: NATSServer) -> None:
        async def main() -> None:
            await create_stream(private_nats.url, "orders")
            broker = NATSBroker(private_nats.url, subject="orders")
            assert await broker.publish([message("a", 1)], soon()) == [Sent()]
            freeze(private_nats.pid)
            try:
                began = time.monotonic()
                (result,) = await broker.publish([late := message("a", 2)], began + 0.3)
                assert isinstance(result, TryAgain)
                assert time.monotonic() - began < 10
                (result,) = await broker.publish([late], time.monotonic() + 0.3)
                assert isinstance(result, BrokerDown)  # no connection any more, and no new one
            finally:
                os.kill(private_nats.pid or 0, signal.SIGCONT)
            assert await broker.publish([late], soon()) == [Sent()]
            assert await broker.publish([message("a", 3)], soon()) == [Sent()]
            await broker.close()
            source = NATSSource(private_nats.url, subject="orders", durable="d", ordered=False)
            assert [each.message.sequence for each in await receive(source, 3)] == [1, 2, 3]
            await source.close()

        asyncio.run(main())


class TestConsuming(OnNATS):
    def test_an_ordered_source_has_one_message_under_way_in_all_processes(
        self, server: NATSServer, subject: str
    ) -> None:
        async def main() -> None:
            broker = NATSBroker(server.url, subject=subject)
            url = f"{server.url}/{subject}?durable=billing&ack_wait=1200ms"
            first, second = (NATSSource.from_url(url) for _ in range(2))
            for sequence in (1, 2, 3):
                assert await broker.publish([message("s", sequence)], soon()) == [Sent()]
            (one,) = await receive(first, 1)
            assert one.message.sequence == 1
            assert list(await second.receive(10, 1.5)) == []  # longer than ack_wait: the first one is alive
            await first.postpone(one, 0.3)
            (again,) = await receive(second, 1)
            assert (again.message.sequence, again.starts) == (1, 2)
            await second.acknowledge([again])
            (two,) = await receive(first, 1)
            assert two.message.sequence == 2
            await first.close()  # it gives back what it has not finished
            (again,) = await receive(second, 1)
            assert (again.message.sequence, again.starts) == (2, 2)
            await second.acknowledge([again])
            (three,) = await receive(second, 1)
            assert three.message.sequence == 3
            await second.acknowledge([three])
            for each in (second, broker):
                await each.close()

        asyncio.run(main())

    @pytest.mark.process
    def test_a_message_in_hand_is_renewed_as_often_as_the_existing_consumer_asks_for(
        self, server: NATSServer, subject: str
    ) -> None:
        """The consumer may have been created by other means, with a shorter ``ack_wait`` than that of the source."""

        async def main() -> None:
            connection = await nats_py.connect(server.url)
            config = ConsumerConfig(durable_name="c", ack_wait=1, max_ack_pending=1, ack_policy=AckPolicy.EXPLICIT)
            await connection.jetstream().add_consumer(subject, config)
            await connection.close()
            broker = NATSBroker(server.url, subject=subject)
            assert await broker.publish([message("a", 1)], soon()) == [Sent()]
            first, second = (NATSSource(server.url, subject=subject, durable="c", ack_wait=30) for _ in range(2))
            held = await receive(first, 1)
            assert list(await second.receive(1, 3)) == []  # longer than the consumer's time: the first one is alive
            await first.acknowledge(held)
            for each in (first, second, broker):
                await each.close()

        asyncio.run(main())

    def test_what_a_killed_process_held_comes_again_after_ack_wait(self, server: NATSServer, subject: str) -> None:
        url = f"{server.url}/{subject}?durable=billing&ack_wait=1s"

        async def publish() -> None:
            broker = NATSBroker(server.url, subject=subject)
            for sequence in (1, 2):
                assert await broker.publish([message("s", sequence)], soon()) == [Sent()]
            await broker.close()

        async def consume() -> None:
            source = NATSSource.from_url(url)
            for sequence, starts in ((1, 2), (2, 1)):
                (found,) = await receive(source, 1)
                assert (found.message.sequence, found.starts) == (sequence, starts)
                await source.acknowledge([found])
            await source.close()

        asyncio.run(publish())
        with subprocess.Popen([sys.executable, "-c", HOLDS, url], stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"1\n"
            holder.kill()
        asyncio.run(consume())

    def test_a_slow_server_does_not_lose_the_connection_of_a_source(self, private_nats: NATSServer) -> None:
        """What was on its way would come again after ``ack_wait``, and so long an ordered source would stand still."""

        async def main() -> None:
            await create_stream(private_nats.url, "orders")
            source = NATSSource(private_nats.url, subject="orders", durable="d", ack_wait="900ms")
            assert list(await source.receive(1, 0.02)) == []
            waiting = asyncio.ensure_future(source.receive(1, 20))
            await asyncio.sleep(0.05)
            freeze(private_nats.pid)
            await asyncio.sleep(1.5)  # in this time it says twice that it is alive
            os.kill(private_nats.pid or 0, signal.SIGCONT)
            broker = NATSBroker(private_nats.url, subject="orders")
            assert await broker.publish([message("a", 1)], soon()) == [Sent()]
            (found,) = await waiting
            assert found.starts == 1
            await source.acknowledge([found])
            for each in (source, broker):
                await each.close()

        asyncio.run(main())

    def test_an_acknowledgement_does_not_outwait_its_connection(self, private_nats: NATSServer) -> None:
        """nats-py would wait ten seconds for the answer. So long, an ordered source has nothing to do."""

        async def main() -> None:
            await create_stream(private_nats.url, "orders")
            broker = NATSBroker(private_nats.url, subject="orders")
            assert await broker.publish([message("a", 1)], soon()) == [Sent()]
            await broker.close()
            source = NATSSource(private_nats.url, subject="orders", durable="d", ack_wait="1s")
            found = await receive(source, 1)
            freeze(private_nats.pid)  # the request arrives, and no answer
            acknowledging = asyncio.ensure_future(source.acknowledge(found))
            await asyncio.sleep(0.05)
            private_nats.crash()
            began = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                await acknowledging
            assert time.monotonic() - began < ACK_TIMEOUT / 2
            private_nats.return_()
            await source.acknowledge(await receive(source, 1))
            await source.close()

        asyncio.run(main())

    def test_what_was_in_hand_when_the_server_restarted_comes_again_at_once(self, private_nats: NATSServer) -> None:
        """After ``ack_wait`` it would come by itself. So long, an ordered source would stand still."""

        async def main() -> None:
            await create_stream(private_nats.url, "orders")
            broker = NATSBroker(private_nats.url, subject="orders")
            for sequence in (1, 2):
                assert await broker.publish([message("a", sequence)], soon()) == [Sent()]
            await broker.close()
            source = NATSSource(private_nats.url, subject="orders", durable="d", ack_wait="60s")
            found = await receive(source, 1)
            private_nats.crash()
            with pytest.raises(BrokerUnavailable):
                await source.acknowledge(found)
            private_nats.return_()
            came: list[tuple[int, int]] = []
            while not came or came[-1][0] == 1:
                (found,) = await receive(source, 1)
                came.append((found.message.sequence, found.starts))
                await source.acknowledge([found])
            # If the server was killed before it wrote down that it had delivered the first message, it delivers that
            # one once more, as if it were new.
            assert came in ([(1, 2), (2, 1)], [(1, 2), (1, 1), (2, 1)])
            await source.close()

        asyncio.run(main())

    def test_what_another_process_may_have_by_now_is_not_given_back(self, private_nats: NATSServer) -> None:
        async def main() -> None:
            await create_stream(private_nats.url, "orders")
            broker = NATSBroker(private_nats.url, subject="orders")
            assert await broker.publish([message("a", 1)], soon()) == [Sent()]
            await broker.close()
            first, second = (
                NATSSource(private_nats.url, subject="orders", durable="d", ack_wait="1s") for _ in range(2)
            )
            found = await receive(first, 1)
            private_nats.crash()
            with pytest.raises(BrokerUnavailable):
                await first.acknowledge(found)
            await asyncio.sleep(1.1)
            private_nats.return_()
            found = await receive(second, 1)
            assert list(await first.receive(1, 0.5)) == []
            await second.acknowledge(found)
            for each in (first, second):
                await each.close()

        asyncio.run(main())

    @pytest.mark.parametrize("status", ["shipped", "404", "100"])
    def test_a_message_with_a_header_of_the_server_is_delivered(
        self, server: NATSServer, subject: str, status: str
    ) -> None:
        """nats-py dropped it, or raised KeyError, and all that follow waited for it for ever."""

        async def main() -> None:
            connection = await nats_py.connect(server.url)
            for id in ("1", "2"):
                await connection.jetstream().publish(subject, b"{}", headers={"Status": status, "ce-id": id})
            await connection.close()
            source = NATSSource(server.url, subject=subject, durable="d")
            for id in ("1", "2"):
                [found] = await receive(source, 1)
                assert (found.message.id, found.message.headers) == (id, {"status": status})
                await source.acknowledge([found])
            await source.close()

        asyncio.run(main())

    def test_a_consumer_that_keeps_no_order_is_refused(self, server: NATSServer, subject: str) -> None:
        async def main() -> None:
            shared = NATSSource(server.url, subject=subject, durable="d", ordered=False, max_ack_pending=10)
            assert list(await shared.receive(1, 0.05)) == []
            ordered = NATSSource(server.url, subject=subject, durable="d")
            with pytest.raises(ConfigurationError, match="keeps no order"):
                await ordered.receive(1, 0.05)
            nowhere = NATSSource(server.url, subject="nowhere", durable="d")
            with pytest.raises(ConfigurationError, match="create one"):
                await nowhere.receive(1, 0.05)
            with pytest.raises(BrokerUnavailable, match="cannot be reached"):
                await NATSSource("nats://127.0.0.1:1", subject="nowhere", durable="d").receive(1, 0.05)
            for each in (shared, ordered, nowhere):
                await each.close()

        asyncio.run(main())


def test_a_source_declares_how_long_its_stream_keeps_messages() -> None:
    url = "nats://host/orders?durable=billing"
    assert open_source(url).capabilities.retention is None
    assert open_source(f"{url}&retention=7d").capabilities.retention == 7 * 86400


@pytest.mark.parametrize("url", ["nats://localhost/orders", "nats://localhost?durable=d", "nats:///orders?durable=d"])
def test_a_source_needs_a_server_a_subject_and_a_durable_name(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_source(url)


def test_an_error_never_shows_the_password() -> None:
    async def main() -> None:
        broker = open_broker("nats://me:secret@127.0.0.1:1,127.0.0.1:2/orders")
        (result,) = await broker.publish([message()], soon())
        assert isinstance(result, BrokerDown)
        assert "secret" not in repr(result)
        with pytest.raises(ConfigurationError) as caught:
            open_broker("nats://me:secret@127.0.0.1/orders?nonsense=1")
        assert "secret" not in str(caught.value)

    asyncio.run(main())
