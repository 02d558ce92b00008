"""What the settings of stores have in common: URLs, drivers, how many connections, and how long each thing may take."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, Final, Self

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError, MissingDependency

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
        self.read_url()

    def read_url(self) -> None:
        """Read what the URL says, if the driver does not do that itself. Raises StoreURLError."""

    @classmethod
    def for_migration(cls, url: str) -> Self:
        """One connection, on which a statement may take long."""
        return cls(url, connections=1, timeout=MIGRATION_TIMEOUT, retry_for=0.0)


def require(module: str, extra: str, package: str = "") -> Any:
    """Import and return a driver's module. Raises MissingDependency, which names the package if that differs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependency(package or module.partition(".")[0], extra) from error


_SQLALCHEMY: Final = re.compile(r"(sqlite|postgres|postgresql|mysql|mariadb)\+(\w+):")


def plain_url(url: str) -> str:
    """Return the URL without the driver that a URL of SQLAlchemy names: ``postgresql+asyncpg://…``. We choose ours."""
    named = _SQLALCHEMY.match(url)
    if named is None:
        return url
    plain = f"{named[1]}:{url[named.end() :]}"
    # What PostgreSQL's own URLs call sslmode, SQLAlchemy calls ssl in those for asyncpg.
    return re.sub(r"(?<=[?&])ssl=", "sslmode=", plain) if named[2] == "asyncpg" else plain
