"""What the retries of all stores have in common: the pauses between tries, and the error that a caller gets in the end.

What is worth another try, each kind of store decides for itself.
"""

from __future__ import annotations

import time
from typing import Final

from semel.errors import RecordTooLarge, SemelError, StoreUnavailable, StoreUncertain

FIRST_PAUSE: Final = 0.02
SLOWEST_PAUSE: Final = 0.25


class Backoff:
    """Pauses that double from the first to the slowest, until ``retry_for`` seconds are over."""

    __slots__ = ("_pause", "_slowest", "_until")

    def __init__(self, retry_for: float, slowest: float = SLOWEST_PAUSE) -> None:
        self._until = time.monotonic() + retry_for
        self._pause = FIRST_PAUSE
        self._slowest = slowest

    def next_pause(self) -> float | None:
        """Return the seconds to wait before the next try, or None to give up."""
        pause = self._pause
        if time.monotonic() + pause > self._until:
            return None
        self._pause = min(pause * 2, self._slowest)
        return pause


def public_error(error: SemelError, sent: bool = False) -> SemelError:
    """Return the error for the caller, whom it does not concern how it would be retried.

    :param sent: an earlier try may have been stored.
    """
    public = type(error)
    if isinstance(error, RecordTooLarge):
        public = RecordTooLarge  # it was too large in earlier tries, too, so nothing was stored
    elif sent or isinstance(error, StoreUncertain):
        public = StoreUncertain  # nobody can say that nothing was stored
    elif isinstance(error, StoreUnavailable):
        public = StoreUnavailable
    result = public(str(error))
    result.__cause__ = error.__cause__
    return result
