"""What can go wrong with records because of the settings of a server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

ACCEPTED_SKEW: Final = 5.0
"""Seconds by which two clocks may differ."""


@dataclass(frozen=True)
class Risk:
    """A way in which the settings of a server can lose records, or mislead people."""

    name: str
    """Such as ``eviction``: [the doctor's page](../how-to/doctor.md) lists them all."""
    what: str
    """What can happen."""
    remedy: str
    """What to change to avoid it."""


def clock_skew(server: float, before: float, after: float) -> Iterable[Risk]:
    """Yield a risk if the server's clock is not this machine's.

    :param server: the time that the server told, in seconds since 1970.
    :param before: this machine's time when it asked.
    :param after: this machine's time when it had the answer.
    """
    ahead = server - after if server > after else min(server - before, 0.0)
    if abs(ahead) > ACCEPTED_SKEW:
        direction = "ahead of" if ahead > 0 else "behind"
        yield Risk(
            "clock-skew",
            f"the server's clock is {abs(ahead):.0f} s {direction} this machine's. Leases do not depend on it, but "
            "times in logs, tokens and certificates do",
            "synchronise both by NTP",
        )
