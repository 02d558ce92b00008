"""The policy of an operation: its guarantee, lease and ttl, and what to do in case of duplicates and failures.

A ``Policy`` is immutable and belongs to one operation. Durations are numbers of seconds, texts such as ``"24h"``, or
timedeltas. The three guarantees are sets of defaults. A setting that contradicts the guarantee is refused:

================  ============  ==============  ===========  ========================================================
guarantee         on_abandoned  on_store_error  failures     in words
================  ============  ==============  ===========  ========================================================
effectively_once  retry         closed          run again    never runs without a claim; an abandoned attempt is run
                                                             again, and continues after its steps
at_most_once      reject        closed          remembered   never runs twice, even if the outcome stays unknown
at_least_once     retry         open            run again    runs even if the store is down
================  ============  ==============  ===========  ========================================================

A handler that is interrupted (a cancelled task, Ctrl-C, a shutdown) may or may not have had its effect. If an abandoned
attempt may not simply be run again, an interrupted one may not either: see ``on_interrupted``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

from semel.core.ops import FOREVER
from semel.core.states import State, Takeover
from semel.errors import PolicyError

Duration: TypeAlias = float | int | str | timedelta
Guarantee: TypeAlias = Literal["effectively_once", "at_most_once", "at_least_once"]
OnAbandoned: TypeAlias = Literal["retry", "reject"]
OnInterrupted: TypeAlias = Literal["release", "abandon"]
OnStoreError: TypeAlias = Literal["closed", "open"]
OnUnstored: TypeAlias = Literal["deliver", "withhold"]
Remember: TypeAlias = Literal["all"] | type[BaseException] | tuple[type[BaseException], ...]

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_TEXT: Final = re.compile(r"(?:\d{1,12}(?:\.\d{1,6})?(?:ms|s|m|h|d|w))+")
_WRITTEN: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_CENTURY: Final = 36525 * 86400
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def seconds(duration: Duration, name: str = "duration") -> float:
    """Return a duration in seconds: ``30``, ``0.5``, ``"250ms"``, ``"24h"``, ``"1h30m"``, or a timedelta.

    Raises PolicyError if it is not a duration. ``name`` is the name of the setting in the message.
    """
    if isinstance(duration, timedelta):
        result = duration.total_seconds()
    elif isinstance(duration, str):
        text = duration.replace(" ", "")
        if not _TEXT.fullmatch(text):
            raise PolicyError(
                f'{name}: {duration[:40]!r} is not a duration; write seconds (30) or "250ms", "30s", "24h", "7d"'
            )
        result = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    elif type(duration) in (int, float):
        result = _finite(duration)
    else:
        raise PolicyError(
            f"{name}: a duration is a number of seconds, a text such as '24h' or a timedelta, not {duration!r}"
        )
    if not 0 <= result <= FOREVER:  # also false for NaN
        raise PolicyError(f"{name}: {str(duration)[:40]} is out of range")
    return result


def positive_seconds(duration: Duration, name: str) -> float:
    """Return a duration in seconds. Raises PolicyError also if it is 0."""
    result = seconds(duration, name)
    if result <= 0:
        raise PolicyError(f"{name} must be longer than 0 s")
    return result


def duration(seconds: float) -> str:
    """Return a duration for people, in its two largest units: ``850µs``, ``4.2ms``, ``3.14s``, ``5m10s``, ``3d4h``.

    It is written as in settings. They know no years, so these begin at a hundred: such a record does not expire.
    """
    if seconds < 5e-7:
        return "0s"
    if seconds < 10:
        rounded = float(f"{seconds:.3g}")  # before the unit is chosen: 0.9999 is 1s
        if rounded >= 1:
            return f"{rounded:g}s"
        return f"{rounded * 1e3:.3g}ms" if rounded >= 0.001 else f"{rounded * 1e6:.0f}µs"
    if seconds >= _CENTURY:
        return f"{seconds / _CENTURY * 100:.0f}y"
    parts, left = [], round(seconds)
    for unit, size in _WRITTEN:
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def at_least_one(number: int, name: str) -> int:
    """Return the number. Raises PolicyError if it is not a positive whole number."""
    if type(number) is not int or number < 1:
        raise PolicyError(f"{name} is a whole number from 1, not {number!r}")
    return number


def _finite(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf")


@dataclass(frozen=True, slots=True, init=False)
class Wait:
    """``on_duplicate=Wait("5s")``: a duplicate waits for the first call's result, for at most this long.

    It returns that result, or raises InProgress when the time is over.
    """

    seconds: float

    def __init__(self, duration: Duration) -> None:
        """
        :param duration: the longest time to wait.
        """
        object.__setattr__(self, "seconds", seconds(duration, "Wait"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings of one operation. ``None`` means the default of its guarantee."""

    guarantee: Guarantee = "effectively_once"
    lease: Duration = 30.0
    """How long an owner that does not report counts as alive. The lease is renewed while the handler runs, so it may be
    shorter than the work.
    """
    max_run_time: Duration | None = None
    """How long a handler may hold its lease; None means for as long as it runs. After that the lease is not renewed,
    and an async handler is cancelled. It is then as if the process had died.
    """
    ttl: Duration | None = 86400.0
    """How long a result is stored; None means forever."""
    reject_expired_for: Duration | None = None
    """How long after the ttl a key is rejected with KeyExpired instead of being run again as a new one. The record is
    stored that much longer. A record that was written before this was set is rejected in the last part of its ttl.
    """
    on_duplicate: Literal["raise"] | Wait = "raise"
    on_abandoned: OnAbandoned | None = None
    recover: Callable[..., Any] | None = None
    """Called for an abandoned attempt to find out what happened. It returns ``semel.Recovered(result)``, ``NOT_DONE``
    or ``CANNOT_TELL``.
    """
    on_interrupted: OnInterrupted | None = None
    """What to do if a handler is interrupted by a cancellation or Ctrl-C. ``"release"`` assumes that nothing happened,
    as when it raises; ``"abandon"`` treats it like a crash. The default is the former if an abandoned attempt is run
    again, and the latter if it is rejected or recovered.
    """
    on_store_error: OnStoreError | None = None
    on_unstored: OnUnstored = "deliver"
    """What the caller gets if the handler has returned and its result could not be stored within
    ``completion_timeout``: the result, or OutcomeUnknown, which holds it. Either way Semel goes on trying to store it
    in the background, and nobody may take over meanwhile.
    """
    remember_errors: Remember | None = None
    """Exceptions that are stored and replayed like a result. Any other exception means that nothing happened: the key
    is free again. ``"all"`` is every exception; to get your own classes back, name them: ``(Exception, Declined)``.
    """
    completion_timeout: Duration = 5.0
    """How long to try to store the outcome of a finished handler while the store fails, before ``on_unstored``."""
    resumable: bool = False
    """Store the function's arguments, so that a resumer can continue if the process dies. For functions decorated with
    ``once``.
    """

    lease_seconds: float = field(init=False, repr=False, compare=False)
    max_run_seconds: float = field(init=False, repr=False, compare=False)
    ttl_seconds: float = field(init=False, repr=False, compare=False)
    reject_seconds: float = field(init=False, repr=False, compare=False)
    retention_seconds: float = field(init=False, repr=False, compare=False)
    """How long the record is stored: the ttl, plus the time in which an expired key is rejected."""
    wait_seconds: float = field(init=False, repr=False, compare=False)
    completion_seconds: float = field(init=False, repr=False, compare=False)
    takeover: Takeover = field(init=False, repr=False, compare=False)
    interrupted_to: State | None = field(init=False, repr=False, compare=False)
    """The state to which an interrupted attempt is released; None means the same as for one that raised."""
    fails_open: bool = field(init=False, repr=False, compare=False)
    remembered: tuple[type[BaseException], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _known("guarantee", self.guarantee, ("effectively_once", "at_most_once", "at_least_once"))
        _known("on_abandoned", self.on_abandoned, (None, "retry", "reject"))
        _known("on_interrupted", self.on_interrupted, (None, "release", "abandon"))
        _known("on_store_error", self.on_store_error, (None, "closed", "open"))
        _known("on_unstored", self.on_unstored, ("deliver", "withhold"))
        if self.on_duplicate != "raise" and not isinstance(self.on_duplicate, Wait):
            raise PolicyError(f'on_duplicate is "raise" or Wait(seconds), not {self.on_duplicate!r}')
        if self.recover is not None and not callable(self.recover):
            raise PolicyError(f"recover is a function, not {self.recover!r}")
        if self.recover is not None and self.on_abandoned is not None:
            raise PolicyError("recover= decides about abandoned attempts itself: leave on_abandoned out")
        at_most_once = self.guarantee == "at_most_once"
        if at_most_once and self.on_abandoned == "retry":
            raise PolicyError('at_most_once cannot run an abandoned attempt again: on_abandoned="reject" or recover=')
        if at_most_once and self.on_interrupted == "release":
            raise PolicyError('at_most_once cannot run an interrupted attempt again: on_interrupted="abandon"')
        if at_most_once and self.on_store_error == "open":
            raise PolicyError('at_most_once cannot run without its record: on_store_error="closed"')
        if self.resumable and self.recover is None and (at_most_once or self.on_abandoned == "reject"):
            raise PolicyError("resumable= runs an abandoned attempt again, and this policy forbids it: leave one out")
        longest = float("inf") if self.max_run_time is None else positive_seconds(self.max_run_time, "max_run_time")
        self._set("lease_seconds", positive_seconds(self.lease, "lease"))
        self._set("max_run_seconds", longest)
        self._set("ttl_seconds", FOREVER if self.ttl is None else positive_seconds(self.ttl, "ttl"))
        self._set("wait_seconds", self.on_duplicate.seconds if isinstance(self.on_duplicate, Wait) else 0.0)
        self._set("completion_seconds", seconds(self.completion_timeout, "completion_timeout"))
        self._set("takeover", self._takeover(at_most_once))
        self._set("interrupted_to", self._interrupted_to())
        self._set(
            "fails_open", (self.on_store_error or ("open" if self.guarantee == "at_least_once" else "closed")) == "open"
        )
        self._set("remembered", _exceptions(self.remember_errors, all_of_them=at_most_once))
        if self.reject_expired_for is not None and self.ttl is None:
            raise PolicyError("reject_expired_for= begins after the ttl, and ttl=None never ends: leave one out")
        self._set(
            "reject_seconds",
            0.0 if self.reject_expired_for is None else seconds(self.reject_expired_for, "reject_expired_for"),
        )
        self._set("retention_seconds", min(FOREVER, self.ttl_seconds + self.reject_seconds))

    def _takeover(self, at_most_once: bool) -> Takeover:
        if self.recover is not None:
            return Takeover.RECOVER
        return Takeover.REJECT if at_most_once or self.on_abandoned == "reject" else Takeover.RETRY

    def _interrupted_to(self) -> State | None:
        """The same as for a crash: UNKNOWN if nobody may run it again, else ABANDONED."""
        if self.takeover is Takeover.RETRY:
            return State.ABANDONED if self.on_interrupted == "abandon" else None
        if self.on_interrupted == "release":
            return None
        return State.ABANDONED if self.takeover is Takeover.RECOVER else State.UNKNOWN

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Policy:
        """Return this policy with some settings changed. Raises PolicyError for an unknown name, and lists the known
        ones.
        """
        if not changes:
            return self
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        unknown = changes.keys() - settings.keys()
        if unknown:
            raise PolicyError(f"unknown policy {', '.join(sorted(unknown))}; there are: {', '.join(sorted(settings))}")
        return Policy(**{**settings, **changes})


def _known(name: str, word: object, words: tuple[object, ...]) -> None:
    if word not in words:
        known = ", ".join(f'"{w}"' for w in words if w is not None)
        raise PolicyError(f"{name} is one of {known}, not {word!r}")


def _exceptions(remember_errors: object, *, all_of_them: bool) -> tuple[type[BaseException], ...]:
    if remember_errors is None:
        return (Exception,) if all_of_them else ()
    if remember_errors == "all":
        return (Exception,)
    classes = remember_errors if isinstance(remember_errors, tuple) else (remember_errors,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, Exception)):
            raise PolicyError(f'remember_errors is "all" or exception classes, not {cls!r}')
    if all_of_them and Exception not in classes:
        names = ", ".join(cls.__name__ for cls in classes)
        raise PolicyError(
            f"at_most_once remembers every failure: remember_errors=(Exception, {names}), or leave it out"
        )
    return classes
