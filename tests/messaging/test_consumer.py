"""Consumers on every database: a message and its effect commit together, and what cannot be applied is given up."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from semel import AsyncSemel, AsyncSQLiteStore, MemoryStore, Semel, SQLiteStore
from semel.core.lineage import Lineage
from semel.core.messaging.messages import (
    BuryMessage,
    CountStart,
    ForgetStarts,
    JoinRelays,
    Message,
    SeeMessages,
    StartMessages,
    attributes,
    read_message,
)
from semel.errors import ConfigurationError, PolicyError
from semel.messaging import AsyncDeadLetters, AsyncInbox, AsyncRelay, DeadLetters, Inbox, Relay
from semel.messaging.aio_outbox import AsyncOutbox
from semel.messaging.outbox import Outbox
from semel.observe.events import Event
from tests.messaging.desks import DIALECTS, KINDS, Desk
from tests.messaging.recording_broker import RecordingBroker
from tests.messaging.sources import ListSource
from tests.transactional.kinds import mysql_parameters

SERVERS = {"sqlite": (), "postgres": ("postgres", "server"), "mysql": ("mariadb", "server")}
RELAY = bytes(16)


class Refused(Exception):
    """The handler's own error."""


def marked(kind: str) -> Any:
    dialect = "sqlite" if "sqlite" in kind else "mysql" if kind in ("mysql", "asyncmy") else "postgres"
    return pytest.param(kind, marks=[getattr(pytest.mark, name) for name in SERVERS[dialect]])


class Books:
    """A consumer called ledger. Its handler writes the message's id, adds a message to the outbox, and may fail."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.fails: dict[str, int] = {}
        """How often the handler fails, by message."""
        self.batches: list[list[str]] = []
        """The messages of each call of a handler of batches."""
        self.events: list[Event] = []
        self.sync = desk.kind in DIALECTS
        inbox: Any = (Inbox if self.sync else AsyncInbox)(desk.store)
        outbox: Any = (Outbox if self.sync else AsyncOutbox)(desk.store)
        connect = self.connect if self.sync else self.connect_async

        def make(**settings: Any) -> Any:
            decorate = inbox.handler("ledger", connect=connect, on_event=self.events.append, **settings)

            def apply(message: Message, connection: Any) -> None:
                cursor = connection.cursor()
                cursor.execute(f"INSERT INTO applied (id) VALUES ('{message.id}')")
                outbox.add(connection, "booked", {"of": message.id})
                self.check(message)

            async def apply_async(message: Message, connection: Any) -> None:
                statement = f"INSERT INTO applied (id) VALUES ('{message.id}')"
                if desk.kind == "asyncmy":
                    async with connection.cursor() as cursor:
                        await cursor.execute(statement)
                else:
                    await connection.execute(statement)
                await outbox.add(connection, "booked", {"of": message.id})
                self.check(message)

            def apply_all(messages: list[Message], connection: Any) -> None:
                self.batches.append([message.id for message in messages])
                for message in messages:
                    apply(message, connection)

            async def apply_all_async(messages: list[Message], connection: Any) -> None:
                self.batches.append([message.id for message in messages])
                for message in messages:
                    await apply_async(message, connection)

            if settings.get("in_batches"):
                return decorate(apply_all if self.sync else apply_all_async)
            return decorate(apply if self.sync else apply_async)

        self.make = make

    def check(self, message: Message) -> None:
        left = self.fails.get(message.id, 0)
        if left:
            self.fails[message.id] = left - 1
            raise Refused(message.id)

    @contextlib.contextmanager
    def connect(self) -> Iterator[Any]:
        if self.desk.kind == "sqlite":
            with contextlib.closing(sqlite3.connect(self.desk.url)) as connection:
                yield connection
            return
        with contextlib.closing(self.desk.connect()) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def connect_async(self) -> AsyncIterator[Any]:
        url, kind = self.desk.url, self.desk.kind
        if kind == "async-sqlite":
            import aiosqlite

            async with aiosqlite.connect(url) as connection:
                yield connection
        elif kind == "asyncpg":
            import asyncpg

            connection = await asyncpg.connect(url)
            try:
                yield connection
            finally:
                await connection.close()
        elif kind == "async-psycopg":
            import psycopg

            async with await psycopg.AsyncConnection.connect(url) as other:
                yield other
        else:
            import asyncmy

            connection = await asyncmy.connect(**mysql_parameters(url))
            try:
                yield connection
            finally:
                await connection.ensure_closed()

    def consume(self, source: ListSource, **settings: Any) -> Any:
        consumer = self.make(pause=0.001, **settings)
        if self.sync:
            return consumer.drain(source)

        async def drain() -> Any:
            return await consumer.drain(source)

        return self.desk._runner.run(drain())  # type: ignore[union-attr]

    def redrive(self) -> list[Message]:
        """Redrive everything, and return what a relay would send now, without the messages of the handler."""
        letters: Any = (DeadLetters if self.sync else AsyncDeadLetters)(self.desk.store)
        if self.sync:
            letters.redrive()
        else:

            async def redrive() -> None:
                await letters.redrive()

            self.desk._runner.run(redrive())  # type: ignore[union-attr]
        self.desk.execute(JoinRelays(RELAY, 60.0))
        return [one for one in self.desk.execute(StartMessages(RELAY, 100, 60.0)) if one.type != "booked"]

    @property
    def applied(self) -> list[str]:
        return [row[0] for row in self.desk.sql("SELECT id FROM applied ORDER BY place")]

    @property
    def dead(self) -> list[tuple[Any, ...]]:
        return self.desk.sql("SELECT id, reason, starts FROM semel_dead_letter ORDER BY position")

    @property
    def known(self) -> list[str]:
        return [row[0] for row in self.desk.sql("SELECT id FROM semel_inbox ORDER BY id")]


def open_books(desk: Desk) -> Books:
    for table in ("inbox", "inbox_stream", "inbox_start"):
        desk.sql(f"DELETE FROM semel_{table}")
    place = {
        "sqlite": "INTEGER PRIMARY KEY", "postgres": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "mysql": "bigint AUTO_INCREMENT PRIMARY KEY",
    }[desk.dialect]  # fmt: skip
    desk.sql(f"CREATE TABLE IF NOT EXISTS applied (place {place}, id varchar(100) NOT NULL)")
    desk.sql("DELETE FROM applied")
    return Books(desk)


@pytest.fixture(params=[marked(kind) for kind in KINDS])
def books(request: pytest.FixtureRequest, open_desk: Callable[[str], Desk]) -> Books:
    return open_books(open_desk(request.param))


@pytest.fixture
def on_sqlite(open_desk: Callable[[str], Desk]) -> Books:
    return open_books(open_desk("sqlite"))


def message(id: str, stream: str = "", sequence: int = 0, **fields: Any) -> Message:
    return Message(id, "paid", b"{}", "/shop", "orders", stream, sequence, **fields)


def stream_of(first: int, last: int) -> list[Message]:
    return [message(f"m-{number}", "o-7", number) for number in range(first, last + 1)]


def test_each_message_is_applied_once(books: Books) -> None:
    source = ListSource([message("m-1"), message("m-2"), message("m-1")])
    report = books.consume(source)
    assert books.applied == ["m-1", "m-2"]
    assert (report.applied, report.repeated, report.failed, report.dead) == (2, 1, 0, 0)
    assert source.acknowledged == ["m-1", "m-2", "m-1"]


def test_a_handler_that_raises_after_it_has_written_is_rolled_back_and_retried(books: Books) -> None:
    books.fails = {"m-1": 2, "m-2": 9}
    source = ListSource([message("m-1"), message("m-2"), message("m-3")])
    report = books.consume(source, tries=3)
    assert sorted(books.applied) == ["m-1", "m-3"]
    assert (report.applied, report.failed, report.dead) == (2, 4, 1)
    assert books.dead == [("m-2", "Refused('m-2')", 3)]
    assert books.known == ["m-1", "m-3"]  # a redrive can apply it
    assert sorted(source.acknowledged) == ["m-1", "m-2", "m-3"]
    # What the runs that failed had added to the outbox went with their transactions.
    assert len(books.desk.sql("SELECT id FROM semel_outbox")) == 2
    assert books.desk.sql("SELECT id FROM semel_inbox_start") == []
    books.fails = {}
    assert books.consume(ListSource(books.redrive())).applied == 1
    assert sorted(books.applied) == ["m-1", "m-2", "m-3"]
    assert books.dead == []


def test_an_error_whose_text_no_column_holds_does_not_block_the_consumer(books: Books) -> None:
    class Odd(Refused):
        def __repr__(self) -> str:
            return "odd \ud800\x00 text"

    def fail(message: Message) -> None:
        raise Odd

    books.check = fail  # type: ignore[method-assign]
    assert books.consume(ListSource([message("m-1")]), tries=1).dead == 1
    assert books.dead == [("m-1", "odd ? text", 1)]


def test_a_time_that_no_calendar_has_neither_blocks_the_consumer_nor_the_relay(books: Books) -> None:
    times = ["9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59.999999Z", "0001-01-01T00:00:00+12:00", "0001-01-01"]
    messages = [
        read_message({"ce-id": f"m-{at}", "ce-type": "paid", "ce-time": time}, b"{}", "orders")
        for at, time in enumerate(times)
    ]
    books.fails = dict.fromkeys([one.id for one in messages], 1)
    assert books.consume(ListSource(messages), tries=1).dead == len(times)
    again = books.redrive()
    assert sorted(attributes(one)["ce-id"] for one in again) == [one.id for one in messages]
    assert books.consume(ListSource(again)).applied == len(times)


def test_a_stream_is_applied_in_order_and_parked_with_its_poison(books: Books) -> None:
    books.fails = {"m-2": 9}
    source = ListSource([*stream_of(1, 4), message("x-1", "o-8", 1)])
    report = books.consume(source, ordered=True, tries=2)
    assert sorted(books.applied) == ["m-1", "x-1"]
    assert (report.applied, report.dead) == (2, 3)
    assert [(id, reason) for id, reason, _ in books.dead] == [
        ("m-2", "Refused('m-2')"),
        ("m-3", "its stream is parked since its message 2 was given up"),
        ("m-4", "its stream is parked since its message 2 was given up"),
    ]
    books.consume(ListSource(stream_of(5, 5)), ordered=True)  # it is sent while the stream is parked
    assert len(books.dead) == 4
    books.fails = {}
    again = books.redrive()
    assert [one.id for one in again] == ["m-2", "m-3", "m-4", "m-5"]
    books.consume(ListSource([*again, *stream_of(6, 6)]), ordered=True)
    assert [id for id in books.applied if id != "x-1"] == ["m-1", "m-2", "m-3", "m-4", "m-5", "m-6"]
    assert books.dead == []


def test_a_stream_that_has_gone_on_is_not_parked_by_a_process_that_wakes_up_late(books: Books) -> None:
    """It was about to give the message up when another process got it, and applied it."""
    books.consume(ListSource(stream_of(1, 3)), ordered=True)
    books.desk.execute(BuryMessage("ledger", stream_of(2, 2)[0], "late", 10, park=True))
    books.consume(ListSource(stream_of(4, 4)), ordered=True)
    assert books.applied == ["m-1", "m-2", "m-3", "m-4"]


def test_a_stream_is_parked_again_at_an_earlier_message(books: Books) -> None:
    books.fails = {"m-1": 9}
    books.consume(ListSource(stream_of(1, 5)), ordered=True, tries=2)
    assert [row[0] for row in books.dead] == ["m-1", "m-2", "m-3", "m-4", "m-5"]
    books.desk.sql("DELETE FROM semel_dead_letter WHERE id IN ('m-1', 'm-2', 'm-3')")  # as a redrive with a limit
    books.fails = {"m-2": 9}
    books.consume(ListSource(stream_of(1, 3)), ordered=True, tries=2)
    assert books.applied == ["m-1"]  # the stream is not only parked at m-4
    assert sorted(row[0] for row in books.dead) == ["m-2", "m-3", "m-4", "m-5"]
    books.fails = {}
    books.consume(ListSource([*books.redrive(), *stream_of(6, 6)]), ordered=True)
    assert books.applied == ["m-1", "m-2", "m-3", "m-4", "m-5", "m-6"]
    assert books.dead == []


def test_a_stream_is_not_parked_at_a_message_that_was_applied_while_a_later_one_is_dead(books: Books) -> None:
    """A redrive of such a message is a repeat, so nothing would free the stream."""
    books.fails = {"m-1": 9}
    books.consume(ListSource(stream_of(1, 4)), ordered=True, tries=2)
    books.desk.sql("DELETE FROM semel_dead_letter WHERE id IN ('m-1', 'm-2', 'm-3')")  # as a redrive with a limit
    books.fails = {}
    books.consume(ListSource(stream_of(1, 2)), ordered=True)
    books.desk.execute(BuryMessage("ledger", stream_of(2, 2)[0], "late", 10, park=True))  # by a process that is late
    again = books.redrive()
    assert [one.id for one in again] == ["m-2", "m-4"]
    books.consume(ListSource([again[0], *stream_of(3, 3), again[1], *stream_of(5, 5)]), ordered=True)
    assert books.applied == ["m-1", "m-2", "m-3", "m-4", "m-5"]
    assert books.dead == []


def test_a_message_that_is_given_up_while_its_stream_is_freed_is_not_skipped(on_sqlite: Books) -> None:
    books, letters = on_sqlite, DeadLetters(on_sqlite.desk.store)
    books.fails = {"m-1": 9}
    books.consume(ListSource(stream_of(1, 1)), ordered=True, tries=1)
    purged = 0

    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        nonlocal purged
        with contextlib.closing(sqlite3.connect(books.desk.url)) as connection:
            yield connection
        purged += letters.purge()  # the consumer has just found that the stream is parked

    @Inbox(books.desk.store).handler("ledger", connect=connect, ordered=True)
    def apply(message: Message, connection: Any) -> None:
        connection.execute(f"INSERT INTO applied (id) VALUES ('{message.id}')")

    assert apply.drain(ListSource(stream_of(2, 2)), idle=0).dead == 1
    assert purged == 1
    books.consume(ListSource(stream_of(3, 3)), ordered=True)
    assert books.applied == []
    books.consume(ListSource([*books.redrive(), *stream_of(4, 4)]), ordered=True)
    assert books.applied == ["m-2", "m-3", "m-4"]


def test_after_a_failure_the_later_messages_of_the_stream_wait(books: Books) -> None:
    books.fails = {"m-1": 2}
    report = books.consume(ListSource([*stream_of(1, 3), message("x-1", "o-8", 1)]), ordered=True)
    assert books.applied == ["x-1", "m-1", "m-2", "m-3"]
    assert report.failed == 2


def test_a_batch_is_applied_in_one_transaction_and_falls_apart_when_it_fails(books: Books) -> None:
    source = ListSource([message("m-1"), message("m-2"), message("m-1"), message("m-3")])
    report = books.consume(source, in_batches=True)
    assert books.batches == [["m-1", "m-2", "m-3"]]
    assert (report.applied, report.repeated, report.failed) == (3, 1, 0)
    assert source.acknowledged == ["m-1", "m-2", "m-1", "m-3"]
    books.fails = {"m-5": 99}
    report = books.consume(
        ListSource([message("m-3"), message("m-4"), message("m-5"), message("m-6")]), in_batches=True, tries=2
    )
    assert books.batches[1:] == [["m-4", "m-5", "m-6"], ["m-4"], ["m-5"], ["m-6"], ["m-5"]]
    assert books.applied == ["m-1", "m-2", "m-3", "m-4", "m-6"]
    assert books.dead == [("m-5", "Refused('m-5')", 2)]
    assert (report.applied, report.repeated, report.failed, report.dead) == (2, 1, 1, 1)
    assert len(books.desk.sql("SELECT id FROM semel_outbox")) == 5
    assert books.desk.sql("SELECT id FROM semel_inbox_start") == []


def test_batches_keep_the_order_of_streams_and_park_them(books: Books) -> None:
    settings = {"ordered": True, "in_batches": True, "tries": 2}
    books.consume(ListSource([*stream_of(1, 3), message("x-1", "o-8", 1), message("y"), *stream_of(5, 5)]), **settings)
    assert books.batches == [["m-1", "m-2", "m-3", "x-1", "y", "m-5"]]
    (gap,) = [event for event in books.events if event.name == "stream_gap"]
    assert (gap.key, gap.missing) == ("m-5", 1)  # type: ignore[attr-defined]
    books.fails = {"m-6": 9}
    books.consume(ListSource([*stream_of(4, 4), *stream_of(6, 8), message("x-2", "o-8", 2)]), **settings)
    assert books.applied == ["m-1", "m-2", "m-3", "x-1", "y", "m-5", "x-2"]
    assert [row[0] for row in books.dead] == ["m-4", "m-6", "m-7", "m-8"]
    books.fails = {}
    books.desk.sql("DELETE FROM semel_dead_letter WHERE id = 'm-4'")
    again = books.redrive()
    books.consume(ListSource([*again, *stream_of(9, 9)]), **settings)
    assert books.applied[7:] == ["m-6", "m-7", "m-8", "m-9"]
    assert books.dead == []


def test_a_start_that_was_not_the_fault_of_the_message_is_taken_back(books: Books) -> None:
    count = CountStart("ledger", "m-1")
    assert [books.desk.execute(count) for _ in range(2)] == [1, 2]
    books.desk.execute(ForgetStarts("ledger", ("m-1", "m-2"), only_last=True))
    assert books.desk.execute(SeeMessages("ledger", ("m-1", "m-2"))) == {"m-1"}
    assert books.desk.execute(count) == 2


def test_an_offset_commits_with_the_effect_and_never_moves_backwards(books: Books) -> None:
    def offsets() -> list[tuple[Any, ...]]:
        of_places = "FROM semel_inbox_stream WHERE consumer <> '~' ORDER BY stream"
        return books.desk.sql(f"SELECT consumer, stream, sequence {of_places}")

    books.fails = {"m-3": 1}
    source = ListSource([message(f"m-{number}") for number in range(1, 5)], place="log/0", first=10)
    assert books.consume(source, store_offsets=True).applied == 4
    assert books.applied == ["m-1", "m-2", "m-3", "m-4"]
    assert offsets() == [("~ledger", "log/0", 14)]
    # A process that has lost the partition, and does not know it yet, applies what nobody else has.
    late = ListSource([message("m-5"), message("m-6")], place="log/0", first=3)
    assert books.consume(late, store_offsets=True, in_batches=True).applied == 2
    assert offsets() == [("~ledger", "log/0", 14)]
    if books.sync:
        assert source.stored(["log/0", "log/1"]) == {"log/0": 14}
    else:

        async def read() -> Any:
            other = ListSource([], place="log/0")
            await books.make(store_offsets=True).drain(other)
            return await asyncio.to_thread(other.stored, ["log/0", "log/1"])

        assert books.desk._runner.run(read()) == {"log/0": 14}  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="cannot begin at a stored offset"):
        books.consume(ListSource([]), store_offsets=True)


def test_what_a_handler_emits_has_the_same_id_in_every_run(books: Books) -> None:
    headers = {"idempotency-root": "order-1", "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    books.consume(ListSource([message("m-1", headers=headers)]))
    found = books.desk.sql("SELECT id, headers FROM semel_outbox")
    books.desk.sql("DELETE FROM semel_outbox")
    books.desk.sql("DELETE FROM semel_inbox")  # as if the first run had not committed
    books.consume(ListSource([message("m-1", headers=headers)]))
    assert books.desk.sql("SELECT id, headers FROM semel_outbox") == found
    assert '"causation-id":"m-1"' in found[0][1].replace(": ", ":")
    assert '"idempotency-root":"order-1"' in found[0][1].replace(": ", ":")
    assert headers["traceparent"] in found[0][1]


def test_a_message_without_an_id_is_a_dead_letter(on_sqlite: Books) -> None:
    books = on_sqlite
    strange = [message(""), message("x" * 300), message("a\nb", subject="c\nd", headers={"UP": "\x00"})]
    source = ListSource([*strange, message("m-1"), message("")])
    report = books.consume(source)
    assert (report.applied, report.dead) == (1, 4)
    assert len(source.acknowledged) == 5
    assert len(books.dead) == 3  # the same message has the same id again
    assert "the message has no id" in books.dead[0][1]
    assert books.consume(ListSource(books.redrive())).applied == 3


def test_a_message_that_comes_too_late_is_no_repeat_and_is_not_lost(on_sqlite: Books) -> None:
    books = on_sqlite
    first, second, third = stream_of(1, 3)
    books.consume(ListSource([first, third, second, first]), ordered=True)
    assert books.applied == ["m-1", "m-3"]
    assert [(id, reason) for id, reason, _ in books.dead] == [
        ("m-2", "it came too late: the message 3 of its stream was applied before it")
    ]
    (gap,) = [event for event in books.events if event.name == "stream_gap"]
    assert (gap.key, gap.missing) == ("m-3", 1)  # type: ignore[attr-defined]


def test_skip_goes_on_and_block_never_gives_up(on_sqlite: Books) -> None:
    books = on_sqlite
    books.fails = {"m-1": 1}
    books.consume(ListSource(stream_of(1, 2)), ordered=True, on_poison="skip", tries=1)
    assert books.applied == ["m-2"]
    books.fails = {"n-1": 20}
    books.consume(ListSource([message("n-1", "o-9", 1)]), ordered=True, on_poison="block", tries=1)
    assert books.applied == ["m-2", "n-1"]


def test_an_inbox_that_forgets_too_soon_is_refused(on_sqlite: Books, async_store: AsyncSQLiteStore) -> None:
    books = on_sqlite
    with pytest.raises(ConfigurationError, match="a list keeps messages for 8, and dead letters"):
        books.consume(ListSource([], retention=8 * 86400.0))
    forgetful = Inbox(books.desk.store, keep="8d", redrive_within="9d")
    consumer = forgetful.handler("mail", connect=books.connect)(lambda message, connection: None)
    with pytest.raises(ConfigurationError, match="it may come again for 9 days: dead letters are redriven within 9"):
        consumer.drain(ListSource([]))
    books.consume(ListSource([], retention=7.9 * 86400.0))
    with pytest.raises(ConfigurationError, match="does not deliver the messages of a stream in their order"):
        books.consume(ListSource([], ordered=False), ordered=True)
    inbox = Inbox(books.desk.store)
    with pytest.raises(ConfigurationError, match="connect="):
        inbox.handler("ledger")
    with pytest.raises(ConfigurationError, match=r"connect= is a function that opens a .* not a nullcontext"):
        inbox.handler("ledger", connect=cast(Any, contextlib.nullcontext()))
    with pytest.raises(ConfigurationError, match="guards of the class Semel, not AsyncSemel"):
        inbox.handler("ledger", guard=cast(Any, AsyncSemel(async_store)))


@pytest.mark.parametrize(
    "wrong", [lambda: None, lambda message: None, lambda message, connection, log: None, lambda *, message: None]
)
def test_a_handler_that_cannot_be_called_is_refused(on_sqlite: Books, wrong: Any) -> None:
    """Every message would fail, and become a dead letter."""
    inbox = Inbox(on_sqlite.desk.store)
    with pytest.raises(PolicyError, match=r"with two arguments, .*\(message, connection\): "):
        inbox.handler("ledger", connect=on_sqlite.connect)(wrong)
    with pytest.raises(PolicyError, match=r"with two arguments, .*\(messages, connection\): "):
        inbox.handler("ledger", connect=on_sqlite.connect, in_batches=True)(wrong)
    with Semel(on_sqlite.desk.store) as guard, pytest.raises(PolicyError, match=r"\(message, op\): "):
        inbox.handler("ledger", guard=guard)(wrong)


def test_an_id_that_is_no_text_is_refused(on_sqlite: Books) -> None:
    with on_sqlite.connect() as connection, pytest.raises(ConfigurationError, match="is text, not int: pass str"):
        Inbox(on_sqlite.desk.store).process(connection, "ledger", cast(Any, 7), lambda: None)


def test_what_is_no_source_is_refused(on_sqlite: Books) -> None:
    for wrong, text in (("redis://localhost", "a string: open_source"), (RecordingBroker(), "RecordingBroker")):
        with pytest.raises(ConfigurationError, match=f"a consumer takes a source, not {text}"):
            on_sqlite.consume(cast(Any, wrong))


@pytest.mark.parametrize(
    ("sync", "awaited"),
    [
        (Inbox, AsyncInbox),
        (Outbox, AsyncOutbox),
        (DeadLetters, AsyncDeadLetters),
        (partial(Relay, broker=RecordingBroker()), partial(AsyncRelay, broker=RecordingBroker())),
    ],
)
def test_a_store_of_the_wrong_kind_is_refused(
    sync: Any, awaited: Any, async_store: AsyncSQLiteStore, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"AsyncSQLiteStore is an async store: (\w+) cannot .*; use Async\1"):
        sync(async_store)
    with (
        contextlib.closing(SQLiteStore(tmp_path / "app.db")) as store,
        pytest.raises(ConfigurationError, match=r"SQLiteStore is a sync store: Async(\w+) cannot use it; use \1"),
    ):
        awaited(store)
    for make in (sync, awaited):
        with pytest.raises(ConfigurationError, match=r"takes a store, .*, not a string: open_store\(URL\)"):
            make("postgresql://app:secret@localhost/shop")
        with pytest.raises(ConfigurationError, match=r"takes a store, .*, not object"):
            make(object())
        with pytest.raises(ConfigurationError, match="MemoryStore is in none"):
            make(MemoryStore())


def test_old_messages_are_forgotten(books: Books) -> None:
    books.consume(ListSource([message(f"m-{number}") for number in range(3)]))
    past = {"sqlite": "1", "postgres": "'epoch'", "mysql": "'1970-01-02'"}[books.desk.dialect]
    books.desk.sql(f"UPDATE semel_inbox SET received = {past} WHERE id <> 'm-1'")
    inbox: Any = (Inbox if books.sync else AsyncInbox)(books.desk.store)
    if books.sync:
        assert inbox.purge() == 2
    else:

        async def purge() -> Any:
            return await inbox.purge()

        assert books.desk._runner.run(purge()) == 2  # type: ignore[union-attr]
    assert books.known == ["m-1"]


def test_no_consumer_forgets_for_another_one_that_remembers_for_longer(books: Books) -> None:
    """The other one has checked at its start that this is long enough for its broker."""
    kind: Any = Inbox if books.sync else AsyncInbox

    def consume(name: str, keep: str, *messages: Message) -> None:
        inbox = kind(books.desk.store, keep=keep)
        if books.sync:
            inbox.handler(name, connect=books.connect)(lambda message, connection: None).drain(
                ListSource(messages), idle=0
            )
        else:

            async def nothing(message: Message, connection: Any) -> None: ...

            async def drain() -> None:
                await inbox.handler(name, connect=books.connect_async)(nothing).drain(ListSource(messages), idle=0)

            books.desk._runner.run(drain())  # type: ignore[union-attr]

    consume("archive", "60d", message("m-1"))
    day = 86400_000_000
    before = {
        "sqlite": f"received - 30 * {day}", "postgres": "received - interval '30 days'",
        "mysql": "received - INTERVAL 30 DAY",
    }[books.desk.dialect]  # fmt: skip
    books.desk.sql(f"UPDATE semel_inbox SET received = {before}")
    consume("mail", "15d")
    assert books.known == ["m-1"]
    consume("archive", "20d")  # it needs it no longer
    assert books.known == []


def test_a_consumer_runs_until_it_is_stopped(on_sqlite: Books) -> None:
    books = on_sqlite
    consumer = books.make()
    source = ListSource([message("m-1")])
    receive = source.receive

    async def receive_and_stop(limit: int, seconds: float) -> Any:
        found = await receive(limit, seconds)
        if not found:
            consumer.stop()
        return found

    source.receive = receive_and_stop  # type: ignore[method-assign]
    consumer.run(source)
    assert consumer.report.applied == 1
    assert source.acknowledged == ["m-1"]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "semel-inbox"]


def test_a_consumer_can_be_used_again_after_it_was_stopped(on_sqlite: Books) -> None:
    consumer = on_sqlite.make()
    source = ListSource([message("m-1")])
    on_sqlite.check = lambda applied: consumer.stop()  # type: ignore[assignment,method-assign]
    consumer.run(source)
    source.add(message("m-2"))
    assert consumer.drain(source, idle=0).applied == 1
    assert on_sqlite.applied == ["m-1", "m-2"]


@pytest.mark.timeout(20)
def test_a_signal_that_comes_before_a_consumer_runs_is_not_lost(on_sqlite: Books) -> None:
    consumer = on_sqlite.make()
    consumer.stop()
    consumer.run(ListSource([message("m-1")]))
    assert on_sqlite.applied == []


def test_what_a_stopped_consumer_holds_goes_back_to_the_broker(on_sqlite: Books) -> None:
    books = on_sqlite
    consumer = books.make()
    check = books.check

    def stop(applied: Message) -> None:
        check(applied)
        consumer.stop()

    books.check = stop  # type: ignore[method-assign]
    source = ListSource([message("m-1"), message("m-2")])
    consumer.run(source)
    assert books.applied == ["m-1"]
    assert [waiting.id for _, waiting in source.waiting] == ["m-2"]


def test_a_cancelled_consumer_rolls_back(open_desk: Callable[[str], Desk]) -> None:
    books = open_books(open_desk("async-sqlite"))
    consumer = books.make()
    source = ListSource([message("m-1")])

    async def run() -> None:
        task = asyncio.ensure_future(consumer.run(source))
        books.check = lambda applied: task.cancel()  # type: ignore[assignment,method-assign,return-value]
        with pytest.raises(asyncio.CancelledError):
            await task

    books.desk._runner.run(run())  # type: ignore[union-attr]
    assert books.applied == books.known == []
    assert [waiting.id for _, waiting in source.waiting] == ["m-1"]


def test_a_connection_that_cannot_be_given_back_does_not_end_the_consumer(on_sqlite: Books) -> None:
    """Nobody knows then what was committed, so the messages come again, and the inbox knows them."""
    books = on_sqlite
    broken = 2

    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        nonlocal broken
        with contextlib.closing(sqlite3.connect(books.desk.url)) as connection:
            yield connection
        if broken:
            broken -= 1
            raise OSError("the connection is broken")

    @Inbox(books.desk.store).handler("ledger", connect=connect, on_event=books.events.append)
    def apply(message: Message, connection: Any) -> None:
        connection.execute(f"INSERT INTO applied (id) VALUES ('{message.id}')")

    source = ListSource([message("m-1"), message("m-2")])
    reports = [apply.drain(source, idle=0) for _ in range(3)]
    assert [(each.applied, each.repeated) for each in reports] == [(0, 0), (0, 0), (1, 1)]
    assert books.applied == ["m-1", "m-2"]
    assert [event.name for event in books.events] == ["consumer_interrupted"] * 2 + ["skipped", "applied"]


@pytest.mark.parametrize("swallows", [True, False])
def test_a_handler_that_breaks_its_connection_is_judged_by_its_own_error(on_sqlite: Books, swallows: bool) -> None:
    books = on_sqlite

    @contextlib.contextmanager
    def connect() -> Iterator[Any]:
        connection = sqlite3.connect(books.desk.url)
        try:
            yield connection
        except Exception:
            if not swallows:
                connection.rollback()  # raises, because it is closed
        connection.close()

    @Inbox(books.desk.store).handler("ledger", connect=connect, tries=2, pause=0.001)
    def apply(message: Message, connection: Any) -> None:
        connection.close()
        raise Refused(message.id)

    report = apply.drain(ListSource([message("m-1")]), idle=0)
    assert (report.applied, report.failed, report.dead) == (0, 1, 1)
    assert books.dead == [("m-1", "Refused('m-1')", 2)]


@pytest.mark.postgres
@pytest.mark.server
def test_a_handler_that_goes_on_in_a_failed_transaction_does_not_hold_up_other_messages(
    open_desk: Callable[[str], Desk],
) -> None:
    """Its outbox reports an error of the store then, but the database is not down."""
    books = open_books(open_desk("postgres"))
    outbox = Outbox(books.desk.store)

    @Inbox(books.desk.store).handler("ledger", connect=books.connect, tries=2, pause=0.001)
    def apply(message: Message, connection: Any) -> None:
        if message.id == "m-1":
            with contextlib.suppress(Exception):
                connection.execute("SELECT 1 / 0")
        outbox.add(connection, "booked", {"of": message.id})

    report = apply.drain(ListSource([message("m-1"), message("m-2")]), idle=0)
    assert (report.applied, report.failed, report.dead) == (1, 1, 1)
    assert [row[0] for row in books.dead] == ["m-1"]
    assert "transaction is aborted" in books.dead[0][1]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_cancellation_that_escapes_from_another_task_is_an_error_of_the_handler(
    open_desk: Callable[[str], Desk], guarded: bool
) -> None:
    books = open_books(open_desk("async-sqlite"))
    books.desk.sql("DELETE FROM semel_record")

    async def run() -> Any:
        connect: dict[str, Any] = {"connect": books.connect_async}
        if guarded:
            connect = {"guard": AsyncSemel(books.desk.store, sweep_every=None)}

        @AsyncInbox(books.desk.store).handler("ledger", **connect, tries=2, pause=0.001)
        async def apply(message: Message, connection: Any) -> None:
            if message.id == "m-1":
                other = asyncio.ensure_future(asyncio.sleep(60))
                other.cancel()
                await other

        return await apply.drain(ListSource([message("m-1"), message("m-2")]), idle=0)

    report = books.desk._runner.run(run())  # type: ignore[union-attr]
    assert (report.applied, report.failed, report.dead) == (1, 1, 1)
    assert "was cancelled" in books.dead[0][1]


@pytest.mark.parametrize("kind", ["sqlite", "async-sqlite"])
def test_a_handler_with_a_guard_repeats_no_step(open_desk: Callable[[str], Desk], kind: str) -> None:
    desk = open_desk(kind)
    desk.sql("DELETE FROM semel_record")
    done: list[str] = []
    source = ListSource([message("m-1"), message("m-1")])
    if kind == "sqlite":
        with Semel(desk.store, sweep_every=None) as guard:

            @Inbox(desk.store).handler("payout", guard=guard, pause=0.001)
            def pay(message: Message, op: Any) -> None:
                op.step("pay", done.append, message.id)
                if len(source.postponed) < 2:
                    raise Refused

            report = pay.drain(source)
    else:

        async def consume() -> Any:
            guard = AsyncSemel(desk.store, sweep_every=None)

            @AsyncInbox(desk.store).handler("payout", guard=guard, pause=0.001)
            async def pay(message: Message, op: Any) -> None:
                await op.step("pay", done.append, message.id)
                if len(source.postponed) < 2:
                    raise Refused

            return await pay.drain(source)

        report = desk._runner.run(consume())  # type: ignore[union-attr]
    assert done == ["m-1"]
    assert (report.applied, report.repeated, report.failed) == (1, 1, 2)


@pytest.mark.parametrize("kind", ["sqlite", "async-sqlite"])
def test_a_handler_with_a_guard_goes_on_with_the_lineage_of_the_message(
    open_desk: Callable[[str], Desk], kind: str
) -> None:
    desk = open_desk(kind)
    desk.sql("DELETE FROM semel_record")
    trace = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    headers = {"idempotency-root": "order-1", "idempotency-parent": "pay-1", "traceparent": trace}
    source = ListSource([message("m-1", headers=headers)])
    came: list[Any] = []
    if kind == "sqlite":
        with Semel(desk.store, sweep_every=None) as guard:

            @Inbox(desk.store).handler("payout", guard=guard)
            def pay(message: Message, op: Any) -> None:
                came.extend((op.lineage, op._next_lineage))

            pay.drain(source)
            record: Any = guard.lookup("payout", "m-1")
    else:

        async def consume() -> Any:
            guard = AsyncSemel(desk.store, sweep_every=None)

            @AsyncInbox(desk.store).handler("payout", guard=guard)
            async def pay(message: Message, op: Any) -> None:
                came.extend((op.lineage, op._next_lineage))

            await pay.drain(source)
            return await guard.lookup("payout", "m-1")

        record = desk._runner.run(consume())  # type: ignore[union-attr]
    assert came == [Lineage("order-1", "pay-1", trace), Lineage("order-1", "m-1", trace)]
    assert (record.key, record.root, record.parent) == ("m-1", "order-1", "pay-1")


def test_an_async_handler_needs_an_async_inbox(on_sqlite: Books) -> None:
    async def apply(message: Message, connection: Any) -> None: ...

    with pytest.raises(PolicyError, match="use AsyncInbox"):
        Inbox(on_sqlite.desk.store).handler("ledger", connect=on_sqlite.connect)(apply)


def test_a_handler_that_commits_by_itself_is_told(open_desk: Callable[[str], Desk]) -> None:
    """The row of the inbox would be committed without the rest of the handler's work."""
    books = open_books(open_desk("sqlite"))

    @Inbox(books.desk.store).handler("ledger", connect=books.connect, tries=1)
    def apply(message: Message, connection: Any) -> None:
        connection.rollback()

    report = apply.drain(ListSource([message("m-1")]), idle=0)
    assert report.dead == 1
    assert "ended the transaction" in books.dead[0][1]
    assert books.known == []
