"""Apache Kafka: one broker that is its own controller, on Java 17. Maven brings its parts: see `maven.py`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from tests.servers.base import LOOPBACK, Server, free_port
from tests.servers.maven import JAVA, MavenParts

PARTS = MavenParts("kafka.xml", "kafka_")
PARTITIONS = 3
CLUSTER = "AAAAAAAAAAAAAAAAAAAAAQ"


class KafkaServer(Server):
    name = "kafka"
    binaries = ("java",)
    packages = MavenParts.packages
    costly = True

    def __init__(self, **settings: object) -> None:
        """:param settings: further settings of the broker, with ``_`` for each dot: ``message_max_bytes=5000``."""
        super().__init__()
        self._settings = {name.replace("_", "."): value for name, value in settings.items()}
        self._numbers = itertools.count(1)
        self._controller = 0
        self._log_before = 0

    @property
    def url(self) -> str:
        return f"kafka://{LOOPBACK}:{self.port}"

    @classmethod
    def find(cls) -> Path | None:
        return super().find() if PARTS.home.is_dir() else None

    @classmethod
    def fetch(cls) -> None:
        if super().find() is not None:
            PARTS.fetch()

    def start(self) -> None:
        self.fetch()
        super().start()

    def command(self) -> Sequence[str | Path]:
        properties = self.folder / "server.properties"
        if not properties.exists() or f":{self.port}," not in properties.read_text():
            self._controller = free_port()
            properties.write_text("".join(f"{name}={value}\n" for name, value in self._properties().items()))
        if not (self.folder / "data").exists():
            self.run([*self._java(), "kafka.tools.StorageTool", "format", "-t", CLUSTER, "-c", properties])
        self._log_before = self.log.stat().st_size
        return [*self._java(), "-Xmx256m", "kafka.Kafka", properties]

    def _java(self) -> Sequence[str | Path]:
        quiet = "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn"
        return [self.binary("java"), *JAVA, quiet, *PARTS.classes]

    def _properties(self) -> dict[str, object]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@{LOOPBACK}:{self._controller}",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{self._controller}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": self.folder / "data",
            "num.partitions": PARTITIONS,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1000,
            "broker.session.timeout.ms": 2000,  # a broker that was killed is let in again after this time
            "broker.heartbeat.interval.ms": 300,
            "log.index.size.max.bytes": 65536,  # each file has this size at first
            "log.cleaner.enable": "false",
            "num.network.threads": 2,
            "num.io.threads": 2,
            **self._settings,
        }

    def ready(self) -> bool:
        with self.log.open("rb") as log:
            log.seek(self._log_before)
            return b"Kafka Server started" in log.read()

    def topic(self, partitions: int = PARTITIONS, **settings: object) -> str:
        """The URL of a new topic. ``settings`` as of the broker."""
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        name = f"test-{next(self._numbers)}"
        config = {key.replace("_", "."): str(value) for key, value in settings.items()}
        admin = AdminClient({"bootstrap.servers": f"{LOOPBACK}:{self.port}"})
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        admin.create_topics([topic])[name].result(30)
        return f"{self.url}/{name}"
