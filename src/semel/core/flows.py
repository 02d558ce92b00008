"""The flow of a call: claim the key, then run, replay, wait, take over or refuse. Written once for sync and async.

A flow is a generator. It yields Ops for the store (``core/ops.py``) and requests for the engine (``core/call.py``). The
engine drives it: it sends each answer in, and throws the store's errors in at the yield. Nothing here does I/O, reads a
clock or awaits. An attempt that does not simply succeed ends in ``core/endings.py``.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from semel.core.call import (
    CANNOT_TELL,
    NOT_DONE,
    Await,
    Call,
    Declined,
    Failed,
    Flow,
    NotRun,
    Outcome,
    Recover,
    Recovered,
    Request,
    Returned,
    Run,
    Stopped,
)
from semel.core.encoding.snapshot import NotSerializable
from semel.core.endings import end_uncompleted, fail, lose, release, send_again
from semel.core.ops import INPUT, Claim, Claimed, Existing, Record, SaveStep
from semel.core.policy import duration
from semel.core.quota import admit
from semel.core.semantics import same_request
from semel.core.states import DONE, State
from semel.errors import (
    InProgress,
    KeyExpired,
    KeyReused,
    OutcomeUnknown,
    PolicyError,
    SemelError,
    StoreError,
    StoreUncertain,
)
from semel.observe import events

FIRST_POLL: Final = 0.005
SLOWEST_POLL: Final = 0.5


def perform(call: Call) -> Flow:
    """Perform one call under a lease. Returns its outcome, or Failed with the error of the handler.

    The usual ways, a first call and a replay, are written out here. What is rare has functions of its own.
    """
    policy = call.policy
    remaining = policy.wait_seconds
    interval = FIRST_POLL
    if call.quota is not None:
        yield from admit(call, call.quota)
    claim = call.claim or call.make_claim()
    while True:
        try:
            answer = yield claim
        except StoreError as error:
            answer = yield from _claim_again(call, claim, error)
        if type(answer) is Claimed:
            break
        if answer is None:
            return (yield from _run_unprotected())
        record: Record = answer.record
        if record.state is DONE:
            return replay(call, record)
        if call.fingerprint != record.fingerprint:
            check_same_request(call, record)
        if record.state is State.UNKNOWN:
            raise outcome_unknown(call, record)
        if remaining <= 0:
            raise in_progress(call, record)
        # Look again when the lease ends, at the latest: from then on the operation may be taken over.
        span = min(remaining, max(record.lease_left, FIRST_POLL))
        elapsed: float = yield Await(call.id, span, min(interval, span))
        call.tell(events.Waited, elapsed)
        call.waited += elapsed
        remaining -= elapsed
        interval = min(interval * 2, SLOWEST_POLL)

    claimed: Claimed = answer
    ending: Any = None
    if claimed.attempt > 1 or call.resumption:
        ending = yield from _take_over(call, claimed)
    else:
        if call.quota is not None:
            call.quota.add_key(call.tenant)
        if call.hook is not None:
            call.tell_start(claimed.token)
    if ending is None and call.input is not None:
        ending = yield from _save_input(call, claimed)
    if ending is None:
        ending = yield Run(claimed)
    if type(ending) is not Returned:
        return (yield from _end_without_result(call, claimed, ending))

    result, loss = ending.value, None
    op = call.completion
    if op is None:
        try:
            snapshot = call.seal_value(result)
        except NotSerializable as error:
            # The effect has happened. Store that it is done, without the result, so that it never runs again.
            loss = error
            snapshot = call.seal_nothing(str(error))
        op = call.make_completion(claimed.token, snapshot, result)
    try:
        stored = yield op
    except StoreError as error:
        op, stored, lost = yield from send_again(call, op, result, error)
        loss = loss or lost
    if stored is not True or loss is not None:
        return (yield from end_uncompleted(call, claimed, op, result, stored, loss))
    if call.hook is not None:
        call.tell_completion(claimed.attempt, op)
    return Outcome(result, False, claimed.attempt)


def replay(call: Call, record: Record) -> Outcome[Any]:
    """Return the result of a record that is done, or raise the stored exception. Raises KeyExpired and KeyReused.

    Drivers call it too: if the store answers the first claim with such a record, no flow is needed.
    """
    if 0 < call.policy.reject_seconds >= record.expires_in:
        raise key_expired(call, record)
    if call.fingerprint != record.fingerprint:
        check_same_request(call, record)
    if call.hook is not None:
        call.tell_replay(record)
    return call.open_outcome(record.snapshot, record.attempt)


def begins_plainly(call: Call, claimed: Claimed) -> bool:
    """Whether the flow runs the handler next: the attempt is the first one, and nothing is stored or counted before it.

    Drivers then run the handler and send its completion without a flow. If anything else happens, they start the flow,
    and send it the answers that they have.
    """
    return claimed.attempt == 1 and call.input is None and call.quota is None and not call.resumption


def _claim_again(call: Call, claim: Claim, error: StoreError) -> Generator[Request, Any, Claimed | Existing | None]:
    """The claim has failed. Returns the store's answer to a second one, or None if the call runs unprotected."""
    if isinstance(error, StoreUncertain) and not error.answered:
        # The claim may have been won although its answer is lost. Send the same claim again to find out: the store
        # recognises its nonce.
        call.tell(events.StoreFailed, "claim", str(error))
        try:
            answer: Claimed | Existing = yield claim
            return answer
        except StoreError as again:
            error = again
    if error.answered or not call.policy.fails_open:
        call.alert(events.StoreFailed, "claim", str(error))
        raise error
    call.tell(events.StoreFailed, "claim", str(error))
    call.alert(events.Unprotected)
    return None


def _take_over(call: Call, claimed: Claimed) -> Generator[Request, Any, Any]:
    """Begin an attempt that is not the first. Returns None if the handler runs now, or how the attempt has ended."""
    if claimed.attempt == 1:  # the abandoned record is gone, and a resumer must not start a new operation
        yield from release(call, claimed, None, to=State.ABSENT)
        return Outcome(None, False, 0)
    call.tell(events.TakenOver, claimed.attempt, claimed.token)
    return None if call.policy.recover is None else (yield from _recover(call, claimed))


def _end_without_result(call: Call, claimed: Claimed, ending: Any) -> Flow:
    """End an attempt whose handler has not returned a result."""
    kind = type(ending)
    if kind is Outcome or kind is Failed:
        return ending  # type: ignore[no-any-return] # it has ended already
    call.writes = None
    if kind is Stopped:
        return (yield from lose(call, claimed))
    if kind is Declined:
        to = State.ABANDONED if call.has_steps else State.ABSENT
        yield from release(call, claimed, None, to=to)
        return Outcome(ending.value, False, claimed.attempt)
    if kind is NotRun:
        # Nothing happened in this attempt. What an earlier one did or saved must stay.
        yield from release(call, claimed, ending.error, to=State.ABSENT if claimed.attempt == 1 else State.ABANDONED)
        return Failed(ending.error)
    return (yield from fail(call, claimed, ending.error))


def _recover(call: Call, claimed: Claimed) -> Generator[Request, Any, Returned | Outcome[Any] | Failed | None]:
    """Ask the hook what the abandoned attempt did. Returns None if it did nothing, so that the handler runs."""
    outcome = yield Recover(claimed)
    if type(outcome) is Stopped:
        return (yield from lose(call, claimed))
    if type(outcome) is not Returned:
        # The hook failed, so nothing is known yet. Leave the record abandoned: the next call asks again.
        yield from release(call, claimed, outcome.error, to=State.ABANDONED)
        return Failed(outcome.error)
    verdict = outcome.value
    if verdict is NOT_DONE:
        call.writes = ()
        return None
    if isinstance(verdict, Recovered):
        call.tell(events.RecoveredEvent, claimed.attempt)
        return Returned(verdict.value)
    error = no_recovery(call, claimed, verdict)
    yield from release(call, claimed, error, to=State.UNKNOWN if verdict is CANNOT_TELL else State.ABANDONED)
    raise error


def _save_input(call: Call, claimed: Claimed) -> Generator[Request, Any, NotRun | Stopped | None]:
    """Store the arguments before the handler runs. Returns None, or the ending of an attempt that must not run."""
    if any(name == INPUT for name, _ in claimed.steps):
        return None
    try:
        stored = yield SaveStep(call.id, claimed.token, INPUT, call.seal_input(), len(claimed.steps))
    except StoreError as error:
        call.alert(events.StoreFailed, "keep input", str(error))
        return None if call.policy.fails_open else NotRun(error)
    except NotSerializable as error:
        return NotRun(PolicyError(f"{call}: its arguments cannot be stored, so it was not run: {error}"))
    return None if stored else Stopped()


def _run_unprotected() -> Flow:
    """Run the handler without a record."""
    outcome = yield Run(None)
    if type(outcome) in (Returned, Declined):
        return Outcome(outcome.value, False, 1)
    return Failed(outcome.error)


def check_same_request(call: Call, record: Record) -> None:
    """Raise KeyReused if the record belongs to another request."""
    if not same_request(record.fingerprint, call.fingerprint):
        call.tell(events.Mismatched)
        raise KeyReused(
            f"{call}: this key was used before, and not with {call.comparison}. A new request needs a new key"
        )


def key_expired(call: Call, record: Record) -> KeyExpired:
    call.tell(events.Expired, record.age)
    return KeyExpired(f"{call}: this key was used {duration(record.age)} ago and its answer has expired; use a new key")


def in_progress(call: Call, record: Record) -> InProgress:
    retry_after = max(1.0, min(record.lease_left, 5.0))
    call.tell(events.TurnedAway, retry_after)
    return InProgress(f"{call}: the first call is still running; retry in {retry_after:.0f} s", retry_after=retry_after)


def outcome_unknown(call: Call, record: Record) -> OutcomeUnknown:
    call.alert(events.WentUnknown, record.attempt)
    return OutcomeUnknown(
        f"{call}: attempt {record.attempt} was abandoned, and the policy forbids another. "
        "Find out what happened, then resolve() or release() it"
    )


def no_recovery(call: Call, claimed: Claimed, verdict: object) -> SemelError:
    """Return the error to raise if a recover hook returned CANNOT_TELL, or a value that it must not return."""
    if verdict is CANNOT_TELL:
        call.alert(events.WentUnknown, claimed.attempt)
        return OutcomeUnknown(f"{call}: the recover hook could not tell what attempt {claimed.attempt - 1} did")
    return PolicyError(f"recover must return Recovered(value), NOT_DONE or CANNOT_TELL, not {type(verdict).__name__}")
