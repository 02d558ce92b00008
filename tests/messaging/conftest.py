"""Databases with an outbox: migrated once for each module, emptied before each test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semel import AsyncSQLiteStore
from semel.stores import mysql, postgres, sqlite
from tests.messaging.desks import Desk, dialect_of
from tests.servers import MariaDBServer, PostgresServer


@pytest.fixture(scope="module")
def outbox_urls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """The migrated database of a dialect."""
    urls: dict[str, str] = {}

    def url(dialect: str) -> str:
        if dialect not in urls:
            if dialect == "sqlite":
                urls[dialect] = str(Path(tmp_path_factory.mktemp("outbox")) / "semel.db")
                sqlite.migrate(urls[dialect])
            elif dialect == "postgres":
                server: PostgresServer = request.getfixturevalue("postgres")
                urls[dialect] = server.create_database()
                postgres.migrate(urls[dialect])
            else:
                mariadb: MariaDBServer = request.getfixturevalue("mariadb")
                urls[dialect] = mariadb.create_database()
                mysql.migrate(urls[dialect])
        return urls[dialect]

    yield url
    if "postgres" in urls:
        request.getfixturevalue("postgres").drop_database(urls["postgres"])
    if "mysql" in urls:
        request.getfixturevalue("mariadb").drop_database(urls["mysql"])


@pytest.fixture
def open_desk(outbox_urls: Callable[[str], str]) -> Iterator[Callable[[str], Desk]]:
    """Opens a database by its kind, empty."""
    desks: list[Desk] = []

    def open(kind: str) -> Desk:
        desk = Desk(kind, outbox_urls(dialect_of(kind)))
        desks.append(desk)
        desk.clear()
        return desk

    yield open
    for desk in desks:
        desk.close()


@pytest.fixture
def async_store(tmp_path: Path) -> Iterator[AsyncSQLiteStore]:
    """A store that is only looked at."""
    store = AsyncSQLiteStore(tmp_path / "async.db")
    yield store
    asyncio.run(store.close())
