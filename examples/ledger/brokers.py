"""The brokers of the ledger run: how each is started and restarted, and where its messages go."""

import asyncio
import signal
from types import TracebackType
from typing import Any, Self

from tests.servers import KafkaServer, NATSServer, RabbitMQServer, RedisServer, Server


class BrokerServer:
    """A broker's server with one destination, which all relays publish to and all consumers read."""

    destination = "ledger"

    def __init__(self, server: Server) -> None:
        self.server: Any = server

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()

    @property
    def publish_url(self) -> str:
        return f"{self.server.url}/{self.destination}"

    @property
    def consume_url(self) -> str:
        return f"{self.server.url}/{self.destination}?group=ledger"

    def prepare(self) -> None:
        """Make the destination, where the first message does not."""

    def restart(self) -> None:
        self.server.restart_with(signal.SIGTERM)


class Kafka(BrokerServer):
    def __init__(self) -> None:
        super().__init__(KafkaServer())

    @property
    def consume_url(self) -> str:
        # After so long, the partitions of a consumer that was killed are given to the other one.
        return f"{super().consume_url}&session.timeout.ms=6000"


class RabbitMQ(BrokerServer):
    def __init__(self) -> None:
        super().__init__(RabbitMQServer())

    @property
    def publish_url(self) -> str:
        return f"{self.server.url}?queue={self.destination}"

    consume_url = publish_url


class Redis(BrokerServer):
    def __init__(self) -> None:
        # A message that Redis has confirmed is in its file.
        super().__init__(RedisServer("--appendonly", "yes", "--appendfsync", "always"))

    @property
    def publish_url(self) -> str:
        return f"{self.server.url}?stream={self.destination}"

    @property
    def consume_url(self) -> str:
        return f"{self.publish_url}&group=ledger&takeover=3s"


class NATS(BrokerServer):
    def __init__(self) -> None:
        super().__init__(NATSServer())

    @property
    def consume_url(self) -> str:
        return f"{self.publish_url}?durable=ledger&ack_wait=5s"

    def prepare(self) -> None:
        asyncio.run(self._add_stream())

    async def _add_stream(self) -> None:
        import nats

        connection = await nats.connect(self.server.url)
        await connection.jetstream().add_stream(name="ledger", subjects=[self.destination])
        await connection.close()


BROKERS = {"kafka": Kafka, "rabbitmq": RabbitMQ, "redis": Redis, "nats": NATS}
