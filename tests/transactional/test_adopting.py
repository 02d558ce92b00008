"""The caller's connection, adopted: known by its class, refused in words that help, and left as it was."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from semel import (
    AsyncSemel,
    AsyncSQLiteStore,
    ConfigurationError,
    MemoryStore,
    PolicyError,
    PostgresStore,
    Semel,
    SQLiteStore,
    StoreUnavailable,
)
from semel.observe import events
from semel.sql.program import Query


@pytest.fixture
def guard(tmp_path: Path) -> Any:
    with Semel(SQLiteStore(tmp_path / "shop.db"), sweep_every=None) as guard:
        yield guard


def never() -> None:
    raise AssertionError("the handler ran")


def test_an_unknown_connection_is_refused_and_the_known_ones_are_listed(guard: Semel) -> None:
    with pytest.raises(
        ConfigurationError, match=r"not a builtins\.str.*sqlite3\.Connection.*psycopg\.Connection"
    ) as error:
        guard.run_in_transaction("postgresql://app@localhost/shop", "pay", key="1", call=never)
    assert len(str(error.value).partition("supported are: ")[2].split(", ")) >= 14


def test_a_subclass_of_a_known_connection_is_known(guard: Semel, tmp_path: Path) -> None:
    class Mine(sqlite3.Connection):
        pass

    conn = sqlite3.connect(tmp_path / "shop.db", factory=Mine)
    with conn:
        assert guard.run_in_transaction(conn, "pay", key="1", call=lambda: 1) == 1
    conn.close()


def test_a_store_outside_of_any_database_cannot_take_part() -> None:
    with (
        closing(sqlite3.connect(":memory:")) as conn,
        pytest.raises(ConfigurationError, match=r"MemoryStore is in none.*SQLiteStore, PostgresStore or MySQLStore"),
    ):
        Semel(MemoryStore(), sweep_every=None).run_in_transaction(conn, "pay", key="1", call=never)


@pytest.mark.postgres
@pytest.mark.server
def test_a_store_of_another_database_is_refused(guard: Semel, database: str) -> None:
    with (
        psycopg.connect(database) as conn,
        pytest.raises(ConfigurationError, match=r"store is SQLite and psycopg's Connection is connected to PostgreSQL"),
    ):
        guard.run_in_transaction(conn, "pay", key="1", call=never)


def test_an_async_connection_belongs_to_an_async_guard(guard: Semel, tmp_path: Path) -> None:
    import aiosqlite

    async def main() -> None:
        async with aiosqlite.connect(tmp_path / "shop.db") as conn:
            with pytest.raises(ConfigurationError, match="is async: use it with AsyncSemel"):
                guard.run_in_transaction(conn, "pay", key="1", call=never)
        async with AsyncSemel(AsyncSQLiteStore(tmp_path / "shop.db"), sweep_every=None) as other:
            with (
                closing(sqlite3.connect(":memory:")) as plain,
                pytest.raises(ConfigurationError, match="is sync: use it with Semel"),
            ):
                await other.run_in_transaction(plain, "pay", key="1", call=never)  # type: ignore[arg-type]

    asyncio.run(main())


# No transaction, no promise.


def test_sqlite3_in_autocommit_needs_a_begin(guard: Semel, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    with pytest.raises(ConfigurationError, match=r"no transaction is open.*BEGIN IMMEDIATE.*own_transaction=True"):
        guard.run_in_transaction(conn, "pay", key="1", call=never)
    conn.execute("BEGIN")
    assert guard.run_in_transaction(conn, "pay", key="1", call=lambda: 1) == 1
    conn.execute("COMMIT")
    conn.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has autocommit= since Python 3.12")
@pytest.mark.parametrize("autocommit", [True, False])
def test_sqlite3s_own_autocommit_is_understood(guard: Semel, tmp_path: Path, autocommit: bool) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db", autocommit=autocommit)  # type: ignore[call-overload,unused-ignore]
    if autocommit:
        with pytest.raises(ConfigurationError, match="no transaction is open"):
            guard.run_in_transaction(conn, "pay", key="1", call=never)
        assert guard.run_in_transaction(conn, "pay", key="1", call=lambda: 1, own_transaction=True) == 1
        assert not conn.in_transaction
    else:
        with pytest.raises(ConfigurationError, match="open already"):
            guard.run_in_transaction(conn, "pay", key="1", call=never, own_transaction=True)
        assert guard.run_in_transaction(conn, "pay", key="1", call=lambda: 1) == 1
        conn.commit()
    assert guard.lookup("pay", "1") is not None
    conn.close()


@pytest.mark.postgres
@pytest.mark.server
def test_postgres_connections_in_autocommit_are_refused(database: str) -> None:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    with Semel(PostgresStore(database), sweep_every=None) as guard:
        with (
            psycopg.connect(database, autocommit=True) as conn,
            pytest.raises(ConfigurationError, match=r"Open one: `with conn\.transaction"),
        ):
            guard.run_in_transaction(conn, "pay", key="1", call=never)
        by_engine = sa.create_engine(database.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
        for engine in (
            by_engine.execution_options(isolation_level="AUTOCOMMIT"),
            sa.create_engine(by_engine.url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool),
        ):
            with engine.begin() as connection, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                guard.run_in_transaction(connection, "pay", key="1", call=never)
            with Session(engine) as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                guard.run_in_transaction(session, "pay", key="1", call=never)
        with (
            Session(by_engine, autobegin=False) as session,
            pytest.raises(ConfigurationError, match=r"Open one: `with session\.begin"),
        ):
            guard.run_in_transaction(session, "pay", key="1", call=never)
        assert guard.lookup("pay", "1") is None


@pytest.mark.parametrize("as_session", [False, True])
def test_a_driver_that_commits_behind_sqlalchemys_back_is_found_out(
    guard: Semel, tmp_path: Path, as_session: bool
) -> None:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    engine = sa.create_engine(
        f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"isolation_level": None}, poolclass=sa.NullPool
    )
    with (
        Session(engine) if as_session else engine.connect() as conn,
        pytest.raises(ConfigurationError, match="commits each statement"),
    ):
        guard.run_in_transaction(conn, "pay", key="1", call=never)
    assert guard.lookup("pay", "1") is None

    @sa.event.listens_for(engine, "begin")  # SQLAlchemy's own recipe for real transactions on SQLite
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    with Session(engine) if as_session else engine.connect() as conn:
        assert guard.run_in_transaction(conn, "pay", key="1", call=lambda: 1) == 1
        conn.commit()
    assert guard.lookup("pay", "1") is not None


def test_django_outside_of_atomic_is_refused(tmp_path: Path) -> None:
    from tests.transactional.kinds import Till

    till = Till("django-sqlite", str(tmp_path / "shop.db"))
    with pytest.raises(ConfigurationError, match=r"with transaction\.atomic"):
        till.guard.run_in_transaction(till.conn, "pay", key="1", call=never)
    from django.db import connections
    from django.utils.connection import ConnectionProxy

    proxy = ConnectionProxy(connections, till.conn.alias)  # what programs import as django.db.connection
    with till.transaction():
        assert till.guard.run_in_transaction(proxy, "pay", key="1", call=lambda: 1) == 1
    till.close()


def test_a_database_that_cannot_keep_transactions_is_named(guard: Semel) -> None:
    from django.db.backends.dummy.base import DatabaseWrapper

    with pytest.raises(ConfigurationError, match="not on Django's unknown"):
        guard.run_in_transaction(DatabaseWrapper({}), "pay", key="1", call=never)


@pytest.mark.postgres
@pytest.mark.server
def test_asyncpg_outside_of_a_transaction_is_refused(database: str) -> None:
    from tests.transactional.kinds import AsyncTill

    till = AsyncTill("asyncpg", database)
    with pytest.raises(ConfigurationError, match=r"Open one: `async with conn\.transaction"):
        till.run(lambda: till.guard.run_in_transaction(till.conn, "pay", key="1", call=never))
    till.close()


def test_a_sqlite3_connection_that_the_handler_closed_is_rolled_back_in_words_of_ours(tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db")
    seen: list[events.Event] = []

    def closes() -> None:
        conn.close()
        raise RuntimeError("declined")

    store = SQLiteStore(tmp_path / "shop.db")
    with Semel(store, sweep_every=None, on_event=seen.append) as guard:
        with pytest.raises(RuntimeError, match="declined"):
            guard.run_in_transaction(conn, "pay", key="k1", call=closes, own_transaction=True)
        with pytest.raises(StoreUnavailable, match="the database connection is closed"):
            store.adopt(conn).undo()
    told = [event.error for event in seen if isinstance(event, events.StoreFailed)]
    assert told == ["the database connection is closed or misused: Cannot operate on a closed database."]


# The connection is left as it was.


def test_the_callers_row_and_text_factories_are_for_the_callers_rows(guard: Semel, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db")
    conn.row_factory = lambda cursor, row: {"row": row}
    conn.text_factory = bytes
    for _ in range(2):
        with conn:
            assert guard.run_in_transaction(conn, "pay", key="ключ", call=lambda: "да") == "да"
    assert conn.execute("SELECT 1").fetchone() == {"row": (1,)}
    conn.close()


@pytest.mark.postgres
@pytest.mark.server
@pytest.mark.parametrize("cursors", ["Cursor", "ClientCursor", "RawCursor"])
def test_psycopgs_factories_formats_and_settings_are_left_alone(database: str, cursors: str) -> None:
    with (
        Semel(PostgresStore(database), sweep_every=None) as guard,
        psycopg.connect(database, row_factory=dict_row) as conn,
    ):
        conn.cursor_factory = getattr(psycopg, cursors)
        conn.prepare_threshold = None
        adapters = conn.adapters
        path = conn.execute("SHOW search_path").fetchone()
        for _ in range(7):
            with conn.transaction():
                assert guard.run_in_transaction(conn, "pay", key="1", call=lambda: "да") == "да"
        assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == {"count": 0}
        assert conn.execute("SHOW search_path").fetchone() == path
        assert (conn.autocommit, conn.isolation_level, conn.adapters) == (False, None, adapters)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        conn.commit()
        assert conn.execute(held.encode()).fetchone() == {"count": 0}


@pytest.mark.postgres
@pytest.mark.server
def test_any_program_of_ours_runs_on_a_lent_connection(database: str) -> None:
    """Statements over arrays too: they are what the stores' own programs are made of."""
    query = Query("pairs", "SELECT * FROM unnest(:ids::bytea[], :names::text[]) AS g (id, name)", False)
    from tests.transactional.kinds import ASYNC_POSTGRES, POSTGRES, till

    for kind in (*POSTGRES, *ASYNC_POSTGRES):
        each = till(kind, database)
        statement = query(ids=[b"\x00a", b"b"], names=["%ü", None])
        rows = each.run(lambda each=each: each.lent.execute(statement))  # noqa: B023
        assert [(bytes(id), name) for id, name in rows] == [(b"\x00a", "%ü"), (b"b", None)], kind
        each.close()


@pytest.mark.slow
def test_adopting_imports_no_package_that_is_not_loaded() -> None:
    probe = (
        "import sqlite3, sys; from semel.sql.connections.adopt import adopt; adopt(sqlite3.connect(':memory:'));"
        "print(*[name for name in ('psycopg', 'asyncpg', 'sqlalchemy', 'django', 'aiosqlite') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


# What a caller may ask.


def test_tries_are_for_transactions_that_semel_opens(guard: Semel, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db")
    with pytest.raises(PolicyError, match="can only be run again by you"):
        guard.run_in_transaction(conn, "pay", key="1", call=never, tries=2)
    with pytest.raises(PolicyError, match="from 1"):
        guard.run_in_transaction(conn, "pay", key="1", call=never, own_transaction=True, tries=0)
    conn.close()


def test_the_function_may_take_the_handle_or_nothing(guard: Semel, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db")

    class Desk:
        def with_handle(self, op: Any) -> str:
            return str(op.key)

        def without(self, amount: int = 7) -> int:
            return amount

        def __call__(self, op: Any) -> str:
            return f"called {op.key}"

    calls: list[Any] = [Desk().with_handle, Desk().without, Desk(), lambda: "nothing", lambda op: op.key, int]
    with conn:
        answers = [guard.run_in_transaction(conn, "pay", key=str(n), call=call) for n, call in enumerate(calls)]
    assert answers == ["0", 7, "called 2", "nothing", "4", 0]
    with pytest.raises(PolicyError, match="generator"):
        guard.run_in_transaction(conn, "pay", key="g", call=lambda: (yield 1))
    conn.close()


def test_an_operation_within_itself_is_found_out(guard: Semel, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db")
    with conn, pytest.raises(Exception, match="called within itself"):
        guard.run_in_transaction(
            conn, "pay", key="1", call=lambda: guard.run_in_transaction(conn, "pay", key="1", call=never)
        )
    conn.close()


def test_a_decorated_function_finds_its_connection_among_its_arguments(guard: Semel, tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "shop.db")
    conn.execute("CREATE TABLE payment (amount)")

    @guard.once_in_transaction(connection="session", key="order")
    def pay(order: str, amount: int, session: sqlite3.Connection) -> dict[str, int]:
        session.execute("INSERT INTO payment VALUES (?)", (amount,))
        return {"amount": amount}

    with conn:
        assert pay("o-1", 5, conn) == {"amount": 5}
    other = sqlite3.connect(tmp_path / "shop.db")
    with other:
        assert pay("o-1", 5, session=other) == {"amount": 5}  # another connection is no other request
    assert other.execute("SELECT count(*) FROM payment").fetchone() == (1,)
    with pytest.raises(PolicyError, match="no parameter 'nothing'"):
        guard.once_in_transaction(connection="nothing", key="order")(pay)

    async def later(order: str, session: Any) -> None: ...

    with pytest.raises(PolicyError, match="AsyncSemel"):
        guard.once_in_transaction(connection="session", key="order")(later)
    conn.close()
    other.close()
