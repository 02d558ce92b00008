"""PostgreSQL: the conformance suite for each driver, with a second instance on the same database."""

from collections.abc import Callable, Iterator

import psycopg
import pytest

from semel import AsyncPostgresStore, PostgresStore
from semel.stores.postgres import migrate
from semel.testing import conformance
from tests.servers import PostgresServer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def migrated(postgres: PostgresServer) -> Iterator[str]:
    """One migrated database for the whole module: making one for each proof would take most of the time."""
    url = postgres.create_database()
    migrate(url)
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="module")
def cleaning(migrated: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(migrated, autocommit=True) as connection:
        yield connection


@pytest.fixture
def database(migrated: str, cleaning: psycopg.Connection) -> str:
    """The database, without any records. Of small tables DELETE takes a tenth of the time of TRUNCATE."""
    cleaning.execute("DELETE FROM semel_record; DELETE FROM semel_step")
    return migrated


class TestPostgresStore(conformance.StoreSuite):
    examples = 25
    wakes = True
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], PostgresStore]:
        return lambda: PostgresStore(database)


class TestAsyncpgStore(conformance.AsyncStoreSuite):
    sampled = True
    examples = 15  # the statements are those above: what differs is the driver
    wakes = True
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], AsyncPostgresStore]:
        return lambda: AsyncPostgresStore(database, driver="asyncpg")


class TestAsyncPsycopgStore(conformance.AsyncStoreSuite):
    sampled = True
    examples = 15  # the statements are those above: what differs is the driver
    wakes = True
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], AsyncPostgresStore]:
        return lambda: AsyncPostgresStore(database, driver="psycopg")
