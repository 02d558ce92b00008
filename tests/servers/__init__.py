"""Real servers for tests and benchmarks: ephemeral, on free loopback ports, in temporary folders, never shared.

    with PostgresServer() as server:
        connect(server.url)

One file per kind, one row per kind in `kinds.KINDS`. Nothing here knows pytest but `plugin`.
"""

from tests.servers.base import Server, ServerError, ServerMissing
from tests.servers.chromium import Browser, ChromiumServer
from tests.servers.dynamodb import DynamoDBServer
from tests.servers.dynamodb_moto import MotoServer
from tests.servers.elasticmq import ElasticMQServer
from tests.servers.kafka import KafkaServer
from tests.servers.kinds import KINDS
from tests.servers.mariadb import MariaDBServer
from tests.servers.nats import NATSServer
from tests.servers.pool import ServerPool
from tests.servers.postgres import PostgresServer
from tests.servers.prometheus import PrometheusServer
from tests.servers.rabbitmq import RabbitMQServer
from tests.servers.redis import RedisClusterServers, RedisSentinelServers, RedisServer

__all__ = [
    "KINDS",
    "Browser",
    "ChromiumServer",
    "DynamoDBServer",
    "ElasticMQServer",
    "KafkaServer",
    "MariaDBServer",
    "MotoServer",
    "NATSServer",
    "PostgresServer",
    "PrometheusServer",
    "RabbitMQServer",
    "RedisClusterServers",
    "RedisSentinelServers",
    "RedisServer",
    "Server",
    "ServerError",
    "ServerMissing",
    "ServerPool",
]
