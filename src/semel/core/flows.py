"""What to do, written once for sync and async: generators that yield requests and are sent the answers.

A flow yields Ops for the store and a few requests for the engine (``Run``, ``Recover``, ``Await``, ``Pause``); an
engine drives it with ``send``, and throws the store's errors in at the yield. Nothing here does I/O, reads a clock or
awaits.

How an attempt ends. The handler returned: Complete. It raised: Complete where the policy remembers that exception, else
Release to ABSENT, or to ABANDONED where steps were saved. It was interrupted, by a cancellation, Ctrl-C or a shutdown,
which says nothing about the effect: like one that raised where an abandoned attempt may be run again anyway; otherwise
like a crash, Release to ABANDONED for the recover hook to look, or to UNKNOWN where nobody may run it again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, TypeAlias

from semel.core.ops import INPUT, Claim, Claimed, Complete, Lookup, NotWritten, Op, Record, Release, SaveStep
from semel.core.outcomes import CANNOT_TELL, NOT_DONE, Call, Failed, Outcome, Recovered, shown
from semel.core.quota import admit
from semel.core.serializers import NotSerializable
from semel.core.states import DONE, State
from semel.core.values import value
from semel.errors import (
    InProgress,
    KeyExpired,
    KeyReused,
    LeaseLost,
    NotUndone,
    OutcomeUnknown,
    PolicyError,
    ResultNotStored,
    SemelError,
    StoreError,
    StoreUncertain,
)
from semel.observe import events

__all__ = [
    "Await",
    "Declined",
    "Flow",
    "Lost",
    "NotRun",
    "Pause",
    "Raised",
    "Recover",
    "Request",
    "Returned",
    "Run",
    "check_same_request",
    "expired",
    "perform",
    "replay",
    "turned_away",
]


@value
class Run:
    """Run the handler, keeping the lease alive meanwhile; None as claim: the store is down and the policy is open."""

    claimed: Claimed | None


@value
class Recover:
    """Call the recover hook under the new lease."""

    claimed: Claimed


@value
class Await:
    """Wait until the record may have changed, ``seconds`` at most, polling every ``interval`` where nothing wakes us.

    Answered with the seconds that passed.
    """

    id: bytes
    seconds: float
    interval: float


@value
class Pause:
    """Let so many seconds pass."""

    seconds: float


@value
class Returned:
    """The handler returned this."""

    value: Any


@value
class Raised:
    """The handler raised this."""

    error: BaseException


@value
class Declined:
    """The handler returned this, and says that nothing happened: the answer is given, and the key is free again."""

    value: Any


@value
class Lost:
    """The lease was lost and the handler was stopped."""


@value
class NotRun:
    """The caller went away before the handler began."""

    error: BaseException


Request: TypeAlias = "Op[Any] | Run | Recover | Await | Pause"
Flow: TypeAlias = Generator[Request, Any, "Outcome[Any] | Failed"]

FIRST_POLL: Final = 0.005
SLOWEST_POLL: Final = 0.5
SETTLE_PAUSES: Final = (0.02, 0.05, 0.1, 0.25, 0.5)


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
                # It may have been made, for nobody. The same claim, known by its nonce, finds out.
                call.tell(events.StoreFailed, "claim", str(error))
                answer = yield claim
        except StoreError as error:
            call.tell(events.StoreFailed, "claim", str(error))
            if not policy.fails_open:
                raise
            call.tell(events.Unprotected)
            return (yield from _unprotected())
        if type(answer) is Claimed:
            return (yield from _execute(call, answer))
        record: Record = answer.record
        done = record.state is DONE
        if done and 0 < policy.refuse_seconds >= record.expires_in:
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
        if call.resumption:  # what was abandoned is gone by now, and a recoverer begins nothing
            yield from _release(call, claimed, None, to=State.ABSENT)
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
        return (yield from _complete(call, claimed, outcome.value))
    call.writes = None
    if kind is Lost:
        return (yield from _superseded(call, claimed))
    if kind is Declined:
        to = State.ABANDONED if call.has_steps else State.ABSENT
        yield from _release(call, claimed, None, to=to)
        return Outcome(outcome.value, False, claimed.attempt)
    if kind is NotRun:
        # Nothing happened in this attempt; what an earlier one did, or saved, is as it was.
        yield from _release(call, claimed, outcome.error, to=State.ABSENT if claimed.attempt == 1 else State.ABANDONED)
        return Failed(outcome.error)
    return (yield from _failed(call, claimed, outcome.error))


def _recover(call: Call, claimed: Claimed) -> Generator[Request, Any, Outcome[Any] | Failed | None]:
    """Ask the hook what the abandoned attempt did. None: it did nothing, so run."""
    outcome = yield Recover(claimed)
    if type(outcome) is Lost:
        return (yield from _superseded(call, claimed))
    if type(outcome) is not Returned:
        # The hook failed, so nothing is known yet: leave the attempt abandoned, for the next call to ask again.
        yield from _release(call, claimed, outcome.error, to=State.ABANDONED)
        return Failed(outcome.error)
    verdict = outcome.value
    if verdict is NOT_DONE:
        call.writes = ()
        return None
    if isinstance(verdict, Recovered):
        call.tell(events.Recovered, claimed.attempt)
        return (yield from _complete(call, claimed, verdict.value))
    error: SemelError
    if verdict is CANNOT_TELL:
        call.tell(events.WentUnknown, claimed.attempt)
        error = OutcomeUnknown(f"{call}: the recover hook could not tell what attempt {claimed.attempt - 1} did")
        yield from _release(call, claimed, error, to=State.UNKNOWN)
    else:
        error = PolicyError(f"recover returns Recovered(value), NOT_DONE or CANNOT_TELL, not {type(verdict).__name__}")
        yield from _release(call, claimed, error, to=State.ABANDONED)
    raise error


def _keep_input(call: Call, claimed: Claimed) -> Generator[Request, Any, NotRun | Lost | None]:
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
    return None if held else Lost()


def _complete(call: Call, claimed: Claimed, result: Any) -> Flow:
    dropped: NotSerializable | None = None
    try:
        snapshot = call.seal_value(result)
    except NotSerializable as error:
        # The effect has happened: remember that it is done, whatever becomes of the result, and never run it again.
        dropped = error
        snapshot = call.seal_nothing(str(error))
    op = call.completion(claimed.token, snapshot, result)
    try:
        held = yield op
    except StoreError as error:
        held = yield from _settle(call, op, result, error)
    if type(held) is NotWritten:
        return (yield from _failed(call, claimed, held.error))
    if held is False:
        return (yield from _superseded(call, claimed))
    if held is None:
        return Outcome(result, False, claimed.attempt)
    if dropped is not None:
        call.tell(events.ResultDropped, str(dropped))
        raise ResultNotStored(
            f"{call} is done and will not run again, but its result is lost: {dropped}", result=result
        ) from dropped
    call.tell(events.Completed, claimed.attempt, len(snapshot))
    return Outcome(result, False, claimed.attempt)


def _failed(call: Call, claimed: Claimed, error: BaseException) -> Flow:
    """The handler raised. An exception that is an answer is stored; any other means that nothing happened, unless it
    is no Exception but an interruption."""
    policy = call.policy
    if isinstance(error, NotUndone):  # half of it stands: nobody may run it again, or be told that it is over
        yield from _release(call, claimed, error, to=State.UNKNOWN)
        return Failed(error)
    if isinstance(error, policy.remembered):
        op = Complete(call.id, claimed.token, call.seal_error(error), policy.kept_seconds)
        try:
            try:
                held = yield op
            except StoreError as failure:
                held = yield from _settle(call, op, error, failure)
        except StoreError:
            held = None  # the lease will end by itself; the handler's own error matters more to the caller
        if held:
            call.tell(events.FailureRemembered, claimed.attempt, shown(error))
        elif held is False:
            call.tell(events.LeaseLost, claimed.attempt, claimed.token)
        return Failed(error)
    to = State.ABANDONED if call.has_steps else State.ABSENT
    if policy.interrupted_to is not None and not isinstance(error, Exception):
        to = policy.interrupted_to
    yield from _release(call, claimed, error, to=to)
    return Failed(error)


def _release(call: Call, claimed: Claimed, error: BaseException | None, *, to: State) -> Generator[Request, Any, None]:
    try:
        held = yield Release(call.id, claimed.token, to)
    except StoreError as failure:
        # Not fatal: the lease ends by itself. The error in hand is the one the caller must see.
        call.tell(events.StoreFailed, "release", str(failure))
        return
    if held:
        if to is State.ABSENT and call.quota is not None:
            call.quota.released(call.tenant)
        call.tell(events.Released, claimed.attempt, "" if error is None else shown(error), to is State.ABANDONED)
    else:
        call.tell(events.LeaseLost, claimed.attempt, claimed.token)


def _settle(call: Call, op: Complete, result: Any, error: StoreError) -> Generator[Request, Any, bool | None]:
    """Offer a finished outcome to a failing store until it takes it, for ``settle_for`` at most.

    None where it was not stored and the policy is open: the caller gets its answer all the same.
    """
    left = call.policy.settle_seconds
    pauses = iter(SETTLE_PAUSES)
    pause = 0.0
    while True:
        call.tell(events.StoreFailed, "complete", str(error))
        pause = next(pauses, pause)
        if pause > left:
            if call.policy.fails_open and type(op) is Complete:  # without its writes it has had no effect
                return None
            # Not the store's own words alone: they speak of the last Op, and the effect has happened.
            unsettled = type(error)(f"{call} ran, but its outcome could not be stored: {error}")
            unsettled.result = result
            raise unsettled from error
        left -= pause
        yield Pause(pause)
        try:
            held: bool = yield op
            return held
        except StoreError as again:
            error = again


def _superseded(call: Call, claimed: Claimed) -> Flow:
    """Another owner has the operation: its outcome is the answer, where there is one."""
    call.tell(events.LeaseLost, claimed.attempt, claimed.token)
    record = yield Lookup(call.id)
    if record is not None and record.state is State.DONE:
        return replay(call, record)
    raise LeaseLost(f"{call}: attempt {claimed.attempt} outlived its lease and another owner took over")


def _unprotected() -> Flow:
    outcome = yield Run(None)
    if type(outcome) in (Returned, Declined):
        return Outcome(outcome.value, False, 1)
    return Failed(outcome.error)


def replay(call: Call, record: Record) -> Outcome[Any]:
    call.tell(events.Replayed, record.age, record.attempt)
    return Outcome(call.open_snapshot(record.snapshot), True, record.attempt)


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
