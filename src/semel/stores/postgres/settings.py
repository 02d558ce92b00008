"""What the sync and the async PostgreSQL store have in common: bounds, session settings, how a trip is tried again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from semel.core.ops import Op
from semel.errors import ConfigurationError, SemelError, StoreUnavailable, StoreUncertain
from semel.sql.connections.postgres_errors import Contended, Refused

__all__ = ["Settings", "Trip"]

LANES: Final = 2
"""Connections of a store. Under load one is quickest, as more share each trip; the other is for when it is slow."""
TIMEOUT: Final = 10.0
CONNECT_TIMEOUT: Final = 5.0
PATIENCE: Final = 1.0
FIRST_PAUSE: Final = 0.02
SLOWEST_PAUSE: Final = 0.25
CONTENTION_TRIES: Final = 5
LISTEN_AGAIN: Final = 1.0
"""A waiter looks again after so many seconds although nobody woke it: a listener may be deaf without knowing."""


class Settings:
    """One store's bounds."""

    __slots__ = ("connect_timeout", "lanes", "patience", "timeout", "url")

    def __init__(self, url: str, lanes: int, timeout: float, connect_timeout: float, patience: float) -> None:
        if not 1 <= lanes <= 64:
            raise ConfigurationError(f"lanes are connections, 1 to 64, not {lanes!r}")
        self.url = url
        self.lanes = lanes
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.patience = patience

    def session(self) -> dict[str, str]:
        """Server settings of our own connections, sent when they are opened."""
        return {
            "application_name": "semel",
            "default_transaction_isolation": "read committed",
            "statement_timeout": str(int(self.timeout * 1000)),
            "jit": "off",
            # Our few statements are prepared once; planning each anew would cost more than running it.
            "plan_cache_mode": "force_generic_plan",
            # A plan made while the table is new would read all of it for every Op, and be kept while it grows.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    def options(self, given: object = "") -> str:
        """The same as libpq's ``options``, before those the user gave."""
        own = " ".join(
            f"-c {name}={value}".replace("read committed", r"read\ committed") for name, value in self.session().items()
        )
        return f"{own} {given}".strip()


class Trip:
    """How often one batch is tried: pure bookkeeping, the lane does the waiting.

    A lost connection is opened again and the batch sent again, for Ops may be sent twice; until ``patience`` is used
    up. Contention (a deadlock) is tried again at once, a few times. Anything else in a batch of several is found out
    by sending each Op by itself, so that one bad Op does not fail its neighbours.
    """

    __slots__ = ("_contention", "_left", "_pause", "_sent")

    def __init__(self, patience: float) -> None:
        self._left = patience
        self._pause = FIRST_PAUSE
        self._contention = 0
        self._sent = False

    def pause_after(self, error: SemelError) -> float | None:
        """Seconds to wait before the next try, or None to give up."""
        if isinstance(error, Contended):
            self._contention += 1
            return 0.0 if self._contention < CONTENTION_TRIES else None
        if isinstance(error, StoreUncertain):
            self._sent = True
        elif not isinstance(error, _Unreachable):
            return None
        pause = self._pause
        if pause > self._left:
            return None
        self._left -= pause
        self._pause = min(pause * 2, SLOWEST_PAUSE)
        return pause

    def apart(self, error: SemelError, ops: Sequence[Op[Any]]) -> bool:
        """Whether each Op should be sent by itself, to find the one that is refused."""
        return len(ops) > 1 and isinstance(error, Refused)

    def verdict(self, error: SemelError) -> SemelError:
        """The error of a trip that is given up: once anything was sent, nobody can say that nothing was stored."""
        if self._sent and not isinstance(error, StoreUncertain):
            return StoreUncertain(str(error))
        return error


class _Unreachable(StoreUnavailable):
    """No connection could be opened, so nothing was sent."""


def unreachable(error: Exception) -> StoreUnavailable:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return _Unreachable(f"PostgreSQL cannot be reached: {text}")


def each(ops: Sequence[Op[Any]], error: SemelError) -> list[Any]:
    """The same failure for every Op, as errors of their own, in the words of the public tree."""
    public = StoreUnavailable if isinstance(error, StoreUnavailable) else type(error)
    answers = []
    for _ in ops:
        answer = public(str(error))
        answer.__cause__ = error.__cause__
        answers.append(answer)
    return answers
