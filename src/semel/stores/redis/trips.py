"""How often an Op is tried: until it is answered, refused, or the store's patience is used up."""

from __future__ import annotations

import time
from typing import Any, Final

from semel.core.ops import Op, Resolve
from semel.errors import SemelError, StoreError, StoreUnavailable, StoreUncertain
from semel.stores.redis.replies import Moved, Unconfirmed, Unreachable

__all__ = ["Trip"]

FIRST_PAUSE: Final = 0.02
SLOWEST_PAUSE: Final = 0.25
MOST_MOVES: Final = 16
"""How many redirections one Op follows."""


class Trip:
    """One Op that met an error; made when the first comes."""

    __slots__ = ("_answered", "_moves", "_op", "_pause", "_sent", "_until")

    def __init__(self, op: Op[Any], retry_for: float) -> None:
        self._op = op
        self._until = time.monotonic() + retry_for
        self._pause = FIRST_PAUSE
        self._moves = 0
        self._sent = False
        self._answered = False

    def pause_after(self, error: SemelError) -> float | None:
        """Seconds to wait before the next try; None where it is given up."""
        if isinstance(error, StoreError) and error.answered:
            self._answered = True
        if isinstance(error, Moved):
            self._moves += 1
            return 0.0 if self._moves <= MOST_MOVES else None
        if isinstance(error, (StoreUncertain, Unconfirmed)):
            self._sent = True
            if type(self._op) is Resolve:
                return None  # the one Op that may not be sent twice: by then the record may be another owner's
        elif not isinstance(error, Unreachable):
            return None
        pause = self._pause
        if time.monotonic() + pause > self._until:
            return None
        self._pause = min(pause * 2, SLOWEST_PAUSE)
        return pause

    def failure(self, error: SemelError) -> SemelError:
        """What the caller is told: once anything was sent, nobody can say that nothing was stored."""
        public: type[SemelError] = type(error)
        if self._sent or isinstance(error, StoreUncertain):
            public = StoreUncertain
        elif isinstance(error, StoreUnavailable):
            public = StoreUnavailable
        told = public(str(error))
        told.__cause__ = error.__cause__
        if isinstance(told, StoreError):
            told.answered = self._answered
        return told
