"""Two transactions for one key: one runs, the other learns at once, waits, or is stopped by the primary key."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from semel import (
    AsyncPostgresStore,
    AsyncSemel,
    InProgress,
    PostgresStore,
    Semel,
    SQLiteStore,
    StoreUnavailable,
    TransactionConflict,
    Wait,
)
from semel.core.keys import identity
from semel.observe import events
from semel.sql.sync import SQLUnit
from tests.transactional.kinds import TABLE, Till

LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]


@pytest.fixture
def guard(database: str) -> Iterator[Semel]:
    with Semel(PostgresStore(database, listen=False), sweep_every=None) as guard:
        yield guard


def pay(conn: Any, key: str = "k1") -> dict[str, str]:
    conn.execute("INSERT INTO payment (key) VALUES (%s)", (key,))
    return {"paid": key}


def payments(database: str) -> int:
    with psycopg.connect(database) as conn:
        row = conn.execute("SELECT count(*) FROM payment").fetchone()
        assert row is not None
        return int(row[0])


def never() -> None:
    raise AssertionError("the handler ran")


# PostgreSQL


def test_a_duplicate_learns_at_once_that_the_first_still_runs(guard: Semel, database: str) -> None:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        for _ in range(2):
            with pytest.raises(InProgress) as refused:
                guard.run_in_transaction(second, "pay", key="k1", call=never)
            assert refused.value.retry_after
            assert second.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS  # usable, and not aborted
        first.commit()
        assert guard.run_in_transaction_outcome(second, "pay", key="k1", call=never).replayed
    assert payments(database) == 1


def test_replays_do_not_stand_in_each_others_way(guard: Semel, database: str) -> None:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        first.commit()
        for conn in (first, second, first, second):  # both transactions stay open
            assert guard.run_in_transaction_outcome(conn, "pay", key="k1", call=never).replayed
        with psycopg.connect(database, autocommit=True) as third:
            assert guard.run_in_transaction_outcome(third, "pay", key="k1", call=never, own_transaction=True).replayed


def test_a_pipeline_of_the_callers_is_no_hindrance(guard: Semel, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as conn:
        for expected in (False, True):
            with conn.pipeline(), conn.transaction():
                assert (
                    guard.run_in_transaction_outcome(conn, "pay", key="k1", call=lambda: pay(conn)).replayed is expected
                )
            with conn.pipeline():
                outcome = guard.run_in_transaction_outcome(
                    conn, "pay", key="k2", call=lambda: pay(conn), own_transaction=True
                )
                assert outcome.replayed is expected
    assert payments(database) == 2


def test_an_async_pipeline_of_the_callers_is_no_hindrance(database: str) -> None:
    async def main() -> None:
        async with (
            AsyncSemel(AsyncPostgresStore(database, listen=False), sweep_every=None) as guard,
            await psycopg.AsyncConnection.connect(database, autocommit=True) as conn,
        ):

            async def work(op: Any) -> str:
                await conn.execute("INSERT INTO payment (key) VALUES ('k1')")
                return str(op.key)

            for expected in (False, True):
                async with conn.pipeline(), conn.transaction():
                    assert (
                        await guard.run_in_transaction_outcome(conn, "pay", key="k1", call=work)
                    ).replayed is expected
                async with conn.pipeline():
                    outcome = await guard.run_in_transaction_outcome(
                        conn, "pay", key="k2", call=work, own_transaction=True
                    )
                    assert outcome.replayed is expected

    asyncio.run(main())
    assert payments(database) == 2


def test_other_keys_do_not_wait(guard: Semel, database: str) -> None:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        guard.run_in_transaction(second, "pay", key="k2", call=lambda: pay(second, "k2"))
        guard.run_in_transaction(second, "pay", key="k1", tenant="other", call=lambda: pay(second))
    assert payments(database) == 3


def test_a_waiting_duplicate_sees_the_winners_commit(database: str) -> None:
    told: list[Any] = []
    waited = threading.Event()

    def tell(event: Any) -> None:
        told.append(event)
        if isinstance(event, events.Waited):
            waited.set()

    with (
        Semel(PostgresStore(database, listen=False), sweep_every=None, on_event=tell) as guard,
        psycopg.connect(database) as first,
        psycopg.connect(database) as second,
    ):
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        second.execute("INSERT INTO payment (key) VALUES ('mine')")  # work of the caller's that must survive the wait

        def commit() -> None:
            waited.wait(30)
            first.commit()

        thread = threading.Thread(target=commit)
        thread.start()
        outcome = guard.run_in_transaction_outcome(second, "pay", key="k1", call=never, on_duplicate=Wait("30s"))
        thread.join()
    assert outcome.replayed
    assert outcome.value == {"paid": "k1"}
    assert payments(database) == 2


def test_a_waiting_duplicate_runs_where_the_first_rolls_back(guard: Semel, database: str) -> None:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        timer = threading.Timer(0.05, first.rollback)
        timer.start()
        outcome = guard.run_in_transaction_outcome(
            second, "pay", key="k1", call=lambda: pay(second), on_duplicate=Wait("30s")
        )
        timer.join()
        assert not outcome.replayed
    assert payments(database) == 1


def test_waiting_is_bounded(guard: Semel, database: str) -> None:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        with pytest.raises(InProgress):
            guard.run_in_transaction(second, "pay", key="k1", call=never, on_duplicate=Wait("60ms"))
        first.rollback()


@pytest.mark.parametrize("level", LEVELS[1:])
def test_semel_waits_with_a_new_snapshot_each_time(guard: Semel, database: str, level: IsolationLevel) -> None:
    """In a transaction of ours: under these levels one that was begun before the winner's commit would never see it.

    If the winner commits between the snapshot and the lock, the handler does run: the primary key refuses its record,
    everything is rolled back, and the next try is a replay.
    """
    with psycopg.connect(database) as first, psycopg.connect(database, autocommit=True) as second:
        second.isolation_level = level
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        timer = threading.Timer(0.05, first.commit)
        timer.start()
        outcome = guard.run_in_transaction_outcome(
            second, "pay", key="k1", call=lambda: pay(second), on_duplicate=Wait("30s"), own_transaction=True
        )
        timer.join()
    assert outcome.replayed
    assert payments(database) == 1


# The order of lock and look-up.

GATE = 4242


def looked_up(database: str, id: bytes, look: str) -> list[Any]:
    """What ``look`` finds of a record that is committed after its statement began, and before it takes the lock."""
    found: list[Any] = []
    with psycopg.connect(database, autocommit=True) as gate, psycopg.connect(database) as late:
        gate.execute("SELECT pg_advisory_lock(%s)", (GATE,))
        statement = f"SELECT looked.* FROM (SELECT pg_advisory_lock({GATE})) AS gate, LATERAL ({look}) AS looked"
        thread = threading.Thread(target=lambda: found.extend(late.execute(statement.encode(), (id,)).fetchall()))
        thread.start()
        pid = late.info.backend_pid
        waiting = "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND NOT granted"
        try:
            for _ in range(3000):
                row = gate.execute(waiting, (pid,)).fetchone()
                if row and row[0]:
                    break
            with (
                Semel(PostgresStore(database, listen=False), sweep_every=None) as guard,
                psycopg.connect(database) as first,
            ):
                guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        finally:
            gate.execute("SELECT pg_advisory_unlock(%s)", (GATE,))
        thread.join(30)
        late.execute("SELECT pg_advisory_unlock(%s)", (GATE,))
    return found


def test_the_look_up_reads_a_snapshot_taken_after_the_lock(database: str) -> None:
    found = looked_up(database, identity("", "pay", "k1"), "SELECT length(semel_guard(%s, 42)) > 8 AS seen")
    assert found == [(True,)]


def test_a_single_select_of_both_would_read_an_older_one_and_run_twice(database: str) -> None:
    """Why the guard is a function: this is the statement that it replaces, and it does not see the record."""
    single = (
        "SELECT pg_try_advisory_xact_lock(42) AS locked, (SELECT r.state FROM semel_record r WHERE r.id = %s) AS state"
    )
    assert looked_up(database, identity("", "pay", "k1"), single) == [(True, None)]


# Isolation levels: the primary key is the judge.


@pytest.mark.parametrize("level", LEVELS)
def test_a_replay_works_at_every_level(guard: Semel, database: str, level: IsolationLevel) -> None:
    with psycopg.connect(database) as conn:
        conn.isolation_level = level
        for expected in (False, True):
            assert guard.run_in_transaction_outcome(conn, "pay", key="k1", call=lambda: pay(conn)).replayed is expected
            conn.commit()
    assert payments(database) == 1


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_snapshot_older_than_the_winner_ends_in_a_conflict(
    guard: Semel, database: str, level: IsolationLevel
) -> None:
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        second.isolation_level = level
        second.execute("SELECT count(*) FROM payment")  # its snapshot is taken here
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
        first.commit()
        with pytest.raises(TransactionConflict, match="roll back and run the unit of work again") as conflict:
            guard.run_in_transaction(second, "pay", key="k1", call=lambda: pay(second))
        assert conflict.value.__cause__ is not None
        assert second.info.transaction_status == psycopg.pq.TransactionStatus.INERROR  # it cannot be committed
        second.rollback()
        assert guard.run_in_transaction_outcome(second, "pay", key="k1", call=never).replayed
    assert payments(database) == 1


@pytest.mark.parametrize("autocommit", [True, False])
def test_serialization_failures_run_the_unit_of_work_again(database: str, autocommit: bool) -> None:
    told: list[Any] = []
    with (
        Semel(PostgresStore(database, listen=False), sweep_every=None, on_event=told.append) as guard,
        psycopg.connect(database) as other,
        psycopg.connect(database, autocommit=autocommit) as conn,
    ):
        other.execute("INSERT INTO payment (key, worker) VALUES ('balance', 0)")
        other.commit()
        conn.isolation_level = IsolationLevel.REPEATABLE_READ
        runs = 0

        def work() -> int:
            nonlocal runs
            runs += 1
            conn.execute("SELECT 1 FROM payment")
            if runs < 3:
                other.execute("UPDATE payment SET worker = worker + 1")
                other.commit()
            conn.execute("UPDATE payment SET worker = worker + 10")
            return runs

        assert guard.run_in_transaction(conn, "pay", key="k1", call=work, own_transaction=True) == 3
        assert other.execute("SELECT worker FROM payment").fetchone() == (12,)
    names = [type(event).__name__ for event in told]
    assert names == ["Started", "Conflicted", "Started", "Conflicted", "Started", "Completed"]
    conflicts = [event for event in told if isinstance(event, events.Conflicted)]
    assert [event.tries for event in conflicts] == [1, 2]
    assert all("could not serialize" in event.error for event in conflicts)


def test_the_runs_after_conflicts_are_bounded(guard: Semel, database: str) -> None:
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        raise psycopg.errors.SerializationFailure("could not serialize")

    with psycopg.connect(database, autocommit=True) as conn:
        with pytest.raises(TransactionConflict) as conflict:
            guard.run_in_transaction(conn, "pay", key="k1", call=work, own_transaction=True, tries=3)
        assert isinstance(conflict.value.__cause__, psycopg.errors.SerializationFailure)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert runs == 3


def test_at_most_once_is_not_run_again_once_it_has_begun(guard: Semel, database: str) -> None:
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        raise psycopg.errors.SerializationFailure("could not serialize")

    async def work_soon() -> None:
        work()

    async def main() -> None:
        async with (
            AsyncSemel(AsyncPostgresStore(database), sweep_every=None) as other,
            await psycopg.AsyncConnection.connect(database, autocommit=True) as conn,
        ):
            await other.run_in_transaction(
                conn, "pay", key="k1", call=work_soon, own_transaction=True, guarantee="at_most_once"
            )

    with psycopg.connect(database, autocommit=True) as conn:
        with pytest.raises(TransactionConflict, match="nothing was stored"):
            guard.run_in_transaction(conn, "pay", key="k1", call=work, own_transaction=True, guarantee="at_most_once")
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert runs == 1
    with pytest.raises(TransactionConflict, match="nothing was stored"):
        asyncio.run(main())
    assert runs == 2


def test_at_most_once_is_tried_again_while_it_has_not_begun(
    guard: Semel, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, asked = SQLUnit.lock, []

    def met(self: Any, op: Any) -> Any:
        asked.append(1)
        if len(asked) < 3:
            raise TransactionConflict("it met another one")
        return lock(self, op)

    monkeypatch.setattr(SQLUnit, "lock", met)
    with psycopg.connect(database, autocommit=True) as conn:
        paid = guard.run_in_transaction(
            conn, "pay", key="k1", call=lambda: "paid", own_transaction=True, guarantee="at_most_once"
        )
    assert (paid, len(asked)) == ("paid", 3)


def test_in_the_callers_transaction_its_own_conflicts_are_its_own(guard: Semel, database: str) -> None:
    def work() -> None:
        raise psycopg.errors.DeadlockDetected("deadlock")

    with psycopg.connect(database) as conn, pytest.raises(psycopg.errors.DeadlockDetected):
        guard.run_in_transaction(conn, "pay", key="k1", call=work)


def test_a_real_deadlock_is_run_again(guard: Semel, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as set_up:
        set_up.execute("INSERT INTO payment (key, worker) VALUES ('a', 0), ('b', 0)")
        set_up.execute(
            "ALTER DATABASE " + psycopg.conninfo.conninfo_to_dict(database)["dbname"] + " SET deadlock_timeout = '50ms'"
        )
    meet = threading.Barrier(2, timeout=30)
    results: list[Any] = []

    def transfer(key: str, order: tuple[str, str]) -> None:
        runs = 0
        with psycopg.connect(database, autocommit=True) as conn:

            def work() -> int:
                nonlocal runs
                runs += 1
                conn.execute("UPDATE payment SET worker = worker + 1 WHERE key = %s", (order[0],))
                if runs == 1:
                    meet.wait()
                conn.execute("UPDATE payment SET worker = worker + 1 WHERE key = %s", (order[1],))
                return runs

            results.append(guard.run_in_transaction(conn, "transfer", key=key, call=work, own_transaction=True))

    threads = [threading.Thread(target=transfer, args=each) for each in (("1", ("a", "b")), ("2", ("b", "a")))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert max(results) > 1  # one of them was the victim, once or more
    with psycopg.connect(database) as conn:
        assert conn.execute("SELECT sum(worker) FROM payment").fetchone() == (4,)


@pytest.mark.parametrize("level", LEVELS)
def test_threads_run_every_key_once_at_every_level(guard: Semel, database: str, level: IsolationLevel) -> None:
    keys = [f"k{number}" for number in range(10)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with psycopg.connect(database, autocommit=True) as conn:
                conn.isolation_level = level
                for key in keys:
                    guard.run_in_transaction(
                        conn, "pay", key=key, call=lambda op: pay(conn, op.key), own_transaction=True, tries=50,
                        on_duplicate=Wait("30s"),
                    )  # fmt: skip
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert payments(database) == len(keys)


def test_tasks_of_one_loop_run_a_key_once(database: str) -> None:
    import asyncpg

    async def main() -> list[bool]:
        async with (
            AsyncSemel(AsyncPostgresStore(database, listen=False), sweep_every=None) as guard,
            asyncpg.create_pool(database, min_size=8, max_size=8) as pool,
        ):

            async def one() -> bool:
                async with pool.acquire() as conn:

                    async def work() -> str:
                        await conn.execute("INSERT INTO payment (key) VALUES ('k1')")
                        return "paid"

                    outcome = await guard.run_in_transaction_outcome(
                        conn, "pay", key="k1", call=work, own_transaction=True, on_duplicate=Wait("30s")
                    )
                    assert outcome.value == "paid"
                    return outcome.replayed

            return await asyncio.gather(*(one() for _ in range(24)))

    assert sorted(asyncio.run(main())) == [False, *[True] * 23]
    assert payments(database) == 1


def test_cancellation_rolls_back_and_leaves_the_connection_clean(database: str) -> None:
    import asyncpg

    async def main() -> None:
        async with AsyncSemel(AsyncPostgresStore(database, listen=False), sweep_every=None) as guard:
            conn = await asyncpg.connect(database)
            inside = asyncio.Event()

            async def work() -> None:
                await conn.execute("INSERT INTO payment (key) VALUES ('k1')")
                inside.set()
                await asyncio.sleep(60)

            task = asyncio.ensure_future(
                guard.run_in_transaction(conn, "pay", key="k1", call=work, own_transaction=True)
            )
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not conn.is_in_transaction()
            assert await guard.lookup("pay", "k1") is None
            async with conn.transaction():  # and asyncpg knows it
                assert await conn.fetchval("SELECT count(*) FROM payment") == 0
            await conn.close()

    asyncio.run(main())


# SQLite


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "shop.db") as conn:
        conn.execute(TABLE)
    conn.close()
    return tmp_path / "shop.db"


def test_on_sqlite_a_duplicate_waits_for_the_file_and_replays(shop: Path) -> None:
    with Semel(SQLiteStore(shop), sweep_every=None) as guard:
        first = sqlite3.connect(shop, check_same_thread=False)
        second = sqlite3.connect(shop, timeout=30)
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: 1)
        timer = threading.Timer(0.05, first.commit)
        timer.start()
        with second:
            assert guard.run_in_transaction_outcome(second, "pay", key="k1", call=never).replayed
        timer.join()
        first.close()
        second.close()


def test_on_sqlite_a_duplicate_may_wait_longer_than_the_connection_does(shop: Path) -> None:
    with Semel(SQLiteStore(shop), sweep_every=None) as guard:
        first, second = sqlite3.connect(shop, check_same_thread=False), sqlite3.connect(shop, timeout=0)
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: 1)
        timer = threading.Timer(0.05, first.commit)
        timer.start()
        with second:
            outcome = guard.run_in_transaction_outcome(second, "pay", key="k1", call=never, on_duplicate=Wait("30s"))
        timer.join()
        assert outcome.replayed
        first.close()
        second.close()


def test_on_sqlite_a_busy_file_is_no_word_about_the_key(shop: Path) -> None:
    with Semel(SQLiteStore(shop), sweep_every=None) as guard:
        first, second = sqlite3.connect(shop), sqlite3.connect(shop, timeout=0)
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: 1)
        with pytest.raises(StoreUnavailable, match="another process held the database") as busy:
            guard.run_in_transaction(second, "pay", key="k2", call=never)
        assert not isinstance(busy.value, TransactionConflict)
        with pytest.raises(StoreUnavailable):
            guard.run_in_transaction(second, "pay", key="k2", call=never, on_duplicate=Wait("30ms"))
        first.commit()
        with second:
            assert guard.run_in_transaction_outcome(second, "pay", key="k1", call=never).replayed
        first.close()
        second.close()


def test_on_sqlite_the_wait_for_the_file_counts(shop: Path) -> None:
    told: list[Any] = []
    with Semel(SQLiteStore(shop), sweep_every=None, on_event=told.append) as guard:
        first, second = sqlite3.connect(shop), sqlite3.connect(shop, timeout=0.2)
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: 1)
        with pytest.raises(StoreUnavailable):
            guard.run_in_transaction(second, "pay", key="k1", call=never, on_duplicate=Wait("250ms"))
        assert sum(isinstance(event, events.Waited) for event in told) <= 1  # and not until polls alone make 250 ms
        first.close()
        second.close()


@pytest.mark.parametrize("kind", ["sqlite3", "sqlalchemy-pysqlite", "session-pysqlite", "django-sqlite"])
def test_on_sqlite_a_stale_snapshot_is_a_conflict(tmp_path: Path, kind: str) -> None:
    first, second = Till(kind, str(tmp_path / "shop.db")), Till(kind, str(tmp_path / "shop.db"))
    with pytest.raises(TransactionConflict), second.transaction():  # noqa: PT012
        if kind != "django-sqlite":  # which begins by itself
            second.send("BEGIN")
        second.send("SELECT count(*) FROM payment")
        first.pay("k1")
        second.guard.run_in_transaction(second.conn, "pay", key="k1", call=never)
    assert second.pay("k1").replayed
    assert second.rows() == ["k1"]
    first.close()
    second.close()
