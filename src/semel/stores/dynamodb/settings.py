"""The settings of a DynamoDB store: its URL, its limits, and the clock of the service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration, seconds
from semel.errors import MissingDependency, StoreURLError
from semel.stores.dynamodb.clock import CallerClock, DynamoDBClock, ServiceClock

TIMEOUT: Final = 5.0
CONNECT_TIMEOUT: Final = 2.0
RETRY_FOR: Final = 2.0
CONNECTIONS: Final = 50
"""Calls at the same time; more wait for a free connection."""


class DynamoDBSettings:
    """One store's table, limits and clock."""

    __slots__ = ("clock", "connect_timeout", "endpoint", "region", "retry_for", "table", "timeout")

    def __init__(
        self,
        url: str,
        timeout: Duration = TIMEOUT,
        connect_timeout: Duration = CONNECT_TIMEOUT,
        retry_for: Duration = RETRY_FOR,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.region, self.table, self.endpoint = _parts_of(url)
        self.timeout = seconds(timeout, "timeout")
        self.connect_timeout = seconds(connect_timeout, "connect_timeout")
        self.retry_for = seconds(retry_for, "retry_for")
        self.clock: DynamoDBClock = ServiceClock() if clock is None else CallerClock(clock)

    def client(self) -> dict[str, Any]:
        """Return the arguments for a client of boto3 or aiobotocore."""
        return {"service_name": "dynamodb", "region_name": self.region, "endpoint_url": self.endpoint}

    def config(self) -> dict[str, Any]:
        """Return the arguments for the client's Config."""
        return {
            "connect_timeout": self.connect_timeout,
            "read_timeout": self.timeout,
            "max_pool_connections": CONNECTIONS,
            # We retry ourselves: the driver would send calls twice that may only be sent once.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "user_agent_extra": "semel",
        }

    def learn_time(self, response: dict[str, Any], sent: float) -> None:
        """Take in the Date header of a response to a call that was sent at ``sent``, by the local count of seconds."""
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        self.clock.learn(headers.get("date"), sent, self.clock.local())


def _parts_of(url: str) -> tuple[str, str, str | None]:
    """Return region, table and endpoint of ``dynamodb://eu-central-1/table?endpoint=http://localhost:8000``."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    region, table = parts.netloc, unquote(parts.path[1:])
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme != "dynamodb" or not region or not table or "/" in table or set(options) - {"endpoint"}:
        raise StoreURLError("a DynamoDB URL is dynamodb://region/table, with ?endpoint=http://… for another server")
    if "@" in region:
        raise StoreURLError("a DynamoDB URL has no user or password: the AWS credentials of the process are used")
    return region, table, options.get("endpoint")


def require(package: str, extra: str) -> Any:
    """Import and return the driver's module, or raise MissingDependency."""
    from importlib import import_module

    try:
        return import_module(package)
    except ImportError as error:
        raise MissingDependency(package.partition(".")[0], extra) from error
