"""What to do, written once for sync and async: generators that yield requests and are sent the answers.

A flow yields Ops for the store and a few requests for the engine (``Run``, ``Recover``, ``Await``, ``Pause``); an
engine drives it with ``send``, and throws the store's errors in at the yield. Nothing here does I/O, reads a clock or
awaits.
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
from semel.core.encoding.serializers import NotSerializable
from semel.core.endings import complete, failed, release, replay, superseded
from semel.core.ops import INPUT, Claim, Claimed, Record, SaveStep
from semel.core.quota import admit
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

__all__ = ["check_same_request", "claim_of", "expired", "perform", "turned_away"]


FIRST_POLL: Final = 0.005
SLOWEST_POLL: Final = 0.5


def perform(call: Call) -> Flow:
    """Claim, then run; or replay, wait, take over, recover, refuse."""
    policy = call.policy
    patience = policy.wait_seconds
    interval = FIRST_POLL
    if call.quota is not None:
        yield from admit(call, call.quota)
    while True:
        claim = claim_of(call)
        try:
            try:
                answer = yield claim
            except StoreUncertain as error:
                if error.answered:
                    raise
                # It may have been made, for nobody. The same claim, known by its nonce, finds out.
                call.tell(events.StoreFailed, "claim", str(error))
                answer = yield claim
        except StoreError as error:
            call.tell(events.StoreFailed, "claim", str(error))
            if error.answered or not policy.fails_open:
                raise
            call.tell(events.Unprotected)
            return (yield from _unprotected())
        if type(answer) is Claimed:
            return (yield from _execute(call, answer))
        record: Record = answer.record
        done = record.state is DONE
        if done and 0 < policy.reject_seconds >= record.expires_in:
            raise expired(call, record)
        check_same_request(call, record)
        if done:
            return replay(call, record)
        if record.state is State.UNKNOWN:
            call.tell(events.WentUnknown, record.attempt)
            raise OutcomeUnknown(
                f"{call}: attempt {record.attempt} ended without a word, and the policy forbids another. "
                "Find out what happened, then resolve() or release() it"
            )
        if patience <= 0:
            raise turned_away(call, record)
        # Look again no later than the lease ends: from then on the operation may be taken over.
        span = min(patience, max(record.lease_left, FIRST_POLL))
        waited: float = yield Await(call.id, span, min(interval, span))
        call.tell(events.Waited, waited)
        patience -= waited
        interval = min(interval * 2, SLOWEST_POLL)


def claim_of(call: Call) -> Claim:
    """The same in every try of a call: a store that has made it knows it by its nonce, and answers alike."""
    policy = call.policy
    return Claim(
        call.id, call.nonce, call.fingerprint, policy.lease_seconds, policy.kept_seconds, policy.takeover, call.tenant,
        call.operation, call.stored_key,
    )  # fmt: skip


def _execute(call: Call, claimed: Claimed) -> Flow:
    if claimed.attempt == 1:
        if call.resumption:  # what was abandoned is gone by now, and a resumer begins nothing
            yield from release(call, claimed, None, to=State.ABSENT)
            return Outcome(None, False, 0)
        if call.quota is not None:
            call.quota.claimed(call.tenant)
        call.tell(events.Started, 1, claimed.token)
    else:
        call.tell(events.TakenOver, claimed.attempt, claimed.token)
        if call.policy.recover is not None:
            recovered = yield from _recover(call, claimed)
            if recovered is not None:
                return recovered
    outcome: Any = None if call.input is None else (yield from _keep_input(call, claimed))
    if outcome is None:
        outcome = yield Run(claimed)
    kind = type(outcome)
    if kind is Returned:
        return (yield from complete(call, claimed, outcome.value))
    call.writes = None
    if kind is Stopped:
        return (yield from superseded(call, claimed))
    if kind is Declined:
        to = State.ABANDONED if call.has_steps else State.ABSENT
        yield from release(call, claimed, None, to=to)
        return Outcome(outcome.value, False, claimed.attempt)
    if kind is NotRun:
        # Nothing happened in this attempt; what an earlier one did, or saved, is as it was.
        yield from release(call, claimed, outcome.error, to=State.ABSENT if claimed.attempt == 1 else State.ABANDONED)
        return Failed(outcome.error)
    return (yield from failed(call, claimed, outcome.error))


def _recover(call: Call, claimed: Claimed) -> Generator[Request, Any, Outcome[Any] | Failed | None]:
    """Ask the hook what the abandoned attempt did. None: it did nothing, so run."""
    outcome = yield Recover(claimed)
    if type(outcome) is Stopped:
        return (yield from superseded(call, claimed))
    if type(outcome) is not Returned:
        # The hook failed, so nothing is known yet: leave the attempt abandoned, for the next call to ask again.
        yield from release(call, claimed, outcome.error, to=State.ABANDONED)
        return Failed(outcome.error)
    verdict = outcome.value
    if verdict is NOT_DONE:
        call.writes = ()
        return None
    if isinstance(verdict, Recovered):
        call.tell(events.Recovered, claimed.attempt)
        return (yield from complete(call, claimed, verdict.value))
    error: SemelError
    if verdict is CANNOT_TELL:
        call.tell(events.WentUnknown, claimed.attempt)
        error = OutcomeUnknown(f"{call}: the recover hook could not tell what attempt {claimed.attempt - 1} did")
        yield from release(call, claimed, error, to=State.UNKNOWN)
    else:
        error = PolicyError(f"recover returns Recovered(value), NOT_DONE or CANNOT_TELL, not {type(verdict).__name__}")
        yield from release(call, claimed, error, to=State.ABANDONED)
    raise error


def _keep_input(call: Call, claimed: Claimed) -> Generator[Request, Any, NotRun | Stopped | None]:
    """Where the input is to be kept, before the handler runs. What came in the handler's place, or None."""
    if any(name == INPUT for name, _ in claimed.steps):
        return None
    try:
        held = yield SaveStep(call.id, claimed.token, INPUT, call.seal_input(), len(claimed.steps))
    except StoreError as error:
        call.tell(events.StoreFailed, "keep input", str(error))
        return None if call.policy.fails_open else NotRun(error)
    except NotSerializable as error:
        return NotRun(PolicyError(f"{call}: its input cannot be sealed, so nothing was run: {error}"))
    return None if held else Stopped()


def _unprotected() -> Flow:
    outcome = yield Run(None)
    if type(outcome) in (Returned, Declined):
        return Outcome(outcome.value, False, 1)
    return Failed(outcome.error)


def check_same_request(call: Call, record: Record) -> None:
    if call.fingerprint and record.fingerprint and call.fingerprint != record.fingerprint:
        call.tell(events.Mismatched)
        raise KeyReused(f"{call}: this key came before with another request; use a new key for a new request")


def expired(call: Call, record: Record) -> KeyExpired:
    call.tell(events.Expired, record.age)
    return KeyExpired(f"{call}: this key was used {record.age:.0f} s ago and its answer has expired; use a new key")


def turned_away(call: Call, record: Record) -> InProgress:
    retry_after = max(1.0, min(record.lease_left, 5.0))
    call.tell(events.TurnedAway, retry_after)
    return InProgress(f"{call}: the first call still runs; retry in {retry_after:.0f} s", retry_after=retry_after)
