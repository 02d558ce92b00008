"""The arithmetic of ``semel size``: how many keys a window holds, and how long it must be. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from semel.errors import PolicyError, StoreUnavailable

__all__ = [
    "DEFAULT_WINDOW", "MARGIN", "Measured", "Needs", "Work", "bytes_in", "duration", "in_pages", "recommended", "size",
]  # fmt: skip

DEFAULT_WINDOW: Final = 86400.0
MARGIN: Final = 0.1
"""Added to the longest need: the last retry may leave within the budget and arrive after it."""
_HOUR: Final = 3600.0
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*(B|kB|KB|KiB|MB|MiB)?")
_UNITS: Final = {"B": 1, "kB": 1000, "KB": 1000, "KiB": 1024, "MB": 1000**2, "MiB": 1024**2}


@dataclass(frozen=True)
class Work:
    """The work that calls cause in a store."""

    unit: str
    """Statements, commands, capacity units."""
    first: float
    """For a new key: claim and completion."""
    again: float
    """For a retry that is answered by replay."""
    sweep: float | None = None
    """For one sweep, at most; None if it does not matter."""
    which: str = "each retry"
    """Which retries ``again`` is about."""


@dataclass(frozen=True)
class Measured:
    """What one record takes in a store, measured with real records."""

    store: str
    """Its kind, as in URLs."""
    what: str
    """``disk`` or ``memory``."""
    records: int
    """How many records were measured; 0 if the store gets none."""
    record: float
    """Bytes of a record without indexes, on average."""
    index: float | None
    """Bytes of its index entries; None if the store cannot tell, and ``record`` includes them."""
    how: str
    """How it was measured, in words; or why there are no records."""
    holds: float | None = None
    """Seconds for which a cache holds records; None if they are held for the whole window."""
    work: tuple[Work, ...] = ()

    @property
    def each(self) -> float:
        return self.record + (self.index or 0.0)


def in_pages(store: str, records: int, data: float, index: float | None, how: str, work: tuple[Work, ...]) -> Measured:
    """What a database tells that gives out whole pages: of few records it may not have needed another one."""
    if data <= 0:
        raise StoreUnavailable(
            f"{records} records took no more room in {store} than it had ready; write more --records"
        )
    if index is not None and index <= 0:
        how, index = f"{how}; their indexes fill no page", None
    return Measured(store, "disk", records, data / records, None if index is None else index / records, how, work=work)


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


def duration(seconds: float) -> str:
    """Seconds for people, and for ``ttl=``."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    parts = []
    left = round(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length:
            parts.append(f"{left // length}{unit}")
            left %= length
    return "".join(parts)
