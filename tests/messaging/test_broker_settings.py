"""What the adapters of Kafka and RabbitMQ read from their URLs. They connect when they are used, so no server runs."""

from __future__ import annotations

import importlib
import sys

import pytest

from semel.errors import ConfigurationError, MissingDependency
from semel.messaging import open_broker, open_source

pytest.importorskip("confluent_kafka")
pytest.importorskip("aio_pika")


def test_what_the_brokers_declare() -> None:
    kafka = open_broker("kafka://one:9092,two:9092/orders?largest=5000&security.protocol=SSL").capabilities
    assert (kafka.name, kafka.ordered, kafka.pipelines, kafka.largest) == ("Kafka", True, True, 5000)
    rabbit = open_broker("amqp://app:secret@host/shop?exchange=events&largest=7000").capabilities
    assert (rabbit.name, rabbit.ordered, rabbit.pipelines, rabbit.largest) == ("RabbitMQ", True, False, 7000)


def test_what_the_sources_declare() -> None:
    kafka = open_source("kafka://host:9092/orders?group=billing&retention=7d").capabilities
    assert (kafka.ordered, kafka.counts_starts, kafka.retention) == (True, False, 7 * 86400)
    quorum = open_source("amqp://host/shop?queue=orders").capabilities
    assert (quorum.ordered, quorum.counts_starts, quorum.retention) == (True, True, None)
    shared = open_source("amqp://host/shop?queue=orders&type=classic&ordered=no").capabilities
    assert (shared.ordered, shared.counts_starts) == (False, False)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafka:///orders?group=g", "names its servers"),
        ("kafka://host:9092/orders", "needs a topic and a group"),
        ("kafka://host:9092?group=g", "needs a topic and a group"),
        ("kafka://host:9092/orders?group=g&secret=secret", "unknown option"),
        ("kafka://app:secret@host:9092/orders?group=g", "sasl.username"),
        ("amqp://app:secret@host/shop", "needs a queue"),
        ("amqp://app:secret@host/shop?queue=orders&type=stream", "quorum or classic"),
        ("amqp://app:secret@host/shop?queue=orders&prefetch=none", "a number from 1 on"),
        ("amqp://app:secret@host/shop?queue=orders&prefech=5", "unknown option; the options are: queue, .*, prefetch,"),
        ("kafka://host:9092/orders?group=g&sesion.timeout.ms=6000", "librdkafka refuses .*sesion.timeout.ms"),
        ("redis://:secret@host/0?stream=orders&gruop=g", "unknown option; the options are: stream, group, "),
    ],
)
def test_a_source_that_cannot_work_is_refused_without_its_password(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        open_source(url)
    assert "secret@" not in str(raised.value)
    assert "=secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafka://host:9092/orders?liner.ms=5", "librdkafka refuses .*liner.ms"),
        ("amqp://app:secret@host/shop?qeue=orders", "unknown option; the options are: queue, exchange, largest, "),
        ("redis://:secret@host/0?strem=orders", "unknown option; the options are: stream, max_length, largest, "),
    ],
)
def test_a_misspelt_option_of_a_broker_is_refused_at_once(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        open_broker(url)
    assert "secret" not in str(raised.value)


def test_the_options_of_a_driver_are_allowed() -> None:
    open_source("amqp://host/shop?queue=orders&heartbeat=10&cafile=ca.pem")
    open_broker("redis://host/0?stream=orders&wait_replicas=1")
    open_source("kafka://host:9092/orders?group=g&session.timeout.ms=6000")


def test_a_queue_and_an_exchange_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="not both"):
        open_broker("amqp://host/shop?queue=orders&exchange=events")


@pytest.mark.parametrize(
    ("url", "module", "command"),
    [
        ("kafka://host:9092/orders", "confluent_kafka", r"pip install 'semel\[kafka\]'"),
        ("amqp://host/shop?queue=orders", "aio_pika", r"pip install 'semel\[rabbitmq\]'"),
    ],
)
def test_a_missing_library_is_named(url: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=command):
        open_broker(url)


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faststream", None)
    monkeypatch.delitem(sys.modules, "semel.messaging.faststream", raising=False)
    with pytest.raises(MissingDependency, match=r"pip install 'semel\[faststream\]'"):
        importlib.import_module("semel.messaging.faststream")
