"""An inbox that is divided by the time in its ids, on PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from semel import AsyncPostgresStore, PostgresStore
from semel.cli import main
from semel.core.messaging.messages import Message
from semel.messaging import AsyncInbox, Inbox
from semel.stores import postgres as stores
from tests.messaging.sources import ListSource
from tests.servers import PostgresServer

pytestmark = [pytest.mark.postgres, pytest.mark.server]
TODAY = datetime.now(UTC).replace(hour=12, minute=0)


def uuid7(at: datetime) -> str:
    digits = f"{int(at.timestamp() * 1000):012x}"
    return f"{digits[:8]}-{digits[8:]}-7{uuid4().hex[:3]}-{str(uuid4())[19:]}"


@pytest.fixture
def url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.create_database()
    stores.migrate(url)
    yield url
    postgres.drop_database(url)


@pytest.fixture
def conn(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE applied (id text)")
        yield connection


@pytest.fixture
def inbox(url: str) -> Iterator[Inbox]:
    with closing(PostgresStore(url, connections=1, listen=False)) as store:
        yield Inbox(store)


def apply(inbox: Inbox, conn: psycopg.Connection[Any], *ids: str) -> int:
    """Return how many are new."""
    with conn.transaction():
        return inbox.process_many(conn, "ledger", [Message(id, "paid", b"") for id in ids], lambda new: None)


def partitions(conn: psycopg.Connection[Any]) -> list[str]:
    found = conn.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'semel_inbox'::regclass")
    return sorted(name for (name,) in found.fetchall())


def place(conn: psycopg.Connection[Any], id: str) -> str:
    found = conn.execute("SELECT tableoid::regclass::text FROM semel_inbox WHERE id = %s", [id]).fetchone()
    assert found is not None
    return str(found[0])


def name(day: datetime) -> str:
    return f"semel_inbox_{day:%Y%m%d}"


def add_day(conn: psycopg.Connection[Any], day: datetime) -> None:
    """As if it had been made in time."""
    first, next_one = (
        conn.execute("SELECT semel_first_id(%s)", [f"{each:%Y-%m-%d}"]).fetchone() or ("",)
        for each in (day, day + timedelta(1))
    )
    bounds = f"FROM ('{first[0]}') TO ('{next_one[0]}')"
    conn.execute(f"CREATE TABLE {name(day)} PARTITION OF semel_inbox FOR VALUES {bounds}")


def test_an_inbox_is_divided_and_knows_what_it_knew(inbox: Inbox, url: str, conn: psycopg.Connection[Any]) -> None:
    before = [uuid7(TODAY), "order-1", uuid7(TODAY - timedelta(3))]
    assert apply(inbox, conn, *before) == 3
    assert stores.partition_inbox(url)
    assert not stores.partition_inbox(url)
    stores.check(url)  # no drift
    days = [TODAY + timedelta(ahead) for ahead in range(1, 8)]
    assert partitions(conn) == [*map(name, days), "semel_inbox_rest"]
    assert apply(inbox, conn, *before) == 0
    after = [
        uuid7(days[0]),
        uuid7(days[6]),
        "order-2",
        str(uuid4()),
        uuid7(days[0]).upper(),
        uuid7(days[0]).replace("-", ""),
    ]
    assert apply(inbox, conn, *after, *before) == len(after)
    assert apply(inbox, conn, *after) == 0
    assert [place(conn, id) for id in after[:3]] == [name(days[0]), name(days[6]), "semel_inbox_rest"]
    assert inbox.purge() == 0
    assert apply(inbox, conn, *before, *after) == 0


def test_a_day_is_dropped_when_all_of_it_was_applied_long_ago(
    inbox: Inbox, url: str, conn: psycopg.Connection[Any]
) -> None:
    stores.partition_inbox(url)
    old, older = TODAY - timedelta(20), TODAY - timedelta(21)
    for day in (old, older):
        add_day(conn, day)
    gone, late, rest = [uuid7(older) for _ in range(3)], uuid7(old), ["a", "b"]
    apply(inbox, conn, *gone, late, *rest)
    conn.execute("UPDATE semel_inbox SET received = now() - interval '16 days' WHERE id <> ALL (%s)", [[late, "b"]])
    assert inbox.purge() == 1  # of the rest
    assert name(older) not in partitions(conn)
    # Its id is as old, but it was applied a moment ago, and the broker may deliver it again.
    assert name(old) in partitions(conn)
    assert apply(inbox, conn, late, "b") == 0
    assert apply(inbox, conn, *gone, "a") == 4


def test_a_day_that_somebody_writes_to_stays(inbox: Inbox, url: str, conn: psycopg.Connection[Any]) -> None:
    stores.partition_inbox(url)
    old = TODAY - timedelta(20)
    add_day(conn, old)
    id = uuid7(old)
    with psycopg.connect(url) as other:
        other.execute("SELECT 1")
        assert inbox.process(other, "ledger", id, lambda: None)
        inbox.purge()  # it does not wait for that transaction
        assert name(old) in partitions(conn)
        other.commit()
    inbox.purge()
    assert name(old) in partitions(conn)
    assert apply(inbox, conn, id) == 0


def test_days_of_which_the_rest_has_messages_stay_in_the_rest(
    inbox: Inbox, url: str, conn: psycopg.Connection[Any]
) -> None:
    stores.partition_inbox(url)
    day = TODAY + timedelta(3)
    conn.execute(f"DROP TABLE {name(day)}")  # as if it had not been made in time
    early = uuid7(day)
    assert apply(inbox, conn, early) == 1
    conn.execute(f"DROP TABLE {name(day + timedelta(1))}")
    inbox.purge()
    assert name(day) not in partitions(conn)
    assert name(day + timedelta(1)) in partitions(conn)
    assert apply(inbox, conn, early) == 0


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_consumer_works_on_a_divided_inbox(url: str, conn: psycopg.Connection[Any], in_batches: bool) -> None:
    stores.partition_inbox(url)
    ids = [uuid7(TODAY + timedelta(days)) for days in (0, 1, 2)]
    messages = [Message(id, "paid", b"", stream="s", sequence=at + 1) for at, id in enumerate(ids)]

    async def consume() -> None:
        store = AsyncPostgresStore(url, connections=1, listen=False)

        @asynccontextmanager
        async def connect() -> AsyncIterator[Any]:
            async with await psycopg.AsyncConnection.connect(url) as connection:
                yield connection

        @AsyncInbox(store).handler("ledger", connect=connect, ordered=True, in_batches=in_batches)
        async def apply(found: Any, connection: Any) -> None:
            for message in found if in_batches else [found]:
                await connection.execute("INSERT INTO applied VALUES (%s)", [message.id])

        report = await apply.drain(ListSource([*messages, *messages]))
        assert (report.applied, report.repeated) == (3, 3)
        await store.close()

    asyncio.run(consume())
    assert [id for (id,) in conn.execute("SELECT id FROM applied").fetchall()] == ids


def test_commands_divide_and_sweep(
    inbox: Inbox, url: str, conn: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    apply(inbox, conn, "a", "b", "c")
    conn.execute("UPDATE semel_inbox SET received = now() - interval '16 days' WHERE id <> 'c'")
    assert main(["sweep", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 0, "unknown": 0}
    assert main(["sweep", url, "--inbox-keep", "15d", "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forgotten"] == 1
    assert main(["migrate", url, "--partition-inbox"]) == 0
    assert capsys.readouterr().out == "applied partitions of the inbox\n"
    assert main(["migrate", url, "--partition-inbox"]) == 0
    assert main(["migrate", url, "--check"]) == 0
    assert capsys.readouterr().out == "up to date\nup to date\n"
    assert main(["sweep", url, "--inbox-keep", "15d", "--all"]) == 0
    assert "forgot 1 messages of the inbox" in capsys.readouterr().out
    assert apply(inbox, conn, "a", "c") == 1
    assert main(["migrate", "memory://", "--partition-inbox"]) != 0
    assert main(["sweep", "memory://", "--inbox-keep", "15d"]) != 0
