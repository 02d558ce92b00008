"""The clock of the DynamoDB service, as far as it can be known from here.

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
from typing import Final, Protocol

from semel.errors import ConfigurationError

DRIFT: Final = 0.0005
"""How far two good clocks may drift apart, in seconds per second: known bounds widen by it."""
LATE: Final = 1.0
"""Seconds by which a moment may be past when the response comes: at first the time is not known better."""


def _local_seconds() -> Callable[[], float]:
    """Return a count of seconds that continues while the machine is suspended, if the system has one."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)  # time.monotonic stands still while Linux is suspended
    return time.monotonic if boot is None else lambda: time.clock_gettime(boot)


class DynamoDBClock(Protocol):
    def known(self) -> bool:
        """Whether the time is known yet; if not, a response must come first."""
        ...

    def now(self) -> float:
        """Return the best guess, in seconds since 1970."""
        ...

    def earliest(self) -> float:
        """Return the time that it is at least: what has ended by then has ended for everyone."""
        ...

    def learn(self, date: str | None, sent: float, received: float) -> None:
        """Take in the Date header of a response, and when the call was sent and answered by ``local``."""
        ...

    def local(self) -> float:
        """Return this machine's count of seconds."""
        ...


class ServiceClock:
    """The time by the Date headers of the service's responses."""

    def __init__(self, local: Callable[[], float] | None = None) -> None:
        self.local = local or _local_seconds()
        self._bounds: tuple[float, float, float] | None = None
        """Lower and upper bound of the service's time minus ours, and our time when they were found."""

    def known(self) -> bool:
        return self._bounds is not None

    def now(self) -> float:
        least, most, local = self._widened_bounds()
        return local + (least + most) / 2

    def earliest(self) -> float:
        least, _, local = self._widened_bounds()
        return local + least

    def learn(self, date: str | None, sent: float, received: float) -> None:
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
    """A clock of the caller's: all processes on the table must share it, or have clocks that agree."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = self.earliest = clock
        self.local = time.monotonic

    def known(self) -> bool:
        return True

    def learn(self, date: str | None, sent: float, received: float) -> None:
        pass
