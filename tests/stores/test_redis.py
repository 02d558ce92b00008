"""Redis: the conformance suite, sync and async, on one server and on a cluster, each with a second instance beside it.

Redis removes what has expired by itself (``forgets_expired``); it does not count a tenant's records, which would take
an index beside them.
"""

from collections.abc import Callable

import pytest

from semel import AsyncRedisStore, RedisStore
from semel.testing import conformance
from tests.servers import RedisClusterServers


class TestRedisStore(conformance.StoreSuite):
    wakes = True
    forgets_expired = True

    @pytest.fixture
    def open_store(self, redis_url: str) -> Callable[[], RedisStore]:
        return lambda: RedisStore(redis_url)


class TestAsyncRedisStore(conformance.AsyncStoreSuite):
    wakes = True
    forgets_expired = True

    @pytest.fixture
    def open_store(self, redis_url: str) -> Callable[[], AsyncRedisStore]:
        return lambda: AsyncRedisStore(redis_url)


class TestRedisClusterStore(conformance.StoreSuite):
    wakes = True
    forgets_expired = True
    examples = 10

    @pytest.fixture
    def open_store(self, redis_cluster: RedisClusterServers) -> Callable[[], RedisStore]:
        return lambda: RedisStore(redis_cluster.url)


class TestAsyncRedisClusterStore(conformance.AsyncStoreSuite):
    wakes = True
    forgets_expired = True
    examples = 10

    @pytest.fixture
    def open_store(self, redis_cluster: RedisClusterServers) -> Callable[[], AsyncRedisStore]:
        return lambda: AsyncRedisStore(redis_cluster.url)
