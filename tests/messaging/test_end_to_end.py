"""From the outbox of one service to the effects in another, on real brokers, with a poison message on the way."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import SQLiteStore
from semel.messaging import DeadLetters, Inbox, Message, Outbox, Relay, open_broker, open_source
from semel.messaging.inbox import Consumer

BROKERS = [
    pytest.param(name, marks=[pytest.mark.server, getattr(pytest.mark, name)])
    for name in ("kafka", "rabbitmq", "redis")
]


class Refused(Exception):
    """The consumer's own error."""


class Shop:
    """A database with an outbox and an inbox. Its consumer fails twice at `b-2`, and at `a-2` until it is repaired."""

    def __init__(self, folder: Path) -> None:
        self.file = str(folder / "shop.db")
        self.store = SQLiteStore(self.file)
        self.conn = sqlite3.connect(self.file)
        self.conn.execute("CREATE TABLE applied (place INTEGER PRIMARY KEY, id TEXT)")
        self.repaired = False
        self.failures: Counter[str] = Counter()

        @Inbox(self.store).handler(
            "ledger", connect=lambda: contextlib.closing(sqlite3.connect(self.file)), ordered=True, tries=3, pause=0.01
        )
        def apply(message: Message, connection: Any) -> None:
            connection.execute("INSERT INTO applied (id) VALUES (?)", (message.id,))
            if message.id == "a-2" and not self.repaired:
                raise Refused
            if message.id == "b-2" and self.failures[message.id] < 2:
                self.failures[message.id] += 1
                raise Refused

        self.consumer: Consumer = apply

    def add(self, stream: str, first: int, last: int) -> None:
        for number in range(first, last + 1):
            with self.conn:
                Outbox(self.store).add(self.conn, "paid", {"n": number}, id=f"{stream}-{number}", stream=stream)

    def applied(self) -> dict[str, list[int]]:
        streams: defaultdict[str, list[int]] = defaultdict(list)
        for (id,) in self.conn.execute("SELECT id FROM applied ORDER BY place"):
            streams[id[0]].append(int(id[2:]))
        return streams

    def close(self) -> None:
        self.conn.close()
        self.store.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    shop = Shop(tmp_path)
    yield shop
    shop.close()


@pytest.fixture(params=BROKERS)
def urls(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Where the relay publishes to, and where the consumer reads from."""
    if request.param == "kafka":
        topic = request.getfixturevalue("kafka").topic()
        return topic, f"{topic}?group=ledger"
    if request.param == "rabbitmq":
        queue = request.getfixturevalue("rabbitmq").queue()
        return queue, queue
    server = request.getfixturevalue("redis_url")
    return f"{server}?stream=orders", f"{server}?stream=orders&group=ledger"


def test_streams_are_applied_in_order_and_a_redrive_mends_the_one_that_was_parked(
    shop: Shop, urls: tuple[str, str]
) -> None:
    def deliver(expected: int) -> None:
        """Until so many messages are applied or dead. A group may take a while to form."""
        Relay(shop.store, open_broker(urls[0])).drain()
        until = time.monotonic() + 60
        while True:
            shop.consumer.drain(open_source(urls[1]), idle=1)
            done = sum(map(len, shop.applied().values())) + DeadLetters(shop.store).count()
            if done >= expected or time.monotonic() > until:
                assert done == expected
                return

    for stream in "abc":
        shop.add(stream, 1, 4)
    deliver(12)
    assert shop.applied() == {"a": [1], "b": [1, 2, 3, 4], "c": [1, 2, 3, 4]}
    letters = DeadLetters(shop.store)
    assert [letter.message.id for letter in letters.list()] == ["a-2", "a-3", "a-4"]
    assert letters.list()[0].reason == "Refused()"
    shop.repaired = True
    shop.add("a", 5, 6)
    assert letters.redrive() == 3
    deliver(14)
    assert shop.applied()["a"] == [1, 2, 3, 4, 5, 6]
    assert letters.redrive() == letters.count() == 0
