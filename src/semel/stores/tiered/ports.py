"""What a tiered store asks of its cache: the same names, sync and async.

A cache never raises and never makes a caller wait for longer than its time-out: what it cannot do, it leaves. It knows
nothing of Ops, policies or the store behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from semel.core.ops import Record
from semel.core.values import value

__all__ = ["AsyncCache", "Cache", "Found", "Tally", "Write"]


@dataclass(slots=True)
class Tally:
    """What became of the questions and of the writes, counted since the store was opened."""

    replayed: int = 0
    """Claims that the cache answered with a finished record."""
    turned_away: int = 0
    """Claims that the cache answered with a mark: the first call still runs."""
    missed: int = 0
    """Claims that the cache did not answer."""
    skipped: int = 0
    """Of these, the claims for which it was not asked, for it was away."""
    written: int = 0
    dropped: int = 0
    """Writes that were left out: the cache was away, or too many waited."""
    failed: int = 0
    """Questions and writes that it refused, or did not answer in time."""


@value
class Found:
    """What stands in the cache: a copy of a finished record, or a mark, which shows as a record that runs."""

    record: Record
    nonce: int
    """Of the claim that a mark stands for."""


@value
class Write:
    """What is to stand in the cache under an id. Instants are those of ``time.monotonic`` in this process."""

    id: bytes
    record: Record | None
    """None: nothing is to stand there."""
    at: float
    """When the record's times were true, or a little before."""
    until: float
    """When it must be gone."""
    nonce: int = 0
    delay: float = 0.0
    """Held back for so long ..."""
    wanted: Callable[[], bool] | None = None
    """... and then asked whether it is still to be written."""


class Cache(Protocol):
    """For threads."""

    tally: Tally
    on_change: Callable[[str | None], None] | None
    """Called with words when the cache is lost, and with None when it is back. May be called in any thread."""

    def get(self, id: bytes) -> Found | None:
        """What stands there; None also when the cache is away, or does not answer in time."""
        ...

    def write(self, write: Write) -> None:
        """Have it written soon, in the order of the calls, or not at all. Never waits."""
        ...

    def settle(self, id: bytes) -> None:
        """Wait until what was to be written for the id is there, or the time-out is over."""
        ...

    def connect(self, seconds: float) -> bool:
        """Wait until the cache can be asked, for so long at most; whether it can."""
        ...

    def close(self) -> None: ...


class AsyncCache(Protocol):
    """The same, for one event loop."""

    tally: Tally
    on_change: Callable[[str | None], None] | None

    async def get(self, id: bytes) -> Found | None: ...

    def write(self, write: Write) -> None: ...

    async def settle(self, id: bytes) -> None: ...

    async def connect(self, seconds: float) -> bool: ...

    async def close(self) -> None: ...
