"""PostgreSQL: what is its own: round trips, updates that touch no index, concurrent migrations and sweeps, drift."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from semel import (
    AsyncPostgresStore,
    AsyncSemel,
    NotMigrated,
    PostgresStore,
    SchemaDrift,
    Semel,
    StoreError,
    StoreUnavailable,
)
from semel.core.ops import Claim, Claimed, Complete, Lookup, Op, Record, Release, Renew, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.sql.connections.psycopg import PsycopgConnection
from semel.sql.migrations import LOCK_TIMEOUT, POSTGRES
from semel.sql.sync import check
from semel.sql.sync import migrate as migrate_on
from semel.stores import listening
from semel.stores.postgres import migrate
from tests.servers import PostgresServer

PATIENCE = 30.0


def claim(number: int, *, lease: float = 30.0, ttl: float = 3600.0, nonce: int | None = None) -> Claim:
    made = number if nonce is None else nonce
    return Claim(b"%016d" % number, made, b"", lease, ttl, Takeover.RETRY, "", "test", str(number))


@pytest.fixture
def database(postgres_url: str) -> str:
    """A fresh database with our tables."""
    migrate(postgres_url)
    return postgres_url


@pytest.fixture
def store(database: str) -> Iterator[PostgresStore]:
    with contextlib.closing(PostgresStore(database)) as opened:
        yield opened


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


# Round trips


class Statements:
    """Statements that the server has logged for one database."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.server = server
        self.name = url.rpartition("/")[2]
        query(url, f"ALTER DATABASE \"{self.name}\" SET log_statement = 'all'")
        self.seen = len(self._all())

    def _all(self) -> list[str]:
        lines = self.server.log.read_text(errors="replace").splitlines()
        return [
            line for line in lines if f" {self.name} LOG:  " in line and ("execute " in line or "statement: " in line)
        ]

    def new(self) -> list[str]:
        found = self._all()
        fresh, self.seen = found[self.seen :], len(found)
        return fresh


@pytest.fixture
def statements(postgres: PostgresServer, database: str) -> Statements:
    return Statements(postgres, database)


def test_a_first_execution_is_two_statements_and_a_replay_one(database: str, statements: Statements) -> None:
    with contextlib.closing(PostgresStore(database, connections=1)) as store:
        guard = Semel(store, sweep_every=None)
        guard.run("ship", key="0", call=lambda: 0)  # opens the connection
        statements.new()
        assert guard.run("ship", key="1", call=lambda: 7) == 7
        assert len(statements.new()) == 2
        assert guard.run("ship", key="1", call=lambda: 8) == 7
        assert len(statements.new()) == 1
        guard.close()


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_an_async_first_execution_is_two_statements_and_a_replay_one(
    database: str, statements: Statements, driver: Any
) -> None:
    async def main() -> None:
        store = AsyncPostgresStore(database, driver=driver, connections=1)
        guard = AsyncSemel(store, sweep_every=None)

        async def call() -> int:
            return 7

        await guard.run("ship", key="0", call=call)
        await asyncio.to_thread(statements.new)
        assert await guard.run("ship", key="1", call=call) == 7
        assert len(await asyncio.to_thread(statements.new)) == 2
        assert await guard.run("ship", key="1", call=call) == 7
        assert len(await asyncio.to_thread(statements.new)) == 1
        await guard.close()
        await store.close()

    asyncio.run(main())


def test_tasks_of_one_turn_share_a_statement(database: str, statements: Statements) -> None:
    async def main() -> None:
        store = AsyncPostgresStore(database, connections=1)
        await store.execute(claim(0))
        await asyncio.to_thread(statements.new)
        answers = await asyncio.gather(*(store.execute(claim(i)) for i in range(1, 33)))
        assert {type(answer) for answer in answers} == {Claimed}
        assert len(await asyncio.to_thread(statements.new)) == 1
        await store.close()

    asyncio.run(main())


def test_renewing_and_completing_touch_no_index(database: str, store: PostgresStore) -> None:
    for i in range(20):
        claimed = store.execute(claim(i))
        assert isinstance(claimed, Claimed)
        assert store.execute(Renew(claim(i).id, claimed.token, 30.0))
        assert store.execute(Complete(claim(i).id, claimed.token, b"answer" * 100, 3600.0))
    store.close()  # a session hands its counters over when it ends
    statistics = "SELECT n_tup_upd, n_tup_hot_upd, n_tup_ins FROM pg_stat_user_tables WHERE relname = 'semel_record'"
    for _ in range(200):
        ((updated, hot, inserted),) = query(database, statistics)
        if inserted >= 20 and updated >= 40:
            break
    assert (inserted, updated, hot) == (20, 40, 40)


# Waking


@pytest.mark.parametrize("driver", [None, "asyncpg", "psycopg"])
def test_a_waiter_is_woken_and_does_not_just_look_again(
    database: str, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second look out of reach, only a notification can end the wait in time."""
    monkeypatch.setattr(listening, "LISTEN_AGAIN", 1000.0)
    with contextlib.closing(PostgresStore(database)) as other:
        claimed = other.execute(claim(1, lease=1000.0))
        assert isinstance(claimed, Claimed)

        def finish() -> None:
            until_awaited(database)
            other.execute(Complete(claim(1).id, claimed.token, b"answer", 60.0))

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        began = time.monotonic()
        if driver is None:
            with contextlib.closing(PostgresStore(database)) as store:
                store.wait(claim(1).id, 60.0)
        else:
            asyncio.run(waits(database, driver))
        assert time.monotonic() - began < 30
        thread.join(PATIENCE)
        record = other.execute(Lookup(claim(1).id))
        assert record is not None
        assert record.state is State.DONE


def until_awaited(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(10_000):
            if connection.execute("SELECT 1 FROM semel_record WHERE awaited").fetchone():
                return
    raise AssertionError("nobody waits")


async def waits(url: str, driver: Any) -> None:
    store = AsyncPostgresStore(url, driver=driver)
    try:
        await store.wait(claim(1).id, 60.0)
    finally:
        await store.close()


# Neighbours


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"])
def test_an_op_that_the_driver_refuses_does_not_fail_its_neighbours(store: PostgresStore, name: str) -> None:
    """Text that PostgreSQL does not know (NUL) or that is no text fails in the driver, before anything is sent."""
    claimed = store.execute(claim(1))
    assert isinstance(claimed, Claimed)
    wrong = SaveStep(claim(1).id, claimed.token, name, b"", 0)
    before, failed, after = store.execute_many([Lookup(claim(1).id), wrong, claim(1)])
    assert isinstance(failed, StoreError)
    assert (type(before), type(after)) == (Record, Claimed)
    assert before.token == after.token == claimed.token


def test_many_sweepers_neither_wait_nor_count_twice(database: str, store: PostgresStore) -> None:
    store.execute_many([claim(i, lease=0.001, ttl=0.001) for i in range(200)])
    with psycopg.connect(database) as holder:
        ids = [b"%016d" % i for i in range(50)]
        holder.execute("SELECT id FROM semel_record WHERE id = ANY (%s) FOR UPDATE", [ids])
        swept: list[int] = []

        def sweep() -> None:
            with contextlib.closing(PostgresStore(database, timeout=5)) as own:
                while count := own.execute(Sweep(10)).removed:
                    swept.append(count)

        sweepers = [threading.Thread(target=sweep) for _ in range(4)]
        for thread in sweepers:
            thread.start()
        for thread in sweepers:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert sum(swept) == 150  # what someone holds is passed over, not waited for
        holder.rollback()
    assert store.execute(Sweep(1000)).removed == 50


# Migrations

MIGRATES = """
import sys
from semel.stores.postgres import migrate
print(*migrate(sys.argv[1]))
"""


def test_many_processes_may_migrate_at_once(postgres_url: str) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", MIGRATES, postgres_url], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    printed = [process.communicate(timeout=PATIENCE)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * 8
    migrations = POSTGRES.migrations()
    assert sorted(printed) == [*[""] * 7, " ".join(f"{number:04d}_{name}" for number, name, _ in migrations)]
    applied = query(postgres_url, "SELECT version, name FROM semel_migration ORDER BY version")
    assert applied == [(number, name) for number, name, _ in migrations]
    checked(postgres_url)


def checked(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            check(PsycopgConnection(connection), POSTGRES)
        finally:
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_database_without_our_tables_is_not_migrated(postgres_url: str) -> None:
    with pytest.raises(NotMigrated, match="0001_records"):
        checked(postgres_url)
    with contextlib.closing(PostgresStore(postgres_url)) as store:
        ops: list[Op[Any]] = [claim(1), Lookup(claim(1).id), Release(claim(1).id, 1)]
        for op in ops:
            with pytest.raises(NotMigrated, match="semel migrate"):
                store.execute(op)
    assert query(postgres_url, "SELECT relname FROM pg_class WHERE relname LIKE 'semel%'") == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("DROP INDEX semel_record_sweep", "semel_record_sweep"),
        ("ALTER TABLE semel_record ADD COLUMN note text", "semel_record.note"),
        ("ALTER TABLE semel_record DROP COLUMN awaited", "semel_record.awaited"),
        ("ALTER TABLE semel_record ALTER COLUMN attempt TYPE bigint", "semel_record.attempt"),
        ("ALTER TABLE semel_record ALTER COLUMN tenant DROP NOT NULL", "semel_record.tenant"),
        ("ALTER TABLE semel_record ALTER COLUMN steps DROP DEFAULT", "semel_record.steps"),
        ("ALTER TABLE semel_record ADD CONSTRAINT semel_record_state CHECK (state < 4)", "semel_record_state"),
        ("ALTER TABLE semel_record SET (fillfactor = 100)", "semel_record"),
        ("ALTER TABLE semel_step DROP CONSTRAINT semel_step_pkey", "semel_step_pkey"),
        ("DROP TABLE semel_step", "semel_step"),
        ("CREATE INDEX semel_extra ON semel_record (tenant)", "semel_extra"),
    ],
)
def test_a_changed_schema_is_found(database: str, change: str, names: str) -> None:
    checked(database)
    query(database, change)
    with pytest.raises(SchemaDrift, match=names):
        checked(database)
    assert query(database, "SELECT 1 FROM pg_namespace WHERE nspname = 'semel_drift'") == []


def test_tables_of_others_are_no_drift(database: str) -> None:
    query(database, "CREATE TABLE semelfactive (id integer)")
    query(database, "CREATE TABLE orders (id integer PRIMARY KEY, semel_id text)")
    checked(database)


def only_the_first(url: str) -> None:
    """A database that was migrated when there was one file."""
    number, name, statements = POSTGRES.migrations()[0]
    for statement in [POSTGRES.ledger, *statements]:
        query(url, statement)
    query(url, f"INSERT INTO semel_migration VALUES ({number}, '{name}')")


def later_indexes() -> list[str]:
    """The statements that make an index on a table that may be large by then."""
    later = [statement for _, _, statements in POSTGRES.migrations()[1:] for statement in statements]
    return [statement for statement in later if re.match("CREATE INDEX.* ON semel_(record|step) ", statement)]


def test_an_index_that_was_made_by_hand_without_stopping_writers_is_accepted(postgres_url: str) -> None:
    only_the_first(postgres_url)
    assert len(later_indexes()) >= 2
    for statement in later_indexes():
        query(postgres_url, statement.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY"))
    before = query(postgres_url, "SELECT relname, oid FROM pg_class WHERE relname LIKE 'semel%' AND relkind = 'i'")
    assert migrate(postgres_url)[0] == "0002_tenants"
    after = query(postgres_url, "SELECT relname, oid FROM pg_class WHERE relname LIKE 'semel%' AND relkind = 'i'")
    assert set(before) <= set(after), "it was made again"
    checked(postgres_url)


def test_a_migration_does_not_keep_writers_waiting_behind_a_transaction_that_does_not_end(
    postgres_url: str,
) -> None:
    only_the_first(postgres_url)
    *begin, limit = POSTGRES.begin
    assert limit == f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"
    impatient = replace(POSTGRES, begin=(*begin, "SET LOCAL lock_timeout = '20ms'"))
    with psycopg.connect(postgres_url) as writer, psycopg.connect(postgres_url, autocommit=True) as connection:
        writer.execute("DELETE FROM semel_record")  # and does not commit
        with pytest.raises(StoreUnavailable, match=r"nothing was changed\. Run it again when that one has ended"):
            migrate_on(PsycopgConnection(connection), impatient)
        assert query(postgres_url, "SELECT version FROM semel_migration") == [(1,)]
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        writer.rollback()
        assert migrate_on(PsycopgConnection(connection), impatient)[0] == "0002_tenants"
        assert connection.execute("SHOW lock_timeout").fetchall() == [("0",)], "it outlives the migration"
    checked(postgres_url)


def test_migrators_wait_for_each_other_for_as_long_as_it_takes() -> None:
    lock, limit = (next(i for i, sql in enumerate(POSTGRES.begin) if word in sql) for word in ("advisory", "timeout"))
    assert lock < limit


def test_migrating_again_changes_nothing(database: str) -> None:
    assert migrate(database) == []
