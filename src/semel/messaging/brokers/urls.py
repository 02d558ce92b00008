"""Brokers by URL, for the command line and for configuration: ``kafka://host:9092/topic``, ``amqp://…``, ``nats://…``.

All kinds of brokers stand in one table: their URL schemes, their classes, and what to install. Every class reads its
own URL, by its classmethod ``from_url``. A URL that names no destination is fine if every message has one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from semel.errors import ConfigurationError
from semel.messaging.ports import Broker, Source
from semel.stores.urls import load

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, kw_only=True)
class BrokerKind:
    """One kind of broker. Its classes are named as ``module:name`` and imported when needed."""

    name: str
    example: str
    schemes: tuple[str, ...]
    """The URL schemes that open it."""
    extra: str
    """What to install: ``semel[…]``."""
    broker: str
    """The class that publishes."""
    source: str | None = None
    """The class that consumes; None if nothing can be consumed."""


BROKER_KINDS: Final = (
    BrokerKind(
        name="Kafka", example="kafka://host:9092/topic", schemes=("kafka",), extra="kafka",
        broker="semel.messaging.brokers.kafka:KafkaBroker", source="semel.messaging.brokers.kafka:KafkaSource",
    ),
    BrokerKind(
        name="RabbitMQ", example="amqp://user:password@host/vhost", schemes=("amqp", "amqps"), extra="rabbitmq",
        broker="semel.messaging.brokers.rabbitmq:RabbitMQBroker",
        source="semel.messaging.brokers.rabbitmq:RabbitMQSource",
    ),
    BrokerKind(
        name="NATS JetStream", example="nats://host:4222/subject", schemes=("nats",), extra="nats",
        broker="semel.messaging.brokers.nats:NATSBroker", source="semel.messaging.brokers.nats:NATSSource",
    ),
    BrokerKind(
        name="Redis Streams", example="redis://host:6379/0?stream=name", schemes=("redis", "rediss"), extra="redis",
        broker="semel.messaging.brokers.redis_streams:RedisStreamsBroker",
        source="semel.messaging.brokers.redis_streams:RedisStreamsSource",
    ),
    BrokerKind(
        name="Amazon SQS", example="sqs://region/queue.fifo", schemes=("sqs",), extra="sqs",
        broker="semel.messaging.brokers.sqs:SQSBroker", source="semel.messaging.brokers.sqs:SQSSource",
    ),
    BrokerKind(
        name="Amazon SNS", example="sns://region/topic.fifo", schemes=("sns",), extra="sqs",
        broker="semel.messaging.brokers.sns:SNSBroker",
    ),
    BrokerKind(
        name="webhooks", example="https://host/path", schemes=("https", "http"), extra="webhooks",
        broker="semel.messaging.brokers.webhook:WebhookBroker",
    ),
)  # fmt: skip
"""All kinds of brokers."""

BROKER_SCHEMES: Final = {scheme: kind for kind in BROKER_KINDS for scheme in kind.schemes}
"""The kind that each URL scheme opens."""


def open_broker(url: str) -> Broker:
    """Return the broker to publish to. It connects when it is first used.

    Raises ConfigurationError if the URL names no broker, MissingDependency if its library is not installed.
    """
    broker: Broker = load(_kind_of(url).broker).from_url(url)
    return broker


def open_source(url: str) -> Source:
    """Return the source to consume from. It connects when it is first used. Raises the same as ``open_broker``."""
    kind = _kind_of(url)
    if kind.source is None:
        raise ConfigurationError(f"nothing can be consumed from {kind.name}")
    source: Source = load(kind.source).from_url(url)
    return source


def _kind_of(url: str) -> BrokerKind:
    """Errors quote at most a scheme, because any other part of the URL may be a password."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        examples = ", ".join(kind.example for kind in BROKER_KINDS)
        raise ConfigurationError(f"this is no URL of a broker: write one like {examples}")
    kind = BROKER_SCHEMES.get(scheme[1].lower())
    if kind is None:
        raise ConfigurationError(f"no broker is called {scheme[1][:40]!r}; there are: {', '.join(BROKER_SCHEMES)}")
    return kind
