"""MySQL and MariaDB: the conformance suite for each driver, and for the statements of a server without RETURNING."""

from collections.abc import Callable, Iterator

import pytest

from semel import AsyncMySQLStore, MySQLStore
from semel.sql.connections import asyncmy, pymysql
from semel.stores.mysql import migrate
from semel.testing import conformance
from tests.servers import MariaDBServer


@pytest.fixture(scope="module")
def migrated(mariadb: MariaDBServer) -> Iterator[str]:
    """One migrated database for the whole module: making one for each proof would take most of the time."""
    url = mariadb.create_database()
    migrate(url)
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def database(migrated: str, mariadb: MariaDBServer) -> str:
    """The database, without any records."""
    name = migrated.rpartition("/")[2]
    mariadb.execute(f"DELETE FROM `{name}`.semel_record")
    mariadb.execute(f"DELETE FROM `{name}`.semel_step")
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
    counts = True
    resumes = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], MySQLStore]:
        return lambda: MySQLStore(database)


class TestAsyncMySQLStore(conformance.AsyncStoreSuite):
    counts = True
    resumes = True

    @pytest.fixture
    def open_store(self, database: str) -> Callable[[], AsyncMySQLStore]:
        return lambda: AsyncMySQLStore(database)


@pytest.mark.usefixtures("as_mysql")
class TestMySQLStoreWithoutReturning(TestMySQLStore):
    pass


@pytest.mark.usefixtures("as_mysql")
class TestAsyncMySQLStoreWithoutReturning(TestAsyncMySQLStore):
    pass
