"""The conformance suite for brokers: derive test classes from ``BrokerSuite`` and ``SourceSuite``.

::

    class Mine:
        @pytest.fixture
        def open_broker(self, topic):
            return lambda: MyBroker("127.0.0.1:7000", topic)

        @pytest.fixture
        def open_source(self, topic):
            return lambda: MySource("127.0.0.1:7000", topic, group="tests")

    class TestMyBroker(Mine, brokers.BrokerSuite): ...

    class TestMySource(Mine, brokers.SourceSuite): ...

``BrokerSuite`` proves an adapter that publishes, ``SourceSuite`` one that consumes. The suite calls the factories
inside its event loop, as often as it needs, and closes what they opened. Both lead to the same destination, which is
empty when a test begins. A source sees what was published before it was opened, and all sources that ``open_source``
opens in one test share their place, as the members of a group.

An adapter declares what its broker can do in ``capabilities``; what it does not declare is not asked of it. Tests that
stop the broker run only if the fixture ``outage`` is overridden too. Needs pytest.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Final, Protocol, TypeAlias
from uuid import uuid4

import pytest

from semel.core.messaging.messages import Message, attributes, size_of
from semel.core.values import value
from semel.errors import BrokerUnavailable
from semel.messaging.ports import Broker, BrokerDown, Delivery, DestinationDown, Refused, Result, Sent, Source, TryAgain

__all__ = ["BrokerSuite", "ServerSwitch", "SourceSuite"]

PATIENCE: Final = 60.0
"""Seconds after which a proof fails if the broker has not done what was asked."""
DEADLINE: Final = 15.0
"""Seconds that a call of ``publish`` is given."""
LARGEST_TRIED: Final = 4 << 20
"""The suite sends a message of the broker's largest size only if that is at most this many bytes."""

OpenBroker: TypeAlias = Callable[[], Broker]
OpenSource: TypeAlias = Callable[[], Source]


class ServerSwitch(Protocol):
    """Stops and starts the broker's server. The methods block; what the server has stored stays."""

    def stop(self) -> None: ...

    def start(self) -> None: ...


def _proof(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of an async one, whose ``bench`` is open. It needs no plugin of pytest."""

    @wraps(test)
    def run(self: object, bench: _Bench, **fixtures: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(4 * PATIENCE), bench:
                await test(self, bench, **fixtures)

        asyncio.run(main())

    return run


class _Factories:
    """The fixtures that a test class overrides."""

    @pytest.fixture
    def open_broker(self) -> OpenBroker:
        """Override this: return a function without arguments that returns an adapter to publish with."""
        pytest.fail(f"{type(self).__name__} needs a fixture open_broker that returns a function", pytrace=False)

    @pytest.fixture
    def open_source(self) -> OpenSource:
        """Override this: return a function that returns a source of what is published. See ``BrokerSuite``."""
        pytest.fail(f"{type(self).__name__} needs a fixture open_source that returns a function", pytrace=False)

    @pytest.fixture
    def bench(self, open_broker: OpenBroker, open_source: OpenSource) -> _Bench:
        """The broker and the source of a test. No need to override this."""
        return _Bench(open_broker, open_source)

    @pytest.fixture
    def outage(self) -> ServerSwitch:
        """Override this if the test can stop the broker's server and start it again, with what it had stored."""
        pytest.skip("the fixture outage is not overridden")


class BrokerSuite(_Factories):
    """The proofs of an adapter that publishes. They need no ``postpone`` of the source."""

    @_proof
    async def test_a_message_arrives_as_it_was_sent(self, bench: _Bench) -> None:
        message = new_message(stream="Zürich ☃", sequence=7, subject="order/1", headers=_HEADERS, time=1.5e9 + 0.25)
        assert await bench.publish([message]) == [Sent()]
        await bench.arrives([message])

    @_proof
    async def test_any_data_arrives(self, bench: _Bench) -> None:
        sizes = (b"", bytes(range(256)), b"\x00", "größe".encode(), b"x" * 100_000)
        messages = [new_message(data=data, content_type="application/octet-stream") for data in sizes]
        assert await bench.publish(messages) == [Sent()] * len(messages)
        await bench.arrives(messages)

    @_proof
    async def test_the_largest_message_arrives(self, bench: _Bench) -> None:
        largest = bench.broker.capabilities.largest
        if largest > LARGEST_TRIED:
            pytest.skip(f"the largest message has {largest} bytes")
        message = sized_message(largest, headers=_HEADERS)
        assert await bench.publish([message]) == [Sent()]
        await bench.arrives([message])

    @_proof
    async def test_a_message_that_is_too_large_is_refused_alone(self, bench: _Bench) -> None:
        large = sized_message(bench.broker.capabilities.largest + 1, stream="a", sequence=2)
        before, other, after = (new_message(stream=s, sequence=n) for s, n in (("a", 1), ("b", 1), ("a", 3)))
        results = await bench.publish([before, large, other, after])
        assert [type(result) for result in results[:3]] == [Sent, Refused, Sent], results
        if bench.broker.capabilities.pipelines:
            assert type(results[3]) is TryAgain, "a message overtook one of its stream that was refused"
        await bench.arrives([before, other, *([after] if results[3] == Sent() else [])])
        await bench.nothing_else_arrives()

    @_proof
    async def test_an_empty_batch_has_no_results(self, bench: _Bench) -> None:
        assert list(await bench.publish([])) == []

    @_proof
    async def test_the_order_of_each_stream_is_kept(self, bench: _Bench) -> None:
        messages = new_streams(streams=5, each=40)
        await bench.relay(messages)
        received = [each.message for each in await bench.receive(len(messages))]
        if bench.broker.capabilities.ordered:
            check_order(received)
        check_all_arrived(messages, received)
        assert len(received) == len(messages), "a message was delivered twice although it was acknowledged"

    @_proof
    async def test_calls_at_the_same_time_do_not_mix(self, bench: _Bench) -> None:
        large = sized_message(bench.broker.capabilities.largest + 1)
        batches = [[new_message() for _ in range(10)] for _ in range(5)]
        results = await asyncio.gather(*map(bench.publish, [*batches, [large]]))
        assert [list(each) for each in results[:5]] == [[Sent()] * 10] * 5
        assert [type(result) for result in results[5]] == [Refused]
        await bench.arrives([message for batch in batches for message in batch])

    @_proof
    async def test_nothing_is_sent_after_the_deadline(self, bench: _Bench) -> None:
        assert await bench.publish([new_message()]) == [Sent()]
        await bench.receive(1)
        late = [new_message() for _ in range(3)]
        results = await bench.broker.publish(late, time.monotonic() - 1)
        assert [type(result) for result in results] == [TryAgain] * 3, results
        await bench.nothing_else_arrives()

    @_proof
    async def test_it_opens_again_after_close(self, bench: _Bench) -> None:
        await bench.broker.close()
        for _ in range(2):
            message = new_message()
            assert await bench.publish([message]) == [Sent()]
            await bench.arrives([message])
            await bench.broker.close()
            await bench.broker.close()

    def test_a_second_event_loop_may_use_it_after_close(self, open_broker: OpenBroker) -> None:
        """As the next ``Relay.drain`` does."""

        async def publish_at_once(broker: Broker) -> Sequence[Sequence[Result]]:
            deadline = time.monotonic() + DEADLINE
            try:
                return await asyncio.gather(*(broker.publish([new_message()], deadline) for _ in range(3)))
            finally:
                await broker.close()

        async def open_it() -> Broker:
            return open_broker()

        broker = asyncio.run(open_it())
        for _ in range(2):
            assert [list(each) for each in asyncio.run(publish_at_once(broker))] == [[Sent()]] * 3

    @_proof
    async def test_a_broker_that_is_stopped_is_down(self, bench: _Bench, outage: ServerSwitch) -> None:
        assert await bench.publish([new_message()]) == [Sent()]
        await bench.receive(1)
        await asyncio.to_thread(outage.stop)
        messages = new_streams(streams=2, each=2)
        for _ in range(2):
            began = time.monotonic()
            results = await bench.broker.publish(messages, began + 2)
            assert time.monotonic() - began < 2 + 8, "publish returns when the deadline has passed"
            assert {type(result) for result in results} in ({BrokerDown}, {DestinationDown}), results
        await asyncio.to_thread(outage.start)
        await bench.relay(messages)
        check_all_arrived(messages, await bench.receive_again(messages))

    @_proof
    async def test_what_is_sent_while_the_broker_restarts_is_kept_in_order(
        self, bench: _Bench, outage: ServerSwitch
    ) -> None:
        messages = new_streams(streams=4, each=200)
        sending = asyncio.create_task(bench.relay(messages, batch=20))
        while bench.sent < len(messages) // 10:
            assert not sending.done() or sending.result() is None
            await asyncio.sleep(0.001)
        await asyncio.to_thread(outage.stop)
        assert not sending.done(), "the broker was stopped too late to prove anything"
        await asyncio.to_thread(outage.start)
        await sending
        received = await bench.receive_again(messages)
        check_all_arrived(messages, received)
        if bench.broker.capabilities.ordered:
            check_order(received)
        counts = defaultdict[str, int](int)
        for message in received:
            counts[message.id] += 1
        twice = {id for id, count in counts.items() if count > 1}
        assert twice <= bench.doubtful, "a message was stored twice although its first result was Sent"


class SourceSuite(_Factories):
    """The proofs of an adapter that consumes. It publishes with ``open_broker``."""

    @_proof
    async def test_a_source_without_messages_waits_and_returns_none(self, bench: _Bench) -> None:
        assert list(await bench.source.receive(10, 0.05)) == []
        message = new_message()
        assert await bench.publish([message]) == [Sent()]
        await bench.arrives([message])

    @_proof
    async def test_at_most_the_limit_is_delivered(self, bench: _Bench) -> None:
        messages = [new_message() for _ in range(7)]
        await bench.relay(messages)
        received: list[Delivery] = []
        while len(received) < 7:
            found = await bench.source.receive(3, 5)
            assert len(found) <= 3
            received += found
        check_all_arrived(messages, [each.message for each in received])

    @_proof
    async def test_what_is_not_acknowledged_is_delivered_again(self, bench: _Bench) -> None:
        messages = new_streams(streams=1, each=4)
        await bench.relay(messages)
        first = await bench.hold(4)
        await bench.source.acknowledge([each for each in first if each.message.sequence <= 2])
        await bench.reopen_source()
        again = await bench.hold(2)
        assert [each.message.sequence for each in again] == [3, 4]
        await bench.source.acknowledge(again)
        await bench.nothing_else_arrives()

    @_proof
    async def test_what_is_acknowledged_is_never_delivered_again(self, bench: _Bench) -> None:
        messages = new_streams(streams=2, each=10)
        await bench.relay(messages)
        await bench.receive(20)
        await bench.reopen_source()
        await bench.nothing_else_arrives()

    @_proof
    async def test_acknowledging_twice_is_harmless(self, bench: _Bench) -> None:
        await bench.relay([new_message()])
        held = await bench.hold(1)
        for _ in range(2):
            await bench.source.acknowledge(held)
        await bench.source.acknowledge([])
        await bench.nothing_else_arrives()

    @_proof
    async def test_what_is_postponed_is_delivered_again_in_order(self, bench: _Bench) -> None:
        messages = new_streams(streams=1, each=6)
        await bench.relay(messages)
        held = await bench.hold(4)
        await bench.source.acknowledge(held[:1])
        for delivery in held[1:]:
            await bench.source.postpone(delivery, 0.1)
        received = await bench.hold(5)
        assert sorted({each.message.sequence for each in received}) == [2, 3, 4, 5, 6]
        if bench.source.capabilities.ordered:
            check_order([each.message for each in [*held[:1], *received]])
        await bench.source.acknowledge(received)
        await bench.reopen_source()
        await bench.nothing_else_arrives()

    @_proof
    async def test_deliveries_are_counted_as_declared(self, bench: _Bench) -> None:
        counts = bench.source.capabilities.counts_starts

        async def postpone(held: Delivery) -> None:
            await bench.source.postpone(held, 0.0)

        async def die(_held: Delivery) -> None:
            await bench.reopen_source()

        for begin_again in (postpone, die):
            await bench.relay([new_message()])
            starts = []
            for _ in range(3):
                [held] = await bench.hold(1)
                starts.append(held.starts)
                await begin_again(held)
            assert starts == ([1, 2, 3] if counts else [0, 0, 0]), "the deliveries are counted, or 0 is said"
            await bench.receive(1)

    @_proof
    async def test_close_is_idempotent(self, bench: _Bench) -> None:
        await bench.relay([new_message()])
        await bench.receive(1)
        await bench.source.close()
        await bench.source.close()
        never_used = bench.open_source()
        await never_used.close()

    @_proof
    async def test_a_source_survives_a_restart_of_the_broker(self, bench: _Bench, outage: ServerSwitch) -> None:
        done, open, after = new_streams(streams=1, each=3)
        await bench.relay([done, open])
        held = await bench.hold(2)
        await asyncio.to_thread(outage.stop)
        began = time.monotonic()
        with suppress(BrokerUnavailable):
            assert list(await bench.source.receive(1, 0.5)) == []
        assert time.monotonic() - began < 10, "receive waits no longer than it was told to"
        with pytest.raises(BrokerUnavailable):  # with that, the caller has let go of both
            await bench.source.acknowledge(held[:1])
        await asyncio.to_thread(outage.start)
        await bench.relay([after])
        check_all_arrived([open, after], await bench.receive_again([open, after]))


# What the proofs share.

_HEADERS: Final = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "note": "größe ☃ = 5 %"}


def new_message(**fields: Any) -> Message:
    """Return a message that no other proof uses."""
    id = uuid4().hex
    return Message(**{"id": id, "type": "conformance", "data": id.encode(), "source": "/tests", **fields})


def sized_message(size: int, **fields: Any) -> Message:
    """Return a message of this size in bytes, its headers included."""
    fields = {"id": uuid4().hex, **fields}
    rest = size_of(attributes(new_message(data=b"", **fields)), b"")
    return new_message(data=b"x" * (size - rest), **fields)


def new_streams(streams: int, each: int) -> list[Message]:
    """Return messages of several streams, in turn."""
    names = [f"{uuid4().hex[:8]}-{number}" for number in range(streams)]
    return [new_message(stream=name, sequence=place) for place in range(1, each + 1) for name in names]


def check_order(received: Iterable[Message]) -> None:
    """Check that the messages of each stream came in their order. A repeat is allowed."""
    last = defaultdict[str, int](int)
    for message in received:
        assert message.sequence <= last[message.stream] + 1, f"message {message.sequence} overtook an earlier one"
        last[message.stream] = max(last[message.stream], message.sequence)


def check_all_arrived(sent: Iterable[Message], received: Iterable[Message]) -> None:
    """Check that each message arrived, and nothing else, and that each is as it was sent."""
    found = {message.id: _content(message) for message in received}
    wanted = {message.id: _content(message) for message in sent}
    missing = wanted.keys() - found.keys()
    assert not missing, f"{len(missing)} of {len(wanted)} messages did not arrive"
    assert not found.keys() - wanted.keys(), "messages arrived that should not"
    for id, content in wanted.items():
        assert found[id] == content, f"sent {content}, received {found[id]}"


@value
class _Content:
    """What two equal messages have in common."""

    headers: dict[str, str]
    data: bytes


def _content(message: Message) -> _Content:
    return _Content(attributes(message), message.data)


class _Bench:
    """A broker and a source, what was sent, and what is known of it."""

    def __init__(self, open_broker: OpenBroker, open_source: OpenSource) -> None:
        self._open_broker = open_broker
        self.open_source = open_source
        self.sent = 0
        """How many messages ``relay`` has sent."""
        self.doubtful: set[str] = set()
        """The ids of messages that were at some time reported as anything but Sent."""

    async def __aenter__(self) -> _Bench:
        self.broker = self._open_broker()
        self.source = self.open_source()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.source.close()
        await self.broker.close()

    async def reopen_source(self) -> None:
        """Close the source, and open another."""
        await self.source.close()
        self.source = self.open_source()

    async def publish(self, messages: Sequence[Message]) -> Sequence[Result]:
        results = await self.broker.publish(messages, time.monotonic() + DEADLINE)
        assert len(results) == len(messages), "publish returns a result for each message"
        return results

    async def relay(self, messages: Sequence[Message], batch: int = 1000) -> None:
        """Publish as a relay does: in order, again and again, until all are sent."""
        waiting, end = list(messages), time.monotonic() + PATIENCE
        while waiting:
            assert time.monotonic() < end, f"{len(waiting)} messages are not sent after {PATIENCE:.0f} s"
            some = self._next(waiting, batch)
            results = await self.publish(some)
            failed = set[str]()
            for message, result in zip(some, results, strict=True):
                if type(result) is Sent:
                    assert message.stream not in failed, (
                        "a message was sent although an earlier one of its stream failed"
                    )
                    waiting.remove(message)
                    self.sent += 1
                else:
                    assert type(result) is not Refused, result
                    self.doubtful.add(message.id)
                    failed |= {message.stream} - {""}
                    await asyncio.sleep(0.01)

    def _next(self, waiting: list[Message], batch: int) -> list[Message]:
        """The messages that a relay may send now."""
        if self.broker.capabilities.pipelines:
            return waiting[:batch]
        heads: dict[str, Message] = {}
        for message in waiting:
            heads.setdefault(message.stream or message.id, message)
        return list(heads.values())[:batch]

    async def until(self, last: Callable[[Delivery], bool]) -> list[Delivery]:
        """Receive and acknowledge until such a delivery comes. The broker may be unreachable for a while."""
        received: list[Delivery] = []
        end = time.monotonic() + PATIENCE
        while not any(map(last, received)):
            assert time.monotonic() < end, f"only {len(received)} messages came within {PATIENCE:.0f} s"
            with suppress(BrokerUnavailable):
                some = await self.source.receive(100, 1)
                received += some
                await self.source.acknowledge(some)
        return received

    async def receive(self, count: int) -> list[Delivery]:
        """Receive and acknowledge this number of messages."""
        seen = set[int]()

        def enough(delivery: Delivery) -> bool:
            seen.add(id(delivery))
            return len(seen) >= count

        return await self.until(enough)

    async def receive_again(self, messages: Sequence[Message]) -> list[Message]:
        """Receive and acknowledge until each of these has come. Returns them, and their repeats.

        A broker that was stopped may also deliver what was acknowledged shortly before.
        """
        ids = {message.id for message in messages}
        missing = set(ids)

        def enough(delivery: Delivery) -> bool:
            missing.discard(delivery.message.id)
            return not missing

        return [each.message for each in await self.until(enough) if each.message.id in ids]

    async def hold(self, count: int) -> list[Delivery]:
        """Receive this number of different messages, in the order of their arrival, and acknowledge none."""
        held: list[Delivery] = []
        end = time.monotonic() + PATIENCE
        while (missing := count - len({each.message.id for each in held})) > 0:
            assert time.monotonic() < end, f"only {len(held)} messages came within {PATIENCE:.0f} s"
            held += await self.source.receive(missing, 1)
        return held

    async def arrives(self, messages: Sequence[Message]) -> None:
        """Check that these messages arrive, as they were sent, and acknowledge them."""
        check_all_arrived(messages, [each.message for each in await self.receive(len(messages))])

    async def nothing_else_arrives(self) -> None:
        """Send a message, and check that no other one arrives before it, or soon after."""
        marker = new_message()
        assert await self.publish([marker]) == [Sent()]
        received = await self.until(lambda each: each.message.id == marker.id)
        received += await self.source.receive(10, 0.2)
        ids = [each.message.id for each in received]
        assert ids == [marker.id], f"{len(ids) - 1} messages arrived that should not"
