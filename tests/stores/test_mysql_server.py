"""MySQL and MariaDB: what is their own: packets, locks, plans, migrations that cannot be rolled back, drift."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import asyncmy.connection
import pymysql
import pytest

from semel import AsyncMySQLStore, AsyncSemel, MySQLStore, NotMigrated, SchemaDrift, Semel, StoreError, StoreUnavailable
from semel.cli import main
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Op, Record, Release, Renew, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.sql.aio import run_async
from semel.sql.connections.asyncmy import AsyncmyConnection
from semel.sql.connections.pymysql import PyMySQLConnection
from semel.sql.dialects import mysql as dialect
from semel.sql.program import Packet, Piece
from semel.sql.sync import run
from semel.stores.mysql import check, check_async, migrate, migrate_async
from semel.stores.mysql import connections as mysql_connections
from semel.stores.mysql.connections import MySQLSettings
from tests.servers import MariaDBServer

pytestmark = pytest.mark.server

PATIENCE = 30.0


def claim(number: int, *, lease: float = 30.0, ttl: float = 3600.0, nonce: int | None = None) -> Claim:
    made = number if nonce is None else nonce
    return Claim(b"%016d" % number, made, b"", lease, ttl, Takeover.RETRY, "", "test", str(number))


@pytest.fixture
def database(mariadb_url: str) -> str:
    """A fresh database with our tables."""
    migrate(mariadb_url)
    return mariadb_url


@pytest.fixture
def store(database: str) -> Iterator[MySQLStore]:
    with contextlib.closing(MySQLStore(database)) as opened:
        yield opened


def raw(url: str, **more: Any) -> Any:
    parts = MySQLSettings(url, 1, 1, 1, 1).where
    return pymysql.connect(**parts, autocommit=True, **more)


def query(url: str, *statements: str) -> tuple[tuple[Any, ...], ...]:
    with raw(url) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        rows: tuple[tuple[Any, ...], ...] = cursor.fetchall()
        return rows


# Round trips


class Trips:
    """Packets that our own connections to one server have sent, counted where they leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        for driver in (mysql_connections.PyMySQL, mysql_connections.Asyncmy):

            def counting(self_: Any, settings: MySQLSettings, connect: Any = driver.connect) -> Any:
                made = connect(self_, settings)
                return self._tapped(made) if isinstance(made, object) and hasattr(made, "raw") else self._later(made)

            monkeypatch.setattr(driver, "connect", counting)

    async def _later(self, coming: Any) -> Any:
        return self._tapped(await coming)

    def _tapped(self, connection: Any) -> Any:
        query = connection.raw.query

        def tapped(sql: Any, *rest: Any, **more: Any) -> Any:
            self.sent.append(str(sql))
            return query(sql, *rest, **more)

        connection.raw.query = tapped
        return connection

    def new(self) -> list[str]:
        fresh, self.sent = self.sent, []
        return fresh


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> Trips:
    return Trips(monkeypatch)


@pytest.fixture(params=[True, False], ids=["returning", "as mysql"])
def flavour(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With INSERT … RETURNING, and as of MySQL, which has none."""
    if not request.param:
        program = dialect.program
        monkeypatch.setattr(dialect, "program", lambda ops, found, returning: program(ops, found, returning=False))


@pytest.mark.usefixtures("flavour")
def test_a_first_execution_is_two_round_trips_and_a_replay_one(database: str, trips: Trips) -> None:
    with contextlib.closing(MySQLStore(database, connections=1)) as store:
        guard = Semel(store, sweep_every=None)
        guard.run("ship", key="0", call=lambda: 0)  # opens the connection
        trips.new()
        assert guard.run("ship", key="1", call=lambda: 7) == 7
        assert len(trips.new()) == 2
        assert guard.run("ship", key="1", call=lambda: 8) == 7
        assert len(trips.new()) == 1
        guard.close()


@pytest.mark.usefixtures("flavour")
def test_an_async_first_execution_is_two_round_trips_and_a_replay_one(database: str, trips: Trips) -> None:
    async def main() -> None:
        store = AsyncMySQLStore(database, connections=1)
        guard = AsyncSemel(store, sweep_every=None)

        async def call() -> int:
            return 7

        await guard.run("ship", key="0", call=call)
        trips.new()
        assert await guard.run("ship", key="1", call=call) == 7
        assert len(trips.new()) == 2
        assert await guard.run("ship", key="1", call=call) == 7
        assert len(trips.new()) == 1
        await guard.close()
        await store.close()

    asyncio.run(main())


def test_the_server_sees_two_statements_and_then_one(private_mariadb: MariaDBServer) -> None:
    """Of MariaDB the packets are single statements too: no transaction, no look, no reset. MySQL needs the look."""
    url = private_mariadb.create_database()
    migrate(url)
    with contextlib.closing(MySQLStore(url, connections=1)) as store:
        guard = Semel(store, sweep_every=None)
        guard.run("ship", key="0", call=lambda: 0)
        private_mariadb.execute("SET GLOBAL general_log = 1")
        guard.run("ship", key="1", call=lambda: 7)
        guard.run("ship", key="1", call=lambda: 8)
        private_mariadb.execute("SET GLOBAL general_log = 0")
        guard.close()
    logged = private_mariadb.general_log.read_text(errors="replace")
    claimed = ["INSERT", "SELECT"] if private_mariadb.is_mysql() else ["INSERT"]
    seen = [line.partition("Query\t")[2][:6] for line in logged.splitlines() if "semel_record" in line]
    assert seen == [*claimed, "UPDATE", *claimed]


def test_tasks_of_one_turn_share_a_trip_and_so_do_their_completions(database: str, trips: Trips) -> None:
    async def main() -> None:
        store = AsyncMySQLStore(database, connections=1)
        await store.execute(claim(0))
        trips.new()
        claims = [claim(i) for i in range(1, 33)]
        answers = await asyncio.gather(*(store.execute(op) for op in claims))
        assert {type(answer) for answer in answers} == {Claimed}
        assert len(trips.new()) == 1
        done = [Complete(op.id, won.token, b"x", 60.0) for op, won in zip(claims, answers, strict=True)]  # type: ignore[union-attr]
        done[3] = Complete(done[3].id, done[3].token + 1, b"stale", 60.0)
        assert await asyncio.gather(*(store.execute(op) for op in done)) == [i != 3 for i in range(32)]
        assert len(trips.new()) == 2, "the second asks whether the one that was refused had been said before"
        await store.close()

    asyncio.run(main())


# Locks and plans


def test_connections_of_ours_read_committed_whatever_the_server_says(database: str, mariadb: MariaDBServer) -> None:
    ours = (
        "@@transaction_isolation, @@max_execution_time / 1000"
        if mariadb.is_mysql()
        else "@@tx_isolation, @@max_statement_time"
    )
    connection = mysql_connections.PyMySQL().connect(MySQLSettings(database, 1, 10.0, 5.0, 0.0))
    with contextlib.closing(connection.raw), connection.raw.cursor() as cursor:
        cursor.execute(f"SELECT {ours}, @@autocommit, @@innodb_lock_wait_timeout, @@sql_mode")
        isolation, slowest, autocommit, lock_wait, mode = cursor.fetchone()
    assert (isolation, autocommit, lock_wait, float(slowest)) == ("READ-COMMITTED", 1, 2, 10.0)
    assert "STRICT_ALL_TABLES" in mode


def deadlocks(server: MariaDBServer) -> int:
    counted = (
        "SELECT name, count FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks' AND status = 'enabled'"
        if server.is_mysql()
        else "SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'"
    )
    return int(server.execute(counted)[0][1])


@pytest.mark.usefixtures("flavour")
def test_concurrent_claims_releases_and_sweeps_of_the_same_keys_do_not_deadlock(private_mariadb: MariaDBServer) -> None:
    """Batches in any order over the same few keys, neighbours in the index, coming and going."""
    url = private_mariadb.create_database()
    migrate(url)
    wrong: list[Any] = []

    def storm(number: int) -> None:
        with contextlib.closing(MySQLStore(url, connections=1)) as own:
            for turn in range(15):
                keys = [(number * 7 + turn * 3 + i) % 24 for i in range(12)]
                claims = [claim(key, nonce=number * 1000 + turn) for key in dict.fromkeys(keys)]
                answers = own.execute_many(claims[:: -1 if number % 2 else 1])
                order = claims[:: -1 if number % 2 else 1]
                wrong.extend(answer for answer in answers if not isinstance(answer, (Claimed, Existing)))
                held = [(op, answer) for op, answer in zip(order, answers, strict=True) if isinstance(answer, Claimed)]
                moves = [
                    Release(op.id, won.token) if i % 2 else Complete(op.id, won.token, b"x", 0.000_001)
                    for i, (op, won) in enumerate(held)
                ]
                wrong.extend(answer for answer in own.execute_many(moves) if answer is not True)
                own.execute(Sweep(10))

    threads = [threading.Thread(target=storm, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []
    assert deadlocks(private_mariadb) == 0


def test_a_deadlock_is_tried_again(database: str, store: MySQLStore) -> None:
    """Someone else's transaction holds our rows in another order; the server picks a victim, and no caller is told."""
    a, b = store.execute_many([claim(1), claim(2)])
    with raw(database) as rival, rival.cursor() as cursor:
        cursor.execute("SET SESSION innodb_lock_wait_timeout = 5")
        for _ in range(3):
            cursor.execute("START TRANSACTION")
            # The rival has touched more, so that we are the cheaper victim.
            cursor.execute("UPDATE semel_record SET `key` = CONCAT(`key`, 'x') WHERE id = %s", [claim(2).id])
            renewed: list[Any] = []
            ops = [Renew(claim(1).id, a.token, 60.0), Renew(claim(2).id, b.token, 60.0)]
            thread = threading.Thread(target=lambda ops=ops, renewed=renewed: renewed.extend(store.execute_many(ops)))
            thread.start()
            until_waiting(database)
            cursor.execute("UPDATE semel_record SET `key` = CONCAT(`key`, 'x') WHERE id = %s", [claim(1).id])
            cursor.execute("COMMIT")
            thread.join(PATIENCE)
            assert renewed == [True, True]


def until_waiting(url: str) -> None:
    """Wait until a transaction of this database waits for a lock."""
    sql = (
        "SELECT COUNT(*) FROM information_schema.innodb_trx JOIN information_schema.processlist "
        "ON id = trx_mysql_thread_id WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'"
    )
    end = time.monotonic() + PATIENCE
    with raw(url) as connection, connection.cursor() as cursor:
        while time.monotonic() < end:
            cursor.execute(sql)
            if cursor.fetchone()[0]:
                return
            # The server shows what it has shown last if it was asked within the last tenth of a second.
            time.sleep(0.15)
    raise AssertionError("nobody waits for a lock")


@pytest.mark.usefixtures("flavour")
def test_a_lock_held_for_too_long_is_an_error_and_nothing_is_stored(database: str) -> None:
    with contextlib.closing(MySQLStore(database, timeout=1.0)) as store:
        held = store.execute(claim(1))
        assert isinstance(held, Claimed)
        with raw(database) as rival, rival.cursor() as cursor:
            cursor.execute("START TRANSACTION")
            cursor.execute("SELECT * FROM semel_record FOR UPDATE")
            refused: list[Op[Any]] = [Renew(claim(1).id, held.token, 60.0), claim(1, nonce=2)]
            for op in refused:
                with pytest.raises(StoreUnavailable, match=r"because of others|too long"):
                    store.execute(op)
            cursor.execute("ROLLBACK")
        assert store.execute(Renew(claim(1).id, held.token, 60.0)) is True


def test_many_sweepers_neither_wait_nor_count_twice(database: str, store: MySQLStore) -> None:
    store.execute_many([claim(i, lease=0.001, ttl=0.001) for i in range(100)])
    with raw(database) as holder, holder.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute("START TRANSACTION")
        cursor.execute("SELECT id FROM semel_record WHERE id < %s FOR UPDATE", [b"%016d" % 25])
        assert len(cursor.fetchall()) == 25
        swept: list[int] = []

        def sweep() -> None:
            with contextlib.closing(MySQLStore(database, timeout=5)) as own:
                while count := own.execute(Sweep(10)).removed:
                    swept.append(count)

        sweepers = [threading.Thread(target=sweep) for _ in range(3)]
        for thread in sweepers:
            thread.start()
        for thread in sweepers:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert sum(swept) == 75  # what someone holds is passed over, not waited for
        cursor.execute("ROLLBACK")
    assert store.execute(Sweep(1000)).removed == 25


PARAMETERS: dict[str, Any] = {
    "after": b"", "last": b"1" * 16, "stored": 1, "alive": 0,
    "token": 1, "origin": 1, "nonce": 1, "takeover": 0, "lease": 1, "ttl": 1, "position": 0, "most": 10, "state": 1,
    "place": "2026-01-01 00:00:00.000000", "past": 0, "oldest": 10,
    "fingerprint": b"", "snapshot": b"", "value": b"", "name": b"n", "tenant": "t", "operation": "o", "key": "k",
}  # fmt: skip


@pytest.mark.parametrize(("records", "asked_for"), [(1000, 3), (12, 12)])
def test_no_statement_reads_the_whole_table(database: str, store: MySQLStore, records: int, asked_for: int) -> None:
    """Those that lock not even a small one: they would wait for the rows that others have locked."""
    won = store.execute_many([claim(i) for i in range(records)])
    store.execute_many([SaveStep(claim(i).id, won[i].token, "a", b"x", 0) for i in range(min(records, 100))])
    query(database, "ANALYZE TABLE semel_record", "ANALYZE TABLE semel_step")
    read: list[str] = []
    connection = mysql_connections.PyMySQL().connect(MySQLSettings(database, 1, 10.0, 5.0, 0.0))
    with contextlib.closing(connection.raw):
        for name, asked in dialect._Q.items():
            if name in ("clock", "claim", "claim_returning") or not (asked.writes or records > 100):
                continue
            rows = [{"id": b"%016d" % i, **PARAMETERS} for i in range(asked_for)]
            piece = Piece(asked, rows, **{"id": b"%016d" % 1, **PARAMETERS})
            plan = connection.execute(Packet(_Explained(piece)))
            read += [  # MySQL has a column more before the one that says how a table is read
                f"{name}: {row}" for row in plan if str(row[2]).startswith(("semel", "r", "s")) and "ALL" in row[3:5]
            ]
            assert plan, name
    assert read == []


class _Explained(Piece):
    def __init__(self, piece: Piece) -> None:
        super().__init__(piece.query, piece.rows, **piece.params)

    def values(self) -> tuple[str, list[Any]]:
        text, values = super().values()
        return f"EXPLAIN FORMAT = TRADITIONAL {text}", values


# The caller's own connection


def moves(token: int) -> list[Op[Any]]:
    return [
        SaveStep(claim(1).id, token, "a", b"x", 0),
        Renew(claim(1).id, token, 60.0),
        Complete(claim(1).id, token, b"y", 60.0),
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_the_same_programs_run_on_the_callers_connection_in_its_transaction(
    database: str, store: MySQLStore, kept: bool
) -> None:
    """One by one, and nothing is begun or ended: what the caller rolls back was never there."""
    with pymysql.connect(**MySQLSettings(database, 1, 1, 1, 1).where) as connection:
        lent = PyMySQLConnection(connection)
        (won,) = run(dialect.program([claim(1)], returning=lent.returning), lent)
        assert run(dialect.program(moves(won.token), returning=lent.returning), lent) == [True] * 3
        (record,) = run(dialect.program([Lookup(claim(1).id)], returning=lent.returning), lent)
        assert record.state is State.DONE
        assert run(dialect.program([Sweep(10)], returning=False), lent)[0].removed == 0
        assert store.execute(Lookup(claim(1).id)) is None, "not committed by any of it"
        connection.commit() if kept else connection.rollback()
    assert (store.execute(Lookup(claim(1).id)) is not None) is kept


@pytest.mark.parametrize("kept", [True, False])
def test_the_same_on_an_async_connection(database: str, store: MySQLStore, kept: bool) -> None:
    async def main() -> None:
        connection = asyncmy.connection.Connection(**MySQLSettings(database, 1, 1, 1, 1).where)  # type: ignore[no-untyped-call]
        await connection.connect()
        lent = AsyncmyConnection(connection)
        (won,) = await run_async(dialect.program([claim(1)], returning=False), lent)
        assert await run_async(dialect.program(moves(won.token), returning=False), lent) == [True] * 3
        assert store.execute(Lookup(claim(1).id)) is None, "not committed by any of it"
        await (connection.commit() if kept else connection.rollback())
        await connection.ensure_closed()

    asyncio.run(main())
    assert (store.execute(Lookup(claim(1).id)) is not None) is kept


# Neighbours


def test_an_op_that_cannot_be_stored_does_not_fail_its_neighbours(database: str, store: MySQLStore) -> None:
    claimed = store.execute(claim(1))
    assert isinstance(claimed, Claimed)
    wrong = SaveStep(claim(1).id, claimed.token, "x" * 2000, b"", 0)
    before, failed, after = store.execute_many([Lookup(claim(1).id), wrong, claim(1)])
    assert isinstance(failed, StoreError)
    assert (type(before), type(after)) == (Record, Claimed)
    assert before.token == after.token == claimed.token
    # Undone as a whole, and no transaction is left open that would hold the row.
    assert query(database, "SELECT steps FROM semel_record FOR UPDATE NOWAIT") == ((0,),)


def test_keys_that_differ_in_case_or_in_spaces_are_kept_as_they_are(store: MySQLStore) -> None:
    for number, key in enumerate(("a", "A", "a ", "á")):
        op = Claim(b"%016d" % number, 1, b"", 30.0, 60.0, Takeover.RETRY, key, key, key)
        won = store.execute(op)
        assert isinstance(won, Claimed)
        for name in ("a", "A", "a ", "á"):
            assert store.execute(SaveStep(op.id, won.token, name, name.encode(), 0))
        record = store.execute(Lookup(op.id))
        assert record is not None
        assert (record.tenant, record.operation, record.key) == (key, key, key)
        assert store.execute(Release(op.id, won.token, State.ABANDONED))
        again = store.execute(Claim(op.id, 2, b"", 30.0, 60.0, Takeover.RETRY, key, key, key))
        assert isinstance(again, Claimed)
        assert sorted(dict(again.steps)) == sorted(["a", "A", "a ", "á"])


# Migrations

MIGRATES = """
import sys
from semel.stores.mysql import migrate
print(*migrate(sys.argv[1]))
"""


def test_many_processes_may_migrate_at_once(mariadb_url: str) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", MIGRATES, mariadb_url], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    printed = [process.communicate(timeout=PATIENCE)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sorted(printed) == [*[""] * 3, "0001_records 0002_messages 0003_trail"]
    assert query(mariadb_url, "SELECT version, name FROM semel_migration") == (
        (1, "records"),
        (2, "messages"),
        (3, "trail"),
    )
    check(mariadb_url)


def test_a_migration_that_broke_off_is_simply_run_again(mariadb_url: str) -> None:
    """MySQL commits each table by itself: the first is there, and nothing is written down."""
    migrate(mariadb_url)
    query(mariadb_url, "DROP TABLE semel_step", "DELETE FROM semel_migration")
    with pytest.raises(NotMigrated, match="0001_records"):
        check(mariadb_url)
    assert migrate(mariadb_url) == ["0001_records", "0002_messages", "0003_trail"]
    check(mariadb_url)


def test_migrating_and_checking_by_the_async_driver(mariadb_url: str) -> None:
    async def main() -> None:
        with pytest.raises(NotMigrated, match="0001_records"):
            await check_async(mariadb_url)
        assert await migrate_async(mariadb_url) == ["0001_records", "0002_messages", "0003_trail"]
        assert await migrate_async(mariadb_url) == []
        await check_async(mariadb_url)
        query(mariadb_url, "DROP INDEX semel_record_sweep ON semel_record")
        with pytest.raises(SchemaDrift, match="semel_record_sweep"):
            await check_async(mariadb_url)

    asyncio.run(main())


def test_a_database_without_our_tables_is_not_migrated(mariadb_url: str) -> None:
    with contextlib.closing(MySQLStore(mariadb_url)) as store:
        ops: list[Op[Any]] = [claim(1), Lookup(claim(1).id), Release(claim(1).id, 1), Sweep(1)]
        for op in ops:
            with pytest.raises(NotMigrated, match="semel migrate"):
                store.execute(op)
    assert query(mariadb_url, "SHOW TABLES") == ()


def test_the_command_line_migrates_and_checks(mariadb_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--check", mariadb_url]) == 1
    assert main(["migrate", mariadb_url]) == 0
    assert main(["migrate", "--check", mariadb_url.replace("mysql:", "mariadb:")]) == 0
    assert capsys.readouterr().out == "applied 0001_records\napplied 0002_messages\napplied 0003_trail\nup to date\n"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("DROP INDEX semel_record_sweep ON semel_record", "semel_record_sweep"),
        ("ALTER TABLE semel_record ADD COLUMN note text", "semel_record.note"),
        ("ALTER TABLE semel_record DROP COLUMN steps", "semel_record.steps"),
        ("ALTER TABLE semel_record MODIFY attempt bigint NOT NULL", "semel_record.attempt"),
        ("ALTER TABLE semel_record MODIFY tenant text", "semel_record.tenant"),
        ("ALTER TABLE semel_record MODIFY `key` varchar(255) COLLATE utf8mb4_general_ci", "semel_record.key"),
        ("ALTER TABLE semel_record ADD CONSTRAINT some_check CHECK (attempt > 0)", "some_check"),
        ("ALTER TABLE semel_record ENGINE = MyISAM", "semel_record"),
        ("ALTER TABLE semel_step DROP PRIMARY KEY", "semel_step.PRIMARY"),
        ("DROP TABLE semel_step", "semel_step"),
        ("CREATE INDEX extra ON semel_record (nonce)", "semel_record.extra"),
        ("CREATE TABLE semel_other (id int)", "semel_other"),
    ],
)
def test_a_changed_schema_is_found(database: str, change: str, names: str) -> None:
    check(database)
    query(database, change)
    with pytest.raises(SchemaDrift, match=names):
        check(database)


def test_tables_of_others_are_no_drift(database: str) -> None:
    query(database, "CREATE TABLE semelfactive (id integer)")
    query(database, "CREATE TABLE orders (id integer PRIMARY KEY, semel_id text)")
    check(database)
    assert migrate(database) == []
