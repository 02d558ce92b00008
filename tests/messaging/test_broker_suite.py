"""The suite for brokers passes an adapter in memory that keeps the contract, and finds each way to break it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from semel.core.messaging.messages import Message, attributes, size_of
from semel.errors import BrokerUnavailable
from semel.messaging.ports import BrokerDown, Capabilities, Delivery, Refused, Result, Sent, TryAgain
from semel.testing import brokers

MEMORY = Capabilities(name="memory", ordered=True, pipelines=True, largest=200_000, counts_starts=True)


@dataclass
class Server:
    """A queue. ``held`` is what the source has received and not acknowledged."""

    queue: list[Delivery] = field(default_factory=list)
    held: list[Delivery] = field(default_factory=list)
    up: bool = True
    met: threading.Event = field(default_factory=threading.Event)
    """Set when somebody has found it stopped. It starts after that: an outage that nobody meets proves nothing."""
    back: threading.Event = field(default_factory=threading.Event)
    taken: int = 0

    def stop(self) -> None:
        self.up = False

    def start(self) -> None:
        assert self.met.wait(60)
        self.up = True
        self.back.set()

    def take(self, message: Message) -> None:
        self.taken += 1
        self.queue.append(Delivery(replace(message, destination="", redrives=0), 0, self.taken))


class MemoryQueue:
    """The adapter, both ends of it."""

    capabilities = MEMORY

    def __init__(self, server: Server) -> None:
        self.server = server

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        await asyncio.sleep(0.001)
        results: list[Result] = []
        failed = set[str]()
        for message in messages:
            result = self._publish(message, deadline)
            if message.stream in failed and type(result) is Sent:
                result = TryAgain("an earlier message of the stream failed")
            if type(result) is Sent:
                self.server.take(message)
            elif message.stream:
                failed.add(message.stream)
            results.append(result)
        return results

    def _publish(self, message: Message, deadline: float) -> Result:
        if not self.server.up:
            self.met()
            return BrokerDown("stopped")
        if time.monotonic() > deadline:
            return TryAgain("too late")
        if size_of(attributes(message), message.data) > self.capabilities.largest:
            return Refused("too large")
        return Sent()

    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        await self.check()
        if not self.server.queue:
            await asyncio.sleep(min(seconds, 0.001))
        some = [replace(each, starts=each.starts + 1) for each in self.server.queue[:limit]]
        del self.server.queue[:limit]
        self.server.held += some
        return some

    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        await self.check()
        done = {each.handle for each in deliveries}
        self.server.held = [each for each in self.server.held if each.handle not in done]

    async def check(self) -> None:
        """Raise BrokerUnavailable if the server is stopped. The caller has then let go of all that it had."""
        if not self.server.up:
            self.met()
            await self.let_go()
            raise BrokerUnavailable("stopped")

    def met(self) -> None:
        """The server was found stopped."""
        self.server.met.set()

    async def let_go(self) -> None:
        self.server.queue = sorted([*self.server.held, *self.server.queue], key=lambda each: each.handle)
        self.server.held = []

    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        await self.acknowledge([delivery])
        self.server.queue = sorted([*self.server.queue, delivery], key=lambda each: each.handle)

    async def close(self) -> None:
        await self.let_go()


Adapter = Callable[[], MemoryQueue]


class Memory:
    @pytest.fixture
    def server(self) -> Server:
        return Server()

    @pytest.fixture
    def open_broker(self, server: Server) -> Adapter:
        return lambda: MemoryQueue(server)

    open_source = open_broker

    @pytest.fixture
    def outage(self, server: Server) -> Server:
        return server


class TestMemoryBroker(Memory, brokers.BrokerSuite):
    """As the contract says."""


class TestMemorySource(Memory, brokers.SourceSuite):
    """As the contract says."""


# Ways to break the contract, each with a proof that finds it.


class LosesHeaders(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        return await super().publish([replace(message, headers={}) for message in messages], deadline)


class Latin(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        changed = [
            replace(each, stream=each.stream.encode("latin-1", "replace").decode("latin-1")) for each in messages
        ]
        return await super().publish(changed, deadline)


class LosesEmptyOnes(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        await super().publish([message for message in messages if message.data], deadline)
        return [Sent()] * len(messages)


class SwallowsLargeOnes(MemoryQueue):
    def _publish(self, message: Message, deadline: float) -> Result:
        return Sent()


class GoesOnAfterAFailure(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        results: list[Result] = []
        for place, message in enumerate(messages):
            results += await super().publish([message], deadline)
            if not self.server.up and place < len(messages) // 2:
                self.server.met.set()
                await asyncio.to_thread(self.server.back.wait)  # in the middle of the batch
        return results

    def met(self) -> None:
        """Not at the end of a batch, where nothing is left to overtake with."""


class Reverses(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        return (await super().publish(messages[::-1], deadline))[::-1]


class SendsLate(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        results = await super().publish(messages, deadline)
        for message in messages if results else ():
            asyncio.get_running_loop().call_later(0.0, self.server.take, message)
        return results


class StaysClosed(MemoryQueue):
    closed = False

    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        return [BrokerDown("closed")] * len(messages) if self.closed else await super().publish(messages, deadline)

    async def close(self) -> None:
        await super().close()
        self.closed = True


class SaysSentTooEarly(MemoryQueue):
    async def publish(self, messages: Sequence[Message], deadline: float) -> Sequence[Result]:
        await super().publish(messages, deadline)
        return [Sent()] * len(messages)


class AcknowledgesItself(MemoryQueue):
    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        some = await super().receive(limit, seconds)
        await self.acknowledge(some)
        return some


class ForgetsAcknowledgements(MemoryQueue):
    async def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        pass


class IgnoresTheLimit(MemoryQueue):
    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        return await super().receive(100, seconds)


class PostponesToTheEnd(MemoryQueue):
    async def postpone(self, delivery: Delivery, seconds: float) -> None:
        await self.acknowledge([delivery])
        self.server.queue.append(delivery)


class DoesNotCount(MemoryQueue):
    async def receive(self, limit: int, seconds: float) -> Sequence[Delivery]:
        return [replace(each, starts=1) for each in await super().receive(limit, seconds)]


class KeepsWhatWasLetGo(MemoryQueue):
    async def check(self) -> None:
        if not self.server.up:
            self.met()
            raise BrokerUnavailable("stopped")


PUBLISHING, CONSUMING = brokers.BrokerSuite, brokers.SourceSuite


@pytest.mark.parametrize(
    ("adapter", "proof"),
    [
        (LosesHeaders, PUBLISHING.test_a_message_arrives_as_it_was_sent),
        (Latin, PUBLISHING.test_a_message_arrives_as_it_was_sent),
        (LosesEmptyOnes, PUBLISHING.test_any_data_arrives),
        (SwallowsLargeOnes, PUBLISHING.test_a_message_that_is_too_large_is_refused_alone),
        (GoesOnAfterAFailure, PUBLISHING.test_a_message_that_is_too_large_is_refused_alone),
        (Reverses, PUBLISHING.test_the_order_of_each_stream_is_kept),
        (SendsLate, PUBLISHING.test_nothing_is_sent_after_the_deadline),
        (StaysClosed, PUBLISHING.test_it_opens_again_after_close),
        (AcknowledgesItself, CONSUMING.test_what_is_not_acknowledged_is_delivered_again),
        (ForgetsAcknowledgements, CONSUMING.test_what_is_acknowledged_is_never_delivered_again),
        (IgnoresTheLimit, CONSUMING.test_at_most_the_limit_is_delivered),
        (PostponesToTheEnd, CONSUMING.test_what_is_postponed_is_delivered_again_in_order),
        (DoesNotCount, CONSUMING.test_deliveries_are_counted_as_declared),
    ],
)  # fmt: skip
def test_a_broken_adapter_is_found(
    adapter: type[MemoryQueue], proof: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "PATIENCE", 0.3)
    server = Server()
    suite = brokers.BrokerSuite() if proof.__qualname__.startswith("BrokerSuite") else brokers.SourceSuite()
    bench = brokers._Bench(lambda: adapter(server), lambda: adapter(server))
    with pytest.raises((AssertionError, TimeoutError)):
        proof(suite, bench=bench)


@pytest.mark.parametrize(
    ("adapter", "proof"),
    [
        (SaysSentTooEarly, PUBLISHING.test_what_is_sent_while_the_broker_restarts_is_kept_in_order),
        (SaysSentTooEarly, PUBLISHING.test_a_broker_that_is_stopped_is_down),
        (GoesOnAfterAFailure, PUBLISHING.test_what_is_sent_while_the_broker_restarts_is_kept_in_order),
        (KeepsWhatWasLetGo, CONSUMING.test_a_source_survives_a_restart_of_the_broker),
    ],
)
def test_a_broken_adapter_is_found_by_an_outage(
    adapter: type[MemoryQueue], proof: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "PATIENCE", 0.3)
    server = Server()
    bench = brokers._Bench(lambda: adapter(server), lambda: adapter(server))
    with pytest.raises((AssertionError, TimeoutError)):
        proof(brokers.BrokerSuite(), bench=bench, outage=server)
