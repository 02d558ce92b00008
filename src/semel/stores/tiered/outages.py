"""When a cache is left alone, when it is sought again, and who is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["MOST_REFUSALS", "Outage"]

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""A server that is away is sought again after a pause, which doubles from the first to the longest."""
MOST_REFUSALS: Final = 5
"""Answers in a row that are errors; then the server is left alone for a pause, as one that does not answer."""
_log: Final = logging.getLogger("semel.tiered")


class Outage:
    """Begins when a line is lost or cannot be opened; ends when all are open."""

    def __init__(self) -> None:
        self.away = True
        """Until a line is open."""
        self.seek_at = 0.0
        """When the cache may be sought again, by ``time.monotonic``."""
        self.refusals = 0
        self._pause = FIRST_PAUSE
        self._told = False

    def begins(self, error: object, change: Callable[[str | None], None] | None) -> None:
        self.away = True
        self.refusals = 0
        self.seek_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        if not self._told:
            self._told = True
            _log.warning("the cache is away, and every claim is asked of the store behind it: %s", error)
            _tell(change, str(error))

    def ends(self, change: Callable[[str | None], None] | None) -> None:
        self.away = False
        if self._told:
            self._told = False
            _log.info("the cache is back")
            _tell(change, None)

    def refused(self) -> bool:
        """It answered with an error; whether it is to be left alone."""
        self.refusals += 1
        return self.refusals >= MOST_REFUSALS

    def answered(self) -> None:
        """It does not only let us in, it answers: the next pause is the shortest again."""
        self.refusals = 0
        self._pause = FIRST_PAUSE


def _tell(change: Callable[[str | None], None] | None, error: str | None) -> None:
    if change is not None:
        try:
            change(error)
        except Exception:  # a sink must never fail what it watches
            _log.exception("the event hook failed")
