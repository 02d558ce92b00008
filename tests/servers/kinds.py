"""The table of server kinds. Its names are also the names of fixtures and markers."""

from typing import TYPE_CHECKING

from tests.servers.base import Server
from tests.servers.chromium import ChromiumServer
from tests.servers.dynamodb import DynamoDBServer
from tests.servers.dynamodb_moto import MotoServer
from tests.servers.elasticmq import ElasticMQServer
from tests.servers.kafka import KafkaServer
from tests.servers.mariadb import MariaDBServer
from tests.servers.nats import NATSServer
from tests.servers.pgbouncer import PgBouncerServer
from tests.servers.postgres import PostgresServer
from tests.servers.prometheus import PrometheusServer
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisClusterServers, RedisSentinelServers, RedisServer

if TYPE_CHECKING:  # the examples run without pytest
    import pytest

KINDS: dict[str, type[Server]] = {
    kind.name: kind
    for kind in (
        PostgresServer,
        PgBouncerServer,
        MariaDBServer,
        DynamoDBServer,
        MotoServer,
        RedisServer,
        RedisSentinelServers,
        RedisClusterServers,
        NATSServer,
        ElasticMQServer,
        KafkaServer,
        RabbitMQServer,
        ChromiumServer,
        PrometheusServer,
    )
}


def kinds_of(item: "pytest.Item") -> list[str]:
    """The kinds of server that the test is marked with."""
    markers = {marker.name for marker in item.iter_markers()}
    return [name for name in KINDS if name in markers] if "server" in markers else []


def costly_kind(item: "pytest.Item") -> str | None:
    """The costly kind of server that the test shares with others."""
    fixtures = fixtures_of(item)
    shared = [name for name in kinds_of(item) if f"private_{name}" not in fixtures]
    return next((name for name in shared if KINDS[name].costly), None)


def fixtures_of(item: "pytest.Item") -> list[str]:
    """The names of all fixtures that the test is known to use."""
    return getattr(item, "fixturenames", [])
