"""What we know of a server's clock: asked when a connection opens, and reckoned on from there by our own monotonic one.

Leases and expiry do not need it: the life of the key tells them. It serves for what a first claim must write without a
script: the token, which outside systems may compare, and the instant that a record's age counts from.

The answer to TIME was true at some moment after we asked; reckoned from the moment of asking, the estimate is never
behind the server, and ahead by a round trip at most. Of several tries the tightest counts.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, Final

__all__ = ["TRIES", "ServerClock"]

TRIES: Final = 3
"""How often TIME is asked for on a new connection."""
ASK_AGAIN: Final = 600.0
"""Seconds after which a claim asks once more: two clocks never run alike."""


class ServerClock:
    """One server's clock, in microseconds. Tokens that it gives out grow, also while the estimate is corrected."""

    __slots__ = ("_ahead", "_asked_at", "_last")

    def __init__(self) -> None:
        self._ahead: int | None = None
        self._asked_at = 0
        self._last = 0

    def learn(self, asked_at: int, answer: Any, *, anew: bool = False) -> None:
        """``TIME`` was answered so; ``asked_at`` is our monotonic clock, in ns, when it was sent."""
        ahead = int(answer[0]) * 1_000_000 + int(answer[1]) - asked_at // 1000
        self._ahead = ahead if anew or self._ahead is None else min(self._ahead, ahead)
        self._asked_at = asked_at

    def is_old(self) -> bool:
        """Whether to ask again; says so to one caller only."""
        now = monotonic_ns()
        if now - self._asked_at < ASK_AGAIN * 1e9:
            return False
        self._asked_at = now
        return True

    def now(self) -> int:
        return monotonic_ns() // 1000 + (self._ahead or 0)

    def saw(self, token: int) -> None:
        """A token that the server gave out: ours will be greater."""
        self._last = max(self._last, token)

    def next_token(self, now: int) -> int:
        self._last = token = max(self._last + 1, now)
        return token
