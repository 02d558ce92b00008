"""The table of server kinds. Its names are also the names of fixtures and markers."""

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


def costly_kind(nodeid: str) -> str | None:
    """The costly server that the name of a test names."""
    plain = nodeid.lower().replace("_", "")
    return next((name for name, kind in KINDS.items() if kind.costly and name.replace("_", "") in plain), None)
