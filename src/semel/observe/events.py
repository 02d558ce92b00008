"""Every step of an operation's life, as frozen events. All of them stand in ``EVENTS``, with what they mean and how
loud.

An event is handed to the hook of the engine (``Semel(store, on_event=…)``): any callable. With no hook no event is
made. This module is a leaf: it knows nothing of engines, stores or sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

__all__ = ["EVENTS", "Event", "EventHook"]

DEBUG: Final = 10
INFO: Final = 20
WARNING: Final = 30
ERROR: Final = 40


@dataclass(frozen=True, slots=True)
class Event:
    """Which operation; ``level`` is that of stdlib logging."""

    name: ClassVar[str] = ""
    level: ClassVar[int] = DEBUG
    operation: str
    tenant: str
    key: str
    """As the caller gave it. Sinks that leave the process should hash it where keys are secrets."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The claim was won and the handler is about to run."""

    name = "started"
    attempt: int
    token: int


@dataclass(frozen=True, slots=True)
class TakenOver(Event):
    """An abandoned attempt was taken over; the handler, or the recover hook, is about to run."""

    name = "taken_over"
    level = WARNING
    attempt: int
    token: int


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """The handler returned and its result is stored."""

    name = "completed"
    attempt: int
    size: int
    """Bytes of the stored snapshot."""


@dataclass(frozen=True, slots=True)
class Prepared(Event):
    """The handler returned and its result is written in the caller's transaction: stored if and when that commits."""

    name = "prepared"
    attempt: int
    size: int
    """Bytes of the snapshot."""


@dataclass(frozen=True, slots=True)
class Conflicted(Event):
    """A unit of work met another transaction and was rolled back; it is run again unless the tries are used up, or the
    guarantee forbids it."""

    name = "conflicted"
    level = INFO
    tries: int
    """How often it has been run."""
    error: str


@dataclass(frozen=True, slots=True)
class FailureRemembered(Event):
    """The handler raised an exception that is an answer, and it is stored."""

    name = "failure_remembered"
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class Recovered(Event):
    """The recover hook found what an abandoned attempt had done."""

    name = "recovered"
    level = INFO
    attempt: int


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The handler raised and the key is free again; or, with steps, the next try resumes."""

    name = "released"
    level = INFO
    attempt: int
    error: str
    resumable: bool


@dataclass(frozen=True, slots=True)
class Replayed(Event):
    """A duplicate was answered with the stored outcome."""

    name = "replayed"
    level = INFO
    age: float
    """Seconds since the first attempt."""
    attempt: int


@dataclass(frozen=True, slots=True)
class Waited(Event):
    """A duplicate waited for the first call."""

    name = "waited"
    seconds: float


@dataclass(frozen=True, slots=True)
class TurnedAway(Event):
    """A duplicate came while the first still runs, and was refused."""

    name = "turned_away"
    level = INFO
    retry_after: float


@dataclass(frozen=True, slots=True)
class Mismatched(Event):
    """The same key came with another request, and was refused."""

    name = "mismatched"
    level = WARNING


@dataclass(frozen=True, slots=True)
class WentUnknown(Event):
    """A call met an operation whose outcome nobody knows."""

    name = "went_unknown"
    level = ERROR
    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """An attempt was fenced off; its outcome was refused."""

    name = "lease_lost"
    level = ERROR
    attempt: int
    token: int


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A lease was renewed while its handler runs."""

    name = "renewed"
    attempt: int


@dataclass(frozen=True, slots=True)
class RenewalFailed(Event):
    """A renewal did not get through; it is tried again before the lease ends."""

    name = "renewal_failed"
    level = WARNING
    error: str


@dataclass(frozen=True, slots=True)
class StepSaved(Event):
    """A step or captured value is stored."""

    name = "step_saved"
    step: str


@dataclass(frozen=True, slots=True)
class UndoFailed(Event):
    """A step of an operation that failed could not be undone at this try."""

    name = "undo_failed"
    level = ERROR
    step: str
    error: str


@dataclass(frozen=True, slots=True)
class ResultDropped(Event):
    """Done and remembered, but the result could not be kept."""

    name = "result_dropped"
    level = ERROR
    reason: str


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """The store failed at this Op; what follows is the policy's choice."""

    name = "store_failed"
    level = ERROR
    op: str
    error: str


@dataclass(frozen=True, slots=True)
class Unprotected(Event):
    """The store was down and the policy is open: the handler runs without a record."""

    name = "unprotected"
    level = ERROR


@dataclass(frozen=True, slots=True)
class Unkeyed(Event):
    """A request came without the key that its route leaves optional: the handler runs without a record."""

    name = "unkeyed"
    level = INFO


@dataclass(frozen=True, slots=True)
class Expired(Event):
    """A key came again after its answer had expired, and was refused."""

    name = "expired"
    level = WARNING
    age: float
    """Seconds since the first attempt."""


@dataclass(frozen=True, slots=True)
class OverQuota(Event):
    """A new key was refused: its tenant holds as many live keys as its quota allows."""

    name = "over_quota"
    level = WARNING
    live_keys: int
    """How many it holds, as far as is known; counted up to the quota."""


@dataclass(frozen=True, slots=True)
class Resolved(Event):
    """Someone said what became of an unknown operation."""

    name = "resolved"
    level = INFO
    happened: bool


@dataclass(frozen=True, slots=True)
class Swept(Event):
    """Expired records were removed. ``operation``, ``tenant`` and ``key`` are empty: a sweep is over all."""

    name = "swept"
    removed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class CacheLost(Event):
    """The cache of a tiered store does not answer: all is asked of the store behind it. Told by the store's hook;
    ``operation``, ``tenant`` and ``key`` are empty.
    """

    name = "cache_lost"
    level = WARNING
    error: str


@dataclass(frozen=True, slots=True)
class CacheBack(Event):
    """The cache of a tiered store answers again. ``operation``, ``tenant`` and ``key`` are empty."""

    name = "cache_back"
    level = INFO


@dataclass(frozen=True, slots=True)
class RecoveryFailed(Event):
    """A resumer tried to resume an abandoned operation, and it failed; it is tried again later."""

    name = "recovery_failed"
    level = WARNING
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class RecoveryGivenUp(Event):
    """An abandoned operation has used up its tries: resumers leave it alone. Told once by each of them."""

    name = "recovery_given_up"
    level = ERROR
    attempt: int


EVENTS: Final[tuple[type[Event], ...]] = (
    Started,
    TakenOver,
    Completed,
    Prepared,
    Conflicted,
    FailureRemembered,
    Recovered,
    Released,
    Replayed,
    Waited,
    TurnedAway,
    Mismatched,
    WentUnknown,
    LeaseLost,
    Renewed,
    RenewalFailed,
    StepSaved,
    UndoFailed,
    ResultDropped,
    StoreFailed,
    Unprotected,
    Unkeyed,
    Expired,
    OverQuota,
    Resolved,
    Swept,
    CacheLost,
    CacheBack,
    RecoveryFailed,
    RecoveryGivenUp,
)
"""All events. The reference page is generated from this table."""

EventHook: TypeAlias = Callable[[Event], None]
"""What ``on_event=`` takes: a function of one event. It runs in the call, so it must be quick."""
