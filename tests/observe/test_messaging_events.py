"""An outbox and an inbox that are used without an operation and without a consumer tell their own hooks."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import aiosqlite
import pytest

from semel import AsyncSQLiteStore, Semel, SQLiteStore
from semel.core.messaging.messages import Message
from semel.messaging import AsyncInbox, AsyncOutbox, Inbox, Outbox
from semel.observe.events import AppliedEvent, Emitted, Event, Skipped

HEADERS = {"idempotency-root": "r", "idempotency-parent": "p"}
BATCH = [Message("m-2", "paid", b"", headers=HEADERS), Message("m-1", "paid", b""), Message("m-2", "paid", b"")]


def check(told: list[Event]) -> None:
    for event in told:
        if isinstance(event, (AppliedEvent, Skipped)):
            assert event.seconds > 0
    found = [(type(event), event.operation, event.key, event.route) for event in told]
    assert found == [
        (Emitted, "paid", "o-1", "paid"),
        (AppliedEvent, "ledger", "m-1", "ledger"),
        (Skipped, "ledger", "m-1", "ledger"),
        (AppliedEvent, "paid", "m-2", "paid"),
        (Skipped, "paid", "m-1", "paid"),
        (Skipped, "paid", "m-2", "paid"),
    ]
    applied = told[3]
    assert isinstance(applied, AppliedEvent)
    assert (applied.consumer, applied.root, applied.parent) == ("ledger", "r", "p")


def test_sync(tmp_path: Path) -> None:
    told: list[Event] = []
    with (
        closing(SQLiteStore(tmp_path / "a.db")) as store,
        closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as connection,
    ):
        inbox, outbox = Inbox(store, on_event=told.append), Outbox(store, on_event=[told.append])
        connection.execute("BEGIN")
        outbox.add(connection, "paid", {}, id="o-1")
        for _ in range(2):
            inbox.process(connection, "ledger", "m-1", lambda: None)
        inbox.process_many(connection, "ledger", BATCH, lambda new: None)
        connection.execute("COMMIT")
    check(told)


def test_async(tmp_path: Path) -> None:
    told: list[Event] = []

    async def main() -> None:
        store = AsyncSQLiteStore(tmp_path / "a.db")
        inbox, outbox = AsyncInbox(store, on_event=told.append), AsyncOutbox(store, on_event=[told.append])
        async with aiosqlite.connect(tmp_path / "a.db", isolation_level=None) as connection:
            await connection.execute("BEGIN")
            await outbox.add(connection, "paid", {}, id="o-1")
            for _ in range(2):
                await inbox.process(connection, "ledger", "m-1", lambda: None)
            await inbox.process_many(connection, "ledger", BATCH, lambda new: None)
            await connection.execute("COMMIT")
        await store.close()

    asyncio.run(main())
    check(told)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_message_of_an_operation_is_told_once(tmp_path: Path, guarded: bool) -> None:
    """The hook of the guard is told if it has one. A hook that both have must not count the message twice."""
    told: list[Event] = []
    with (
        Semel(SQLiteStore(tmp_path / "a.db"), on_event=told.append if guarded else None, sweep_every=None) as guard,
        closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as connection,
    ):
        outbox = Outbox(guard.store, on_event=told.append)
        connection.execute("BEGIN")
        guard.run_in_transaction(connection, "pay", key="k", call=lambda: outbox.add(connection, "paid", {}, id="o-1"))
        connection.execute("COMMIT")
    (emitted,) = (event for event in told if isinstance(event, Emitted))
    assert (emitted.operation, emitted.key) == (("pay", "k") if guarded else ("paid", "o-1"))
