"""A database with the tables, and tills of every kind on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.stores.postgres import migrate
from tests.servers import PostgresServer
from tests.transactional.kinds import ALL, ASYNC_SQLITE, SQLITE, TABLE, AsyncTill, Till, till


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
    """The database, without any records or payments."""
    with psycopg.connect(migrated, autocommit=True) as connection:
        connection.execute("TRUNCATE semel_record, semel_step, payment")
    return migrated


KINDS = [
    kind if kind in SQLITE + ASYNC_SQLITE else pytest.param(kind, marks=[pytest.mark.postgres, pytest.mark.server])
    for kind in ALL
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of each kind of connection."""
    return str(request.param)


@pytest.fixture
def open_till(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Till | AsyncTill]]:
    """Opens tills of that kind, all on one database."""
    on_file = kind in SQLITE + ASYNC_SQLITE
    url = str(tmp_path / "shop.db") if on_file else request.getfixturevalue("database")
    opened: list[Till | AsyncTill] = []

    def open_one(**settings: Any) -> Till | AsyncTill:
        opened.append(till(kind, url, **settings))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()
