"""Redis Streams, on real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest
import redis as redis_py

from semel.core.messaging.messages import Message
from semel.errors import BrokerUnavailable, ConfigurationError
from semel.messaging.brokers.redis_streams import RedisStreamsBroker, RedisStreamsSource
from semel.messaging.brokers.urls import open_broker, open_source
from semel.messaging.ports import BrokerDown, Delivery, DestinationDown, Refused, Sent, TryAgain
from semel.stores.redis.commands import RedisCommand
from semel.testing.brokers import BrokerSuite, SourceSuite
from tests.servers import RedisClusterServers, RedisServer


class RedisOutage:
    """Kills the server. It writes every command to its file before it answers."""

    def __init__(self, server: RedisServer) -> None:
        self.stop = server.crash
        self.start = server.return_


class OnRedis:
    @pytest.fixture
    def server(self, request: pytest.FixtureRequest, redis: RedisServer) -> Iterator[RedisServer]:
        if "outage" not in request.fixturenames:
            yield redis
            return
        with RedisServer("--appendonly", "yes", "--appendfsync", "no") as server:
            yield server

    @pytest.fixture
    def url(self, server: RedisServer) -> str:
        return server.database()

    @pytest.fixture
    def outage(self, server: RedisServer) -> RedisOutage:
        return RedisOutage(server)

    @pytest.fixture
    def open_broker(self, url: str) -> Callable[[], RedisStreamsBroker]:
        return lambda: RedisStreamsBroker(url, stream="orders")


class TestBroker(OnRedis, BrokerSuite):
    @pytest.fixture
    def open_source(self, url: str) -> Callable[[], RedisStreamsSource]:
        return lambda: RedisStreamsSource(url, stream="orders", group="tests")


class TestOrderedSource(OnRedis, SourceSuite):
    @pytest.fixture
    def open_source(self, url: str) -> Callable[[], RedisStreamsSource]:
        return lambda: RedisStreamsSource(url, stream="orders", group="tests")


class TestSharedSource(OnRedis, SourceSuite):
    @pytest.fixture
    def open_source(self, url: str) -> Callable[[], RedisStreamsSource]:
        return lambda: RedisStreamsSource(url, stream="orders", group="tests", ordered=False)


def message(stream: str = "", sequence: int = 0, **fields: object) -> Message:
    return Message(**{"id": uuid4().hex, "type": "t", "data": b"{}", "stream": stream, "sequence": sequence, **fields})  # type: ignore[arg-type]


def soon() -> float:
    return time.monotonic() + 10


def sequences(deliveries: list[Delivery]) -> list[int]:
    return [delivery.message.sequence for delivery in deliveries]


async def receive(source: RedisStreamsSource, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found += await source.receive(count - len(found), 1)
    return found


class TestPublishing:
    def test_an_entry_has_the_attributes_and_the_data_as_fields(self, redis_url: str) -> None:
        async def main() -> None:
            broker = open_broker(f"{redis_url}?stream=orders")
            sent = message("a", 1, id="m1", source="/shop", headers={"traceparent": "00-1"})
            assert await broker.publish([sent], soon()) == [Sent()]
            await broker.close()

        asyncio.run(main())
        [(_, fields)] = redis_py.Redis.from_url(redis_url).xrange("orders") or []
        assert fields == {
            b"ce-specversion": b"1.0", b"ce-id": b"m1", b"ce-type": b"t", b"ce-source": b"/shop", b"ce-stream": b"a",
            b"ce-sequence": b"1", b"content-type": b"application/json", b"traceparent": b"00-1", b"data": b"{}",
        }  # fmt: skip

    def test_a_destination_that_is_no_stream_is_refused_and_what_follows_waits(self, redis_url: str) -> None:
        server = redis_py.Redis.from_url(redis_url)
        server.set("text", "x")

        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            batch = [message("a", 1), message("a", 2, destination="text"), message("a", 3), message("b", 1)]
            first, refused, follows, other = await broker.publish(batch, soon())
            assert (first, other) == (Sent(), Sent())
            assert isinstance(refused, Refused)
            assert isinstance(follows, TryAgain)
            await broker.close()

        asyncio.run(main())
        assert server.xlen("orders") == 2

    def test_what_has_no_destination_or_a_header_called_data_is_refused(self, redis_url: str) -> None:
        async def main() -> None:
            broker = RedisStreamsBroker(redis_url)
            batch = [message(), message(destination="orders", headers={"data": "1"}), message(destination="orders")]
            assert [type(result) for result in await broker.publish(batch, soon())] == [Refused, Refused, Sent]
            await broker.close()

        asyncio.run(main())

    def test_a_batch_that_is_cut_off_is_not_stored_in_part(self, redis_url: str) -> None:
        port = redis_py.Redis.from_url(redis_url).connection_pool.connection_kwargs["port"]
        cut = asyncio.Event()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Pass on what comes, up to the half of the batch."""
            there, back = await asyncio.open_connection("127.0.0.1", port)

            async def answers() -> None:
                while data := await there.read(65536):
                    writer.write(data)

            answering = asyncio.create_task(answers())
            while data := await reader.read(65536):
                if b"XADD" in data:
                    back.write(data[: len(data) // 2])
                    await back.drain()
                    cut.set()
                    break
                back.write(data)
            back.close()
            await answering
            writer.close()

        async def main() -> None:
            proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
            near = proxy.sockets[0].getsockname()[1]
            broker = RedisStreamsBroker(redis_url.replace(f":{port}", f":{near}"), stream="orders")
            results = await broker.publish([message("a", n) for n in range(1, 101)], soon())
            assert cut.is_set()
            assert {type(result) for result in results} == {TryAgain}
            await broker.close()
            proxy.close()

        asyncio.run(main())
        assert redis_py.Redis.from_url(redis_url).xlen("orders") == 0

    def test_a_server_that_takes_nothing_is_down_and_one_without_permission_refuses(
        self, private_redis: RedisServer
    ) -> None:
        async def publish(url: str = private_redis.url) -> object:
            broker = RedisStreamsBroker(url, stream="orders", connect_timeout=2)
            (result,) = await broker.publish([message()], soon())
            await broker.close()
            return result

        async def main() -> None:
            limited = private_redis.url.replace("redis://", "redis://limited:secret@")
            private_redis.cli("ACL", "SETUSER", "limited", "on", ">secret", "+@all", "~other")
            refused = await publish(limited)
            assert isinstance(refused, Refused)
            assert "secret" not in repr(refused)
            assert isinstance(await publish(limited.replace("secret", "wrong")), BrokerDown)
            private_redis.cli("CONFIG", "SET", "maxmemory", "1")
            assert isinstance(await publish(), BrokerDown)
            private_redis.cli("CONFIG", "SET", "maxmemory", "0")
            private_redis.cli("REPLICAOF", "127.0.0.1", "1")
            assert isinstance(await publish(), BrokerDown)
            private_redis.cli("REPLICAOF", "NO", "ONE")
            assert await publish() == Sent()
            unconfirmed = await publish(f"{private_redis.url}?wait_replicas=1")
            assert isinstance(unconfirmed, TryAgain)

        asyncio.run(main())

    def test_a_longest_length_trims_the_stream(self, redis_url: str) -> None:
        async def main() -> None:
            broker = RedisStreamsBroker.from_url(f"{redis_url}?stream=orders&max_length=100")
            for _ in range(10):
                assert await broker.publish([message() for _ in range(100)], soon()) == [Sent()] * 100
            await broker.close()

        asyncio.run(main())
        assert redis_py.Redis.from_url(redis_url).xlen("orders") < 500


class TestConsuming:
    def test_one_consumer_reads_and_another_takes_over_in_order_when_it_dies(self, redis_url: str) -> None:
        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            first, second = (
                RedisStreamsSource(redis_url, stream="orders", group="g", consumer=name, takeover=1.2) for name in "ab"
            )
            await broker.publish([message("s", n) for n in range(1, 7)], soon())
            assert sequences(await receive(first, 3)) == [1, 2, 3]
            assert list(await second.receive(10, 1.5)) == []  # longer than the lease: the first renews it
            await first._keeping.stop(timeout=0)  # it dies, or is paused
            assert sequences(await receive(second, 6)) == [1, 2, 3, 4, 5, 6]
            await broker.publish([message("s", 7)], soon())
            first._reader_until = time.monotonic() + 60  # it wakes, and believes that it is still the reader
            assert list(await first.receive(10, 0.0)) == []
            assert sequences(await receive(second, 1)) == [7]
            for source in (first, second):
                await source.close()
            await broker.close()

        asyncio.run(main())

    def test_a_consumer_that_lost_the_stream_reads_nothing_new_before_it_has_taken_over_what_is_left(
        self, redis_url: str
    ) -> None:
        """It is paused before it reads what it has not finished. Another one is the reader then, and dies."""

        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            first, second = (RedisStreamsSource(redis_url, stream="orders", group="g", consumer=name) for name in "ab")
            await broker.publish([message("s", n) for n in range(1, 4)], soon())
            await first.acknowledge(await receive(first, 1))
            first._read_again()
            read, paused = first._as_reader, False

            async def end_lease() -> None:
                await broker._servers.exchange("orders", [RedisCommand((b"DEL", first._reader_key))])

            async def read_late(lease: float, *what: object) -> list[object] | None:
                nonlocal paused
                if paused or not what:
                    return await read(lease, *what)
                paused = True
                await end_lease()
                assert sequences(await receive(second, 1)) == [2]
                found = await read(lease, *what)
                await second._keeping.stop(timeout=0)
                await end_lease()
                return found

            first._as_reader = read_late  # type: ignore[method-assign]
            assert sequences(await receive(first, 2)) == [2, 3]
            for source in (first, second):
                await source.close()
            await broker.close()

        asyncio.run(main())

    @pytest.mark.parametrize("ordered", [True, False])
    def test_a_source_that_may_not_wait_returns_what_is_there(self, redis_url: str, ordered: bool) -> None:
        """``drain`` would end before the first message if to connect took longer than it waits for a message."""

        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            await broker.publish([message("s", 1)], soon())
            source = RedisStreamsSource(redis_url, stream="orders", group="g", ordered=ordered)
            assert sequences(await source.receive(10, 0.0)) == [1]
            await source.close()
            await broker.close()

        asyncio.run(main())

    def test_a_consumer_that_restarts_under_its_name_continues_at_once(self, redis_url: str) -> None:
        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            await broker.publish([message("s", n) for n in range(1, 5)], soon())
            for ordered in (True, False):
                url = f"{redis_url}?stream=orders&group=g{ordered:d}&consumer=me&ordered={ordered}"
                for starts in (1, 2, 3):
                    source = open_source(url)
                    assert isinstance(source, RedisStreamsSource)
                    found = await receive(source, 4)
                    assert sequences(found) == [1, 2, 3, 4]
                    assert [each.starts for each in found] == [starts] * 4
                    await source._servers.close()  # without a word to the server
                    await source._blocking.close()
                    await source._keeping.stop(timeout=0)
            await broker.close()

        asyncio.run(main())

    def test_what_follows_a_postponed_message_waits_and_does_not_count_a_start(self, redis_url: str) -> None:
        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            source = RedisStreamsSource(redis_url, stream="orders", group="g")
            await broker.publish([message("s", 1), message("s", 2), message("other", 1)], soon())
            for starts in (1, 2, 3):
                one, two = [each for each in await receive(source, 2) if each.message.stream == "s"]
                assert (one.starts, two.starts) == (starts, 1)
                await source.postpone(one, 0.05)
                await source.postpone(two, 0.05)
                if starts == 1:
                    (other,) = await receive(source, 1)
                    await source.acknowledge([other])
                    await broker.publish([message("s", 3)], soon())
            await source.close()
            again = RedisStreamsSource(redis_url, stream="orders", group="g")
            assert sequences(await receive(again, 3)) == [1, 2, 3]
            await again.close()
            await broker.close()

        asyncio.run(main())

    def test_consumers_that_share_a_group_take_over_from_a_dead_one(self, redis_url: str) -> None:
        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            first, second = (
                RedisStreamsSource(redis_url, stream="orders", group="g", ordered=False, takeover=0.9) for _ in range(2)
            )
            await broker.publish([message("s", n) for n in range(1, 5)], soon())
            await receive(first, 2)
            mine = await receive(second, 2)
            await second.acknowledge(mine)
            assert list(await second.receive(10, 1.2)) == []  # longer than the takeover: the first one lives
            await first._keeping.stop(timeout=0)
            found = await receive(second, 2)
            assert sorted(sequences(found)) == [1, 2]
            assert all(each.starts > 1 for each in found)
            await second.acknowledge(found)
            for source in (first, second):
                await source.close()
            await broker.close()

        asyncio.run(main())

    @pytest.mark.redis
    @pytest.mark.server
    def test_a_postponed_message_stays_with_its_consumer(self, redis_url: str) -> None:
        """Another consumer would try it too early, and then both would work on it."""

        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            assert await broker.publish([message()], soon()) == [Sent()]
            await broker.close()
            first, second = (
                RedisStreamsSource(redis_url, stream="orders", group="g", ordered=False, takeover=0.5) for _ in range(2)
            )
            (delivery,) = await receive(first, 1)
            await first.postpone(delivery, 2.5)
            assert list(await second.receive(10, 2)) == []
            (again,) = await receive(first, 1)
            assert again.starts == 2
            await first.acknowledge([again])
            for source in (first, second):
                await source.close()

        asyncio.run(main())

    def test_after_an_error_all_that_is_not_acknowledged_comes_again(self) -> None:
        """The caller has let go of it: what it held would otherwise wait for the end of the process."""

        async def main(server: RedisServer) -> None:
            broker = RedisStreamsBroker(server.url, stream="orders")
            for ordered in (True, False):
                source = RedisStreamsSource(server.url, stream="orders", group=f"g{ordered}", ordered=ordered)
                if ordered:
                    await broker.publish([message("s", n) for n in range(1, 5)], soon())
                held = await receive(source, 4)
                await source.postpone(held[3], 0.1)
                await asyncio.to_thread(server.crash)
                with pytest.raises(BrokerUnavailable):
                    await source.acknowledge(held[:1])
                await asyncio.to_thread(server.return_)
                assert sorted(sequences(await receive(source, 4))) == [1, 2, 3, 4]
                await source.close()
            await broker.close()

        with RedisServer("--appendonly", "yes", "--appendfsync", "no") as server:
            asyncio.run(main(server))

    @pytest.mark.redis
    @pytest.mark.server
    def test_an_error_while_postponed_messages_come_again_loses_none(self) -> None:
        async def main(server: RedisServer) -> None:
            broker = RedisStreamsBroker(server.url, stream="orders")
            source = RedisStreamsSource(server.url, stream="orders", group="g")
            await broker.publish([message("s", n) for n in range(1, 4)], soon())
            for delivery in await receive(source, 3):
                await source.postpone(delivery, 0.0)
            server.cli("ACL", "SETUSER", "default", "-xclaim")
            with pytest.raises(BrokerUnavailable, match="xclaim"):
                await source.receive(1, 1)  # fewer than wait
            server.cli("ACL", "SETUSER", "default", "+xclaim")
            assert sequences(await receive(source, 3)) == [1, 2, 3]
            await source.close()
            await broker.close()

        with RedisServer() as server:
            asyncio.run(main(server))

    def test_a_source_waits_for_a_new_entry_whatever_the_stream_still_has(self) -> None:
        """The wait ended at once for each entry that was read before, so a long stream kept both sides busy."""

        async def main(server: RedisServer) -> None:
            url = server.database()
            client = redis_py.Redis.from_url(url)
            broker = RedisStreamsBroker(url, stream="orders")
            source = RedisStreamsSource(url, stream="orders", group="g")

            async def wait() -> None:
                client.config_resetstat()
                assert await source.receive(100, 0.5) == []
                assert client.info("commandstats")["cmdstat_xread"]["calls"] < 5

            assert await broker.publish([message() for _ in range(200)], soon()) == [Sent()] * 200
            await source.acknowledge(await receive(source, 200))
            await wait()
            await source.close()
            await wait()  # as a reader that begins with a long stream
            later = message()
            waiting = asyncio.create_task(source.receive(1, 10))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            assert await broker.publish([later], soon()) == [Sent()]
            [found] = await waiting
            assert found.message.id == later.id
            assert time.monotonic() - began < 1, "a new entry ends the wait"
            await source.close()
            await broker.close()
            client.close()

        with RedisServer() as server:
            asyncio.run(main(server))

    def test_a_stream_that_was_deleted_is_read_again_from_its_beginning(self, redis_url: str) -> None:
        server = redis_py.Redis.from_url(redis_url)

        async def main() -> None:
            broker = RedisStreamsBroker(redis_url, stream="orders")
            source = RedisStreamsSource(redis_url, stream="orders", group="g", delete=True)
            await broker.publish([message("s", 1)], soon())
            await source.acknowledge(await receive(source, 1))
            assert server.xlen("orders") == 0
            server.delete("orders")
            await broker.publish([message("s", 2)], soon())
            with pytest.raises(BrokerUnavailable, match="NOGROUP"):
                await source.receive(1, 1)
            assert sequences(await receive(source, 1)) == [2]
            await source.close()
            await broker.close()

        asyncio.run(main())


@pytest.mark.parametrize("wrong", ["redis://:password@{}/0?stream=s", "redis://{}/4711?stream=s"])
def test_a_server_that_refuses_the_connection_is_down(redis: RedisServer, wrong: str) -> None:
    """Otherwise a relay would give up every message because of its URL."""

    async def main() -> None:
        broker = open_broker(wrong.format(f"127.0.0.1:{redis.port}"))
        (result,) = await broker.publish([Message(id="m", type="t", data=b"")], time.monotonic() + 5)
        assert isinstance(result, BrokerDown)
        await broker.close()

    asyncio.run(main())


@pytest.mark.parametrize("url", ["redis://localhost", "redis://localhost?stream=s", "redis://localhost?group=g"])
def test_a_source_needs_a_stream_and_a_group(url: str) -> None:
    with pytest.raises(ConfigurationError, match="needs a stream and a group"):
        open_source(url)


def test_a_full_server_of_a_redis_cluster_is_down_for_its_own_streams_only(redis_cluster: RedisClusterServers) -> None:
    async def main() -> None:
        broker = RedisStreamsBroker(redis_cluster.url)
        batch = [message(name, 1, destination=name) for name in (uuid4().hex for _ in range(24))]
        full = redis_cluster.masters()[0]
        full.cli("CONFIG", "SET", "maxmemory", "1")
        try:
            results = await broker.publish(batch, soon())
        finally:
            full.cli("CONFIG", "SET", "maxmemory", "0")
        assert {type(result) for result in results} == {Sent, DestinationDown}, results
        assert await broker.publish(batch, soon()) == [Sent()] * 24
        await broker.close()

    asyncio.run(main())


def test_the_streams_of_a_redis_cluster_may_be_on_several_servers(redis_cluster: RedisClusterServers) -> None:
    async def main() -> None:
        names = [f"{uuid4().hex}-{number}" for number in range(6)]
        broker = RedisStreamsBroker(redis_cluster.url)
        batch = [message(name, n, destination=name) for n in (1, 2) for name in names]
        assert await broker.publish(batch, soon()) == [Sent()] * 12
        for name in names:
            source = RedisStreamsSource(redis_cluster.url, stream=name, group="g")
            found = await receive(source, 2)
            assert sequences(found) == [1, 2]
            await source.acknowledge(found)
            await source.close()
        await broker.close()

    asyncio.run(main())
