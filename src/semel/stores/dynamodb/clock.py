"""The service's clock, as well as it can be known from here.

DynamoDB has no clock in its expressions, so whoever asks says what time it is. The clock of a worker may be wrong by
minutes; the one of the service is told in the Date header of every answer, in whole seconds. Each answer bounds how far
this machine's count of seconds is from it: to a second and the time of the trip at first, and closer with every answer
that comes at another part of a second.

That count goes on while the machine sleeps, where the system has such a one. A virtual machine that was paused knows
nothing of it, and has the time wrong until the next answer: what that answer shows to have been written by a moment
long past is written again (``LATE``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final, Protocol

from semel.errors import ConfigurationError

__all__ = ["LATE", "Clock", "GivenClock", "ServiceClock"]

DRIFT: Final = 0.0005
"""How far two good clocks may drift apart, in seconds per second: bounds that were found widen by it."""


LATE: Final = 1.0
"""Seconds that a moment may be past by the time an answer comes: the time is not known better at first."""


def _awake_or_asleep() -> Callable[[], float]:
    boot = getattr(time, "CLOCK_BOOTTIME", None)  # time.monotonic stands still while Linux is suspended
    return time.monotonic if boot is None else lambda: time.clock_gettime(boot)


class Clock(Protocol):
    def known(self) -> bool:
        """Whether the time can be told yet; if not, an answer must be heard first."""
        ...

    def now(self) -> float:
        """Seconds since 1970: the best guess."""
        ...

    def earliest(self) -> float:
        """The time that it is at least: what has ended by then has ended for everyone."""
        ...

    def heard(self, date: str | None, sent: float, received: float) -> None:
        """An answer's Date header, and when it was asked for and came, by ``here``."""
        ...

    def here(self) -> float:
        """This machine's count of seconds."""
        ...


class ServiceClock:
    """The time by the Date headers of the service's answers."""

    def __init__(self, here: Callable[[], float] | None = None) -> None:
        self.here = here or _awake_or_asleep()
        self._bounds: tuple[float, float, float] | None = None
        """The service's time less ours is from the first to the second; found when ours was the third."""

    def known(self) -> bool:
        return self._bounds is not None

    def now(self) -> float:
        least, most, here = self._widened()
        return here + (least + most) / 2

    def earliest(self) -> float:
        least, _, here = self._widened()
        return here + least

    def heard(self, date: str | None, sent: float, received: float) -> None:
        try:
            told = parsedate_to_datetime(date or "").timestamp()
        except (ValueError, IndexError):
            return
        least, most = told - received, told + 1.0 - sent
        if self._bounds is not None:
            known_least, known_most, _ = self._widened()
            if max(least, known_least) <= min(most, known_most):  # otherwise a clock was set: begin anew
                least, most = max(least, known_least), min(most, known_most)
        self._bounds = (least, most, self.here())

    def _widened(self) -> tuple[float, float, float]:
        if self._bounds is None:  # it was asked, and has answered
            raise ConfigurationError(
                "the answers of this endpoint have no Date header, and DynamoDB has no other clock: let whatever "
                "stands before it pass the header on, or give the store a clock=, which all processes share"
            )
        least, most, found = self._bounds
        here = self.here()
        slack = max(0.0, here - found) * DRIFT
        return least - slack, most + slack, here


class GivenClock:
    """A clock of the caller's: all processes on the table must share it, or have clocks that agree."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = self.earliest = clock
        self.here = time.monotonic

    def known(self) -> bool:
        return True

    def heard(self, date: str | None, sent: float, received: float) -> None:
        pass
