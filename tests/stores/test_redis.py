"""Redis: the conformance suite, sync and async, on one server and on a cluster, each with a second instance beside it.

Redis removes what has expired by itself (``forgets_expired``); it does not count a tenant's records, which would take
an index beside them.
"""

import time
from collections.abc import Callable, Iterator

import pytest

from semel import AsyncRedisStore, RedisStore
from semel.testing import conformance
from tests.servers import RedisClusterServers, RedisServer
from tests.servers.base import LOOPBACK

pytestmark = pytest.mark.server


class TestRedisStore(conformance.StoreSuite):
    wakes = True
    lists = True
    forgets_expired = True
    lists_twice = True

    @pytest.fixture
    def open_store(self, redis_url: str) -> Callable[[], RedisStore]:
        return lambda: RedisStore(redis_url)


class TestAsyncRedisStore(conformance.AsyncStoreSuite):
    sampled = True
    wakes = True
    lists = True
    forgets_expired = True
    lists_twice = True

    @pytest.fixture
    def open_store(self, redis_url: str) -> Callable[[], AsyncRedisStore]:
        return lambda: AsyncRedisStore(redis_url)


@pytest.fixture(scope="module")
def replicated(redis: RedisServer) -> Iterator[RedisServer]:
    """A master with a replica that confirms."""
    with RedisServer() as master, RedisServer("--replicaof", f"{LOOPBACK} {master.port}"):
        end = time.monotonic() + 20
        while "state=online" not in master.cli("INFO", "replication"):
            assert time.monotonic() < end, "the replica does not come up"
            time.sleep(0.02)
        yield master


class TestConfirmedRedisStore(conformance.StoreSuite):
    sampled = True
    wakes = True
    lists = True
    forgets_expired = True
    lists_twice = True
    examples = 10

    @pytest.fixture
    def open_store(self, replicated: RedisServer) -> Callable[[], RedisStore]:
        replicated.cli("FLUSHALL")
        return lambda: RedisStore(replicated.url, wait_replicas=1, retry_for="10s")


class TestAsyncConfirmedRedisStore(conformance.AsyncStoreSuite):
    sampled = True
    wakes = True
    lists = True
    forgets_expired = True
    lists_twice = True
    examples = 10

    @pytest.fixture
    def open_store(self, replicated: RedisServer) -> Callable[[], AsyncRedisStore]:
        replicated.cli("FLUSHALL")
        return lambda: AsyncRedisStore(replicated.url, wait_replicas=1, retry_for="10s")


class TestRedisClusterStore(conformance.StoreSuite):
    sampled = True
    wakes = True
    lists = True
    forgets_expired = True
    lists_twice = True
    examples = 10

    @pytest.fixture
    def open_store(self, redis_cluster: RedisClusterServers) -> Callable[[], RedisStore]:
        return lambda: RedisStore(redis_cluster.url)


class TestAsyncRedisClusterStore(conformance.AsyncStoreSuite):
    sampled = True
    wakes = True
    lists = True
    forgets_expired = True
    lists_twice = True
    examples = 10

    @pytest.fixture
    def open_store(self, redis_cluster: RedisClusterServers) -> Callable[[], AsyncRedisStore]:
        return lambda: AsyncRedisStore(redis_cluster.url)
