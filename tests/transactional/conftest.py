"""A database with the tables, and tills of every kind on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from semel.stores import mysql
from semel.stores.postgres import migrate
from tests.servers import MariaDBServer, PostgresServer
from tests.transactional.kinds import (
    ASYNC_MYSQL,
    ASYNC_SQLITE,
    MYSQL,
    SQLITE,
    TABLE,
    AsyncTill,
    Till,
    in_mysql,
    mysql_parameters,
    till,
)
from tests.transactional.marked import MARKED


@pytest.fixture(scope="module")
def migrated(postgres: PostgresServer) -> Iterator[str]:
    """One database for a whole module: making one for each test would take most of the time."""
    url = postgres.create_database()
    migrate(url)
    with psycopg.connect(url) as connection:
        connection.execute(TABLE.encode())
    yield url
    postgres.drop_database(url)


@pytest.fixture
def database(migrated: str) -> str:
    """The database, without any records or payments. Of small tables DELETE takes a tenth of the time of TRUNCATE."""
    with psycopg.connect(migrated, autocommit=True) as connection:
        connection.execute(
            "DELETE FROM semel_record; DELETE FROM semel_step; DELETE FROM semel_inbox; DELETE FROM payment"
        )
    return migrated


@pytest.fixture(scope="module")
def migrated_mysql(mariadb: MariaDBServer) -> Iterator[str]:
    """The same on MariaDB."""
    url = mariadb.create_database()
    mysql.migrate(url)
    with pymysql.connect(**mysql_parameters(url)) as connection:
        connection.cursor().execute(in_mysql(TABLE))
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def mysql_database(migrated_mysql: str) -> str:
    """The database, without any records or payments."""
    with pymysql.connect(**mysql_parameters(migrated_mysql), autocommit=True) as connection:
        for table in ("semel_record", "semel_step", "semel_inbox", "payment"):
            connection.cursor().execute(f"DELETE FROM {table}")
    return migrated_mysql


@pytest.fixture(params=MARKED)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of each kind of connection."""
    return str(request.param)


@pytest.fixture
def open_till(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Till | AsyncTill]]:
    """Opens tills of that kind, all on one database."""
    on_file = kind in SQLITE + ASYNC_SQLITE
    name = "mysql_database" if kind in MYSQL + ASYNC_MYSQL else "database"
    url = str(tmp_path / "shop.db") if on_file else request.getfixturevalue(name)
    opened: list[Till | AsyncTill] = []

    def open_one(**settings: Any) -> Till | AsyncTill:
        opened.append(till(kind, url, **settings))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()
