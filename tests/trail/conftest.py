"""Databases for histories: migrated once for each module, emptied before each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pymysql
import pytest

from semel.stores import mysql, postgres
from tests.servers import MariaDBServer, PostgresServer
from tests.trail.histories import History, server_of
from tests.transactional.kinds import mysql_parameters


@pytest.fixture(scope="module")
def migrated(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Returns the URL of a database with tables, on a server of that name."""
    urls: dict[str, str] = {}

    def url(server: str) -> str:
        if server not in urls:
            if server == "postgres":
                database: PostgresServer = request.getfixturevalue("postgres")
                urls[server] = database.create_database()
                postgres.migrate(urls[server])
            else:
                mariadb: MariaDBServer = request.getfixturevalue("mariadb")
                urls[server] = mariadb.create_database()
                mysql.migrate(urls[server])
        return urls[server]

    yield url
    for server, found in urls.items():
        request.getfixturevalue("postgres" if server == "postgres" else "mariadb").drop_database(found)


@pytest.fixture
def empty_url(request: pytest.FixtureRequest, migrated: Callable[[str], str], tmp_path: Path) -> Callable[[str], str]:
    """Returns the URL, or the file, of an empty history on a server of that name."""

    def url(server: str) -> str:
        if server == "redis":
            return str(request.getfixturevalue("redis_url"))
        if server == "redis-cluster":
            cluster = request.getfixturevalue("redis_cluster")
            cluster.flush()
            return str(cluster.url)
        if server not in ("postgres", "mysql"):
            return str(tmp_path / "history.db")
        found = migrated(server)
        if server == "postgres":
            with psycopg.connect(found, autocommit=True) as connection:
                connection.execute("DELETE FROM semel_moment; DELETE FROM semel_minute")
        else:
            with (
                closing(pymysql.connect(**mysql_parameters(found), autocommit=True)) as other,
                other.cursor() as cursor,
            ):
                cursor.execute("DELETE FROM semel_moment")
                cursor.execute("DELETE FROM semel_minute")
        return found

    return url


@pytest.fixture
def open_history(empty_url: Callable[[str], str]) -> Iterator[Callable[[str], History]]:
    """Opens a history by its kind, empty."""
    opened: list[History] = []

    def open(kind: str) -> History:
        opened.append(History(kind, empty_url(server_of(kind))))
        return opened[-1]

    yield open
    for history in opened:
        history.close()
