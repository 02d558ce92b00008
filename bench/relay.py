"""The relay on PostgreSQL: one relay empties an outbox into a broker that takes 5 ms for a batch.

*By hand* deletes 500 rows and sends them: the fastest way that keeps an order, with one sender only, and a crash loses
the batch. The time from a commit until the broker has the message is in the notes, at 300 commits a second.

Connections stay open from one turn to the next, and so does the producer of Kafka: what is measured is the rate of a
relay that runs. Only faststream-outbox starts and stops within a turn.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter, time
from typing import Any, Final
from uuid import uuid4

from bench.contest import Contestant, Match
from bench.peer_outboxes import FASTSTREAM, TXOUTBOX, faststream_relay, txoutbox_relay
from bench.turns import Turn
from semel import AsyncPostgresStore, PostgresStore
from semel.core.messaging.messages import Message, OutboxMode, attributes, lane_of
from semel.core.messaging.relaying import LARGE
from semel.messaging import AsyncOutbox, AsyncRelay, Outbox, Relay
from semel.messaging.brokers.kafka import KafkaBroker
from semel.messaging.ports import Broker, Capabilities, Sent
from semel.stores.postgres import migrate

__all__ = ["IN_A_LOG", "ONE_RELAY", "PRODUCER", "kafka_matches", "matches"]

ONE_RELAY: Final = "one relay, asyncio"
IN_A_LOG: Final = "one relay, asyncio, mode log"
PRODUCER: Final = "confluent-kafka alone"
BROKER: Final = 0.005
"""Seconds that the broker takes for a batch."""
BATCH: Final = 500
STREAMS: Final = 500
COMMITS: Final = 300
_FILL: Final = """
INSERT INTO semel_outbox (sequence, due, created, lane, starts, redrives, id, type, source, destination, stream,
    subject, content_type, headers, data)
SELECT (i - 1) / %s + 1, now(), now(), s.lane, 0, 0, gen_random_uuid()::text, 'paid', '/bench', '', s.name, '',
    'application/json', '{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}', '{"order":1}'
FROM generate_series(1, %s) AS i
JOIN unnest(%s::text[], %s::integer[]) WITH ORDINALITY AS s (name, lane, number) ON s.number = (i - 1) %% %s + 1
ORDER BY i
"""
_APPEND: Final = """
SELECT count(semel_add(gen_random_uuid()::text, 'paid', '{"order":1}', '/bench', '', s.name, '', 'application/json',
    '{"traceparent":"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}', 0, 0))
FROM generate_series(1, %s) AS i
JOIN unnest(%s::text[]) WITH ORDINALITY AS s (name, number) ON s.number = (i - 1) %% %s + 1
"""
_TAKE: Final = f"""
DELETE FROM semel_outbox WHERE position IN (SELECT position FROM semel_outbox ORDER BY position LIMIT {BATCH})
RETURNING id, type, data, source, destination, stream, sequence, subject, content_type, created, headers
"""


class SlowBroker:
    """Takes every batch in 5 ms, and remembers when each message came."""

    capabilities = Capabilities("Slow", ordered=True, pipelines=True, largest=1 << 20)

    def __init__(self) -> None:
        self.came: dict[str, float] = {}

    async def publish(self, messages: Sequence[Message], deadline: float) -> list[Sent]:
        await asyncio.sleep(BROKER)
        now = perf_counter()
        self.came.update((message.id, now) for message in messages)
        return [Sent()] * len(messages)

    async def close(self) -> None:
        pass


class WarmKafka(KafkaBroker):
    """Stays connected when a relay has ended. To connect takes longer than a turn."""

    async def close(self) -> None:
        pass


@contextmanager
def kafka_matches(url: str, kafka: str) -> Iterator[list[Match]]:
    """The relay to a topic of Kafka, beside the library that it uses.

    :param kafka: the URL of a topic, which may be filled.
    """
    import psycopg

    migrate(url)
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        broker = WarmKafka.from_url(kafka)
        drain = _drain_async(stack, url, lambda: broker)
        contestants = [
            Contestant(f"{PRODUCER}, from memory", "first", 1, _produce(kafka, False), yardstick=True),
            Contestant(f"{PRODUCER}, with a report for each", "first", 1, _produce(kafka, True)),
            Contestant(ONE_RELAY, "first", 1, _turn(connection, drain)),
            Contestant(IN_A_LOG, "first", 1, _turn_of_log(connection, url, "log", drain)),
        ]
        yield [Match("kafka", f"Relay to Kafka, batches of {BATCH}", contestants)]
    asyncio.run(KafkaBroker.close(broker))


def _produce(kafka: str, reports: bool) -> Turn:
    """The same messages, with the guarantees that the relay asks for.

    :param reports: whether to hear of each message that it was stored. Otherwise nobody knows which ones were not.
    """
    from confluent_kafka import Producer

    servers, _, topic = kafka.removeprefix("kafka://").partition("/")
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 1})
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    messages = [
        Message(str(uuid4()), "paid", b'{"order":1}', "/bench", "", f"order-{n}", n, time=time(), headers=trace)
        for n in range(1, STREAMS + 1)
    ]
    stored: list[None] = []

    def hear(error: Any, message: Any) -> None:
        assert error is None
        stored.append(None)

    def turn(seconds: float) -> float:
        count = max(2 * BATCH, int(seconds * 40_000))
        stored.clear()
        began = perf_counter()
        for number in range(count):
            message = messages[number % STREAMS]
            headers: Any = list(attributes(message).items())
            if reports:
                producer.produce(topic, message.data, key=message.stream, headers=headers, on_delivery=hear)
            else:
                producer.produce(topic, message.data, key=message.stream, headers=headers)
            producer.poll(0)
        producer.flush()
        rate = count / (perf_counter() - began)
        assert len(stored) == (count if reports else 0)
        return rate

    return turn


@contextmanager
def matches(url: str) -> Iterator[list[Match]]:
    """On a database that may be filled."""
    import psycopg

    migrate(url)
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        drain = _drain_async(stack, url, SlowBroker)
        contestants = [
            Contestant("by hand: delete and send", "first", 1, _turn(connection, _by_hand(stack, url)), yardstick=True),
            Contestant(ONE_RELAY, "first", 1, _turn(connection, drain)),
            Contestant("one relay, threads", "first", 1, _turn(connection, _drain(stack, url))),
            Contestant(IN_A_LOG, "first", 1, _turn_of_log(connection, url, "log", drain)),
            Contestant("one relay, asyncio, mode wal", "first", 1, _turn_of_log(connection, url, "wal", drain)),
        ]
        peers = {
            TXOUTBOX: txoutbox_relay(stack, url, connection, BATCH, STREAMS, BROKER),
            FASTSTREAM: faststream_relay(url, connection, BATCH, BROKER),
        }
        contestants += [Contestant(name, "first", 1, turn, peer=True) for name, turn in peers.items() if turn]
        yield [Match("relay", f"Relay, batches of {BATCH}", contestants, [asyncio.run(_latency(url))])]


def _turn(connection: Any, empty: Callable[[], object]) -> Turn:
    streams = [f"order-{number}" for number in range(STREAMS)]
    lanes = [lane_of(stream, "") for stream in streams]

    def turn(seconds: float) -> float:
        count = max(2 * BATCH, int(seconds * 40_000))
        connection.execute("TRUNCATE semel_outbox")
        connection.execute(_FILL, (STREAMS, count, streams, lanes, STREAMS))
        connection.execute("ANALYZE semel_outbox")
        began = perf_counter()
        empty()
        rate = count / (perf_counter() - began)
        assert connection.execute("SELECT count(*) FROM semel_outbox").fetchone() == (0,)
        return rate

    return turn


def _turn_of_log(connection: Any, url: str, mode: OutboxMode, drain: Callable[[], int]) -> Turn:
    streams = [f"order-{number}" for number in range(STREAMS)]

    def switch(to: OutboxMode) -> None:
        store = PostgresStore(url, listen=False)
        Outbox(store).switch(to)
        store.close()

    def turn(seconds: float) -> float:
        count = max(2 * BATCH * LARGE, int(seconds * 100_000))
        switch(mode)
        connection.execute(_APPEND, (count, streams, STREAMS))
        connection.execute("ANALYZE semel_log")
        began = perf_counter()
        sent = drain()
        rate = count / (perf_counter() - began)
        assert sent == count
        switch("queue")
        return rate

    return turn


def _by_hand(stack: ExitStack, url: str) -> Callable[[], None]:
    import asyncpg

    runner = stack.enter_context(asyncio.Runner())
    connection = runner.run(asyncpg.connect(url))
    stack.callback(lambda: runner.run(connection.close()))

    async def empty() -> None:
        while await connection.fetch(_TAKE):  # noqa: ASYNC110  the sleep is the broker
            await asyncio.sleep(BROKER)

    return lambda: runner.run(empty())


def _drain(stack: ExitStack, url: str) -> Callable[[], int]:
    store = PostgresStore(url, listen=False)
    stack.callback(store.close)
    return lambda: Relay(store, SlowBroker(), batch=BATCH).drain().sent


def _drain_async(stack: ExitStack, url: str, broker: Callable[[], Broker]) -> Callable[[], int]:
    """A relay on connections that stay open from one turn to the next: to connect takes longer than a batch."""
    runner = stack.enter_context(asyncio.Runner())

    async def open_store() -> AsyncPostgresStore:
        return AsyncPostgresStore(url, driver="asyncpg", listen=False)

    store = runner.run(open_store())
    stack.callback(lambda: runner.run(store.close()))

    async def drain() -> int:
        return (await AsyncRelay(store, broker(), batch=BATCH).drain()).sent

    return lambda: runner.run(drain())


async def _latency(url: str) -> str:
    import asyncpg

    store, broker = AsyncPostgresStore(url, driver="asyncpg"), SlowBroker()
    outbox = AsyncOutbox(store)
    connection = await asyncpg.connect(url)
    await connection.execute("TRUNCATE semel_outbox")
    committed: dict[str, float] = {}
    async with AsyncRelay(store, broker):
        for number in range(COMMITS):
            async with connection.transaction():
                id = await outbox.add(connection, "paid", {"order": number}, stream=f"order-{number % STREAMS}")
            committed[id] = perf_counter()
            await asyncio.sleep(1 / 300)
        while len(broker.came) < COMMITS:  # noqa: ASYNC110  the relay runs in this loop
            await asyncio.sleep(0.01)
    await connection.close()
    await store.close()
    waits = [1000 * (broker.came[id] - when) for id, when in committed.items()][COMMITS // 10 :]
    median, slow = statistics.median(waits), statistics.quantiles(waits, n=100)[98]
    return (
        f"from the commit until the broker has it, its {1000 * BROKER:.0f} ms included: "
        f"{median:.1f} ms at the median, {slow:.1f} ms for 99 in 100"
    )
