"""Fixtures for all tests. Servers: see `tests/servers/plugin.py` for what happens behind them."""

import gc
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import certifi
import pytest
from hypothesis import settings

from tests.servers import (
    ChromiumServer,
    DynamoDBServer,
    ElasticMQServer,
    KafkaServer,
    MariaDBServer,
    MotoServer,
    NATSServer,
    PostgresServer,
    PrometheusServer,
    RabbitMQServer,
    RedisClusterServers,
    RedisSentinelServers,
    RedisServer,
    Server,
)
from tests.servers.kinds import costly_kind
from tests.servers.pgbouncer import PgBouncerServer

pytest_plugins = ["tests.servers.plugin", "tests.workers", "tests.tracing"]

WHOLE_FILE = re.compile(r"^pytestmark = .*", re.MULTILINE)

# Temporary files are in memory where there is room: a test kills processes and servers, never the machine, so waiting
# for a disk would prove nothing.
MEMORY = Path("/dev/shm")
if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)

# No test asks a server of the internet. To read all authorities that sign for those takes 30 ms, in each client of HTTP
# and each connection of PyMySQL: here, and in the processes that the tests start, they read one that signs for nobody.
AUTHORITY = os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))
certifi.where = lambda: AUTHORITY

# All tests are the same caller: DynamoDB Local gives each caller other tables, and botocore keeps the first it finds.
os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "test"

# No test is judged by the clock: on a busy machine an example takes as long as it takes.
settings.register_profile("semel", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=15)
settings.load_profile("semel")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file that `-m "not server …"` leaves out as a whole: that is half of the time of collecting."""
    if collection_path.suffix == ".py" and (marked := WHOLE_FILE.search(collection_path.read_text(encoding="utf-8"))):
        return any(f"not {name}" in config.option.markexpr for name in re.findall(r"mark\.(\w+)", marked[0])) or None
    return None


@pytest.hookimpl(trylast=True)  # after the tests are shuffled
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what takes long first: at the end of a parallel run nobody waits for a single worker."""
    ranks = {"faults": 0, "process": 0, "slow": 0, "server": 1}
    rank = {item.path: 2 for item in items}
    for item in items:
        for marker in item.iter_markers():
            rank[item.path] = min(rank[item.path], ranks.get(marker.name, 2))
    costly = {item: costly_kind(item) for item in items}
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (-1, 0, name) if (name := costly[item]) else (rank[item.path], -sizes[item.path], ""))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """What is collected stays: no garbage collection need look at thousands of tests again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """A test that leaves an exception behind as "being handled" gives every error after it a wrong context."""
    assert sys.exc_info()[1] is None


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


@pytest.fixture(scope="session")
def redis(shared_server: Callable[[str], Server]) -> RedisServer:
    """The session's Redis server, which keeps nothing on disk. Never restart it: take `private_redis`."""
    return cast(RedisServer, shared_server("redis"))


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    """An empty database on the session's server."""
    return redis.database()


@pytest.fixture
def private_redis(private_server: Callable[[str], Server]) -> RedisServer:
    """A Redis server for this test alone."""
    return cast(RedisServer, private_server("redis"))


@pytest.fixture(scope="session")
def redis_cluster(shared_server: Callable[[str], Server]) -> RedisClusterServers:
    """The session's Redis Cluster: three masters, three replicas."""
    return cast(RedisClusterServers, shared_server("redis_cluster"))


@pytest.fixture
def private_redis_cluster(private_server: Callable[[str], Server]) -> RedisClusterServers:
    """A Redis Cluster for this test alone."""
    return cast(RedisClusterServers, private_server("redis_cluster"))


@pytest.fixture
def private_redis_sentinel(private_server: Callable[[str], Server]) -> RedisSentinelServers:
    """A master, two replicas and three sentinels for this test alone."""
    return cast(RedisSentinelServers, private_server("redis_sentinel"))


@pytest.fixture(scope="session")
def mariadb(shared_server: Callable[[str], Server]) -> MariaDBServer:
    """The session's MariaDB server. Never restart it: that is what `private_mariadb` is for."""
    return cast(MariaDBServer, shared_server("mariadb"))


@pytest.fixture
def mariadb_url(mariadb: MariaDBServer) -> Iterator[str]:
    """A fresh database on the session's server, dropped after the test."""
    url = mariadb.create_database()
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def private_mariadb(private_server: Callable[[str], Server]) -> MariaDBServer:
    """A MariaDB server for this test alone."""
    return cast(MariaDBServer, private_server("mariadb"))


@pytest.fixture(scope="session")
def pgbouncer(shared_server: Callable[[str], Server]) -> PgBouncerServer:
    """The session's PgBouncer in transaction mode, with a Postgres server of its own behind it."""
    return cast(PgBouncerServer, shared_server("pgbouncer"))


@pytest.fixture(scope="session")
def dynamodb(shared_server: Callable[[str], Server]) -> DynamoDBServer:
    """The session's DynamoDB Local."""
    return cast(DynamoDBServer, shared_server("dynamodb"))


@pytest.fixture
def private_dynamodb(private_server: Callable[[str], Server]) -> DynamoDBServer:
    """A DynamoDB Local for this test alone."""
    return cast(DynamoDBServer, private_server("dynamodb"))


@pytest.fixture(scope="session")
def moto(shared_server: Callable[[str], Server]) -> MotoServer:
    """The session's second implementation of DynamoDB's API, and the first one of SQS and SNS."""
    return cast(MotoServer, shared_server("moto"))


@pytest.fixture(scope="session")
def elasticmq(shared_server: Callable[[str], Server]) -> ElasticMQServer:
    """The session's second implementation of the API of SQS."""
    return cast(ElasticMQServer, shared_server("elasticmq"))


@pytest.fixture(scope="session")
def nats(shared_server: Callable[[str], Server]) -> NATSServer:
    """The session's NATS server, with JetStream. Never restart it: take `private_nats`."""
    return cast(NATSServer, shared_server("nats"))


@pytest.fixture
def private_nats(private_server: Callable[[str], Server]) -> NATSServer:
    """A NATS server for this test alone."""
    return cast(NATSServer, private_server("nats"))


@pytest.fixture(scope="session")
def kafka(shared_server: Callable[[str], Server]) -> KafkaServer:
    """The session's Kafka broker. Never restart it: take `private_kafka`."""
    return cast(KafkaServer, shared_server("kafka"))


@pytest.fixture
def private_kafka(private_server: Callable[[str], Server]) -> KafkaServer:
    """A Kafka broker for this test alone."""
    return cast(KafkaServer, private_server("kafka"))


@pytest.fixture(scope="session")
def rabbitmq(shared_server: Callable[[str], Server]) -> RabbitMQServer:
    """The session's RabbitMQ node. Never restart it: take `private_rabbitmq`."""
    return cast(RabbitMQServer, shared_server("rabbitmq"))


@pytest.fixture
def private_rabbitmq(private_server: Callable[[str], Server]) -> RabbitMQServer:
    """A RabbitMQ node for this test alone."""
    return cast(RabbitMQServer, private_server("rabbitmq"))


@pytest.fixture(scope="session")
def prometheus(shared_server: Callable[[str], Server]) -> PrometheusServer:
    """The session's Prometheus, with the alert rules of the package. It scrapes what ``scrape`` names."""
    return cast(PrometheusServer, shared_server("prometheus"))


@pytest.fixture(scope="session")
def chromium(shared_server: Callable[[str], Server]) -> ChromiumServer:
    """The session's ChromeDriver: ``with chromium.browser() as browser``."""
    return cast(ChromiumServer, shared_server("chromium"))
