"""The arithmetic of ``semel size``: how many keys a window holds, and how long the window must be. Pure."""

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
"""What is added to the longest need: the last retry leaves before the budget is over and arrives after it."""
_HOUR: Final = 3600.0
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*(B|kB|KB|KiB|MB|MiB)?")
_UNITS: Final = {"B": 1, "kB": 1000, "KB": 1000, "KiB": 1024, "MB": 1000**2, "MiB": 1024**2}


@dataclass(frozen=True)
class Work:
    """What calls ask of a store besides room."""

    unit: str
    """Statements, commands, capacity units."""
    first: float
    """For a new key: its claim and its completion."""
    again: float
    """For a retry that is answered from the record."""
    sweep: float | None = None
    """For one sweep, at most; None where that is not worth a word."""
    which: str = "each retry"
    """The retries that ``again`` is for."""


@dataclass(frozen=True)
class Measured:
    """What one record takes in a store, as found by writing some there."""

    store: str
    """Its kind, as in URLs."""
    what: str
    """``disk`` or ``memory``."""
    records: int
    """How many were written and measured; 0 where the store gets none of them."""
    record: float
    """Bytes of a record without indexes, on average."""
    index: float | None
    """Bytes of its entries in indexes; None where the store cannot tell them apart, and ``record`` has them."""
    how: str
    """How it was measured, in words; of 0 records, why."""
    holds: float | None = None
    """Seconds for which records are held, where that is not the window: a cache."""
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
    """For how long a request may come again, in seconds; None where nobody said."""

    retry_budget: float | None = None
    broker_retention: float | None = None
    replay_horizon: float | None = None

    def longest(self) -> tuple[str, float] | None:
        """Which of them decides."""
        given = [(name.replace("_", " "), need) for name, need in vars(self).items() if need is not None]
        return max(given, key=lambda each: each[1], default=None)


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
