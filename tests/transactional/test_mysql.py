"""The transactional mode on MariaDB, and on MySQL where the two are alike: duplicates, levels, statements, losses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest
from pymysql.constants import CLIENT
from pymysql.converters import encoders
from pymysql.cursors import DictCursor

from semel import (
    AsyncMySQLStore,
    AsyncSemel,
    ConfigurationError,
    InProgress,
    MySQLStore,
    Operation,
    PolicyError,
    Semel,
    State,
    StoreUnavailable,
    StoreUncertain,
    TransactionConflict,
    Wait,
)
from semel.core.keys import identity
from semel.core.ops import Claim, Complete
from semel.core.states import Takeover
from semel.observe import events
from tests.servers import MariaDBServer
from tests.transactional.kinds import ASYNC_MYSQL, MYSQL, mysql_parameters, till

pytestmark = [pytest.mark.mariadb, pytest.mark.server]

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
ID = identity("", "pay", "k1")


@pytest.fixture
def guard(mysql_database: str) -> Iterator[Semel]:
    with Semel(MySQLStore(mysql_database), sweep_every=None) as guard:
        yield guard


@pytest.fixture
def connect(mysql_database: str) -> Iterator[Callable[..., Any]]:
    """Opens connections, all of them closed when the test is over."""
    opened: list[Any] = []

    def open_one(level: str = "REPEATABLE READ", **settings: Any) -> Any:
        opened.append(pymysql.connect(**mysql_parameters(mysql_database), **settings))
        opened[-1].cursor().execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        return opened[-1]

    yield open_one
    for conn in opened:
        with suppress(pymysql.Error):  # some tests break them
            conn.close()


def pay(conn: Any, key: str = "k1") -> dict[str, str]:
    conn.cursor().execute("INSERT INTO payment (`key`) VALUES (%s)", (key,))
    return {"paid": key}


def asked(conn: Any, sql: str) -> Any:
    cursor = conn.cursor(pymysql.cursors.Cursor)
    cursor.execute(sql)
    return cursor.fetchall()


def payments(connect: Callable[..., Any]) -> int:
    return int(asked(connect(), "SELECT count(*) FROM payment")[0][0])


def never() -> None:
    raise AssertionError("the handler ran")


# Two at once


@pytest.mark.parametrize("level", LEVELS)
def test_a_duplicate_learns_at_once_that_the_first_still_runs(
    guard: Semel, connect: Callable[..., Any], level: str, mariadb: MariaDBServer
) -> None:
    first, second = connect(level), connect(level)
    guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
    patience = 1 if mariadb.is_mysql() else 100  # the caller's own: MySQL waits for so long, MariaDB does not
    asked(second, f"SET innodb_lock_wait_timeout = {patience}")
    pay(second, "mine")
    for _ in range(2):
        with pytest.raises(InProgress) as refused:
            guard.run_in_transaction(second, "pay", key="k1", call=never)
        assert refused.value.retry_after
    assert asked(second, "SELECT @@innodb_lock_wait_timeout") == ((patience,),)
    first.commit()
    assert guard.run_in_transaction_outcome(second, "pay", key="k1", call=never).replayed
    second.commit()  # what it wrote before it was turned away is still there
    assert payments(connect) == 2


@pytest.mark.parametrize("level", LEVELS)
def test_replays_and_other_keys_do_not_stand_in_each_others_way(
    guard: Semel, connect: Callable[..., Any], level: str
) -> None:
    first, second, third = connect(level), connect(level), connect(level)
    for key in ("k1", "k2", "k3", "k4"):
        guard.run_in_transaction(first, "pay", key=key, call=lambda: pay(first))
    first.commit()
    for conn in (first, second, first, second):  # both transactions stay open
        for key in ("k1", "k2", "k3", "k4"):
            assert guard.run_in_transaction_outcome(conn, "pay", key=key, call=never).replayed
    for number in range(40):  # in every gap between the records, none of which is locked
        guard.run_in_transaction(third, "pay", key=f"other {number}", call=lambda: 1)
    assert guard.store.execute(Claim(identity("", "pay", "leased"), 7, b"", 60, 60, Takeover.RETRY, "", "", "")).token  # type: ignore[union-attr]


@pytest.mark.parametrize("own_transaction", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_waiting_duplicate_sees_the_winners_commit(
    mysql_database: str, connect: Callable[..., Any], level: str, own_transaction: bool
) -> None:
    waited = threading.Event()

    def tell(event: Any) -> None:
        if isinstance(event, events.Waited):
            waited.set()

    with Semel(MySQLStore(mysql_database), sweep_every=None, on_event=tell) as guard:
        first, second = connect(level), connect(level)
        if not own_transaction:
            asked(second, "SELECT count(*) FROM semel_step")  # its snapshot is taken here
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))

        def commit() -> None:
            waited.wait(30)
            first.commit()

        thread = threading.Thread(target=commit)
        thread.start()
        outcome = guard.run_in_transaction_outcome(
            second, "pay", key="k1", call=never, on_duplicate=Wait("30s"), own_transaction=own_transaction
        )
        thread.join()
    assert outcome.replayed
    assert outcome.value == {"paid": "k1"}


def test_a_waiting_duplicate_runs_where_the_first_rolls_back(guard: Semel, connect: Callable[..., Any]) -> None:
    first, second = connect(), connect()
    guard.run_in_transaction(first, "pay", key="k1", call=lambda: pay(first))
    timer = threading.Timer(0.05, first.rollback)
    timer.start()
    outcome = guard.run_in_transaction_outcome(
        second, "pay", key="k1", call=lambda: pay(second), on_duplicate=Wait("30s")
    )
    timer.join()
    second.commit()
    assert not outcome.replayed
    assert payments(connect) == 1


def test_a_transaction_does_not_wait_for_an_owner_whom_it_keeps_from_finishing(
    guard: Semel, connect: Callable[..., Any]
) -> None:
    """It has locked the owner's row by looking at it: the owner is heard once the transaction ends, and not before."""
    claimed: Any = guard.store.execute(Claim(ID, 7, b"", 60, 60, Takeover.RETRY, "", "pay", "k1"))
    conn = connect()
    with pytest.raises(InProgress):
        guard.run_in_transaction(conn, "pay", key="k1", call=never, on_duplicate=Wait("60s"))
    conn.rollback()
    assert guard.store.execute(Complete(ID, claimed.token, b"done", 60.0))


def test_a_transaction_of_semels_does_wait_for_an_owner_under_a_lease(
    guard: Semel, connect: Callable[..., Any]
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        inside.set()
        go_on.wait(30)
        return "by lease"

    thread = threading.Thread(target=lambda: guard.run("pay", key="k1", call=slow))
    thread.start()
    inside.wait(30)
    threading.Timer(0.05, go_on.set).start()
    outcome: Any = guard.run_in_transaction_outcome(
        connect(), "pay", key="k1", call=never, on_duplicate=Wait("30s"), own_transaction=True
    )
    thread.join()
    assert (outcome.replayed, outcome.value) == (True, "by lease")


@pytest.mark.parametrize("level", LEVELS)
def test_threads_run_every_key_once_at_every_level(guard: Semel, connect: Callable[..., Any], level: str) -> None:
    keys = [f"k{number}" for number in range(10)]
    failures: list[BaseException] = []

    def work(conn: Any) -> None:
        try:
            for key in keys:
                guard.run_in_transaction(
                    conn, "pay", key=key, call=lambda op: pay(conn, op.key), own_transaction=True, tries=50,
                    on_duplicate=Wait("30s"),
                )  # fmt: skip
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(connect(level, autocommit=bool(n % 2)),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert payments(connect) == len(keys)


def test_tasks_of_one_loop_run_a_key_once(mysql_database: str, connect: Callable[..., Any]) -> None:
    import asyncmy

    async def main() -> list[bool]:
        async with (
            AsyncSemel(AsyncMySQLStore(mysql_database), sweep_every=None) as guard,
            asyncmy.create_pool(**mysql_parameters(mysql_database), minsize=4, maxsize=4) as pool,
        ):

            async def one() -> bool:
                async with pool.acquire() as conn:

                    async def work() -> str:
                        async with conn.cursor() as cursor:
                            await cursor.execute("INSERT INTO payment (`key`) VALUES ('k1')")
                        return "paid"

                    outcome = await guard.run_in_transaction_outcome(
                        conn, "pay", key="k1", call=work, own_transaction=True, on_duplicate=Wait("30s")
                    )
                    return outcome.replayed

            return await asyncio.gather(*(one() for _ in range(12)))

    assert sorted(asyncio.run(main())) == [False, *[True] * 11]
    assert payments(connect) == 1


def test_cancellation_leaves_nothing(mysql_database: str, connect: Callable[..., Any]) -> None:
    import asyncmy

    async def main() -> None:
        async with AsyncSemel(AsyncMySQLStore(mysql_database), sweep_every=None) as guard:
            conn = await asyncmy.connect(**mysql_parameters(mysql_database))
            inside = asyncio.Event()

            async def work() -> None:
                async with conn.cursor() as cursor:
                    await cursor.execute("INSERT INTO payment (`key`) VALUES ('k1')")
                inside.set()
                await asyncio.sleep(60)

            task = asyncio.ensure_future(
                guard.run_in_transaction(conn, "pay", key="k1", call=work, own_transaction=True)
            )
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not conn.get_transaction_status()
            assert await guard.lookup("pay", "k1") is None
            await conn.ensure_closed()

    asyncio.run(main())
    assert payments(connect) == 0


# Steps of a leased operation, in the caller's transaction


def test_a_step_is_remembered_in_the_transaction_that_its_rows_are_in(
    guard: Semel, connect: Callable[..., Any]
) -> None:
    conn, other = connect(), connect(autocommit=True)
    counted: list[Any] = []

    def reserve(order: str, op: Operation) -> str:
        for ends in (conn.rollback, conn.commit):
            op.step("reserve", lambda: pay(conn, "reserved"), connection=conn)
            ends()
            counted.append(asked(other, "SELECT (SELECT count(*) FROM payment), (SELECT count(*) FROM semel_step)")[0])
        with pytest.raises(
            PolicyError, match="is used twice: each step needs its own name"
        ):  # after the commit it is known, after the rollback not
            op.step("reserve", never, connection=conn)
        return "done"

    once: Any = guard.once(key="order")(reserve)
    assert once("k1") == "done"
    assert counted == [(0, 0), (1, 1)]


# Conflicts


def test_a_real_deadlock_is_run_again(guard: Semel, connect: Callable[..., Any]) -> None:
    set_up = connect(autocommit=True)
    asked(set_up, "CREATE TABLE IF NOT EXISTS account (id integer PRIMARY KEY, balance integer)")
    asked(set_up, "REPLACE INTO account VALUES (1, 0), (2, 0)")
    meet = threading.Barrier(2, timeout=30)
    results: list[Any] = []

    def transfer(key: str, order: tuple[int, int], conn: Any) -> None:
        runs = 0

        def work() -> int:
            nonlocal runs
            runs += 1
            asked(conn, f"UPDATE account SET balance = balance + 1 WHERE id = {order[0]}")
            if runs == 1:
                meet.wait()
            asked(conn, f"UPDATE account SET balance = balance + 1 WHERE id = {order[1]}")
            return runs

        results.append(guard.run_in_transaction(conn, "transfer", key=key, call=work, own_transaction=True))

    threads = [threading.Thread(target=transfer, args=(*each, connect())) for each in (("1", (1, 2)), ("2", (2, 1)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [1, 2]
    assert asked(set_up, "SELECT sum(balance) FROM account")[0][0] == 4


@pytest.mark.parametrize("own_transaction", [False, True])
def test_a_handler_that_ends_the_transaction_cannot_be_kept_beside_another(
    guard: Semel, connect: Callable[..., Any], own_transaction: bool
) -> None:
    """A rollback, or a CREATE TABLE, which commits by itself, gives the key away; the row's token tells."""
    conn = connect()

    def work() -> str:
        conn.rollback()
        guard.run("pay", key="k1", call=lambda: "another's")
        return "mine"

    with pytest.raises(TransactionConflict):
        guard.run_in_transaction(
            conn, "pay", key="k1", call=work, own_transaction=own_transaction, tries=1 if own_transaction else None
        )
    conn.rollback()
    assert guard.run("pay", key="k1", call=never) == "another's"


def test_what_was_begun_and_committed_unfinished_counts_as_absent(guard: Semel, connect: Callable[..., Any]) -> None:
    conn = connect()

    def fail() -> None:
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            guard.run_in_transaction(conn, "pay", key="k1", call=fail)
    conn.commit()
    assert asked(conn, "SELECT count(*) FROM semel_record") == ((1,),)
    conn.commit()
    assert guard.lookup("pay", "k1") is None
    assert guard.run("pay", key="k2", call=lambda: 1) == 1
    with pytest.raises(LookupError):
        guard.run_in_transaction(conn, "pay", key="k2", call=fail, tenant="other")
    conn.commit()
    assert guard.sweep().removed == 2
    outcome = guard.run_in_transaction_outcome(conn, "pay", key="k1", call=lambda: pay(conn))
    conn.commit()
    assert (outcome.replayed, outcome.attempt) == (False, 1)


@pytest.mark.slow
def test_a_server_that_undoes_whole_transactions_on_a_time_out_is_heeded(private_mariadb: MariaDBServer) -> None:
    """A caller who went on after being turned away would commit half of its work."""
    from semel.stores.mysql import migrate

    original = type(private_mariadb).command
    private_mariadb.command = lambda: [*original(private_mariadb), "--innodb-rollback-on-timeout=ON"]  # type: ignore[method-assign]
    private_mariadb.restart("crash")
    url = private_mariadb.create_database()
    migrate(url)
    with (
        Semel(MySQLStore(url), sweep_every=None) as guard,
        pymysql.connect(**mysql_parameters(url)) as first,
        pymysql.connect(**mysql_parameters(url)) as second,
    ):
        guard.run_in_transaction(first, "pay", key="k1", call=lambda: 1)
        with pytest.raises(TransactionConflict, match="undoes all of a transaction"):
            guard.run_in_transaction(second, "pay", key="k1", call=never)
        first.commit()
        assert guard.run_in_transaction_outcome(second, "pay", key="k1", call=never).replayed


# What it costs


class Heard(pymysql.connections.Connection):  # type: ignore[type-arg]
    """A connection that remembers what it was asked to send."""

    said: list[str]

    def _execute_command(self, command: int, sql: Any) -> None:
        text = sql if isinstance(sql, str) else bytes(sql).decode("utf-8", "replace")
        self.__dict__.setdefault("said", []).append(text)
        super()._execute_command(command, sql)  # type: ignore[misc]

    def heard(self) -> list[str]:
        """The first words of each statement since the last time, and its table."""
        said, self.said = self.said, []
        words = ("INSERT INTO semel_record", "INSERT INTO payment", "UPDATE semel_record", "FROM semel_record")
        return [next((word for word in words if word in text), text) for text in said]


def test_two_statements_and_no_commit_are_added(guard: Semel, mysql_database: str) -> None:
    with Heard(**mysql_parameters(mysql_database), autocommit=True) as conn:
        conn.heard()
        for how, ends in (({}, True), ({"own_transaction": True}, False)):
            key = f"k{ends}"
            if ends:
                conn.begin()
            guard.run_in_transaction(conn, "pay", key=key, call=lambda: pay(conn), **how)  # type: ignore[arg-type]
            if ends:
                conn.commit()
            assert conn.heard() == [
                "BEGIN", "INSERT INTO semel_record", "INSERT INTO payment", "UPDATE semel_record", "COMMIT",
            ]  # fmt: skip
            if ends:
                conn.begin()
            guard.run_in_transaction(conn, "pay", key=key, call=never, **how)  # type: ignore[arg-type]
            if ends:
                conn.commit()
            assert conn.heard() == ["BEGIN", "INSERT INTO semel_record", "FROM semel_record", "COMMIT" if ends else
                                    "ROLLBACK"]  # fmt: skip
        assert asked(conn, "SHOW SESSION STATUS LIKE 'Com_commit'")[0][1] == "3"  # the callers' two, and Semel's one


def test_the_connection_is_left_as_it_was(guard: Semel, connect: Callable[..., Any], mariadb: MariaDBServer) -> None:
    isolation, modes = ("tx_isolation", ",SIMULTANEOUS_ASSIGNMENT")
    if mariadb.is_mysql():
        isolation, modes = ("transaction_isolation", "")
    settings = (
        f"SELECT @@{isolation}, @@autocommit, @@sql_mode, @@innodb_lock_wait_timeout, @@character_set_client, "
        "@@time_zone, @@sql_safe_updates, @@session.last_insert_id"
    )
    for conn in (
        connect(charset="latin1", cursorclass=DictCursor, conv=encoders),
        connect("READ COMMITTED", charset="utf8mb4", client_flag=CLIENT.FOUND_ROWS, use_unicode=False),
    ):
        asked(conn, f"SET SESSION sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT{modes}'")
        asked(conn, "SET time_zone = '+05:00', sql_safe_updates = 1")
        before = asked(conn, settings)
        key = f"ключ 🗝 {id(conn)}"
        for expected in (False, True):
            outcome = guard.run_in_transaction_outcome(conn, "pay", key=key, tenant="ü", call=lambda: "да")
            assert (outcome.value, outcome.replayed) == ("да", expected)
            conn.commit()
        assert asked(conn, settings) == before
        record = guard.lookup("pay", key, tenant="ü")
        assert record is not None
        assert (record.state, record.key, record.tenant) == (State.DONE, key, "ü")
        assert 0 <= record.age < 60


def test_autocommit_without_a_transaction_is_refused(guard: Semel, mysql_database: str) -> None:
    import sqlalchemy as sa

    with (
        pymysql.connect(**mysql_parameters(mysql_database), autocommit=True) as conn,
        pytest.raises(ConfigurationError, match=r"no transaction is open.*conn\.begin\(\).*own_transaction=True"),
    ):
        guard.run_in_transaction(conn, "pay", key="k1", call=never)
    engine = sa.create_engine(
        mysql_database.replace("mysql:", "mysql+pymysql:"), connect_args={"autocommit": True}, poolclass=sa.NullPool
    )
    with engine.begin() as connection, pytest.raises(ConfigurationError, match="commits each statement"):
        guard.run_in_transaction(connection, "pay", key="k1", call=never)
    assert guard.lookup("pay", "k1") is None


def test_tables_that_are_missing_are_named(mariadb_url: str) -> None:
    from semel import NotMigrated

    with (
        Semel(MySQLStore(mariadb_url), sweep_every=None) as guard,
        pymysql.connect(**mysql_parameters(mariadb_url)) as conn,
        pytest.raises(NotMigrated, match="semel migrate"),
    ):
        guard.run_in_transaction(conn, "pay", key="k1", call=never)


# A connection that is lost


@pytest.fixture(params=[*MYSQL, *ASYNC_MYSQL])
def desk(request: pytest.FixtureRequest, mysql_database: str) -> Iterator[Any]:
    desk = till(request.param, mysql_database)
    yield desk
    with suppress(Exception):  # it was broken on purpose, and some kinds complain when closed
        desk.close()


def severed(connect: Callable[..., Any]) -> Callable[[Any], str]:
    """A handler that ends every other session of this database, its own among them."""

    def work(op: Any) -> str:
        conn = connect(autocommit=True)
        others = "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
        for (number,) in asked(conn, others):
            with suppress(pymysql.Error):
                asked(conn, f"KILL {number}")
        for _ in range(3000):
            if not asked(conn, others):
                break
        return "paid"

    return work


def test_in_the_callers_transaction_nothing_is_stored_for_certain(desk: Any, connect: Callable[..., Any]) -> None:
    with pytest.raises(Exception) as lost:  # what the kind's own transaction makes of it, or ours
        desk.pay("k1", call=severed(connect))
    chain: list[BaseException] = [lost.value]
    for error in chain:  # a driver's error may have a cause of its own, and ours as its context
        chain += [e for e in (error.__cause__, error.__context__) if e is not None and all(e is not k for k in chain)]
    ours = [error for error in chain if isinstance(error, (StoreUnavailable, StoreUncertain))]
    assert ours
    assert isinstance(ours[0], StoreUnavailable)
    assert not isinstance(ours[0], TransactionConflict)
    assert payments(connect) == 0


def test_lost_before_a_commit_of_ours_was_sent_the_answer_is_handed_over(
    desk: Any, connect: Callable[..., Any]
) -> None:
    with pytest.raises((StoreUncertain, StoreUnavailable)) as lost:
        desk.pay("k1", call=severed(connect), own_transaction=True)
    assert lost.value.result == "paid"
    assert payments(connect) == 0


def test_adopting_mysql_imports_no_other_package(tmp_path: Path) -> None:
    import subprocess
    import sys

    probe = (
        "import pymysql, sys; from semel.sql.connections.adopt import adopt; "
        "adopt(pymysql.connections.Connection(defer_connect=True));"
        "print(*[name for name in ('psycopg', 'asyncpg', 'sqlalchemy', 'django', 'asyncmy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.split() == []
