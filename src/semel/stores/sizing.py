"""The arithmetic of a window: how long it must be, and how many bytes its records take. Nothing is measured here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from semel.errors import PolicyError

MARGIN: Final = 0.1
"""Added to the longest need: the last retry may leave within the budget and arrive after it."""
_HOUR: Final = 3600.0
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*(B|kB|KB|KiB|MB|MiB)?")
_UNITS: Final = {"B": 1, "kB": 1000, "KB": 1000, "KiB": 1024, "MB": 1000**2, "MiB": 1024**2}


@dataclass(frozen=True)
class Needs:
    """For how many seconds a request may come again; None if unknown."""

    retry_budget: float | None = None
    broker_retention: float | None = None
    replay_horizon: float | None = None

    def longest(self) -> tuple[str, float] | None:
        """The longest need, by name."""
        needs = [(name.replace("_", " "), need) for name, need in vars(self).items() if need is not None]
        return max(needs, key=lambda each: each[1], default=None)


def recommended(needs: Needs) -> float | None:
    """The window: the longest need and a margin, in whole hours above one."""
    longest = needs.longest()
    if longest is None:
        return None
    wanted = longest[1] * (1 + MARGIN)
    return wanted if wanted <= _HOUR else math.ceil(wanted / _HOUR - 1e-9) * _HOUR


def bytes_in(text: str) -> int:
    """``512``, ``2kB``, ``1.5MB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise PolicyError(f"{text[:40]!r} is no size; write bytes (512), 2kB, 64KiB or 1MB")
    return round(float(found[1]) * _UNITS[found[2] or "B"])


def size(number: float) -> str:
    """A number of bytes for people."""
    for unit, power in (("TB", 4), ("GB", 3), ("MB", 2), ("kB", 1)):
        if number >= 1000**power:
            return f"{number / 1000**power:.3g} {unit}"
    return f"{number:.0f} B"
