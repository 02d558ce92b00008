"""What a tiered store needs from its cache: the same names, sync and async; and how a cache treats an outage.

A cache never raises, and never makes a caller wait for longer than its timeout: what it cannot do, it leaves out. Only
``invalidate`` must be certain. A cache knows nothing of Ops, policies or the store behind it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from semel.core.ops import Record
from semel.core.values import value

CACHE_MEMBERS: Final = (
    "tally", "name", "on_change", "get", "write", "settle", "invalidate", "connect", "open", "close",
)  # fmt: skip
"""What a cache declares, sync or async."""
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""A server that is down is tried again after a pause, which doubles from the first to the longest."""
MAX_REFUSALS: Final = 5
"""Errors in a row after which the server is left alone for a pause, like one that does not answer."""
_log: Final = logging.getLogger("semel.tiered")


@dataclass(slots=True)
class Tally:
    """Counts of reads and writes of a cache since the store was opened."""

    replayed: int = 0
    """Claims that the cache answered with a finished record."""
    turned_away: int = 0
    """Claims that the cache answered with a mark: the first call is still running."""
    missed: int = 0
    """Claims that the cache did not answer."""
    skipped: int = 0
    """Of these, claims that were not sent to the cache, because it could not be reached."""
    written: int = 0
    dropped: int = 0
    """Writes that were left out: the cache could not be reached, or too many were waiting."""
    failed: int = 0
    """Reads and writes that the cache refused, or did not answer in time."""


@value
class CachedRecord:
    """An entry of the cache: a copy of a finished record, or a mark, which looks like a running record."""

    record: Record
    nonce: int
    """The nonce of the claim that a mark stands for."""


@value
class Write:
    """What the cache should hold for an id. Instants are those of ``time.monotonic`` in this process."""

    id: bytes
    record: Record | None
    """None: nothing, so an existing entry is deleted."""
    at: float
    """When the record's times were true, or a little earlier."""
    until: float
    """When the entry must be gone."""
    nonce: int = 0
    delay: float = 0.0
    """Seconds to hold the write back ..."""
    wanted: Callable[[], bool] | None = None
    """... after which this says whether to write it at all."""


class Cache(Protocol):
    """A cache for threads."""

    tally: Tally
    name: bytes
    """The name of the primary, set by the store before the first entry. It is part of every entry's key, so that two
    primaries never share entries."""
    on_change: Callable[[str | None], None] | None
    """Called with an error text when the cache is lost, and with None when it is back. May be called in any thread."""

    def get(self, id: bytes) -> CachedRecord | None:
        """Return the entry of an id. None also if the cache cannot be reached or does not answer in time."""
        ...

    def write(self, write: Write) -> None:
        """Write soon, in the order of the calls, or not at all. Never waits."""
        ...

    def settle(self, id: bytes) -> None:
        """Wait until earlier writes of the id are done, or the timeout is over."""
        ...

    def invalidate(self, id: bytes, token: int, seconds: float) -> None:
        """For this time return no entry of this id with this token or an older one, not even one that is written later.

        Raises SemelError unless that is certain.
        """
        ...

    def connect(self, seconds: float) -> bool:
        """Wait until the cache can be reached, ``seconds`` at most. Returns whether it can."""
        ...

    def open(self) -> None:
        """Make the cache usable again after ``close``."""
        ...

    def close(self) -> None: ...


class AsyncCache(Protocol):
    """A cache for one event loop."""

    tally: Tally
    name: bytes
    on_change: Callable[[str | None], None] | None

    async def get(self, id: bytes) -> CachedRecord | None: ...

    def write(self, write: Write) -> None: ...

    async def settle(self, id: bytes) -> None: ...

    async def invalidate(self, id: bytes, token: int, seconds: float) -> None: ...

    async def connect(self, seconds: float) -> bool: ...

    def open(self) -> None: ...

    async def close(self) -> None: ...


class Outage:
    """Begins when a connection is lost or cannot be opened; ends when all are open."""

    def __init__(self) -> None:
        self.active = True
        """True until the first connection is open, too."""
        self.retry_at = 0.0
        """When the cache may be tried again, by ``time.monotonic``."""
        self._refusals = 0
        self._pause = FIRST_PAUSE
        self._reported = False

    def begin(self, error: object, on_change: Callable[[str | None], None] | None) -> None:
        self.active = True
        self._refusals = 0
        self.retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if not self._reported:
            self._reported = True
            _log.warning("the cache cannot be reached; the store behind it answers every claim: %s", error)
            _notify(on_change, str(error))

    def end(self, on_change: Callable[[str | None], None] | None) -> None:
        self.active = False
        if self._reported:
            self._reported = False
            _log.info("the cache is back")
            _notify(on_change, None)

    def count_refusal(self) -> bool:
        """The server replied with an error. Returns whether to leave it alone now."""
        self._refusals += 1
        return self._refusals >= MAX_REFUSALS

    def count_answer(self) -> None:
        """The server not only accepts connections but answers: the next pause is the shortest again."""
        self._refusals = 0
        self._pause = FIRST_PAUSE


def _notify(on_change: Callable[[str | None], None] | None, error: str | None) -> None:
    if on_change is not None:
        try:
            on_change(error)
        except Exception:  # an event hook must not break the cache
            _log.exception("the event hook failed")
