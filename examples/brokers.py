"""The brokers of the examples: how each is started and restarted, and the URLs of its destinations."""

import asyncio
import signal
from types import TracebackType
from typing import Any, Self

from semel.messaging import open_source
from tests.servers import KafkaServer, NATSServer, RabbitMQServer, RedisServer, Server


class BrokerServer:
    """A broker's server. A relay publishes to its destinations, and consumers read them."""

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
        """Return the URL for a relay whose messages name their destinations."""
        return str(self.server.url)

    def consume_url(self, destination: str, consumer: str) -> str:
        return f"{self.server.url}/{destination}?group={consumer}"

    def prepare(self, destination: str) -> None:
        """Create the destination, if the first message does not."""

    def restart(self) -> None:
        self.server.restart_with(signal.SIGTERM)


class Kafka(BrokerServer):
    def __init__(self) -> None:
        super().__init__(KafkaServer())

    def consume_url(self, destination: str, consumer: str) -> str:
        # The partitions of a killed consumer go to another one after six seconds. A topic that the first message
        # creates is found within a second.
        url = super().consume_url(destination, consumer)
        return f"{url}&session.timeout.ms=6000&topic.metadata.refresh.interval.ms=1000"


class RabbitMQ(BrokerServer):
    def __init__(self) -> None:
        super().__init__(RabbitMQServer())

    def consume_url(self, destination: str, consumer: str) -> str:
        return f"{self.server.url}?queue={destination}"

    def prepare(self, destination: str) -> None:
        asyncio.run(self._declare(destination))

    async def _declare(self, destination: str) -> None:
        source = open_source(self.consume_url(destination, ""))
        await source.receive(1, 0.0)  # it declares its queue
        await source.close()


class Redis(BrokerServer):
    def __init__(self) -> None:
        # Redis confirms a message only when it is in its file.
        super().__init__(RedisServer("--appendonly", "yes", "--appendfsync", "always"))

    def consume_url(self, destination: str, consumer: str) -> str:
        return f"{self.server.url}?stream={destination}&group={consumer}&takeover=3s"


class NATS(BrokerServer):
    def __init__(self) -> None:
        super().__init__(NATSServer())

    def consume_url(self, destination: str, consumer: str) -> str:
        return f"{self.server.url}/{destination}?durable={consumer}&ack_wait=5s"

    def prepare(self, destination: str) -> None:
        asyncio.run(self._add_stream(destination))

    async def _add_stream(self, destination: str) -> None:
        import nats

        connection = await nats.connect(self.server.url)
        await connection.jetstream().add_stream(name=destination, subjects=[destination])
        await connection.close()


BROKERS = {"kafka": Kafka, "rabbitmq": RabbitMQ, "redis": Redis, "nats": NATS}
