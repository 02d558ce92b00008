"""MySQL and MariaDB: the conformance suite for each driver, and for the statements of a server without RETURNING."""

from collections.abc import Callable, Iterator
from typing import Any

import pymysql as driver
import pytest

from semel import AsyncMySQLStore, MySQLStore
from semel.sql.connections import asyncmy, pymysql
from semel.stores.mysql import migrate
from semel.testing import conformance
from semel.testing.conformance import claims, concurrency, steps
from semel.testing.conformance.script import Proof
from semel.testing.conformance.suite import play_async
from tests.servers import MariaDBServer
from tests.transactional.kinds import mysql_parameters

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def migrated(mariadb: MariaDBServer) -> Iterator[str]:
    """One migrated database for the whole module: making one for each proof would take most of the time."""
    url = mariadb.create_database()
    migrate(url)
    yield url
    mariadb.drop_database(url)


@pytest.fixture(scope="module")
def cleaning(migrated: str) -> Iterator[Any]:
    with driver.connect(**mysql_parameters(migrated), autocommit=True) as connection:
        yield connection.cursor()


@pytest.fixture
def database(migrated: str, cleaning: Any) -> str:
    """The database, without any records."""
    cleaning.execute("DELETE FROM semel_record")
    cleaning.execute("DELETE FROM semel_step")
    return migrated


@pytest.fixture
def as_mysql(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask as of MySQL, which has no INSERT … RETURNING."""
    for module, name in ((pymysql, "PyMySQLConnection"), (asyncmy, "AsyncmyConnection")):
        wrapped = getattr(module, name)
        monkeypatch.setattr(
            wrapped, "__init__", lambda self, *args, made=wrapped.__init__, **kw: _without(self, made, *args, **kw)
        )


def _without(self: object, made: Callable[..., None], *args: object, **kw: object) -> None:
    made(self, *args, **kw)
    self.returning = False  # type: ignore[attr-defined]


class TestMySQLStore(conformance.StoreSuite):
    sampled = True  # the async suite and the one without RETURNING play them all
    examples = 15
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], MySQLStore]:
        return lambda: MySQLStore(database)


class TestAsyncMySQLStore(conformance.AsyncStoreSuite):
    examples = 15
    counts = True
    resumes = True
    lists = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], AsyncMySQLStore]:
        return lambda: AsyncMySQLStore(database)


@pytest.mark.usefixtures("as_mysql")
class TestMySQLStoreWithoutReturning(TestMySQLStore):
    sampled = False
    examples = 15  # the proofs ask for every statement that differs


@pytest.mark.usefixtures("as_mysql")
@pytest.mark.parametrize(
    "proof", [*claims.CLAIM.proofs, *steps.STEPS.proofs, *concurrency.BATCH.proofs, *concurrency.RACE.proofs], ids=str
)
def test_async_without_returning(proof: Proof, database: str) -> None:
    """What is written by other statements then: their answers come from a second one. The rest is shown above."""
    play_async(proof, lambda: AsyncMySQLStore(database))
