"""Natural idempotency on every kind of connection: a repeat changes nothing, and says so."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from pymysql.constants import CLIENT

from semel import natural
from semel.errors import ConfigurationError, StoreUnavailable
from semel.natural import Applied, Change, aio, programs
from tests.servers import MariaDBServer, PostgresServer
from tests.transactional.kinds import (
    ASYNC_MYSQL,
    ASYNC_SQLITE,
    MYSQL,
    SQLITE,
    AsyncTill,
    Till,
    in_mysql,
    mysql_parameters,
    till,
)
from tests.transactional.marked import MARKED, SOME, marked

TABLES = [
    "CREATE TABLE orders (id integer PRIMARY KEY, status text, note text, version integer DEFAULT 1, changed_by text)",
    "CREATE TABLE charge (id integer, order_id integer NOT NULL UNIQUE, amount integer, label text)",
    "CREATE TABLE event (stream text, sequence integer, id text, data text, PRIMARY KEY (stream, sequence))",
    "CREATE TABLE loose (id integer, order_id integer, stream text, sequence integer, UNIQUE (order_id, sequence))",
]


class Desk:
    """The helpers on one connection, each call in a transaction of its own; sync and async look alike."""

    def __init__(self, on: Till | AsyncTill) -> None:
        self.till = on

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(aio if isinstance(self.till, AsyncTill) else natural, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(self.till, AsyncTill):

                async def work() -> Any:
                    async with self.till.transaction():
                        return await function(self.till.conn, *args, **kwargs)

                return self.till.run(work)
            with self.till.transaction():
                return function(self.till.conn, *args, **kwargs)

        return call

    def sql(self, text: str) -> Any:
        if isinstance(self.till, AsyncTill):

            async def work() -> Any:
                async with self.till.transaction():
                    return await self.till.send(text)

            return [tuple(row) for row in self.till.run(work)]
        with self.till.transaction():
            return [tuple(row) for row in self.till.send(text)]


@pytest.fixture(scope="module")
def shop(postgres: PostgresServer) -> Iterator[str]:
    """One database for all tests: making one for each would take most of the time."""
    url = postgres.create_database()
    _migrate(url)
    with psycopg.connect(url, autocommit=True) as conn:
        for table in TABLES:
            conn.execute(table.encode())
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def mysql_shop(mariadb: MariaDBServer) -> Iterator[str]:
    """The same on MariaDB."""
    url = mariadb.create_database()
    with pymysql.connect(**mysql_parameters(url)) as conn:
        for table in TABLES:
            conn.cursor().execute(f"{in_mysql(table)} CHARACTER SET utf8mb4")
    yield url
    mariadb.drop_database(url)


@pytest.fixture(params=SOME)
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Desk]:
    """A kind of connection, on empty tables: the first test is run on every kind, the others on some."""
    on_file = request.param in (*SQLITE, *ASYNC_SQLITE)
    name = "empty_mysql_shop" if request.param in (*MYSQL, *ASYNC_MYSQL) else "empty_shop"
    url = str(tmp_path / "shop.db") if on_file else request.getfixturevalue(name)
    opened = till(request.param, url)
    desk = Desk(opened)
    for table in TABLES if on_file else ():
        desk.sql(table)
    yield desk
    opened.close()


@pytest.fixture
def empty_shop(shop: str) -> str:
    with psycopg.connect(shop, autocommit=True) as conn:
        conn.execute("DELETE FROM orders; DELETE FROM charge; DELETE FROM event")
    return shop


@pytest.fixture
def empty_mysql_shop(mysql_shop: str) -> str:
    with pymysql.connect(**mysql_parameters(mysql_shop), autocommit=True) as conn:
        for table in ("orders", "charge", "event"):
            conn.cursor().execute(f"DELETE FROM {table}")
    return mysql_shop


def _migrate(url: str) -> None:
    from semel.stores.postgres import migrate

    migrate(url)


@pytest.mark.parametrize("desk", MARKED, indirect=True)
def test_a_row_is_inserted_once_and_found_after(desk: Desk) -> None:
    first = desk.insert_once("charge", {"order_id": 7, "amount": 5, "label": None}, key="order_id")
    again = desk.insert_once("charge", {"order_id": 7, "amount": 9, "label": "other"}, key="order_id")
    row, new = first
    assert (dict(row), new) == ({"order_id": 7, "amount": 5, "label": None}, True)
    assert (dict(again.row), again.new) == ({"order_id": 7, "amount": 5, "label": None}, False)
    assert desk.sql("SELECT order_id, amount FROM charge") == [(7, 5)]


def test_other_columns_of_the_row_can_be_asked_for(desk: Desk) -> None:
    desk.sql("INSERT INTO charge (id, order_id, amount) VALUES (3, 7, 5)")
    found = desk.insert_once("charge", {"order_id": 7, "amount": 5}, key=["order_id"], returning=("id", "amount"))
    assert (dict(found.row), found.new) == ({"id": 3, "amount": 5}, False)


def test_an_upsert_tells_whether_it_changed_anything(desk: Desk) -> None:
    assert desk.upsert("orders", {"id": 1, "status": "new", "note": None}, key="id") is True
    assert desk.upsert("orders", {"id": 1, "status": "new", "note": None}, key="id") is False
    assert desk.upsert("orders", {"id": 1, "status": "new", "note": "x"}, key="id") is True
    assert desk.upsert("orders", {"id": 1}, key="id") is False
    assert desk.sql("SELECT id, status, note FROM orders") == [(1, "new", "x")]


def test_compare_and_set_tells_a_repeat_from_a_lost_race(desk: Desk) -> None:
    desk.sql("INSERT INTO orders (id, status, version) VALUES (1, 'new', 4)")
    change = {"where": {"id": 1}, "version": 4, "values": {"note": "mine"}}
    assert desk.compare_and_set("orders", **change) == Change(Applied.NOW)
    assert desk.compare_and_set("orders", **change) == Change(Applied.ALREADY, 5)
    lost = desk.compare_and_set("orders", {"id": 1}, version=4, values={"note": "another's"})
    assert lost == Change(Applied.LOST, 5)
    assert not lost
    assert desk.compare_and_set("orders", {"id": 9}, version=4, values={"note": "x"}) == Change(Applied.ABSENT)
    assert desk.sql("SELECT note, version FROM orders") == [("mine", 5)]


def test_with_a_marker_a_repeat_is_known_by_it_and_by_nothing_else(desk: Desk) -> None:
    desk.sql("INSERT INTO orders (id, status, version) VALUES (1, 'new', 4)")

    def change(marker: str) -> Change:
        return desk.compare_and_set(  # type: ignore[no-any-return]
            "orders", {"id": 1}, version=4, values={"note": "same"}, marker=("changed_by", marker)
        )

    assert change("me") == Change(Applied.NOW)
    assert change("me") == Change(Applied.ALREADY, 5)
    assert change("other") == Change(Applied.LOST, 5)  # equal values, and yet another's change


def test_a_transition_is_made_once(desk: Desk) -> None:
    desk.sql("INSERT INTO orders (id, status) VALUES (1, 'new')")
    assert desk.transition("orders", {"id": 1}, "status", "new", "paid", values={"note": "n"}) == Change(Applied.NOW)
    assert desk.transition("orders", {"id": 1}, "status", "new", "paid") == Change(Applied.ALREADY, "paid")
    assert desk.transition("orders", {"id": 1}, "status", "new", "gone") == Change(Applied.LOST, "paid")
    assert desk.transition("orders", {"id": 1}, "status", ["new", "paid"], "sent") == Change(Applied.NOW)
    assert desk.transition("orders", {"id": 9}, "status", "new", "paid") == Change(Applied.ABSENT)
    assert desk.sql("SELECT status, note FROM orders") == [("sent", "n")]


def test_an_event_is_appended_once_at_its_place(desk: Desk) -> None:
    def append(sequence: int, id: str) -> Change:
        return desk.append_event("event", {"stream": "order-1"}, sequence, {"id": id, "data": "{}"})  # type: ignore[no-any-return]

    assert append(1, "a") == Change(Applied.NOW)
    assert append(1, "a") == Change(Applied.ALREADY, "a")
    assert append(1, "b") == Change(Applied.LOST, "a")
    assert append(3, "c") == Change(Applied.LOST)  # nothing stands at 2
    assert append(2, "b") == Change(Applied.NOW)
    assert desk.sql("SELECT sequence, id FROM event ORDER BY sequence") == [(1, "a"), (2, "b")]


def test_deleting_what_is_not_there_is_no_error(desk: Desk) -> None:
    desk.sql("INSERT INTO orders (id, status) VALUES (1, 'new')")
    assert [desk.delete("orders", {"id": 1}) for _ in range(2)] == [True, False]
    assert desk.sql("SELECT * FROM orders") == []


def test_a_rolled_back_insert_was_never_made(desk: Desk) -> None:
    class Stop(Exception):
        pass

    on = desk.till
    if isinstance(on, AsyncTill):

        async def work() -> None:
            async with on.transaction():
                await aio.insert_once(on.conn, "charge", {"order_id": 7, "amount": 5}, key="order_id")
                raise Stop

        with pytest.raises(Stop):
            on.run(work)
    else:

        def plain_work() -> None:
            with on.transaction():
                natural.insert_once(on.conn, "charge", {"order_id": 7, "amount": 5}, key="order_id")
                raise Stop

        with pytest.raises(Stop):
            plain_work()
    assert desk.insert_once("charge", {"order_id": 7, "amount": 6}, key="order_id").new


def test_a_key_that_is_not_unique_is_named_with_the_statement_that_makes_it_so(desk: Desk) -> None:
    """A repeat would be a second row, and on MySQL nobody would say so."""
    q = '"' if desk.till.lent.dialect == "postgresql" else "`"
    with pytest.raises(ConfigurationError, match="loose: order_id is not unique, so a repeat would be a second") as one:
        desk.insert_once("loose", {"order_id": 7, "sequence": 1}, key="order_id")
    assert str(one.value).endswith(f": CREATE UNIQUE INDEX {q}loose_order_id_once{q} ON {q}loose{q} ({q}order_id{q})")
    with pytest.raises(ConfigurationError, match="loose: order_id, id are not unique together"):
        desk.upsert("loose", {"order_id": 7, "id": 1, "sequence": 1}, key=("order_id", "id"))
    with pytest.raises(ConfigurationError, match="loose: stream, sequence are not unique together"):
        desk.append_event("loose", {"stream": "s"}, 1, {"id": 1})
    assert desk.sql("SELECT * FROM loose") == []


def test_a_table_or_column_that_is_missing_is_named_and_not_taken_for_one_of_ours_or_for_a_text(desk: Desk) -> None:
    """SQLite takes a name in double quotes for a text where there is no such column: it would be true of every row."""
    desk.sql("INSERT INTO orders (id, status) VALUES (1, 'new')")
    with pytest.raises(ConfigurationError, match=r"^orders: .*statsu") as misspelt:
        desk.delete("orders", {"statsu": "statsu"})
    with pytest.raises(ConfigurationError, match=r"^nowhere: .*nowhere") as missing:
        desk.transition("nowhere", {"id": 1}, "status", "new", "paid")
    for caught in (misspelt, missing):
        assert "semel migrate" not in str(caught.value)
    assert desk.sql("SELECT id, status FROM orders") == [(1, "new")]


@pytest.mark.parametrize("kind", [marked(kind) for kind in ("sqlite3", "psycopg", "asyncpg", "pymysql", "asyncmy")])
def test_the_statement_that_is_named_is_the_cure(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    name = "empty_mysql_shop" if kind in (*MYSQL, *ASYNC_MYSQL) else "empty_shop"
    url = str(tmp_path / "shop.db") if kind == "sqlite3" else request.getfixturevalue(name)
    desk = Desk(till(kind, url))
    desk.sql(f"CREATE TABLE cured_{kind} (order_id integer, part integer)")
    row = {"order_id": 7, "part": 1}
    with pytest.raises(ConfigurationError, match="CREATE UNIQUE INDEX") as caught:
        desk.insert_once(f"cured_{kind}", row, key=("order_id", "part"))
    desk.sql("CREATE UNIQUE INDEX" + str(caught.value).partition("CREATE UNIQUE INDEX")[2])
    assert [desk.insert_once(f"cured_{kind}", row, key=("part", "order_id")).new for _ in range(2)] == [True, False]
    desk.till.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda n, c: n.insert_once(c, "charge", {"order_id": 7}, key="amount"), "key= names columns"),
        (lambda n, c: n.insert_once(c, "charge", {}, key="x"), "values is empty"),
        (lambda n, c: n.insert_once(c, "charge", {'a"; DROP TABLE charge; --': 1}, key="x"), "not a column name"),
        (lambda n, c: n.delete(c, "charge; DROP TABLE charge", {"id": 1}), "not a table name"),
        (lambda n, c: n.delete(c, "charge", {}), "where is empty"),
        (lambda n, c: n.insert_once(c, "charge", {"order_id": None}, key="order_id"), "order_id is None"),
        (lambda n, c: n.upsert(c, "charge", {"order_id": None, "amount": 1}, key="order_id"), "order_id is None"),
        (lambda n, c: n.append_event(c, "event", {"stream": None}, 1, {"id": "e"}), "stream is None"),
        (lambda n, c: n.transition(c, "orders", {"id": 1}, "status", ["a", "b"], "b"), "cannot be both"),
        (lambda n, c: n.compare_and_set(c, "o", {"id": 1}, version=1, values={"version": 9}), "is the version"),
        (lambda n, c: n.append_event(c, "event", {"stream": "s"}, 1, {"data": "x"}), "identified by its 'id'"),
    ],
)
def test_mistakes_are_named_before_anything_is_sent(tmp_path: Path, call: Any, words: str) -> None:
    on = till("sqlite3", str(tmp_path / "x.db"))
    with pytest.raises(ConfigurationError, match=words):
        call(natural, on.conn)
    on.close()


def test_the_wrong_twin_is_named(tmp_path: Path, shop: str) -> None:
    plain = till("sqlite3", str(tmp_path / "x.db"))
    with pytest.raises(ConfigurationError, match=r"is not async: use the functions of semel\.natural$"):
        asyncio.run(aio.delete(plain.conn, "t", {"id": 1}))
    plain.close()
    awaited = till("asyncpg", shop)
    with pytest.raises(ConfigurationError, match=r"is async: use the functions of semel\.natural\.aio$"):
        natural.delete(awaited.conn, "t", {"id": 1})
    awaited.close()


@pytest.mark.parametrize(
    "kind", [marked(kind) for kind in ("psycopg", "sqlalchemy-psycopg", "pymysql", "session-pymysql")]
)
def test_of_many_at_once_one_inserts_and_all_see_its_row(kind: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("empty_mysql_shop" if kind in MYSQL else "empty_shop")
    desks = [Desk(till(kind, url)) for _ in range(6)]
    start = threading.Barrier(len(desks))
    found: list[Any] = []

    def work(desk: Desk, label: str) -> None:
        start.wait()
        found.append(desk.insert_once("charge", {"order_id": 7, "label": label}, key="order_id"))

    threads = [threading.Thread(target=work, args=(desk, uuid.uuid4().hex)) for desk in desks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for desk in desks:
        desk.till.close()
    assert sorted(inserted.new for inserted in found) == [False] * 5 + [True]
    assert len({inserted.row["label"] for inserted in found}) == 1


# MySQL and MariaDB


@pytest.fixture
def found_rows(empty_mysql_shop: str) -> Iterator[Any]:
    """A connection that counts rows found instead of rows changed, as SQLAlchemy's and Django's do."""
    from pymysql.constants import CLIENT

    with pymysql.connect(**mysql_parameters(empty_mysql_shop), client_flag=CLIENT.FOUND_ROWS) as conn:
        yield conn


def test_on_mysql_the_answers_do_not_hang_on_how_the_connection_counts(found_rows: Any) -> None:
    row = {"id": 1, "status": "new", "note": None}
    assert [natural.upsert(found_rows, "orders", row, key="id") for _ in range(2)] == [True, False]
    assert natural.upsert(found_rows, "orders", {**row, "note": "x"}, key="id") is True
    assert natural.upsert(found_rows, "orders", {"id": 1}, key="id") is False
    assert natural.insert_once(found_rows, "charge", {"order_id": 7, "amount": 5}, key="order_id").new is True
    assert natural.insert_once(found_rows, "charge", {"order_id": 7, "amount": 5}, key="order_id").new is False
    assert natural.transition(found_rows, "orders", {"id": 1}, "status", "new", "paid") == Change(Applied.NOW)
    assert natural.transition(found_rows, "orders", {"id": 1}, "status", "new", "paid") == Change(
        Applied.ALREADY, "paid"
    )


def test_on_mysql_what_others_committed_since_the_snapshot_is_seen(empty_mysql_shop: str) -> None:
    """Under REPEATABLE READ, which is its default, a plain read would not show it."""
    where = mysql_parameters(empty_mysql_shop)
    with pymysql.connect(**where, autocommit=True) as other, pymysql.connect(**where) as conn:
        other.cursor().execute("INSERT INTO orders (id, status, version) VALUES (1, 'new', 4)")
        conn.cursor().execute("SELECT * FROM orders")  # its snapshot is taken here
        natural.insert_once(other, "charge", {"order_id": 7, "amount": 5}, key="order_id")
        natural.compare_and_set(other, "orders", {"id": 1}, version=4, values={"note": "theirs"})
        natural.append_event(other, "event", {"stream": "s"}, 1, {"id": "a"})
        found = natural.insert_once(conn, "charge", {"order_id": 7, "amount": 9}, key="order_id")
        assert (found.row["amount"], found.new) == (5, False)
        lost = natural.compare_and_set(conn, "orders", {"id": 1}, version=4, values={"note": "mine"})
        assert lost == Change(Applied.LOST, 5)
        assert natural.append_event(conn, "event", {"stream": "s"}, 2, {"id": "b"}) == Change(Applied.NOW)


def test_on_mysql_only_a_taken_key_is_taken_for_one(empty_mysql_shop: str) -> None:
    with pymysql.connect(**mysql_parameters(empty_mysql_shop)) as conn:
        conn.cursor().execute("CREATE TEMPORARY TABLE whole (id integer PRIMARY KEY, amount integer NOT NULL)")
        with pytest.raises(StoreUnavailable, match="1048"):  # INSERT IGNORE would store 0
            natural.insert_once(conn, "whole", {"id": 1, "amount": None}, key="id")
        conn.cursor().execute("CREATE TEMPORARY TABLE twice (id integer PRIMARY KEY, order_id integer UNIQUE)")
        natural.insert_once(conn, "twice", {"id": 1, "order_id": 7}, key="order_id")
        with pytest.raises(ConfigurationError, match="another unique key of this row is taken"):
            natural.insert_once(conn, "twice", {"id": 2, "order_id": 7}, key="id")


@pytest.mark.parametrize("flags", [0, CLIENT.FOUND_ROWS])
def test_on_mysql_an_upsert_leaves_rows_with_another_key_alone(empty_mysql_shop: str, flags: int) -> None:
    """ON DUPLICATE KEY UPDATE would write to them: any unique index will do for it."""
    with pymysql.connect(**mysql_parameters(empty_mysql_shop), client_flag=flags) as conn:
        cursor = conn.cursor()
        cursor.execute("CREATE TEMPORARY TABLE account (id int PRIMARY KEY, email varchar(50) UNIQUE, balance int)")
        assert natural.upsert(conn, "account", {"id": 1, "email": "a", "balance": 100}, key="id") is True
        for key in ("id", "email"):
            row = {"id": 2, "email": "a", "balance": 7} if key == "id" else {"id": 1, "email": "b", "balance": 7}
            with pytest.raises(ConfigurationError, match="another unique key of this row is taken"):
                natural.upsert(conn, "account", row, key=key)
        assert natural.upsert(conn, "account", {"id": 3, "email": "c", "balance": 1}, key="id") is True
        with pytest.raises(ConfigurationError, match="another unique key"):  # its own row is there, and cannot be so
            natural.upsert(conn, "account", {"id": 1, "email": "c", "balance": 7}, key="email")
        cursor.execute("SELECT * FROM account ORDER BY id")
        assert cursor.fetchall() == ((1, "a", 100), (3, "c", 1))


def test_on_mysql_a_table_is_asked_about_once_in_each_database(mariadb: MariaDBServer, empty_mysql_shop: str) -> None:
    programs._known_indexes.clear()
    with pymysql.connect(**mysql_parameters(empty_mysql_shop)) as conn:
        sent = _listened(conn)
        for order in range(3):
            natural.insert_once(conn, "charge", {"order_id": order}, key="order_id")
            natural.upsert(conn, "charge", {"order_id": order, "amount": 5}, key=["order_id"])
    with pymysql.connect(**mysql_parameters(empty_mysql_shop)) as conn:  # another connection to the same place
        sent += _listened(conn)
        natural.insert_once(conn, "charge", {"order_id": 9}, key="order_id")
    assert [text for text in sent if text.startswith("SHOW INDEX")] == ["SHOW INDEX FROM `charge` WHERE Non_unique = 0"]
    elsewhere = mariadb.create_database()
    with pymysql.connect(**mysql_parameters(elsewhere)) as conn:
        conn.cursor().execute("CREATE TABLE charge (order_id integer)")
        with pytest.raises(ConfigurationError, match="charge: order_id is not unique"):
            natural.insert_once(conn, "charge", {"order_id": 1}, key="order_id")
        conn.cursor().execute("CREATE UNIQUE INDEX later ON charge (order_id)")
        assert natural.insert_once(conn, "charge", {"order_id": 1}, key="order_id").new
    mariadb.drop_database(elsewhere)


def _listened(conn: Any) -> list[str]:
    """What is sent over this connection from now on."""
    sent: list[str] = []
    real = conn.query

    def query(sql: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(sql if isinstance(sql, str) else bytes(sql).decode("utf-8", "replace"))
        return real(sql, *args, **kwargs)

    conn.query = query
    return sent


def test_on_mysql_values_of_every_kind_are_written(empty_mysql_shop: str) -> None:
    text = "it's 100%s \\ ключ 🗝 :id"
    with pymysql.connect(**mysql_parameters(empty_mysql_shop), charset="latin1") as conn:
        natural.upsert(conn, "orders", {"id": 1, "note": text, "status": 1.5, "changed_by": date(2026, 1, 2)}, key="id")
        found = natural.insert_once(
            conn, "orders", {"id": 1}, key="id", returning=("id", "status", "changed_by", "version")
        )
        assert dict(found.row) == {"id": 1, "status": "1.5", "changed_by": "2026-01-02", "version": 1}
        conn.commit()
    with pymysql.connect(**mysql_parameters(empty_mysql_shop), charset="utf8mb4") as conn:
        assert natural.transition(conn, "orders", {"id": 1}, "note", text, "done") == Change(Applied.NOW)
