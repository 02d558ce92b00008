"""A transaction in another database than the one that was migrated: the error names the one that was looked at."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from semel import NotMigrated, Semel, SQLiteStore
from semel.cli import main
from tests.servers import MariaDBServer, PostgresServer
from tests.transactional.kinds import ASYNC_MYSQL, ASYNC_SQLITE, MYSQL, SQLITE, AsyncTill, Till, till


@pytest.fixture(scope="module")
def bare(postgres: PostgresServer) -> Iterator[str]:
    """A database without our tables."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def bare_mysql(mariadb: MariaDBServer) -> Iterator[str]:
    url = mariadb.create_database()
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def desk(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Till | AsyncTill]:
    """A till of every kind on such a database."""
    if kind in SQLITE + ASYNC_SQLITE:
        url = str(tmp_path / "other.db")
    else:
        url = request.getfixturevalue("bare_mysql" if kind in MYSQL + ASYNC_MYSQL else "bare")
    opened = till(kind, url)
    if kind in SQLITE + ASYNC_SQLITE:
        with closing(sqlite3.connect(url)) as raw, raw:
            for table in ("semel_record", "semel_step", "semel_migration"):
                raw.execute(f"DROP TABLE {table}")
    yield opened
    opened.close()


@pytest.mark.parametrize("own_transaction", [False, True])
def test_the_database_that_was_looked_at_is_named_with_the_command_that_migrates_it(
    desk: Till | AsyncTill, kind: str, own_transaction: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with pytest.raises(NotMigrated, match=r"run `semel migrate (\S+)`, or use a connection to") as caught:
        desk.pay("k1", insert=False, **({"own_transaction": True} if own_transaction else {}))
    place = str(caught.value).split("semel migrate ")[1].split("`")[0]
    if kind in SQLITE + ASYNC_SQLITE:
        assert place == f"sqlite:///{tmp_path / 'other.db'}"
    else:
        wanted = urlsplit(request.getfixturevalue("bare_mysql" if kind in MYSQL + ASYNC_MYSQL else "bare"))
        found = urlsplit(place)
        assert (found.scheme, found.hostname, found.port) == (wanted.scheme, wanted.hostname, wanted.port)
        assert (found.path, found.username, found.password) == (wanted.path, wanted.username, None)
    assert caught.value.__cause__ is not None


def test_the_command_that_is_named_is_the_cure(tmp_path: Path) -> None:
    with (
        Semel(SQLiteStore(tmp_path / "records.db"), sweep_every=None) as guard,
        closing(sqlite3.connect(tmp_path / "shop.db")) as conn,
    ):
        with pytest.raises(NotMigrated) as caught:
            guard.run_in_transaction(conn, "pay", key=1, call=lambda: "paid")
        assert main(str(caught.value).split("`semel ")[1].split("`")[0].split()) == 0
        conn.rollback()
        with conn:
            assert guard.run_in_transaction(conn, "pay", key=1, call=lambda: "paid") == "paid"


def test_a_database_in_memory_is_called_so(tmp_path: Path) -> None:
    with (
        Semel(SQLiteStore(tmp_path / "records.db"), sweep_every=None) as guard,
        closing(sqlite3.connect(":memory:")) as conn,
        pytest.raises(NotMigrated, match=r"This connection is to a database in memory: use one to the database"),
    ):
        guard.run_in_transaction(conn, "pay", key=1, call=lambda: "paid")
