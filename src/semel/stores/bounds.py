"""The bounds of a store on a database server: how many connections, and how long each thing may take."""

from __future__ import annotations

from typing import Final

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError

__all__ = ["CONNECTIONS", "CONNECT_TIMEOUT", "RETRY_FOR", "TIMEOUT", "ServerBounds"]

CONNECTIONS: Final = 2
"""Under load one connection is fastest, because more Ops share each round trip. The second helps when it is slow."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
RETRY_FOR: Final = 1.0
MIGRATION_TIMEOUT: Final = 600.0
"""A migration may build an index on a large table."""


class ServerBounds:
    """The bounds of one store. Times are in seconds."""

    __slots__ = ("connect_timeout", "connections", "retry_for", "timeout")

    def __init__(self, connections: int, timeout: Duration, connect_timeout: Duration, retry_for: Duration) -> None:
        if not 1 <= connections <= 64:
            raise ConfigurationError(f"connections is a number from 1 to 64, not {connections!r}")
        self.connections = connections
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")
