"""What the transactional mode costs, counted: two statements and no commit on a first execution, one on a replay."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import AsyncPostgresStore, AsyncSemel, StoreUnavailable
from semel.sql.connections.asyncpg import _write_ahead
from tests.transactional.kinds import AsyncTill, Till


class Wire:
    """The messages that a psycopg connection sends, as libpq traces them."""

    def __init__(self, conn: psycopg.Connection[Any], path: Path) -> None:
        self.conn, self.path = conn, path
        self._file = path.open("wb+")
        conn.pgconn.trace(self._file.fileno())

    def said(self) -> list[str]:
        """The statements since the last time: of ``Query`` and ``Parse`` messages, or ``Bind`` of a prepared one."""
        os.fsync(self._file.fileno())
        lines = self.path.read_text(errors="replace").splitlines()[:None]
        self._file.truncate(0)
        self._file.seek(0)
        found = []
        for line in lines:
            match = re.search(r"\tF\t\d+\t(Query|Parse|Execute)\t ?(.*)", line)
            if match and match[1] in ("Query", "Parse"):
                found.append(match[2])
        return found

    def close(self) -> None:
        self.conn.pgconn.untrace()
        self._file.close()


@pytest.fixture
def till(database: str) -> Any:
    till = Till("psycopg-autocommit", database)
    till.conn.prepare_threshold = None
    yield till
    till.close()


def ours(statements: list[str]) -> list[str]:
    return [word for text in statements for word in re.findall(r"semel_\w+|BEGIN|COMMIT|ROLLBACK|payment", text)]


def transactions(database: str) -> int:
    """How many transactions have written so far: each takes one number."""
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        return int(row[0])


def test_in_the_callers_transaction_two_statements_and_no_commit_are_added(
    till: Till, database: str, tmp_path: Path
) -> None:
    before = transactions(database)
    wire = Wire(till.conn, tmp_path / "wire")
    till.pay("k1")
    assert ours(wire.said()) == ["BEGIN", "semel_guard", "payment", "semel_keep", "COMMIT"]
    till.pay("k1")
    assert ours(wire.said()) == ["BEGIN", "semel_guard", "COMMIT"]
    wire.close()
    assert transactions(database) - before == 2  # the payment's, and the one of this look


def test_opened_by_semel_guard_and_begin_are_one_message_and_so_are_record_and_commit(
    till: Till, database: str, tmp_path: Path
) -> None:
    before = transactions(database)
    wire = Wire(till.conn, tmp_path / "wire")
    till.pay("k1", own_transaction=True)
    said = wire.said()
    assert [ours([message]) for message in said] == [["BEGIN", "semel_guard"], ["payment"], ["semel_keep", "COMMIT"]]
    till.pay("k1", own_transaction=True)
    assert [ours([message]) for message in wire.said()] == [["BEGIN", "semel_guard"], ["ROLLBACK"]]
    wire.close()
    assert transactions(database) - before == 2


def test_without_autocommit_the_drivers_own_begin_travels_with_the_guard(till: Till, tmp_path: Path) -> None:
    till.conn.autocommit = False
    till.conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    wire = Wire(till.conn, tmp_path / "wire")
    pay = "INSERT INTO payment (key) VALUES ('k1')"
    till.guard.run_in_transaction(till.conn, "pay", key="k1", call=lambda: till.conn.execute(pay).rowcount)
    till.conn.commit()
    said = wire.said()
    wire.close()
    assert said[0].startswith('"BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT semel_guard(')
    assert [ours([message]) for message in said] == [["BEGIN", "semel_guard"], ["payment"], ["semel_keep"], ["COMMIT"]]


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-autocommit"])
@pytest.mark.parametrize("own_transaction", [False, True])
def test_a_replay_is_read_whatever_form_the_caller_has_chosen_for_bytes(
    database: str, kind: str, own_transaction: bool
) -> None:
    till = Till(kind, database)
    till.conn.execute("SET bytea_output = 'escape'")
    till.conn.commit()
    till.pay("k1", own_transaction=own_transaction)
    assert till.pay("k1", own_transaction=own_transaction, call=lambda op: "again").replayed
    till.close()


def test_the_record_is_one_row_written_once(till: Till, database: str) -> None:
    till.pay("k1")
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT r.xmin = p.xmin, r.xmax::text FROM semel_record r, payment p").fetchone()
        assert row is not None
        assert row == (True, "0")  # by the payment's own transaction, and never updated
        assert conn.execute("SELECT count(*) FROM semel_record").fetchone() == (1,)


@pytest.mark.parametrize("internals_known", [True, False])
def test_asyncpg_sends_as_many(database: str, monkeypatch: pytest.MonkeyPatch, internals_known: bool) -> None:
    monkeypatch.setattr("semel.sql.connections.asyncpg._INTERNALS_KNOWN", internals_known)
    till = AsyncTill("asyncpg", database)
    said: list[str] = []
    till.run(lambda: asyncio.sleep(0))
    till.conn.add_query_logger(lambda query: said.append(query.query))
    till.pay("k1")
    assert ours(said) == ["BEGIN", "semel_guard", "payment", "semel_record", "COMMIT"]
    said.clear()
    till.pay("k2", own_transaction=True)
    # In a version that we know the BEGIN is written ahead of the guard, where no logger sees it.
    begin = [] if internals_known else ["BEGIN"]
    assert [ours([message]) for message in said] == [[*begin, "semel_guard"], ["payment"], ["semel_keep", "COMMIT"]]
    said.clear()
    till.pay("k2", own_transaction=True)
    found = [] if internals_known else [["semel_record", "semel_guard"]]
    assert [ours([message]) for message in said] == [[*begin, "semel_guard"], *found, ["ROLLBACK"]]
    till.close()


def test_asyncpg_sends_no_begin_into_another_operation(database: str) -> None:
    """A BEGIN that is written ahead must not reach the server while another task uses the connection."""
    import asyncpg

    async def main() -> None:
        async with AsyncSemel(AsyncPostgresStore(database, listen=False), sweep_every=None) as guard:
            holder, conn = await asyncpg.connect(database), await asyncpg.connect(database)

            async def pay() -> str:
                return await guard.run_in_transaction(
                    conn, "pay", key="k1", call=lambda: conn.fetchval("SELECT 'paid'"), own_transaction=True
                )

            for _ in range(2):  # at first the guard is not prepared, then it is
                await holder.execute("SELECT pg_advisory_lock(7)")
                waiting = asyncio.create_task(conn.execute("SELECT pg_advisory_lock(7), pg_advisory_unlock(7)"))
                await asyncio.sleep(0)
                with pytest.raises(StoreUnavailable, match="another operation is in progress"):
                    await pay()
                await holder.execute("SELECT pg_advisory_unlock(7)")
                assert await waiting == "SELECT 1"
                assert not conn.is_in_transaction()
                assert await pay() == "paid"
            await holder.close()
            await conn.close()

    asyncio.run(main())


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_what_is_written_ahead_arrives_with_what_follows_it(loop: str) -> None:
    async def main() -> list[bytes]:
        found: list[bytes] = []
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while found[-1:] != [b""]:
                found.append(await reader.read(100))
            writer.close()
            done.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            _write_ahead(writer.transport, b"BEGIN, ")
            writer.write(b"guard")
            writer.close()
            await done.wait()
        return found

    with asyncio.Runner(loop_factory=pytest.importorskip(loop).new_event_loop) as runner:
        found = runner.run(main())
    assert b"".join(found) == b"BEGIN, guard"
    if sys.platform == "linux":
        assert found == [b"BEGIN, guard", b""]


@pytest.mark.parametrize(("encrypted", "waiting"), [(True, 0), (False, 5)])
def test_past_a_transport_that_encrypts_or_still_has_to_write_nothing_is_sent(encrypted: bool, waiting: int) -> None:
    class Transport:
        written = b""

        def get_write_buffer_size(self) -> int:
            return waiting

        def get_extra_info(self, name: str) -> Any:
            return {"ssl_object": object() if encrypted else None}[name]

        def write(self, data: bytes) -> None:
            self.written += data

    transport = Transport()
    _write_ahead(transport, b"BEGIN")
    assert transport.written == b"BEGIN"


def test_a_codec_of_the_callers_for_numbers_is_not_asked_for_the_guard(database: str) -> None:
    till = AsyncTill("asyncpg", database)

    def refuse(value: object) -> str:
        raise ValueError("not for us")

    till.run(lambda: till.conn.set_type_codec("int8", encoder=refuse, decoder=str, schema="pg_catalog"))
    till.run(lambda: till.conn.set_type_codec("bytea", encoder=refuse, decoder=str, schema="pg_catalog"))
    assert [till.pay("k1", own_transaction=True).replayed for _ in range(2)] == [False, True]
    till.close()


def test_sqlite_runs_two_statements_and_no_commit(tmp_path: Path) -> None:
    till = Till("sqlite3", str(tmp_path / "shop.db"))
    said: list[str] = []
    till.conn.set_trace_callback(said.append)
    till.pay("k1")
    assert [text.split()[0] for text in said] == ["BEGIN", "UPDATE", "INSERT", "INSERT", "COMMIT"]
    assert "semel_record" in said[1]
    assert "payment" in said[2]
    assert "semel_record" in said[3]
    said.clear()
    till.pay("k1")
    assert [text.split()[0] for text in said] == ["BEGIN", "UPDATE", "COMMIT"]
    till.close()


def test_the_guard_of_sqlite_takes_the_write_lock_also_where_it_finds_no_row(tmp_path: Path) -> None:
    till = Till("sqlite3", str(tmp_path / "shop.db"))
    other = sqlite3.connect(tmp_path / "shop.db", timeout=0)

    def try_to_write(op: Any) -> str:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("INSERT INTO payment (key) VALUES ('other')")
        return "locked"

    assert till.pay("k1", insert=False, call=try_to_write).value == "locked"
    other.close()
    till.close()


@pytest.mark.postgres
@pytest.mark.server
@pytest.mark.parametrize("kind", ["sqlalchemy-psycopg", "session-psycopg"])
def test_sqlalchemy_sees_our_two_statements(database: str, kind: str) -> None:
    from sqlalchemy import event

    till = Till(kind, database)
    engine = till.conn.get_bind() if kind.startswith("session") else till.conn.engine
    said: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda conn, cursor, text, *rest: said.append(text))
    till.pay("k1")
    assert ours(said) == ["semel_guard", "payment", "semel_record"]
    till.close()
