"""When a cache that fails is left alone, when it is tried again, and who is notified."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["MAX_REFUSALS", "Outage"]

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""A server that is down is tried again after a pause, which doubles from the first to the longest."""
MAX_REFUSALS: Final = 5
"""After so many errors in a row the server is left alone for a pause, like one that does not answer."""
_log: Final = logging.getLogger("semel.tiered")


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
