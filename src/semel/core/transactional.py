"""The flow of the transactional mode: lock the key, run the handler and write the finished record, in one transaction.

The transaction belongs to the caller, who commits it, or (``own``) to the engine, which opens and ends it. If it
commits, the result is stored; if it rolls back, nothing ever happened. So there is no lease, no owner to fence off, and
nothing to release. The lock makes duplicates wait or fail early, but the record's primary key has the last word. A call
that runs into it, or that the database stops in favour of another transaction, raises TransactionConflict, and nothing
is stored. In a transaction of the engine the whole unit of work is then run again, at most ``tries`` times; under
``at_most_once`` only if the handler had not started.

An effect that is one SQL statement is cheaper (``execute_once``): where the database can, the statement writes its own
record. The record's primary key decides, before anything is locked or looked up, and the statement of the loser is
undone as a whole. Whatever else it meets, the flow goes on as above.

Like ``core/flows.py`` this is a generator that knows no driver, no clock and no event loop.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Final, TypeAlias

from semel.core.call import (
    NOT_DONE,
    Call,
    Failed,
    Outcome,
    Pause,
    Raised,
    Recover,
    Recovered,
    Returned,
    Run,
    describe_error,
)
from semel.core.encoding.snapshot import NotSerializable
from semel.core.flows import (
    FIRST_POLL,
    SLOWEST_POLL,
    check_same_request,
    in_progress,
    no_recovery,
    outcome_unknown,
    replay,
)
from semel.core.ops import Claimed, Op, Record
from semel.core.quota import admit
from semel.core.semantics import Row, may_take_over, same_request, show, state_of
from semel.core.states import State, Takeover
from semel.core.values import value
from semel.errors import (
    ConfigurationError,
    ResultNotStored,
    StoreError,
    StoreUnavailable,
    TransactionConflict,
)
from semel.observe import events

FIRST_PAUSE: Final = 0.004
SLOWEST_PAUSE: Final = 0.25
"""Seconds between two tries after a conflict. Each pause is twice as long as the last, with some jitter."""


@value
class Occupied:
    """Another transaction holds the key, and nobody knows whether it will commit."""

    error: StoreError | None = None
    """The error for a caller that does not wait, if perhaps the whole database is locked and not only the key."""
    waited: float = 0.0
    """Seconds that the driver has already waited, by its own setting."""


@value
class Lock(Op["Row | Occupied | None"]):
    """Lock the key for the transaction. The answer is the stored row, with times relative to now, or None."""

    id: bytes
    own: bool
    """Open the transaction first."""
    waits: bool = False
    """Whether the flow polls until the key is free. Then the store must not keep a lock that the key's holder needs."""
    looks: bool = False
    """Only look: no transaction is open that could hold the lock."""


@value
class Keep(Op[None]):
    """Write the finished record. Raises TransactionConflict if there is another record by now."""

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
    """The row that this one replaces: an expired one, or one that an attempt under a lease abandoned."""
    own: bool
    """Commit afterwards."""


@value
class SQLEffect:
    """An effect that is one SQL statement of the caller's, in the style of the driver's own parameters."""

    statement: str
    parameters: Any
    """A sequence or a mapping."""


@value
class ExecuteOnce(Op["bytes | Raised | HandlerConflict | None"]):
    """Run the effect and write its finished record in one statement. The answer is the snapshot.

    It is None if there is another record, or one about to be committed. The statement is undone then.
    """

    effect: SQLEffect
    keep: Keep
    """The record. Its snapshot is only the header: the database adds the result."""


@value
class StatementResult:
    """What an SQL statement did, when it ran."""

    rows: list[dict[str, Any]]
    """The rows of its RETURNING clause, as plain data: numbers, text, lists and dicts. Dates and times are text."""
    count: int
    """How many rows it returned; without RETURNING, how many it changed."""
    replayed: bool
    """True if the statement did not run now: this is the first call's result."""


@value
class Rollback:
    """Roll back the transaction that the engine opened."""


@value
class Rejected:
    """The handler returned this value, and rejects the request: its rows are rolled back, and the value is stored."""

    value: Any


@value
class HandlerConflict:
    """The database stopped the handler in favour of another transaction. Running it again may help."""

    error: BaseException


class HandlersFault(StoreUnavailable):
    """Raised by a store for a Keep that failed because of the handler: a constraint that is checked at the commit, or a
    transaction that the handler has ended itself. The caller gets its cause.
    """


Flow: TypeAlias = Generator["Op[Any] | Run | Recover | Pause | Rollback", Any, "Outcome[Any] | Failed"]


def transact(call: Call, own: bool, tries: int, effect: SQLEffect | None = None, header: bytes | None = None) -> Flow:
    """Perform one call in a transaction. With ``own``, open and end it here, and run it again after a conflict.

    :param effect: the whole handler, which ``execute_once`` did not get done in one statement.
    :param header: the start of its snapshot, if the database can still write the record with it.
    """
    if call.quota is not None and effect is None:
        yield from admit(call, call.quota)
    remaining, interval = call.policy.wait_seconds, FIRST_POLL  # a duplicate waits so long over all tries
    tried, started = 1, False
    while True:
        try:
            row = yield Lock(call.id, own, remaining > 0)
            record = _FIRST if row is None else _claim(call, row)
            if type(record) is Claimed:
                started = True
                try:
                    if record.attempt > 1:
                        known: Outcome[Any] | Failed | None = yield from _take_over(call, own, row, record)
                        if known is not None:
                            return known
                    elif call.quota is not None or call.hook is not None:
                        _start(call)
                    if effect is None or header is None or own or row is not None:
                        outcome = yield _RUN_FIRST if record is _FIRST else Run(record)
                    else:
                        outcome = yield ExecuteOnce(effect, _keep(call, False, None, record, header))
                    if type(outcome) is Returned:
                        return (yield from _complete(call, own, row, record, outcome.value))
                    return (yield from _end(call, own, row, record, outcome))
                except StoreUnavailable:
                    _free_quota(call, record)  # the next run claims again
                    raise
            if own:
                yield Rollback()  # nothing was done in it, and a duplicate that waits needs a new database snapshot
        except TransactionConflict as error:
            if not own:
                raise
            yield Rollback()
            call.tell(events.Conflicted, tried, str(error))
            if tried == tries or (started and call.policy.guarantee == "at_most_once"):
                raise
            yield Pause(pause_after(call, tried))
            tried += 1
            continue
        assert isinstance(record, Record)
        if record.state is State.DONE:
            return replay(call, record)
        check_same_request(call, record)
        if record.state is State.UNKNOWN:
            raise outcome_unknown(call, record)
        if isinstance(row, Occupied):
            remaining -= row.waited
            call.waited += row.waited
        if remaining <= 0:
            if isinstance(row, Occupied) and row.error is not None:
                raise row.error
            raise in_progress(call, record)
        span = min(remaining, interval)
        yield Pause(span)
        call.tell(events.Waited, span)
        call.waited += span
        remaining -= span
        interval = min(interval * 2, SLOWEST_POLL)


def execute_once(call: Call, own: bool, tries: int, effect: SQLEffect, header: bytes | None) -> Flow:
    """Perform a call whose handler runs ``effect``.

    :param own: no transaction is open, so that a statement commits by itself.
    :param header: the start of the snapshot, if the database can write the record with the same statement. In a
        transaction of the caller that is done after the key was locked: an insert that fails would break it.
    """
    if call.quota is not None:
        yield from admit(call, call.quota)
    if own and header is not None:
        found = yield ExecuteOnce(effect, _keep(call, True, None, _FIRST, header))
        kind = type(found)
        if kind is bytes:
            _start(call)
            return _end_statement(call, True, found)
        if kind is Raised:
            _start(call)
            return (yield from _fail(call, True, None, _FIRST, found.error))
        if found is None:
            row = yield Lock(call.id, False, looks=True)
            if isinstance(row, Row) and state_of(row, 0.0) is State.DONE:
                return replay(call, show(row, 0.0))
    return (yield from transact(call, own, tries, effect, header))


def pause_after(call: Call, tried: int) -> float:
    """Return the seconds until the next try. The call's own random bits spread them, so that two calls that conflicted
    do not conflict again.
    """
    longest: float = min(FIRST_PAUSE * 2 ** min(tried, 10), SLOWEST_PAUSE)
    return longest * (0.5 + ((call.nonce >> (8 * (tried % 7))) & 0xFF) / 512)


def _claim(call: Call, row: Row | Occupied) -> Claimed | Record:
    """Return Claimed if the call may run, otherwise the record that prevents it. The rules are those of a claim."""
    if isinstance(row, Occupied):
        return _TAKEN
    record = show(row, 0.0)
    if record.state is State.ABSENT:
        return _FIRST
    if record.state is not State.ABANDONED or not same_request(row.fingerprint, call.fingerprint):
        return record
    if may_take_over(row.takeover, call.policy.takeover):
        return Claimed(0, row.attempt + 1, row.steps)
    return replace(record, state=State.UNKNOWN)  # reported as UNKNOWN, but nothing is written


_TAKEN: Final = Record(b"", State.RUNNING, 0, 1, b"", None, 1.0, 0.0, 1.0)
"""A placeholder for a record that another transaction is about to write."""
_FIRST: Final = Claimed(0, 1)
_RUN_FIRST: Final = Run(_FIRST)


def _end(call: Call, own: bool, row: Row | None, claimed: Claimed, outcome: Any) -> Flow:
    """End an attempt whose handler did not simply return."""
    kind = type(outcome)
    if kind is bytes:
        return _end_statement(call, False, outcome)
    if kind is Rejected:
        return (yield from _reject(call, row, claimed, outcome.value))
    if kind is HandlerConflict:
        if own:
            raise TransactionConflict(
                f"{call}: the handler met another transaction ({describe_error(outcome.error)}); nothing was stored"
            ) from outcome.error
        _free_quota(call, claimed)
        return Failed(outcome.error)
    return (yield from _fail(call, own, row, claimed, outcome.error))


def _free_quota(call: Call, claimed: Claimed) -> None:
    """Nothing is stored under the key, so it does not count towards the quota."""
    if call.quota is not None and claimed.attempt == 1:
        call.quota.remove_key(call.tenant)


def _start(call: Call) -> None:
    """The first attempt of a call runs."""
    if call.quota is not None:
        call.quota.add_key(call.tenant)
    if call.hook is not None:
        call.started = False  # each run after a conflict is reported
        call.tell_start(0)


def _take_over(
    call: Call, own: bool, row: Row | None, claimed: Claimed
) -> Generator[Any, Any, Outcome[Any] | Failed | None]:
    """Ask the hook what the abandoned attempt did. Returns None if there is none, or if it did nothing, so that the
    handler runs.
    """
    call.tell(events.TakenOver, claimed.attempt, 0)
    if call.policy.recover is None:
        return None
    outcome = yield Recover(claimed)
    if type(outcome) is not Returned:
        if own:
            yield Rollback()
        return Failed(outcome.error)
    verdict = outcome.value
    if verdict is NOT_DONE:
        return None
    if isinstance(verdict, Recovered):
        call.tell(events.RecoveredEvent, claimed.attempt)
        return (yield from _complete(call, own, row, claimed, verdict.value))
    if own:
        yield Rollback()
    raise no_recovery(call, claimed, verdict)


def _complete(call: Call, own: bool, row: Row | None, claimed: Claimed, result: Any) -> Flow:
    loss: NotSerializable | None = None
    try:
        snapshot = call.seal_value(result)
    except NotSerializable as error:
        # The commit makes the effect durable, so it must also make durable that it is done: it must never run again.
        loss = error
        snapshot = call.seal_nothing(str(error))
    if call.hook is not None:
        call.sent = call.elapsed()
    try:
        yield _keep(call, own, row, claimed, snapshot)
    except HandlersFault as fault:
        cause = fault.__cause__
        assert cause is not None
        if not isinstance(cause, ConfigurationError):
            return (yield from _fail(call, own, row, claimed, cause))
        yield Rollback()
        return _forget(call, claimed, cause)
    except StoreError as error:
        error.result = result
        raise
    if loss is not None:
        call.alert(events.ResultDropped, str(loss))
        done = "is done and will not run again" if own else "is done if you commit (not if you roll back)"
        raise ResultNotStored(f"{call} {done}, but its result is lost: {loss}", result=result) from loss
    if call.hook is not None:
        elapsed = call.elapsed()
        if own:
            call.tell(events.Completed, claimed.attempt, len(snapshot), elapsed, elapsed - call.sent)
        else:  # the transaction of the caller is not committed yet, and perhaps never will be
            call.tell(events.Prepared, claimed.attempt, len(snapshot), elapsed)
    return Outcome(result, False, claimed.attempt)


def _end_statement(call: Call, own: bool, snapshot: bytes) -> Outcome[Any]:
    """The statement has written its own record, with this snapshot."""
    if call.hook is not None:
        call.tell(events.Completed if own else events.Prepared, 1, len(snapshot), call.elapsed())
    return call.open_outcome(snapshot, 1, replayed=False)


def _fail(call: Call, own: bool, row: Row | None, claimed: Claimed, error: BaseException) -> Flow:
    """The handler raised. Its rows are rolled back, by the engine or the caller. An exception that the policy remembers
    is stored.

    The engine stores it in a second transaction. In a transaction of the caller it is written if that is still
    possible, and remembered if the caller commits all the same.
    """
    if own:
        yield Rollback()
    if not isinstance(error, call.policy.remembered) or isinstance(error, ConfigurationError):
        return _forget(call, claimed, error)  # a mistake in the program is never remembered
    try:
        if own and not (yield from _lock_again(call, row)):
            yield Rollback()  # later calls get the result of the other call
            _free_quota(call, claimed)
            return Failed(error)
        yield _keep(call, own, row, claimed, call.seal_error(error))
    except StoreError as failure:
        # The handler's own error matters more to the caller. Without its record the operation is run again.
        call.tell(events.StoreFailed, "keep", str(failure))
        if isinstance(failure, StoreUnavailable):
            _free_quota(call, claimed)
        if own:
            yield Rollback()
    else:
        call.tell(events.FailureRemembered, claimed.attempt, describe_error(error), call.elapsed())
    return Failed(error)


def _forget(call: Call, claimed: Claimed, error: BaseException) -> Failed:
    """Nothing is left of the attempt, and the key is free again."""
    _free_quota(call, claimed)
    call.tell(events.Released, claimed.attempt, describe_error(error), False, call.elapsed())
    return Failed(error)


def _reject(call: Call, row: Row | None, claimed: Claimed, answer: Any) -> Flow:
    """Roll back the handler's rows, and store its answer in a transaction of its own."""
    yield Rollback()
    if not (yield from _lock_again(call, row)):
        raise TransactionConflict(f"{call}: another call used the key in the meantime; nothing was stored")
    return (yield from _complete(call, True, row, claimed, answer))


def _lock_again(call: Call, row: Row | None) -> Generator[Any, Any, bool]:
    """Lock the key in a new transaction. Returns False if another call has used it in the meantime."""
    found = yield Lock(call.id, True)
    return not isinstance(found, Occupied) and (found and found.token) == (row and row.token)


def _keep(call: Call, own: bool, row: Row | None, claimed: Claimed, snapshot: bytes) -> Keep:
    policy = call.policy
    return Keep(
        call.id, call.nonce, call.fingerprint, snapshot, policy.retention_seconds, policy.takeover, call.tenant,
        call.operation, call.stored_key, claimed.attempt, row, own,
    )  # fmt: skip
