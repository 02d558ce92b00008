"""Fixtures for all tests. Servers: see `tests/servers/plugin.py` for what happens behind them."""

from collections.abc import Callable, Iterator
from typing import cast

import pytest

from tests.servers import PostgresServer, Server

pytest_plugins = ["tests.servers.plugin"]


@pytest.fixture(scope="session")
def postgres(shared_server: Callable[[str], Server]) -> PostgresServer:
    """The session's Postgres server. Never restart it: that is what `private_postgres` is for."""
    return cast(PostgresServer, shared_server("postgres"))


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """A fresh database on the session's server, dropped after the test."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
def private_postgres(private_server: Callable[[str], Server]) -> PostgresServer:
    """A Postgres server for this test alone."""
    return cast(PostgresServer, private_server("postgres"))
