"""When a request is sent again, and after how long. Nothing here sends, sleeps, or reads a clock.

What an answer says counts in this order: the member ``retryable`` of its body, a hint header, ``Retry-After``, its
status. The wait before the next attempt is what the server asks for plus a random time, which grows with each attempt
(full jitter), so that clients that failed together do not come back together.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

from semel.core.policy import Duration, seconds
from semel.engine.forking import survive_forks
from semel.errors import KeyExpired, PolicyError

RETRIED_STATUSES: Final = frozenset({408, 425, 429, *range(500, 600)})
"""What is retried if an answer gives no hint: 408, 425, 429 and all of 5xx."""
HINT_HEADERS: Final = ("Stripe-Should-Retry", "x-should-retry")
LONGEST_PROBLEM: Final = 64 * 1024
"""Bytes of a body that is searched for ``retryable``. A problem document is short."""
MARGIN: Final = 300.0
"""Seconds before the end of the server's window in which nothing is sent any more: clocks differ, requests travel."""
MAX_ORIGINS: Final = 1000


class Advice(NamedTuple):
    """What an answer says about another attempt."""

    retry: bool
    after: float = 0.0
    """Seconds that the server wants to be left alone."""
    expired: bool = False
    """The server knows the key, but no longer what became of it."""


def advice(
    status: int,
    headers: Mapping[str, str],
    body: Callable[[], bytes],
    now: float,
    statuses: Collection[int] = RETRIED_STATUSES,
) -> Advice:
    """Return whether the request should be sent again with the same key.

    :param headers: found by any spelling of their names, as in the HTTP libraries.
    :param body: returns the decoded body; only called if it may say something.
    :param now: the time of day, for a ``Retry-After`` that is a date.
    """
    if status < 400:
        return Advice(False)
    after = retry_after(headers, now)
    problem = _problem(headers.get("Content-Type") or "", body)
    hint = problem.get("retryable")
    if after is None:
        after = _seconds(problem.get("retry_after"))
    if not isinstance(hint, bool):
        hint = _hint_header(headers)
    if hint is None:
        hint = after is not None or status in statuses
    return Advice(hint, after or 0.0, problem.get("code") == KeyExpired.code)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the ``Retry-After`` of an answer in seconds, or None if it has none that can be read.

    A date is compared with the ``Date`` of the same answer, if it has one: the two clocks are then the same.
    """
    text = (headers.get("Retry-After") or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    date = _instant(text)
    if date is None:
        return None
    sent = _instant(headers.get("Date") or "")
    return max(0.0, date - (now if sent is None else sent))


def _instant(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _hint_header(headers: Mapping[str, str]) -> bool | None:
    for name in HINT_HEADERS:
        text = (headers.get(name) or "").strip().lower()
        if text in ("true", "false"):
            return text == "true"
    return None


def _problem(content_type: str, body: Callable[[], bytes]) -> Mapping[str, Any]:
    """The members of a JSON body; none if it is no JSON object."""
    if "json" not in content_type.lower():
        return {}
    content = body()
    if len(content) > LONGEST_PROBLEM:
        return {}
    try:
        problem = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return problem if isinstance(problem, dict) else {}


def _seconds(after: object) -> float | None:
    known = not isinstance(after, bool) and isinstance(after, (int, float)) and 0 <= after < 1e12
    return float(after) if known else None  # type: ignore[arg-type]


class RetryQuota:
    """Limits the retries of a process, so that many callers together do not make an outage worse.

    Each server has its own purse of tokens. A retry costs some; a first attempt costs nothing. A call that succeeds
    gives back what its last retry cost, or ``refund``. When the purse is empty, calls are sent once and not retried.
    """

    def __init__(self, tokens: int = 500, *, cost: int = 5, refund: int = 1) -> None:
        """
        :param tokens: what the purse of a server holds.
        :param cost: what a retry costs.
        :param refund: what a call gives back that succeeded at its first attempt.
        """
        if not (tokens >= 0 and cost >= 1 and refund >= 0):
            raise PolicyError("RetryQuota: tokens and refund are 0 or more, cost is 1 or more")
        self.tokens, self.cost, self.refund = tokens, cost, refund
        self._spent: dict[str, int] = {}  # only servers whose purse is not full
        self._lock = threading.Lock()
        survive_forks(self._forked)

    def _forked(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it

    def take(self, origin: str) -> bool:
        # Pay for a retry. Returns False if there are not enough tokens.
        with self._lock:
            spent = self._spent.get(origin, 0) + self.cost
            if spent > self.tokens:
                return False
            if origin not in self._spent and len(self._spent) >= MAX_ORIGINS:
                self._spent.pop(next(iter(self._spent)))
            self._spent[origin] = spent
            return True

    @property
    def in_use(self) -> bool:
        # Whether any purse is not full. Almost always all of them are.
        return bool(self._spent)

    def give_back(self, origin: str, retried: bool) -> None:
        # A call has succeeded.
        with self._lock:
            if origin in self._spent:
                spent = self._spent[origin] - (self.cost if retried else self.refund)
                if spent > 0:
                    self._spent[origin] = spent
                else:
                    self._spent.pop(origin, None)

    def left(self, origin: str) -> int:
        """The tokens that are left for a server, such as ``"https://pay.example"``."""
        return self.tokens - self._spent.get(origin, 0)


PROCESS_QUOTA: Final = RetryQuota()
"""What all clients of a process share, unless they are given another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and for how long a client sends a request again. Every attempt has the same key and the same bytes.

    Durations are seconds or texts such as ``"30s"``.
    """

    attempts: int = 8
    """How often a request is sent, at most, the first time included."""
    time: Duration = "2m"
    """No attempt starts later than this after the first one."""
    base: Duration = "200ms"
    """The longest random wait before the second attempt. It doubles with each further one."""
    cap: Duration = "20s"
    """The longest random wait."""
    window: Duration = "24h"
    """How long the server remembers a key. Nothing is sent again near its end or later."""
    statuses: Collection[int] = RETRIED_STATUSES
    """What is retried if the answer gives no hint. For servers that answer 409 while the first request runs and say no
    more, add it: ``statuses={*RETRIED_STATUSES, 409}``."""
    quota: RetryQuota | None = PROCESS_QUOTA
    """Shared by all clients of the process. None sets no limit."""

    time_seconds: float = field(init=False, repr=False, compare=False)
    base_seconds: float = field(init=False, repr=False, compare=False)
    cap_seconds: float = field(init=False, repr=False, compare=False)
    lifetime: float = field(init=False, repr=False, compare=False)
    """Seconds in which a key is used: the window, less a margin."""

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise PolicyError(f"Retry: attempts is a whole number from 1, not {self.attempts!r}")
        for name in ("time", "base", "cap"):
            object.__setattr__(self, f"{name}_seconds", seconds(getattr(self, name), name))
        window = seconds(self.window, "window")
        object.__setattr__(self, "lifetime", window - min(MARGIN, window / 10))
        object.__setattr__(self, "statuses", frozenset(self.statuses))

    def wait(self, attempts: int, after: float, elapsed: float, age: float, chance: float) -> float | None:
        # The seconds to wait before the next attempt, or None if there shall be none. ``after`` is what the server asks
        # for, ``elapsed`` counts from the first attempt of this call, ``age`` from the first use of the key, and
        # ``chance`` is a random number from 0 to 1.
        if attempts >= self.attempts:
            return None
        ceiling = min(self.cap_seconds, self.base_seconds * 2.0 ** min(attempts - 1, 60))
        wait = after + chance * ceiling
        if elapsed + wait > self.time_seconds or age + wait > self.lifetime:
            return None
        return wait


def origin_of(url: str) -> str:
    """Return the server that a URL names, as ``https://pay.example:8443``; the usual ports are left out."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    for end in "/?#":
        rest = rest.partition(end)[0]
    host = rest.rpartition("@")[2].lower()
    return f"{scheme}://{host.removesuffix(':443' if scheme == 'https' else ':80')}"
