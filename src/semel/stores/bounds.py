"""What all stores in SQL databases share: the bounds of connections and times, and how URLs of SQLAlchemy are read."""

from __future__ import annotations

import re
from typing import Final

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError

__all__ = ["CONNECTIONS", "CONNECT_TIMEOUT", "RETRY_FOR", "TIMEOUT", "ServerBounds", "plain_url"]

CONNECTIONS: Final = 2
"""Under load one connection is fastest, because more Ops share each round trip. The second helps when it is slow."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
RETRY_FOR: Final = 1.0
MIGRATION_TIMEOUT: Final = 600.0
"""A migration may build an index on a large table."""
_SQLALCHEMY: Final = re.compile(r"(sqlite|postgres|postgresql|mysql|mariadb)\+(\w+):")


def plain_url(url: str) -> str:
    """Return the URL without the driver that a URL of SQLAlchemy names: ``postgresql+asyncpg://…``. We choose ours."""
    named = _SQLALCHEMY.match(url)
    if named is None:
        return url
    plain = f"{named[1]}:{url[named.end() :]}"
    # For asyncpg, SQLAlchemy calls it ssl what PostgreSQL's own URLs call sslmode.
    return re.sub(r"(?<=[?&])ssl=", "sslmode=", plain) if named[2] == "asyncpg" else plain


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
