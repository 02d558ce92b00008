"""What the sync and the async PostgreSQL store have in common: bounds, session settings, how a trip is tried again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from semel.core.ops import Op, Resolve
from semel.errors import ConfigurationError, SemelError, StoreUnavailable, StoreUncertain, StoreURLError
from semel.sql.connections.postgres_errors import Contended, Refused
from semel.sql.dialects.postgres import PENDING

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
    """One batch on its way: what is answered, and how often the rest is tried. The lane does the sending and waiting.

    A batch is several statements, each committed by itself, so answers are kept as they come and only the rest is sent
    again. A lost connection is opened again and the rest sent again, for Ops may be sent twice, until ``patience`` is
    used up. Contention (a deadlock) is tried again at once, a few times. What is refused in a batch of several is found
    out by sending each Op by itself, so that one bad Op does not fail its neighbours.
    """

    __slots__ = ("_contention", "_left", "_ops", "_pause", "_sent", "_until", "answers", "found")

    def __init__(self, ops: Sequence[Op[Any]], patience: float) -> None:
        self._ops = ops
        self._until = time.monotonic() + patience
        self._pause = FIRST_PAUSE
        self._contention = 0
        self._sent = False
        self._left: list[int] = []
        self.answers: list[Any] = [PENDING] * len(ops)
        self.found: list[Any] = []
        """The answers to the try in hand, filled in as they come."""

    def begin(self) -> list[Op[Any]]:
        """The Ops that have no answer yet, to be sent now; none when the trip is over."""
        for i, answer in zip(self._left, self.found, strict=True):
            self.answers[i] = answer
        self._left = [i for i, answer in enumerate(self.answers) if answer is PENDING]
        self.found = [PENDING] * len(self._left)
        return [self._ops[i] for i in self._left]

    def unanswered(self) -> list[tuple[int, Op[Any]]]:
        """Of the try in hand: positions in ``found``, and the Ops."""
        return [(at, self._ops[i]) for at, i in enumerate(self._left) if self.found[at] is PENDING]

    def apart(self, error: SemelError) -> bool:
        """Whether each Op should be sent by itself, to find the one that is refused."""
        return isinstance(error, Refused) and len(self._ops) > 1

    def pause_after(self, error: SemelError) -> float | None:
        """Seconds to wait before the next try; None where it is given up: each Op left is answered by the error."""
        pause = self._next_pause(error)
        if isinstance(error, StoreUncertain) and any(type(op) is Resolve for _, op in self.unanswered()):
            pause = None  # the one Op that may not be sent twice: by then the record may be another owner's
        if pause is None:
            public = type(error)
            if self._sent:
                public = StoreUncertain  # once anything was sent, nobody can say that nothing was stored
            elif isinstance(error, StoreUnavailable):
                public = StoreUnavailable
            for at, _ in self.unanswered():
                self.found[at] = public(str(error))
                self.found[at].__cause__ = error.__cause__
        return pause

    def _next_pause(self, error: SemelError) -> float | None:
        if isinstance(error, Contended):
            self._contention += 1
            return 0.0 if self._contention < CONTENTION_TRIES else None
        if isinstance(error, StoreUncertain):
            self._sent = True
        elif not isinstance(error, _Unreachable):
            return None
        pause = self._pause
        if time.monotonic() + pause > self._until:
            return None
        self._pause = min(pause * 2, SLOWEST_PAUSE)
        return pause


class _Unreachable(StoreUnavailable):
    """No connection could be opened, so nothing was sent."""


def unreachable(error: Exception) -> StoreUnavailable:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return _Unreachable(f"PostgreSQL cannot be reached: {text}")


def unreadable() -> StoreURLError:
    """The drivers show the part they stumble over, which may be the password: so they are not quoted."""
    return StoreURLError("the PostgreSQL URL cannot be read: percent-encode what is special in its user and password")
