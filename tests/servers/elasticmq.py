"""ElasticMQ: a second implementation of the API of SQS, beside moto, in memory, on Java 17.

Its parts come from Maven Central: see `maven.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.servers.base import LOOPBACK, Server
from tests.servers.maven import JAVA, MavenParts

PARTS = MavenParts("elasticmq.xml", "elasticmq-server")


class ElasticMQServer(Server):
    name = "elasticmq"
    binaries = ("java",)
    packages = MavenParts.packages
    costly = True

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

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
        where = {
            "node-address.host": LOOPBACK, "node-address.port": self.port, "rest-sqs.bind-hostname": LOOPBACK,
            "rest-sqs.bind-port": self.port, "rest-stats.enabled": "false",
        }  # fmt: skip
        settings = [f"-D{name}={text}" for name, text in where.items()]
        return [self.binary("java"), *JAVA, "-Xmx256m", *settings, *PARTS.classes, "org.elasticmq.server.Main"]

    def ready(self) -> bool:
        return f"Started SQS rest server, bind address {LOOPBACK}:{self.port}" in self.log_tail(10)
