"""The inbox inside FastStream: with its test broker, and with RabbitMQ and a subscriber that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import aiosqlite
import pytest

from semel import AsyncSQLiteStore
from semel.core.messaging.messages import Message
from semel.errors import ConfigurationError
from semel.messaging import AsyncInbox, AsyncOutbox, open_broker
from semel.messaging.ports import Sent
from semel.stores import sqlite
from tests.servers import RabbitMQServer

faststream = pytest.importorskip("faststream")
rabbit = pytest.importorskip("faststream.rabbit")
integration = pytest.importorskip("semel.messaging.faststream")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = str(tmp_path / "shop.db")
    sqlite.migrate(url)
    with contextlib.closing(sqlite3.connect(url)) as connection:
        connection.execute("CREATE TABLE applied (id text)")
    return url


def rows(database: str, statement: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return connection.execute(statement).fetchall()


class Shop:
    """A router with a subscriber of the queue ``orders``, and what was published to ``answers``."""

    def __init__(self, database: str, **settings: Any) -> None:
        self.broker = rabbit.RabbitBroker()
        self.inbox = AsyncInbox(AsyncSQLiteStore(database))
        self.outbox = AsyncOutbox(self.inbox.store)
        self.middleware = integration.InboxMiddleware(
            self.inbox, "ledger", connect=lambda: aiosqlite.connect(database), pause="1ms", **settings
        )
        self.router = rabbit.RabbitRouter(middlewares=[self.middleware])
        self.answers: list[Any] = []
        self.decision: Callable[[], None] = lambda: None

        @self.router.subscriber("orders")
        @self.router.publisher("answers")
        async def book(entry: dict[str, Any], connection: Annotated[Any, faststream.Context()]) -> str:
            await connection.execute("INSERT INTO applied (id) VALUES (?)", (entry["id"],))
            await self.outbox.add(connection, "booked", entry)
            self.decision()
            return f"booked {entry['id']}"

        @self.broker.subscriber("answers")
        async def note(answer: str) -> None:
            self.answers.append(answer)

    def run(self, main: Callable[[], Awaitable[None]]) -> None:
        async def start() -> None:
            self.broker.include_router(self.router)
            async with rabbit.TestRabbitBroker(self.broker):
                await main()
            await self.inbox.store.close()

        asyncio.run(start())

    async def send(self, id: str, queue: str = "orders") -> None:
        await self.broker.publish({"id": id}, queue, headers={"ce-id": id, "idempotency-root": "r-1"})


def test_a_repeat_is_skipped_and_publishes_nothing(database: str) -> None:
    shop = Shop(database)

    async def main() -> None:
        for id in ("m-1", "m-1", "m-2"):
            await shop.send(id)

    shop.run(main)
    assert rows(database, "SELECT id FROM applied") == [("m-1",), ("m-2",)]
    assert rows(database, "SELECT consumer, id FROM semel_inbox") == [("ledger", "m-1"), ("ledger", "m-2")]
    assert shop.answers == ["booked m-1", "booked m-2"]
    headers = [json.loads(text) for (text,) in rows(database, "SELECT headers FROM semel_outbox")]
    assert [(each["causation-id"], each["idempotency-root"]) for each in headers] == [("m-1", "r-1"), ("m-2", "r-1")]


def test_a_decision_of_the_subscriber_rolls_back(database: str) -> None:
    from faststream.exceptions import RejectMessage

    shop = Shop(database)

    def reject() -> None:
        raise RejectMessage

    shop.decision = reject

    async def main() -> None:
        await shop.send("m-1")

    shop.run(main)
    assert rows(database, "SELECT id FROM applied") == rows(database, "SELECT id FROM semel_inbox") == []
    assert rows(database, "SELECT id FROM semel_dead_letter") == []
    assert shop.answers == []


def test_a_message_without_an_id_is_a_dead_letter(database: str) -> None:
    """FastStream makes up an id for it, which is another one at the next delivery."""
    shop = Shop(database)

    async def main() -> None:
        await shop.broker.publish({"id": "x"}, "orders")

    shop.run(main)
    assert rows(database, "SELECT id FROM applied") == []
    ((reason,),) = rows(database, "SELECT reason FROM semel_dead_letter")
    assert "has no id" in reason


def test_the_id_may_be_elsewhere(database: str) -> None:
    shop = Shop(database, message_id=lambda msg: json.loads(msg.body)["id"])

    async def main() -> None:
        for _ in range(2):
            await shop.broker.publish({"id": "x"}, "orders")

    shop.run(main)
    assert rows(database, "SELECT id FROM applied") == [("x",)]


def test_two_subscribers_of_one_middleware_are_refused(database: str) -> None:
    shop = Shop(database)

    @shop.router.subscriber("others")
    async def other(entry: dict[str, Any]) -> None: ...

    async def main() -> None:
        await shop.send("m-1")
        with pytest.raises(ConfigurationError, match="for one subscriber"):
            await shop.send("m-1", "others")

    shop.run(main)


def test_a_message_that_is_acknowledged_too_soon_is_refused(database: str) -> None:
    shop = Shop(database)

    @shop.router.subscriber("others", ack_policy=faststream.AckPolicy.ACK_FIRST)
    async def other(entry: dict[str, Any]) -> None: ...

    async def main() -> None:
        with pytest.raises(ConfigurationError, match="MANUAL"):
            await shop.send("m-1", "others")

    shop.run(main)


@pytest.mark.server
@pytest.mark.rabbitmq
@pytest.mark.process
def test_a_killed_subscriber_applies_every_message_once(
    database: str, rabbitmq: RabbitMQServer, tmp_path: Path
) -> None:
    url = rabbitmq.queue(x_single_active_consumer=False)
    ids = ("m-1", "m-2", "m-3", "m-1", "poison", "m-4")

    async def publish() -> None:
        broker = open_broker(url)
        messages = [Message(id, "paid", json.dumps({"id": id}).encode(), "/shop") for id in ids]
        assert await broker.publish(messages, time.monotonic() + 30) == [Sent()] * len(ids)
        await broker.close()

    asyncio.run(publish())
    marks = tmp_path / "marks"
    marks.mkdir()
    queue = url.partition("queue=")[2]
    command = [sys.executable, "-m", "tests.messaging.faststream_worker", rabbitmq.url, queue, database, str(marks)]
    deaths = subprocess.run(command, cwd=ROOT, timeout=100, check=True, stdout=subprocess.PIPE).stdout
    assert int(deaths) == 2
    assert {mark.name for mark in marks.iterdir()} == {"acknowledge", "effect", "failure"}
    assert sorted(rows(database, "SELECT id FROM applied")) == [("m-1",), ("m-2",), ("m-3",), ("m-4",)]
    assert rows(database, "SELECT id, reason FROM semel_dead_letter") == [
        ("poison", "ValueError('this message fails always')")
    ]
