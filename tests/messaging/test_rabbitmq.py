"""RabbitMQ: the conformance suite on a real node, and what is RabbitMQ's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import pytest

from semel.messaging.brokers.rabbitmq import RabbitMQBroker, RabbitMQSource
from semel.testing import brokers
from tests.servers import RabbitMQServer, ServerPool
from tests.servers.plugin import obtain

pytestmark = [pytest.mark.rabbitmq, pytest.mark.server]


@pytest.fixture(scope="module")
def mortal_rabbitmq(servers: ServerPool) -> Iterator[RabbitMQServer]:
    """A server that the tests of this file kill."""
    server = cast(RabbitMQServer, obtain(servers.private, "rabbitmq"))
    try:
        yield server
    finally:
        server.stop()


class Switch:
    """Kills a server, and brings it back."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.stop = server.crash
        self.start = server.return_


class OnRabbitMQ:
    @pytest.fixture
    def url(self, request: pytest.FixtureRequest) -> str:
        if "outage" in request.fixturenames:
            # A single node of RabbitMQ 3 finds no leader for its quorum queues any more if it was killed.
            mortal: RabbitMQServer = request.getfixturevalue("mortal_rabbitmq")
            return f"{mortal.queue('classic')}&type=classic"
        server: RabbitMQServer = request.getfixturevalue("rabbitmq")
        return server.queue()

    @pytest.fixture
    def outage(self, mortal_rabbitmq: RabbitMQServer) -> Switch:
        return Switch(mortal_rabbitmq)

    @pytest.fixture
    def open_broker(self, url: str) -> Callable[[], RabbitMQBroker]:
        return lambda: RabbitMQBroker.from_url(url)

    @pytest.fixture
    def open_source(self, url: str) -> Callable[[], RabbitMQSource]:
        return lambda: RabbitMQSource.from_url(url)


class TestRabbitMQBroker(OnRabbitMQ, brokers.BrokerSuite):
    """The suite, on the session's server."""


class TestRabbitMQSource(OnRabbitMQ, brokers.SourceSuite):
    """The suite, on the session's server."""
