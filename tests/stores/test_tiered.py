"""Tiered: the conformance suite, sync and async: with Redis and marks at once, and with Redis never there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from semel import (
    AsyncPostgresStore,
    AsyncRedisCache,
    AsyncSQLiteStore,
    AsyncTieredStore,
    PostgresStore,
    RedisCache,
    SQLiteStore,
    TieredStore,
)
from semel.stores.postgres import migrate
from semel.testing import conformance
from semel.testing.conformance.machine import async_machine_for, check, machine_for
from tests.servers import PostgresServer
from tests.servers.base import LOOPBACK, free_port

pytestmark = pytest.mark.slow  # or with servers: most of it waits for leases to end

PATIENT = 5.0
"""The time-out of the cache: this machine may be slow, and a cache that is given up proves nothing."""


@pytest.fixture(scope="module")
def migrated(postgres: PostgresServer) -> Iterator[str]:
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
    """The database, without any records."""
    cleaning.execute("DELETE FROM semel_record; DELETE FROM semel_step")
    return migrated


@pytest.fixture
def nobody() -> str:
    """A Redis that is not there."""
    return f"redis://{LOOPBACK}:{free_port()}"


def connected(redis_url: str) -> RedisCache:
    """A cache whose lines are open, so that it takes part from the first Op on."""
    cache = RedisCache(redis_url, timeout=PATIENT)
    assert cache.connect(PATIENT)
    return cache


class ConnectedStore(AsyncTieredStore):
    """Waits for its line at the first Op, where the suite is inside its loop."""

    async def execute(self, op):  # type: ignore[no-untyped-def]
        assert await self.cache.connect(PATIENT)
        return await super().execute(op)


class NeverThere(RedisCache):
    """A Redis that was never there holds no copies, so finished records may be freed."""

    def invalidate(self, id: bytes, token: int, seconds: float) -> None: ...


class AsyncNeverThere(AsyncRedisCache):
    async def invalidate(self, id: bytes, token: int, seconds: float) -> None: ...


class _OnPostgres:
    """Every attempt is marked at once, so that duplicates meet marks wherever they can."""

    wakes = True
    counts = PostgresStore.counts
    resumes = PostgresStore.resumes
    lists = PostgresStore.lists


class TestTieredStoreThatMarksAtOnce(_OnPostgres, conformance.StoreSuite):
    examples = 15

    @pytest.fixture
    def open_store(self, database: str, redis_url: str) -> Callable[[], TieredStore]:
        return lambda: TieredStore(PostgresStore(database), connected(redis_url), mark_after=0)


class TestAsyncTieredStoreThatMarksAtOnce(_OnPostgres, conformance.AsyncStoreSuite):
    sampled = True
    examples = 15

    @pytest.fixture
    def open_store(self, database: str, redis_url: str) -> Callable[[], AsyncTieredStore]:
        return lambda: ConnectedStore(
            AsyncPostgresStore(database), AsyncRedisCache(redis_url, timeout=PATIENT), mark_after=0
        )


class _OnSQLite:
    counts = SQLiteStore.counts
    resumes = SQLiteStore.resumes
    lists = SQLiteStore.lists

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "semel.db"


class TestTieredStoreWithoutRedis(_OnSQLite, conformance.StoreSuite):
    sampled = True
    examples = 10

    @pytest.fixture
    def open_store(self, path: Path, nobody: str) -> Callable[[], TieredStore]:
        return lambda: TieredStore(SQLiteStore(path, synchronous="normal"), NeverThere(nobody))


def test_async_model_without_redis(tmp_path: Path, nobody: str) -> None:
    """The async twin of the class above, by random sequences alone: each of the proofs is shown there."""

    def opened() -> AsyncTieredStore:
        return AsyncTieredStore(AsyncSQLiteStore(tmp_path / "semel.db", synchronous="normal"), AsyncNeverThere(nobody))

    check(async_machine_for(opened), 15)


# As it comes: marks are late, and mostly not needed. The proofs above would not meet any, but random sequences do.


def test_model_with_late_marks(tmp_path: Path, redis_url: str) -> None:
    def opened() -> TieredStore:
        return TieredStore(
            SQLiteStore(tmp_path / "semel.db", synchronous="normal"), connected(redis_url), mark_after="4ms"
        )

    check(machine_for(opened), 20)


def test_async_model_with_late_marks(tmp_path: Path, redis_url: str) -> None:
    def opened() -> AsyncTieredStore:
        primary = AsyncSQLiteStore(tmp_path / "semel.db", synchronous="normal")
        return ConnectedStore(primary, AsyncRedisCache(redis_url, timeout=PATIENT), mark_after="4ms")

    check(async_machine_for(opened), 20)
