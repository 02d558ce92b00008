"""What stores on a database server have in common: the URL, how many connections, and how long each thing may take."""

from __future__ import annotations

from typing import Final, Self

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError
from semel.stores.kinds import plain_url

CONNECTIONS: Final = 2
"""Under load one connection is fastest, because more Ops share each round trip. The second helps when it is slow."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
RETRY_FOR: Final = 1.0
MIGRATION_TIMEOUT: Final = 600.0
"""A migration may build an index on a large table."""


class ServerSettings:
    """The settings of one store: its URL, and its bounds, in seconds."""

    def __init__(
        self,
        url: str,
        connections: int = CONNECTIONS,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
    ) -> None:
        if not 1 <= connections <= 64:
            raise ConfigurationError(f"connections is a number from 1 to 64, not {connections!r}")
        self.url = plain_url(url)
        self.connections = connections
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")

    @classmethod
    def for_migration(cls, url: str) -> Self:
        """One connection, on which a statement may take long."""
        return cls(url, connections=1, timeout=MIGRATION_TIMEOUT, retry_for=0.0)
