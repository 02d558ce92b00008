"""The flow of the transactional mode: lock the key, run the handler, write the finished record; all in one transaction.

The transaction is the caller's, who commits it, or (``own``) one that the engine opens and ends. What commits is
remembered, what rolls back never happened: there is no lease, no owner to fence off, and nothing to release. The lock
makes duplicates wait or go away; the record's primary key is the judge all the same. Whoever meets it in vain, or is
stopped by the database for the sake of others, gets TransactionConflict, with nothing stored; in a transaction of our
own the unit of work is then run again, ``tries`` times at most; under ``at_most_once`` only if it had not begun.

Like the other flows this is a generator that knows no driver, no clock and no event loop.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final, TypeAlias

from semel.core.call import (
    CANNOT_TELL,
    NOT_DONE,
    Call,
    Failed,
    Outcome,
    Pause,
    Recover,
    Recovered,
    Returned,
    Run,
    describe_error,
)
from semel.core.encoding.serializers import NotSerializable
from semel.core.endings import replay
from semel.core.flows import FIRST_POLL, SLOWEST_POLL, check_same_request, expired, turned_away
from semel.core.ops import Claimed, Op, Record
from semel.core.quota import admit
from semel.core.semantics import Row, may_take_over, same_request, show, state_of
from semel.core.states import State, Takeover
from semel.core.values import value
from semel.errors import (
    ConfigurationError,
    OutcomeUnknown,
    PolicyError,
    ResultNotStored,
    SemelError,
    StoreError,
    StoreUnavailable,
    TransactionConflict,
)
from semel.observe import events

__all__ = [
    "Flow",
    "HandlerConflict",
    "HandlersFault",
    "Keep",
    "Lock",
    "Occupied",
    "Rejected",
    "Rollback",
    "pause_after",
    "transact",
]  # fmt: skip

FIRST_PAUSE: Final = 0.004
SLOWEST_PAUSE: Final = 0.25
"""Between two tries of a unit of work that met a conflict; each twice as long as the last, and never quite."""


@value
class Occupied:
    """Another transaction holds the key now: whether it will commit is not known."""

    error: StoreError | None = None
    """What to say to those who do not wait, where it may be the whole database that is held, and not the key."""
    waited: float = 0.0
    """Seconds that the driver has waited already, by its own setting."""


@value
class Lock(Op["Row | Occupied | None"]):
    """Take the key for the transaction, and see what stands under it: a row whose times count from now, or nothing."""

    id: bytes
    own: bool
    """Open the transaction as well."""
    waits: bool = False
    """Asked again until the key is free: a store must not hold on to what the key's holder needs to finish."""


@value
class Keep(Op[None]):
    """Write the finished record; TransactionConflict where something else stands there by now."""

    id: bytes
    nonce: int
    fingerprint: bytes
    snapshot: bytes
    ttl: float
    takeover: Takeover
    tenant: str
    operation: str
    key: str | None
    attempt: int
    instead_of: Row | None
    """The row that this one replaces: expired, or abandoned by an attempt under a lease."""
    own: bool
    """Commit as well."""


@value
class Rollback:
    """Roll back the transaction that we opened."""


@value
class Rejected:
    """The handler answered this, and that it will not do what was asked: its rows go, and the answer is remembered."""

    value: Any


@value
class HandlerConflict:
    """The handler was stopped by the database for the sake of others: running it again is the cure."""

    error: BaseException


class HandlersFault(StoreUnavailable):
    """What a store raises for a Keep that failed by the handler's own doing: a constraint of its tables that is checked
    at the commit, or a transaction that it has ended itself. The cause is what the caller is to see.
    """


Flow: TypeAlias = Generator["Op[Any] | Run | Recover | Pause | Rollback", Any, "Outcome[Any] | Failed"]


def transact(call: Call, own: bool, tries: int) -> Flow:
    """One call in a transaction. ``own``: open and end it here, and run again what met a conflict."""
    if call.quota is not None:
        yield from admit(call, call.quota)
    patience = _Patience(call.policy.wait_seconds)
    for tried in range(1, tries + 1):
        try:
            return (yield from _unit(call, own, patience))
        except TransactionConflict as error:
            if not own:
                raise
            yield Rollback()
            call.tell(events.Conflicted, tried, str(error))
            if tried == tries or (patience.over and call.policy.guarantee == "at_most_once"):
                raise
        yield Pause(pause_after(call, tried))
    raise AssertionError("tries is at least 1")


class _Patience:
    """How long a duplicate still waits, over all tries."""

    __slots__ = ("interval", "left", "over")

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.interval = FIRST_POLL
        self.over = False
        """The key is ours, and what was waited for has begun."""


def pause_after(call: Call, tried: int) -> float:
    """Seconds until the next try. Spread by the call's own random bits, so that two that met do not meet again."""
    longest: float = min(FIRST_PAUSE * 2 ** min(tried, 10), SLOWEST_PAUSE)
    return longest * (0.5 + ((call.nonce >> (8 * (tried % 7))) & 0xFF) / 512)


def _unit(call: Call, own: bool, patience: _Patience) -> Flow:
    while True:
        row = yield Lock(call.id, own, patience.left > 0)
        record = _standing(call, row)
        if isinstance(record, Claimed):
            patience.over = True
            try:
                return (yield from _execute(call, own, row, record))
            except StoreUnavailable:
                _not_kept(call, record)  # whoever runs it again claims again
                raise
        if own:
            yield Rollback()  # nothing was done in it, and a waiting duplicate needs a new snapshot anyway
        if record.state is State.DONE and record.expires_in <= call.policy.reject_seconds:
            raise expired(call, record)
        check_same_request(call, record)
        if record.state is State.DONE:
            return replay(call, record)
        if record.state is State.UNKNOWN:
            call.tell(events.WentUnknown, record.attempt)
            raise OutcomeUnknown(
                f"{call}: attempt {record.attempt} ended without a word, and the policy forbids another. "
                "Find out what happened, then resolve() or release() it"
            )
        if isinstance(row, Occupied):
            patience.left -= row.waited
        if patience.left <= 0:
            if isinstance(row, Occupied) and row.error is not None:
                raise row.error
            raise turned_away(call, record)
        span = min(patience.left, patience.interval)
        yield Pause(span)
        call.tell(events.Waited, span)
        patience.left -= span
        patience.interval = min(patience.interval * 2, SLOWEST_POLL)


def _standing(call: Call, row: Row | Occupied | None) -> Claimed | Record:
    """The right to run, or the record that stands in its way. The rules are those of a claim."""
    if isinstance(row, Occupied):
        return _TAKEN
    if row is None or state_of(row, 0.0) is State.ABSENT:
        return Claimed(0, 1)
    record = show(row, 0.0)
    if record.state is not State.ABANDONED or not same_request(row.fingerprint, call.fingerprint):
        return record
    if may_take_over(row.takeover, call.policy.takeover):
        return Claimed(0, row.attempt + 1, row.steps)
    return replace(record, state=State.UNKNOWN)  # shown as what it is; for a refusal nothing is written


_TAKEN: Final = Record(b"", State.RUNNING, 0, 1, b"", None, 1.0, 0.0, 1.0)
"""What is known of a record that another transaction is about to write."""


def _execute(call: Call, own: bool, row: Row | None, claimed: Claimed) -> Flow:
    if claimed.attempt == 1:
        if call.quota is not None:
            call.quota.claimed(call.tenant)
        call.tell(events.Started, 1, 0)
    else:
        call.tell(events.TakenOver, claimed.attempt, 0)
        if call.policy.recover is not None:
            recovered: Outcome[Any] | Failed | None = yield from _recover(call, own, row, claimed)
            if recovered is not None:
                return recovered
    outcome = yield Run(claimed)
    kind = type(outcome)
    if kind is Returned:
        return (yield from _complete(call, own, row, claimed, outcome.value))
    if kind is Rejected:
        return (yield from _refused(call, row, claimed, outcome.value))
    if kind is HandlerConflict:
        if own:
            raise TransactionConflict(
                f"{call}: the handler met another transaction ({describe_error(outcome.error)}); nothing was stored"
            ) from outcome.error
        _not_kept(call, claimed)
        return Failed(outcome.error)
    return (yield from _failed(call, own, row, claimed, outcome.error))


def _not_kept(call: Call, claimed: Claimed) -> None:
    """Nothing is stored under the key: its place in the quota is free again."""
    if call.quota is not None and claimed.attempt == 1:
        call.quota.released(call.tenant)


def _recover(
    call: Call, own: bool, row: Row | None, claimed: Claimed
) -> Generator[Any, Any, Outcome[Any] | Failed | None]:
    """Ask the hook what the abandoned attempt did. None: it did nothing, so run."""
    outcome = yield Recover(claimed)
    if type(outcome) is not Returned:
        if own:
            yield Rollback()
        return Failed(outcome.error)
    verdict = outcome.value
    if verdict is NOT_DONE:
        return None
    if isinstance(verdict, Recovered):
        call.tell(events.Recovered, claimed.attempt)
        return (yield from _complete(call, own, row, claimed, verdict.value))
    if own:
        yield Rollback()
    error: SemelError
    if verdict is CANNOT_TELL:
        call.tell(events.WentUnknown, claimed.attempt)
        error = OutcomeUnknown(f"{call}: the recover hook could not tell what attempt {claimed.attempt - 1} did")
    else:
        error = PolicyError(f"recover returns Recovered(value), NOT_DONE or CANNOT_TELL, not {type(verdict).__name__}")
    raise error


def _complete(call: Call, own: bool, row: Row | None, claimed: Claimed, result: Any) -> Flow:
    dropped: NotSerializable | None = None
    try:
        snapshot = call.seal_value(result)
    except NotSerializable as error:
        # Whoever commits the effect commits that it is done: it must never run again.
        dropped = error
        snapshot = call.seal_nothing(str(error))
    try:
        yield _keep(call, own, row, claimed, snapshot)
    except HandlersFault as fault:
        cause = fault.__cause__
        assert cause is not None
        if not isinstance(cause, ConfigurationError):
            return (yield from _failed(call, own, row, claimed, cause))
        yield Rollback()
        return _freed(call, claimed, cause)  # a mistake of the program's is never remembered
    except StoreError as error:
        error.result = result
        raise
    if dropped is not None:
        call.tell(events.ResultDropped, str(dropped))
        done = "is done and will not run again" if own else "is done once you commit (roll back, and it never was)"
        raise ResultNotStored(f"{call} {done}, but its result is lost: {dropped}", result=result) from dropped
    # A transaction of the caller's is not committed yet, and perhaps never will be.
    call.tell(events.Completed if own else events.Prepared, claimed.attempt, len(snapshot))
    return Outcome(result, False, claimed.attempt)


def _failed(call: Call, own: bool, row: Row | None, claimed: Claimed, error: BaseException) -> Flow:
    """The handler raised. What it did is undone, by us or by the caller; a failure that is an answer is remembered.

    In a transaction of our own that is one more, for the failure alone. In the caller's, the failure is written where
    that is still possible, and remembered if the caller commits all the same.
    """
    if own:
        yield Rollback()
    if not isinstance(error, call.policy.remembered):
        return _freed(call, claimed, error)
    try:
        if own:
            found = yield Lock(call.id, True)
            if isinstance(found, Occupied) or (found and found.token) != (row and row.token):
                yield Rollback()  # another call has come between: what it found out is the answer for all who follow
                _not_kept(call, claimed)
                return Failed(error)
        yield _keep(call, own, row, claimed, call.seal_error(error))
    except StoreError as failure:
        # The handler's own error matters more to the caller; without its record it is run again, that is all.
        call.tell(events.StoreFailed, "keep", str(failure))
        if isinstance(failure, StoreUnavailable):
            _not_kept(call, claimed)
        if own:
            yield Rollback()
    else:
        call.tell(events.FailureRemembered, claimed.attempt, describe_error(error))
    return Failed(error)


def _freed(call: Call, claimed: Claimed, error: BaseException) -> Failed:
    """Nothing is left of the run, and the key is free again."""
    _not_kept(call, claimed)
    call.tell(events.Released, claimed.attempt, describe_error(error), False)
    return Failed(error)


def _refused(call: Call, row: Row | None, claimed: Claimed, answer: Any) -> Flow:
    """Roll back what the handler wrote, and keep its answer in a transaction of its own."""
    yield Rollback()
    found = yield Lock(call.id, True)
    if isinstance(found, Occupied) or (found and found.token) != (row and row.token):
        raise TransactionConflict(f"{call}: another call has come between; nothing was stored")
    return (yield from _complete(call, True, row, claimed, answer))


def _keep(call: Call, own: bool, row: Row | None, claimed: Claimed, snapshot: bytes) -> Keep:
    policy = call.policy
    return Keep(
        call.id, call.nonce, call.fingerprint, snapshot, policy.kept_seconds, policy.takeover, call.tenant,
        call.operation, call.stored_key, claimed.attempt, row, own,
    )  # fmt: skip
