"""The settings of a DynamoDB store: its URL, its limits, and the clock of the service, as far as it can be known here.

DynamoDB has no clock in its expressions, so each call says what time it is. The clock of a worker may be wrong by
minutes. The clock of the service is in the Date header of every response, in whole seconds. So each response bounds the
difference between the service's clock and this machine's count of seconds: at first to a second plus the round trip,
and closer with every response that comes at another fraction of a second.

The local count continues while the machine sleeps, where the system has such a count. A virtual machine that was paused
does not notice, and has the time wrong until the next response. If that response shows that a call was written with a
time long past, it is written again (``LATE``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from semel.core.policy import Duration, seconds
from semel.errors import ConfigurationError, StoreURLError

DRIFT: Final = 0.0005
"""How far two good clocks may drift apart, in seconds per second: known bounds widen by it."""
LATE: Final = 1.0
"""Seconds by which a moment may be past when the response comes: at first the time is not known better."""


def _local_seconds() -> Callable[[], float]:
    """Return a count of seconds that continues while the machine is suspended, if the system has one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)  # time.monotonic stands still while Linux is suspended
    return time.monotonic if boot is None else lambda: time.clock_gettime(boot)


class ServiceClock:
    """The time by the Date headers of the service's responses."""

    def __init__(self, local: Callable[[], float] | None = None) -> None:
        """:param local: this machine's count of seconds."""
        self.local = local or _local_seconds()
        self._bounds: tuple[float, float, float] | None = None
        """Lower and upper bound of the service's time minus ours, and our time when they were found."""

    def known(self) -> bool:
        """Whether the time is known yet; if not, a response must come first."""
        return self._bounds is not None

    def now(self) -> float:
        """Return the best guess, in seconds since 1970."""
        least, most, local = self._widened_bounds()
        return local + (least + most) / 2

    def earliest(self) -> float:
        """Return the time that it is at least: what has ended by then has ended for everyone."""
        least, _, local = self._widened_bounds()
        return local + least

    def learn(self, date: str | None, sent: float, received: float) -> None:
        """Take in the Date header of a response, and when the call was sent and answered by ``local``."""
        try:
            service = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, IndexError):
            return
        least, most = service - received, service + 1.0 - sent
        if self._bounds is not None:
            known_least, known_most, _ = self._widened_bounds()
            if max(least, known_least) <= min(most, known_most):  # otherwise a clock was set: start again
                least, most = max(least, known_least), min(most, known_most)
        self._bounds = (least, most, self.local())

    def _widened_bounds(self) -> tuple[float, float, float]:
        if self._bounds is None:  # the service has answered, without a Date header
            raise ConfigurationError(
                "the responses of this endpoint have no Date header, and DynamoDB has no other clock: let the proxy in "
                "front of it pass the header on, or give the store a clock= that all processes share"
            )
        least, most, found = self._bounds
        local = self.local()
        slack = max(0.0, local - found) * DRIFT
        return least - slack, most + slack, local


class CallerClock:
    """The same by a clock of the caller's: all processes on the table must share it, or have clocks that agree."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = self.earliest = clock
        self.local = time.monotonic

    def known(self) -> bool:
        return True

    def learn(self, date: str | None, sent: float, received: float) -> None:
        pass


DynamoDBClock: TypeAlias = ServiceClock | CallerClock

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
