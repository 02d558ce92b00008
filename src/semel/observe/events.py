"""The events of an operation's life. ``EVENTS`` lists them all.

A guard passes each event to its hook, ``Semel(store, on_event=…)``. Without a hook it creates no events. This module
imports nothing from engines, stores or sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias

DEBUG: Final = 10
INFO: Final = 20
WARNING: Final = 30
ERROR: Final = 40


@dataclass(frozen=True, slots=True)
class Event:
    """The base of all events. ``level`` is a level of the standard library's logging."""

    name: ClassVar[str] = ""
    level: ClassVar[int] = DEBUG
    operation: str
    tenant: str
    key: str
    """The key as the caller passed it. If keys are secrets, hash it before it leaves the process."""
    route: str = field(default="", kw_only=True, compare=False)
    """A name for metrics, of which there are few: over HTTP the method and the template of the path, such as
    ``POST /orders/{id}``; elsewhere the operation."""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The claim was won and the handler is about to run."""

    name = "started"
    attempt: int
    token: int


@dataclass(frozen=True, slots=True)
class TakenOver(Event):
    """An abandoned attempt was taken over. The handler or the recover hook is about to run."""

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
    """The handler returned and its result is written in the caller's transaction. It is stored when that commits."""

    name = "prepared"
    attempt: int
    size: int
    """Bytes of the snapshot."""


@dataclass(frozen=True, slots=True)
class Conflicted(Event):
    """A transaction conflicted with another one and was rolled back. It is run again, unless its tries are used up or
    the guarantee forbids it."""

    name = "conflicted"
    level = INFO
    tries: int
    """How often it has been run."""
    error: str


@dataclass(frozen=True, slots=True)
class FailureRemembered(Event):
    """The handler raised an exception that the policy remembers, and it is stored."""

    name = "failure_remembered"
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class RecoveredEvent(Event):
    """The recover hook found out what an abandoned attempt did."""

    name = "recovered"
    level = INFO
    attempt: int


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The handler raised. The key is free again; an operation with finished steps resumes after them."""

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
    """A duplicate was refused because the first call still runs."""

    name = "turned_away"
    level = INFO
    retry_after: float


@dataclass(frozen=True, slots=True)
class Mismatched(Event):
    """A request was refused because its key belongs to a different request."""

    name = "mismatched"
    level = WARNING


@dataclass(frozen=True, slots=True)
class WentUnknown(Event):
    """A call found an operation whose outcome is unknown."""

    name = "went_unknown"
    level = ERROR
    attempt: int


@dataclass(frozen=True, slots=True)
class LeaseLostEvent(Event):
    """An attempt lost its lease to another owner, and its outcome was refused."""

    name = "lease_lost"
    level = ERROR
    attempt: int
    token: int


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """The lease of a running handler was renewed."""

    name = "renewed"
    attempt: int


@dataclass(frozen=True, slots=True)
class RenewalFailed(Event):
    """A lease could not be renewed. The renewal is retried before the lease ends."""

    name = "renewal_failed"
    level = WARNING
    error: str


@dataclass(frozen=True, slots=True)
class StepSaved(Event):
    """A step or a captured value was stored."""

    name = "step_saved"
    step: str


@dataclass(frozen=True, slots=True)
class UndoFailed(Event):
    """A step of a failed operation could not be undone at this try."""

    name = "undo_failed"
    level = ERROR
    step: str
    error: str


@dataclass(frozen=True, slots=True)
class ResultDropped(Event):
    """The operation is remembered as done, but its result could not be stored."""

    name = "result_dropped"
    level = ERROR
    reason: str


@dataclass(frozen=True, slots=True)
class Unstored(Event):
    """The handler ended, but its outcome could not be stored. Semel goes on trying in the background."""

    name = "unstored"
    level = ERROR
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """The store failed at this Op. The policy decides what happens next."""

    name = "store_failed"
    level = ERROR
    op: str
    error: str


@dataclass(frozen=True, slots=True)
class Unprotected(Event):
    """The store was down and the policy is ``on_store_error="open"``: the handler runs without a record."""

    name = "unprotected"
    level = ERROR


@dataclass(frozen=True, slots=True)
class Unkeyed(Event):
    """A request was sent without its optional key: the handler runs without a record."""

    name = "unkeyed"
    level = INFO


@dataclass(frozen=True, slots=True)
class Expired(Event):
    """A request was refused because the answer of its key has expired."""

    name = "expired"
    level = WARNING
    age: float
    """Seconds since the first attempt."""


@dataclass(frozen=True, slots=True)
class OverQuota(Event):
    """A new key was refused because its tenant holds as many live keys as its quota allows."""

    name = "over_quota"
    level = WARNING
    live_keys: int
    """How many live keys the tenant holds, counted up to the quota."""


@dataclass(frozen=True, slots=True)
class Resolved(Event):
    """An operation in doubt was settled by ``resolve()`` or ``release()``."""

    name = "resolved"
    level = INFO
    happened: bool


@dataclass(frozen=True, slots=True)
class OutcomeReleased(Event):
    """The stored outcome of a finished operation was dropped by ``release(stored=…)``: the next call runs it again."""

    name = "outcome_released"
    level = WARNING
    outcome: str
    """``failure``, ``result``, or ``unreadable`` if the guard could not tell."""
    token: int
    """The token of the record that was dropped."""


@dataclass(frozen=True, slots=True)
class SweptEvent(Event):
    """A sweep removed expired records. ``operation``, ``tenant`` and ``key`` are empty."""

    name = "swept"
    removed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class CacheLost(Event):
    """The cache of a tiered store does not answer, so the primary is used instead. ``operation``, ``tenant`` and
    ``key`` are empty. Passed to the store's own hook.
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
    """A resumer could not resume an abandoned operation. It tries again later."""

    name = "recovery_failed"
    level = WARNING
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class RecoveryGivenUp(Event):
    """An abandoned operation has used up its tries, so resumers ignore it. Each resumer reports it once."""

    name = "recovery_given_up"
    level = ERROR
    attempt: int


EVENTS: Final[tuple[type[Event], ...]] = tuple(
    each for each in globals().values() if isinstance(each, type) and issubclass(each, Event) and each is not Event
)
"""All events. The reference page is generated from this table."""


EventHook: TypeAlias = Callable[[Event], None]
"""The type of ``on_event=``: a function that takes an event. It runs in the call that causes the event."""


class LoggingHook:
    """A hook that logs events, so that the guard does not log them as well."""

    def __init__(self, log: EventHook) -> None:
        self._log = log

    def __call__(self, event: Event) -> None:
        self._log(event)
