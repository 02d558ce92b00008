"""The outbox on every kind of connection: a message commits with the caller's rows, or goes with them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any

import psycopg
import pytest

from semel import ConfigurationError, MemoryStore, NotMigrated, PostgresStore, Semel
from semel.core.messaging.messages import OUTBOX, lane_of
from semel.engine.operation.emitting import make_message
from semel.messaging import AsyncOutbox, Outbox
from semel.testing.crashpoints import crash_everywhere
from tests.transactional import emitting
from tests.transactional.kinds import AsyncTill, Till
from tests.transactional.marked import marked, on_some
from tests.transactional.test_savepoints import savepoint
from tests.transactional.test_statements import Wire

OpenTill = Callable[..., Any]
COLUMNS = (
    "position", "sequence", "lane", "starts", "redrives", "id", "type", "source", "destination", "stream", "subject",
    "content_type", "headers", "data",
)  # fmt: skip


AUTOCOMMIT = (
    "django-sqlite", "psycopg-autocommit", "django-postgres", "asyncpg", "asyncpg-pool",
    "async-psycopg-autocommit", "pymysql-autocommit", "asyncmy-autocommit", "django-mysql",
)  # fmt: skip
"""The other kinds open a transaction with their first statement."""


class Undone(Exception):
    pass


class Desk:
    """A till and an outbox, sync or async, behind one async face. Nothing in it waits if the till is sync."""

    def __init__(self, till: Any) -> None:
        self.till = till
        self.awaited = till.lent.awaited
        self.outbox: Any = (AsyncOutbox if self.awaited else Outbox)(till.guard.store, source="/shop")
        self.run(self.empty())

    async def empty(self) -> None:
        async with self.transaction():
            for table in ("outbox", "stream", "dead_letter"):
                await self.send(f"DELETE FROM semel_{table}")

    async def wait_for(self, result: Any) -> Any:
        return await result if self.awaited else result

    @asynccontextmanager
    async def within(self, opened: Any) -> AsyncIterator[None]:
        if self.awaited:
            async with opened:
                yield
        else:
            with opened:
                yield

    def transaction(self) -> Any:
        return self.within(self.till.transaction())

    def savepoint(self) -> Any:
        return self.within(savepoint(self.till)())

    async def send(self, sql: str) -> Any:
        return await self.wait_for(self.till.send(sql))

    async def add(self, *args: Any, **how: Any) -> str:
        id: str = await self.wait_for(self.outbox.add(self.till.conn, *args, **how))
        return id

    async def operate(self, key: str, handler: Callable[[Any], Any], **how: Any) -> Any:
        """Run a handler in a transaction of its own, by the guard."""

        async def awaited(op: Any) -> Any:
            return await handler(op)

        def plain(op: Any) -> Any:
            return drive(handler(op))

        return await self.wait_for(
            self.till.guard.run_in_transaction(
                self.till.conn, "pay", key=key, call=awaited if self.awaited else plain, **how
            )
        )

    async def rows(self) -> list[dict[str, Any]]:
        async with self.transaction():
            found = await self.send(f"SELECT {', '.join(COLUMNS)} FROM semel_outbox ORDER BY position")
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in found]
        return [{**row, "data": bytes(row["data"])} for row in rows]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.till.runner.run(work) if self.awaited else drive(work)


def drive(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop: Django refuses to work in one."""
    try:
        work.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


def test_a_message_commits_with_the_rows(open_till: OpenTill) -> None:
    desk = Desk(open_till())

    async def main() -> None:
        async with desk.transaction():
            await desk.send("INSERT INTO payment (key) VALUES ('k1')")
            first = await desk.add("paid", {"b": 1, "a": "ä"}, stream="s", destination="t", subject="k1")
            second = await desk.add("noted", b"\x00\xff'\\", headers={"X-Tenant": "a'b\\c €"}, delay="1h")
            third = await desk.add("said", "text €", source="/else", content_type="text/x", stream="s")
        rows = await desk.rows()
        assert [row["id"] for row in rows] == [first, second, third]
        assert [row["sequence"] for row in rows] == [1, 0, 2]
        assert [row["lane"] for row in rows] == [lane_of("s", ""), lane_of("", second), lane_of("s", "")]
        assert [row["data"] for row in rows] == ['{"a":"ä","b":1}'.encode(), b"\x00\xff'\\", "text €".encode()]
        assert [row["content_type"] for row in rows] == ["application/json", "application/octet-stream", "text/x"]
        assert [row["source"] for row in rows] == ["/shop", "/shop", "/else"]
        assert (rows[0]["type"], rows[0]["destination"], rows[0]["stream"], rows[0]["subject"]) == (
            "paid",
            "t",
            "s",
            "k1",
        )
        assert [json.loads(row["headers"]) for row in rows] == [{}, {"x-tenant": "a'b\\c €"}, {}]

    desk.run(main())


@on_some
def test_a_rollback_takes_the_message_along(open_till: OpenTill) -> None:
    desk = Desk(open_till())

    async def main() -> None:
        with pytest.raises(Undone):  # noqa: PT012
            async with desk.transaction():
                await desk.add("paid", {}, stream="s")
                raise Undone
        async with desk.transaction():
            await desk.add("paid", "kept", stream="s")
            with pytest.raises(Undone):  # noqa: PT012
                async with desk.savepoint():
                    await desk.add("paid", "undone", stream="s")
                    raise Undone
            await desk.add("paid", "kept too", stream="s")
        rows = await desk.rows()
        assert [(row["data"], row["sequence"]) for row in rows] == [(b"kept", 1), (b"kept too", 2)]

    desk.run(main())


@on_some
def test_the_same_message_is_added_once(open_till: OpenTill) -> None:
    """And leaves no gap in its stream."""
    desk = Desk(open_till())

    async def main() -> None:
        async with desk.transaction():
            ids = [await desk.add("paid", {}, stream="s", dedup="order 7") for _ in range(2)]
            ids.append(await desk.add("paid", {}, id=ids[0]))
            await desk.add("paid", {}, stream="s", id="own")
        async with desk.transaction():
            ids.append(await desk.add("paid", {}, stream="s", dedup="order 7"))
            other = await desk.add("refunded", {}, stream="s", dedup="order 7")
        assert len(set(ids)) == 1
        assert [(row["id"], row["sequence"]) for row in await desk.rows()] == [(ids[0], 1), ("own", 2), (other, 3)]

    desk.run(main())


def test_only_a_message_with_a_random_id_is_not_looked_for() -> None:
    """An id that a re-run makes again must be in the index, so that the message is added once."""

    def is_fresh(**how: Any) -> bool:
        given = dict.fromkeys(("stream", "id", "dedup", "content_type", "delay", "headers"))
        return make_message("paid", {}, **given | {"destination": "", "subject": "", "source": ""} | how).fresh  # type: ignore[arg-type]

    assert is_fresh()
    assert is_fresh(stream="s")
    assert not is_fresh(id="own")
    assert not is_fresh(dedup="order 7")
    with Semel(MemoryStore()) as guard:
        assert guard.run("pay", key="k1", call=is_fresh) is False


@on_some
def test_an_operation_emits_the_same_ids_again(open_till: OpenTill) -> None:
    """Whatever the first attempt added is rolled back with it. The next one adds messages with the same ids."""
    desk = Desk(open_till())
    attempts: list[list[str]] = []

    async def handler(op: Any) -> str:
        ids = [
            await desk.wait_for(op.emit("paid", {"n": 1}, stream="s")),
            await desk.wait_for(op.emit("paid", {"n": 2}, stream="s")),
            await desk.wait_for(op.emit("noted", {}, headers={"causation-id": "mine"})),
            await desk.add("paid", {"n": 3}, stream="s"),
        ]
        attempts.append(ids)
        if len(attempts) == 1:
            raise Undone
        return "done"

    async def main() -> None:
        with pytest.raises(Undone):
            await desk.operate("k1", handler, own_transaction=True)
        assert await desk.rows() == []
        for _ in range(2):
            assert await desk.operate("k1", handler, own_transaction=True) == "done"
        first, second = attempts
        assert first == second
        assert len(set(first)) == 4
        rows = await desk.rows()
        assert [row["id"] for row in rows] == first
        headers = json.loads(rows[1]["headers"])
        assert headers == {
            "idempotency-key": first[1],
            "causation-id": "k1",
            "idempotency-root": "k1",
            "idempotency-parent": "k1",
        }
        assert json.loads(rows[2]["headers"])["causation-id"] == "mine"

    desk.run(main())


@pytest.mark.parametrize("kind", [marked(kind) for kind in AUTOCOMMIT])
def test_without_a_transaction_nothing_is_added(open_till: OpenTill) -> None:
    desk = Desk(open_till())

    async def main() -> None:
        with pytest.raises(ConfigurationError, match=r"no transaction is open.*Open one"):
            await desk.add("paid", {})
        assert await desk.rows() == []

    desk.run(main())


@pytest.fixture
def till(tmp_path: Any) -> Any:
    till = Till("sqlite3", str(tmp_path / "shop.db"))
    yield till
    till.close()


def test_what_cannot_be_a_message_is_refused(till: Any) -> None:
    outbox = Outbox(till.guard.store)
    for wrong in (
        {"stream": "s", "delay": 1},
        {"id": "a", "dedup": "b"},
        {"id": "a\n"},
        {"stream": " s"},
        {"data": object()},
        {"data": "\ud800"},
        {"headers": {"ce-id": "x"}},
        {"type": ""},
        {"destination": "x" * 256},
    ):
        arguments = {"type": "paid", "data": {}, **wrong}
        with till.transaction():
            till.send("INSERT INTO payment (key) VALUES ('k1')")
            with pytest.raises(ConfigurationError):
                outbox.add(till.conn, **arguments)
    with till.transaction():
        assert till.send("SELECT count(*) FROM semel_outbox") == [(0,)]


def test_an_operation_outside_of_a_transaction_says_what_to_do(till: Any) -> None:
    def handler(op: Any) -> None:
        op.emit("paid", {})

    with pytest.raises(ConfigurationError, match=r"guard\.run_in_transaction"):
        till.guard.run("pay", key="k1", call=handler)


def test_a_step_with_a_connection_emits_in_its_transaction(till: Any) -> None:
    def pay(op: Any) -> str:
        till.send("INSERT INTO payment (key) VALUES ('k1')")
        return str(op.emit("paid", {}))

    def handler(op: Any) -> str:
        with till.transaction():
            id: str = op.step("pay", lambda: pay(op), connection=till.conn)
        with pytest.raises(ConfigurationError, match="there is none"):
            op.emit("paid", {})
        return id

    id = till.guard.run("pay", key="k1", call=handler)
    with till.transaction():
        assert till.send("SELECT id FROM semel_outbox") == [(id,)]


def test_a_step_emits_the_same_id_whichever_steps_were_done_before(till: Any) -> None:
    """A re-run leaves out the steps that are done. What it emits must not be taken for a message of theirs."""
    outbox = Outbox(till.guard.store)
    ids: list[tuple[str, str]] = []
    fails = {"pay 1", "pay 2"}

    def pay(op: Any, name: str) -> None:
        id = op.emit("paid", name, stream="s") if name == "pay 1" else outbox.add(till.conn, "paid", name, stream="s")
        ids.append((name, id))
        if name in fails:
            fails.remove(name)
            raise Undone

    def handler(op: Any) -> None:
        for name in ("pay 0", "pay 1", "pay 2"):
            with till.transaction():
                till.send("INSERT INTO payment (key) VALUES ('k1')")
                op.step(name, pay, op, name, connection=till.conn)
        with till.transaction():
            till.send("INSERT INTO payment (key) VALUES ('k1')")
            outbox.add(till.conn, "paid", "last", stream="s")

    for _ in range(2):
        with pytest.raises(Undone):
            till.guard.run("pay", key="k1", call=handler)
    till.guard.run("pay", key="k1", call=handler)
    assert [name for name, _ in ids] == ["pay 0", "pay 1", "pay 1", "pay 2", "pay 2"]
    assert len(set(ids)) == len({id for _, id in ids}) == 3
    with till.transaction():
        rows = till.send("SELECT data, sequence FROM semel_outbox ORDER BY position")
    assert rows == [(b"pay 0", 1), (b"pay 1", 2), (b"pay 2", 3), (b"last", 4)]


@pytest.mark.slow
def test_a_row_has_its_message_wherever_the_process_is_killed() -> None:
    report = crash_everywhere(emitting.world, emitting.pay, emitting.check, teardown=emitting.remove)
    assert len(report.points) > 10


def test_a_database_without_the_tables_is_named(tmp_path: Any, till: Any) -> None:
    import sqlite3

    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE t (n)")
        other.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(NotMigrated, match=r"other\.db"):
            Outbox(till.guard.store).add(other, "paid", {})


def test_a_store_outside_of_sql_has_no_outbox() -> None:
    from semel import MemoryStore

    with pytest.raises(ConfigurationError, match="tables in the database"):
        Outbox(MemoryStore())


# PostgreSQL: one round trip, and a relay that is woken


def test_a_message_is_one_statement_on_psycopg(database: str, tmp_path: Any) -> None:
    for kind in ("psycopg", "psycopg-autocommit"):
        till = Till(kind, database)
        outbox = Outbox(till.guard.store)
        with till.transaction():
            outbox.add(till.conn, "paid", {})  # opens what is opened once
            wire = Wire(till.conn, tmp_path / "wire")
            for _ in range(3):
                outbox.add(till.conn, "paid", {"a": "b"}, stream="s")
            said = wire.said()
            wire.close()
        till.close()
        assert ["semel_add(" in text for text in said] == [True] * 3


def test_a_message_is_one_statement_on_asyncpg(database: str) -> None:
    till = AsyncTill("asyncpg", database)
    outbox = AsyncOutbox(till.guard.store)
    said: list[str] = []

    async def main() -> None:
        async with till.transaction():
            await outbox.add(till.conn, "paid", {}, id="one")  # prepares the statements
            await outbox.add(till.conn, "paid", {})
            await outbox.add(till.conn, "paid", {}, stream="s")
            till.conn.add_query_logger(lambda query: said.append(query.query))
            await outbox.add(till.conn, "paid", {}, id="two")
            await outbox.add(till.conn, "paid", {})
            await outbox.add(till.conn, "paid", {}, stream="s")

    till.run(main)
    till.close()
    starts = ["SELECT semel_add", "INSERT INTO semel_outbox ", "WITH place AS ", "COMMIT;"]
    assert [text.partition("(")[0] for text in said] == starts


def test_a_message_wakes_the_relay_that_waits(database: str) -> None:
    store = PostgresStore(database, connections=1)
    woken = threading.Event()
    stop = threading.Event()

    def wait() -> None:
        while not stop.is_set():
            began = time.monotonic()
            store.wait(OUTBOX, 0.9)
            if time.monotonic() - began < 0.5:
                woken.set()

    store.wait(OUTBOX, 0.01)  # it listens from here on
    relay = threading.Thread(target=wait)
    relay.start()
    till = Till("psycopg", database)
    outbox = Outbox(till.guard.store)
    try:
        for _ in range(100):  # the first may come before the relay waits
            with till.transaction():
                outbox.add(till.conn, "paid", {})
                outbox.add(till.conn, "paid", {}, stream="s")
            if woken.wait(0.05):
                break
        assert woken.is_set()
    finally:
        stop.set()
        relay.join()
        till.close()
        store.close()


def test_only_one_transaction_at_a_time_notifies(database: str) -> None:
    """A NOTIFY of every transaction would serialise all commits."""
    tills = [Till("psycopg", database) for _ in range(2)]
    listener = psycopg.connect(database, autocommit=True)
    listener.execute("LISTEN semel")
    outbox = Outbox(tills[0].guard.store)
    with tills[0].transaction():
        outbox.add(tills[0].conn, "paid", {})
        with tills[1].transaction():
            outbox.add(tills[1].conn, "paid", {})
        assert list(listener.notifies(timeout=0)) == []
    assert [one.payload for one in listener.notifies(timeout=10, stop_after=1)] == [OUTBOX.hex()]
    listener.close()
    for till in tills:
        till.close()
