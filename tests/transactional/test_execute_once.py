"""One SQL statement and its record, stored together: on every kind of connection, and in races."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from semel import (
    AsyncPostgresStore,
    AsyncSemel,
    Codec,
    ConfigurationError,
    InProgress,
    KeyReused,
    KeyRing,
    NotMigrated,
    PostgresStore,
    ResultNotStored,
    Semel,
    SemelError,
    State,
    StatementResult,
    StoreUncertain,
    TransactionConflict,
    Wait,
)
from semel.sql.effects import returns_rows
from semel.stores.postgres import migrate
from tests.servers import PostgresServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.transactional.kinds import TABLE, AsyncTill, Till
from tests.transactional.marked import MARKED, SOME
from tests.transactional.test_statements import Wire

OpenTill = Callable[..., Any]
PAY = "INSERT INTO payment (key, worker) VALUES (?, ?)"
PAY_RETURNING = f"{PAY} RETURNING key, worker"
ONE = "INSERT INTO payment (key) VALUES (%s) RETURNING key"


# Every kind of connection


@pytest.fixture(params=SOME)
def kind(request: pytest.FixtureRequest) -> str:
    """The first test is run on every kind of connection, the others on some."""
    return str(request.param)


def run(till: Any, within: bool, key: str, sql: str, values: list[Any], **how: Any) -> Any:
    """Run the statement, in a transaction of the caller's or as the connection is. Then nothing is left open."""
    if within:
        return till.execute_within(key, sql, values, **how)
    end = "rollback"
    try:
        found = till.execute_once(key, sql, values, **how)
        end = "commit"
        return found
    finally:
        if not till.kind.startswith("asyncpg"):  # it has neither
            done = getattr(till.conn, end)
            till.run(done)


@pytest.mark.parametrize("kind", MARKED, indirect=True)
@pytest.mark.parametrize("within", [False, True])
def test_the_rows_are_stored_and_replayed(open_till: OpenTill, within: bool) -> None:
    till = open_till()
    for replayed in (False, True):
        found = run(till, within, "k1", PAY_RETURNING, ["a", 7])
        assert found == StatementResult([{"key": "a", "worker": 7}], 1, replayed)
    assert till.rows() == ["a"]
    assert till.lookup("k1").state is State.DONE


@pytest.mark.parametrize("within", [False, True])
def test_without_returning_the_number_of_changed_rows_is_the_result(open_till: OpenTill, within: bool) -> None:
    till = open_till()
    for key in ("a", "b"):
        assert run(till, within, key, PAY, [key, 1]) == StatementResult([], 1, False)
    change = "UPDATE payment SET worker = worker + ? WHERE worker = ?"
    assert run(till, within, "k1", change, [5, 1]) == StatementResult([], 2, False)
    assert run(till, within, "k1", change, [5, 1]) == StatementResult([], 2, True)
    assert run(till, within, "k2", change, [5, 1]) == StatementResult([], 0, False)


@pytest.mark.parametrize("within", [False, True])
def test_other_parameters_under_the_key_are_refused(open_till: OpenTill, within: bool) -> None:
    till = open_till()
    run(till, within, "k1", PAY, ["a", 7])
    with pytest.raises(KeyReused):
        run(till, within, "k1", PAY, ["a", 8])
    assert run(till, within, "k1", PAY, ["a", 8], fingerprint=None).replayed
    assert till.rows() == ["a"]


@pytest.mark.parametrize("within", [False, True])
def test_a_statement_that_fails_raises_the_drivers_error_and_leaves_nothing(open_till: OpenTill, within: bool) -> None:
    till = open_till()
    with pytest.raises(Exception, match=r"(?i)null") as raised:
        run(till, within, "k1", PAY, [None, 7])
    assert not isinstance(raised.value, SemelError)
    assert till.lookup("k1") is None
    assert not run(till, within, "k1", PAY, ["a", 7]).replayed
    assert till.rows() == ["a"]


def test_what_the_caller_rolls_back_never_happened(open_till: OpenTill) -> None:
    till = open_till()

    class Refused(Exception):
        pass

    if till.lent.awaited:

        async def refused() -> None:
            async with till.transaction():
                await till.execute_async("k1", PAY, ["a", 7])
                raise Refused
    else:

        def refused() -> None:  # type: ignore[misc]
            with till.transaction():
                till.execute_once("k1", PAY, ["a", 7])
                raise Refused

    with pytest.raises(Refused):
        till.run(refused)
    assert (till.lookup("k1"), till.rows()) == (None, [])


@pytest.mark.parametrize("within", [False, True])
def test_an_encrypted_result_is_replayed(open_till: OpenTill, within: bool) -> None:
    till = open_till(codec=Codec(cipher=KeyRing({"k": b"0" * 32})))
    for replayed in (False, True):
        found = run(till, within, "k1", PAY_RETURNING, ["a", 7])
        assert found == StatementResult([{"key": "a", "worker": 7}], 1, replayed)
    assert till.rows() == ["a"]


@pytest.mark.parametrize("within", [False, True])
def test_a_key_of_the_other_calls_is_the_same_key(open_till: OpenTill, within: bool) -> None:
    till = open_till()
    run(till, within, "k1", PAY_RETURNING, ["a", 7])
    assert till.pay("k1").value == [{"key": "a", "worker": 7}]
    till.pay("k2")
    with pytest.raises(ResultNotStored, match="not the result of a statement"):
        run(till, within, "k2", PAY, ["k2", 7])
    assert till.rows() == ["a", "k2"]


# PostgreSQL: one statement


@pytest.fixture
def guard(database: str) -> Iterator[Semel]:
    with Semel(PostgresStore(database, listen=False), sweep_every=None) as guard:
        yield guard


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as conn:
        yield conn


def payments(database: str) -> list[str]:
    with psycopg.connect(database) as conn:
        return [row[0] for row in conn.execute("SELECT key FROM payment ORDER BY key")]


def pay(guard: Semel, conn: Any, key: str = "k1", **how: Any) -> StatementResult:
    return guard.execute_once(conn, "pay", key=key, statement=ONE, parameters=[key], **how)


def test_record_and_effect_are_one_message_and_a_replay_has_no_transaction(
    guard: Semel, conn: Any, tmp_path: Path
) -> None:
    wire = Wire(conn, tmp_path / "wire")
    pay(guard, conn)
    (only,) = wire.said()
    assert "WITH semel_effect AS (" in only
    assert pay(guard, conn).replayed
    refused, look = wire.said()
    assert "WITH semel_effect AS (" in refused
    assert "semel_guard" in look
    wire.close()


def test_asyncpg_sends_one_message_too(database: str) -> None:
    till = AsyncTill("asyncpg", database)
    said: list[str] = []
    till.run(lambda: asyncio.sleep(0))
    till.conn.add_query_logger(lambda query: said.append(query.query))
    till.execute_once("k1", PAY, ["a", 7])
    assert len(said) == 1
    said.clear()
    till.execute_within("k2", PAY, ["a", 7])
    assert len(said) == 4  # BEGIN, the guard, both together, COMMIT
    till.close()


def test_values_are_plain_data_and_the_same_in_a_replay(guard: Semel, conn: Any) -> None:
    statement = """
        INSERT INTO payment (key) VALUES ('a') RETURNING
        12.50::numeric AS price, 3::numeric AS whole, 2::bigint AS number, 0.5::float8 AS half, true AS yes,
        NULL::text AS nothing, 'Zoë'::text AS name, '\\xff00'::bytea AS bytes, ARRAY[1, 2] AS list,
        '{"a": [1]}'::jsonb AS tree, DATE '2026-11-16' AS day, TIMESTAMP '2026-11-16 05:00:00' AS moment,
        '6f6d7d2c-98ab-4bbf-8f0a-0f7d7f0f1b1c'::uuid AS id
    """
    expected = {
        "price": 12.5, "whole": 3, "number": 2, "half": 0.5, "yes": True, "nothing": None, "name": "Zoë",
        "bytes": "\\xff00", "list": [1, 2], "tree": {"a": [1]}, "day": "2026-11-16", "moment": "2026-11-16T05:00:00",
        "id": "6f6d7d2c-98ab-4bbf-8f0a-0f7d7f0f1b1c",
    }  # fmt: skip
    for replayed in (False, True):
        found = guard.execute_once(conn, "pay", key="k1", statement=statement)
        assert found == StatementResult([expected], 1, replayed)
    with conn.transaction():  # a statement with its own WITH runs as it is, and the driver's values become the same
        found = guard.execute_once(conn, "pay", key="k2", statement=f"WITH one AS (SELECT 1) {statement}")
    assert found == StatementResult([expected], 1, False)


@pytest.mark.parametrize(
    ("statement", "parameters", "expected"),
    [
        ("INSERT INTO payment (key) VALUES ('100%') RETURNING key", (), [{"key": "100%"}]),
        ("INSERT INTO payment (key) VALUES (%s || '%%') RETURNING key", ("5",), [{"key": "5%"}]),
        ("INSERT INTO payment (key) VALUES (%(key)s) RETURNING key -- paid", {"key": "a"}, [{"key": "a"}]),
        ("insert into payment (key) values ('returning') -- returning", (), 1),
        ("INSERT INTO payment (key) SELECT 'a' WHERE false RETURNING key", (), []),
        ("WITH one AS (INSERT INTO payment (key) VALUES ('a') RETURNING key) SELECT key FROM one", (), [{"key": "a"}]),
        ("WITH one AS (SELECT 'a' AS key) INSERT INTO payment (key) SELECT key FROM one", (), 1),
        ("SELECT set_config('semel.test', %s, false) AS set", ["x"], [{"set": "x"}]),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_statements_of_many_shapes(
    guard: Semel, conn: Any, statement: str, parameters: Any, expected: Any, within: bool
) -> None:
    conn.autocommit = not within
    for replayed in (False, True):
        found = guard.execute_once(conn, "pay", key="k1", statement=statement, parameters=parameters)
        assert (found.rows or found.count) == (expected or 0)
        assert found.replayed is replayed
        conn.commit()


def test_words_in_literals_names_and_comments_do_not_count() -> None:
    assert returns_rows("SELECT pay(1)")
    assert returns_rows("DELETE FROM a WHERE b = 'x' RETURNING b")
    assert not returns_rows("UPDATE a SET b = 'x returning', c = $q$ returning $q$, d = E'\\' returning'")
    assert not returns_rows('INSERT INTO a SELECT "returning" FROM (DELETE FROM b RETURNING c) /* returning */')
    for statement in ("", "BEGIN", "DELETE FROM a; DELETE FROM b", "DELETE FROM a; -- all"):
        with pytest.raises(ConfigurationError, match="one SQL statement"):
            returns_rows(statement)


def test_parameters_in_a_form_that_the_connection_does_not_take(guard: Semel, conn: Any, database: str) -> None:
    with pytest.raises(ConfigurationError, match="a list or a dict, not a str"):
        guard.execute_once(conn, "pay", key="k1", statement=ONE, parameters="k1")
    till = AsyncTill("asyncpg", database)
    with pytest.raises(ConfigurationError, match=r"\$1"):
        till.run(lambda: till.guard.execute_once(till.conn, "pay", key="k1", statement=ONE, parameters={"key": "k1"}))
    till.close()
    other = Till("session-psycopg", database)
    with pytest.raises(ConfigurationError, match=":name"):
        other.guard.execute_once(other.conn, "pay", key="k1", statement=ONE, parameters=["k1"])
    other.close()


def test_a_pipeline_of_the_callers_is_no_hindrance(guard: Semel, conn: Any, database: str) -> None:
    for replayed in (False, True):
        with conn.pipeline(), conn.transaction():
            assert pay(guard, conn).replayed is replayed
        with conn.pipeline():
            assert pay(guard, conn, "k2").replayed is replayed
    assert payments(database) == ["k1", "k2"]


def test_a_sessions_new_rows_go_first(database: str) -> None:
    from sqlalchemy import Column, String, event
    from sqlalchemy.orm import declarative_base

    base: Any = declarative_base()

    class Payment(base):  # type: ignore[misc]
        __tablename__ = "payment"
        key = Column(String, primary_key=True)

    till = Till("session-psycopg", database)
    said: list[str] = []
    event.listen(till.conn.get_bind(), "before_cursor_execute", lambda conn, cursor, text, *rest: said.append(text))
    with till.conn.begin():
        till.conn.add(Payment(key="first"))
        found = till.execute_once("k1", "UPDATE payment SET worker = 3 WHERE key = ?", ["first"])
    assert found == StatementResult([], 1, False)
    assert len(said) == 3
    till.close()


@pytest.mark.parametrize("awaited", [False, True])
def test_prepared_statements_that_were_thrown_away_are_prepared_again(database: str, awaited: bool) -> None:
    """psycopg's own rollback() sends DEALLOCATE ALL."""
    till: Any = AsyncTill("async-psycopg-autocommit", database) if awaited else Till("psycopg-autocommit", database)
    for number in range(12):
        assert not till.execute_once(f"k{number}", PAY_RETURNING, ["a%", number]).replayed
    ours = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'semel%'"
    assert till.run(lambda: till.send(ours)) == [(1,)]
    till.run(lambda: till.send("DEALLOCATE ALL"))
    for number in range(12, 15):
        assert till.execute_once(f"k{number}", PAY_RETURNING, ["a%", number]).rows == [{"key": "a%", "worker": number}]
    assert till.execute_once("k14", PAY_RETURNING, ["a%", 14]).replayed
    assert till.run(lambda: till.send(ours)) == [(1,)]
    with pytest.raises(Exception, match="null"):
        till.execute_once("k15", PAY_RETURNING, [None, 15])
    assert len(till.rows()) == 15
    till.close()


def test_nothing_is_prepared_where_the_connection_must_not(database: str) -> None:
    till = Till("psycopg-autocommit", database)
    till.conn.prepare_threshold = None
    for number in range(12):
        till.execute_once(f"k{number}", PAY, ["a", number])
    assert till.send("SELECT count(*) FROM pg_prepared_statements") == [(0,)]
    till.close()


# PostgreSQL: what is in the way


def test_a_record_that_has_expired_is_replaced(guard: Semel, conn: Any, database: str) -> None:
    pay(guard, conn)
    conn.execute("UPDATE semel_record SET expires = now() - interval '1 s'")
    assert not pay(guard, conn).replayed
    assert pay(guard, conn).replayed
    conn.execute("UPDATE semel_record SET expires = now() - interval '1 s'")
    with conn.transaction():
        assert not pay(guard, conn).replayed
    assert payments(database) == ["k1"] * 3


def test_a_key_that_runs_under_a_lease_is_in_progress(guard: Semel, conn: Any, database: str) -> None:
    def handler() -> str:
        with pytest.raises(InProgress):
            run_elsewhere(lambda: pay(guard, conn))
        with conn.transaction(), pytest.raises(InProgress):
            run_elsewhere(lambda: pay(guard, conn))
        return "done"

    assert guard.run("pay", key="k1", call=handler) == "done"
    assert payments(database) == []


def run_elsewhere(work: Callable[[], Any]) -> Any:
    """Run in another thread, whose call is not made within the running operation."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_a_transaction_that_is_about_to_commit_the_key_is_in_progress(guard: Semel, conn: Any, database: str) -> None:
    with psycopg.connect(database) as first:
        pay(guard, first)
        with pytest.raises(InProgress):
            pay(guard, conn)
        timer = threading.Timer(0.05, first.commit)
        timer.start()
        assert pay(guard, conn, on_duplicate=Wait("30s")).replayed
        timer.join()
    assert payments(database) == ["k1"]


def test_a_snapshot_older_than_the_winner_ends_in_a_conflict(guard: Semel, conn: Any, database: str) -> None:
    with psycopg.connect(database) as late:
        late.isolation_level = IsolationLevel.REPEATABLE_READ
        late.execute("SELECT 1")  # its snapshot is taken here
        pay(guard, conn)
        with pytest.raises(TransactionConflict, match="roll back and run the unit of work again"):
            pay(guard, late)
        assert late.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
        late.rollback()
        assert pay(guard, late).replayed
    assert payments(database) == ["k1"]


def test_how_many_rows_changed_is_stored_whether_server_or_client_made_the_snapshot(
    guard: Semel, conn: Any, database: str
) -> None:
    """One changed row is the usual case: its snapshot is sent along, and the server makes the others."""
    for many in (0, 1, 2):
        statement = f"INSERT INTO payment (key) SELECT 'k' FROM generate_series(1, {many})"
        counts = [guard.execute_once(conn, "pay", key=many, statement=statement).count for _ in range(2)]
        assert counts == [many, many]
    made = "substr(snapshot, 1, 8) || substr(sha256(substr(snapshot, 1, 8) || '1'), 1, 4) || '1'"
    same = conn.execute(f"SELECT snapshot = {made} FROM semel_record WHERE key = '1'").fetchone()
    assert same == (True,)


def test_a_duplicate_in_the_callers_own_table_is_the_callers_error(guard: Semel, conn: Any) -> None:
    conn.execute("CREATE TEMPORARY TABLE entry (key text PRIMARY KEY)")
    insert = "INSERT INTO entry VALUES ('a')"
    guard.execute_once(conn, "pay", key="k1", statement=insert)
    for _ in range(2):
        with pytest.raises(psycopg.errors.UniqueViolation):
            guard.execute_once(conn, "pay", key="k2", statement=insert, remember_errors=psycopg.errors.UniqueViolation)
    assert (found := guard.lookup("pay", "k2")) is not None
    assert found.state is State.DONE


def test_a_statement_that_met_another_transaction_runs_again(guard: Semel, conn: Any) -> None:
    conn.execute("CREATE SEQUENCE IF NOT EXISTS tries_seen")
    conn.execute("""
        CREATE OR REPLACE FUNCTION pay_at_last() RETURNS bigint LANGUAGE plpgsql AS $$
        DECLARE
            seen bigint := nextval('tries_seen');
        BEGIN
            IF seen < 3 THEN
                RAISE serialization_failure;
            END IF;
            RETURN seen;
        END $$
    """)
    found = guard.execute_once(conn, "pay", key="k1", statement="SELECT pay_at_last() AS seen")
    assert found == StatementResult([{"seen": 3}], 1, False)


def test_events_say_what_happened(conn: Any, database: str) -> None:
    told: list[str] = []
    with Semel(PostgresStore(database), on_event=lambda event: told.append(type(event).__name__)) as guard:
        pay(guard, conn)
        pay(guard, conn)
        with conn.transaction():
            pay(guard, conn, "k2")
    assert told == ["Started", "Completed", "Replayed", "Started", "Prepared"]


def test_a_database_without_the_tables(guard: Semel, postgres: PostgresServer) -> None:
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(TABLE)
        with pytest.raises(NotMigrated, match="run `semel migrate"):
            pay(guard, conn)
        with pytest.raises(psycopg.errors.UndefinedTable, match="elsewhere"):
            guard.execute_once(conn, "pay", key="k1", statement="DELETE FROM elsewhere")
    postgres.drop_database(url)


# PostgreSQL: races and losses

KEYS = [f"k{number}" for number in range(20)]


def test_threads_pay_each_key_once(guard: Semel, database: str) -> None:
    results: list[Any] = []

    def client(autocommit: bool) -> None:
        with psycopg.connect(database, autocommit=autocommit) as conn:
            for key in KEYS:
                results.append((key, pay(guard, conn, key, on_duplicate=Wait("30s")).rows))
                conn.commit()

    threads = [threading.Thread(target=client, args=(at % 2 == 0,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert payments(database) == sorted(KEYS)
    assert sorted(results, key=str) == sorted([(key, [{"key": key}]) for key in KEYS * 6], key=str)


def pay_all(url: str, ready: Any, replays: Any) -> None:
    with Semel(PostgresStore(url, listen=False)) as guard, psycopg.connect(url, autocommit=True) as conn:
        ready.wait(60)
        replays.put(sum(pay(guard, conn, key, on_duplicate=Wait("30s")).replayed for key in KEYS))


def test_processes_pay_each_key_once(database: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready, replays = spawn.Barrier(2), spawn.Queue()
    children = [spawn.Process(target=pay_all, args=(database, ready, replays)) for _ in range(2)]
    for child in children:
        child.start()
    assert sum(replays.get(timeout=60) for _ in children) == len(KEYS)
    for child in children:
        child.join(30)
    assert payments(database) == sorted(KEYS)


def test_tasks_pay_each_key_once(database: str) -> None:
    import asyncpg

    async def client(guard: AsyncSemel, kind: int) -> int:
        replays = 0
        conn: Any
        if kind:
            conn = await asyncpg.connect(database)
        else:
            conn = await psycopg.AsyncConnection.connect(database, autocommit=True)
        statement = ONE.replace("%s", "$1") if kind else ONE
        for key in KEYS:
            found = await guard.execute_once(
                conn, "pay", key=key, statement=statement, parameters=[key], on_duplicate=Wait("30s")
            )
            assert found.rows == [{"key": key}]
            replays += found.replayed
        await conn.close()
        return replays

    async def main() -> None:
        async with AsyncSemel(AsyncPostgresStore(database, listen=False)) as guard:
            replays = await asyncio.gather(*(client(guard, number % 2) for number in range(4)))
        assert sum(replays) == 3 * len(KEYS)

    asyncio.run(main())
    assert payments(database) == sorted(KEYS)


def pay_and_die(url: str) -> None:
    with Semel(PostgresStore(url, listen=False)) as guard, psycopg.connect(url, autocommit=True) as conn:
        pay(guard, conn)


@pytest.mark.parametrize("victim", ["process", "backend"])
def test_killed_in_mid_statement_it_is_paid_once(guard: Semel, conn: Any, database: str, victim: str) -> None:
    """The statement waits for a lock on the table when its process, or its backend, is killed."""
    with psycopg.connect(database) as blocker:
        blocker.execute("LOCK TABLE payment IN ACCESS EXCLUSIVE MODE")
        child = multiprocessing.get_context("spawn").Process(target=pay_and_die, args=(database,))
        child.start()
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%semel_effect%'"
        pid = None
        while pid is None and child.is_alive():
            row = conn.execute(waiting).fetchone()
            pid = row and row[0]
        assert pid is not None
        if victim == "process":
            child.kill()
        else:
            conn.execute("SELECT pg_terminate_backend(%s)", (pid,))
        child.join(30)
        assert child.exitcode != 0
    # Whether the server finishes the statement of a client that is gone is its own affair.
    pay(guard, conn, on_duplicate=Wait("30s"))
    assert pay(guard, conn).replayed
    assert payments(database) == ["k1"]


def test_a_lost_connection_leaves_the_outcome_open_and_a_retry_tells_it(guard: Semel, conn: Any, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as lost:
        lost.execute("SELECT 1")
        conn.execute("SELECT pg_terminate_backend(%s)", (lost.info.backend_pid,))
        with pytest.raises(StoreUncertain):
            pay(guard, lost)
    assert not pay(guard, conn).replayed
    assert payments(database) == ["k1"]


@pytest.mark.parametrize("prepare_threshold", [None, 0])
def test_clients_behind_a_pooler_that_share_sessions(pgbouncer: PgBouncerServer, prepare_threshold: int | None) -> None:
    """Also if nobody has told psycopg that a statement may be prepared in another session than it runs in."""
    import asyncpg

    pooled, direct = pgbouncer.create_database()
    migrate(direct)
    with psycopg.connect(direct) as conn:
        conn.execute(TABLE)

    def client(guard: Semel) -> None:
        with psycopg.connect(pooled, autocommit=True, prepare_threshold=prepare_threshold) as conn:
            for key in KEYS:
                try:
                    results.append(pay(guard, conn, key, on_duplicate=Wait("30s")).rows[0]["key"])
                except Exception as error:
                    results.append(repr(error))

    async def main() -> None:
        conn = await asyncpg.connect(pooled, statement_cache_size=0)
        async with AsyncSemel(AsyncPostgresStore(direct, listen=False)) as other:
            for key in KEYS:
                statement = ONE.replace("%s", "$1")
                assert (await other.execute_once(conn, "pay", key=key, statement=statement, parameters=[key])).replayed
        await conn.close()

    results: list[str] = []
    with Semel(PostgresStore(direct, listen=False)) as guard:
        threads = [threading.Thread(target=client, args=(guard,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(results) == sorted(KEYS * 4)
    asyncio.run(main())
    assert payments(direct) == sorted(KEYS)
    pgbouncer.postgres.drop_database(direct)
