"""How an attempt ends: its outcome is stored, or its key is given back, or another owner's outcome is the answer.

The handler returned: Complete. It raised: Complete where the policy remembers that exception, else Release to ABSENT,
or to ABANDONED where steps were saved. It was interrupted, by a cancellation, Ctrl-C or a shutdown, which says nothing
about the effect: like one that raised where an abandoned attempt may be run again anyway; otherwise like a crash,
Release to ABANDONED for the recover hook to look, or to UNKNOWN where nobody may run it again.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from semel.core.call import Call, Failed, Flow, Outcome, Pause, Request, describe_error
from semel.core.encoding.serializers import NotSerializable
from semel.core.ops import Claimed, Complete, Lookup, NotWritten, Record, Release
from semel.core.states import State
from semel.errors import LeaseLost, NotUndone, RecordTooLarge, ResultNotStored, StoreError
from semel.observe import events

__all__ = ["SETTLE_PAUSES", "complete", "failed", "release", "replay", "superseded"]

SETTLE_PAUSES: Final = (0.02, 0.05, 0.1, 0.25, 0.5)


def complete(call: Call, claimed: Claimed, result: Any) -> Flow:
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
        op, held, lost = yield from _offer_again(call, op, result, error)
        dropped = dropped or lost
    if type(held) is NotWritten:
        return (yield from failed(call, claimed, held.error))
    if held is False:
        return (yield from superseded(call, claimed))
    if held is None:
        return Outcome(result, False, claimed.attempt)
    if dropped is not None:
        call.tell(events.ResultDropped, str(dropped))
        raise ResultNotStored(
            f"{call} is done and will not run again, but its result is lost: {dropped}", result=result
        ) from dropped
    call.tell(events.Completed, claimed.attempt, len(op.snapshot))
    return Outcome(result, False, claimed.attempt)


def failed(call: Call, claimed: Claimed, error: BaseException) -> Flow:
    """The handler raised. An exception that is an answer is stored; any other means that nothing happened, unless it
    is no Exception but an interruption."""
    policy = call.policy
    if isinstance(error, NotUndone):  # half of it stands: nobody may run it again, or be told that it is over
        yield from release(call, claimed, error, to=State.UNKNOWN)
        return Failed(error)
    if isinstance(error, policy.remembered):
        op = Complete(call.id, claimed.token, call.seal_error(error), policy.kept_seconds)
        try:
            try:
                held = yield op
            except StoreError as failure:
                about = f"{type(error).__qualname__}, "
                _, held, _ = yield from _offer_again(call, op, error, failure, about)
        except StoreError:
            held = None  # the lease will end by itself; the handler's own error matters more to the caller
        if held:
            call.tell(events.FailureRemembered, claimed.attempt, describe_error(error))
        elif held is False:
            call.tell(events.LeaseLost, claimed.attempt, claimed.token)
        return Failed(error)
    to = State.ABANDONED if call.has_steps else State.ABSENT
    if policy.interrupted_to is not None and not isinstance(error, Exception):
        to = policy.interrupted_to
    yield from release(call, claimed, error, to=to)
    return Failed(error)


def release(call: Call, claimed: Claimed, error: BaseException | None, *, to: State) -> Generator[Request, Any, None]:
    try:
        held = yield Release(call.id, claimed.token, to)
    except StoreError as failure:
        # Not fatal: the lease ends by itself. The error in hand is the one the caller must see.
        call.tell(events.StoreFailed, "release", str(failure))
        return
    if held:
        if to is State.ABSENT and call.quota is not None:
            call.quota.released(call.tenant)
        call.tell(
            events.Released, claimed.attempt, "" if error is None else describe_error(error), to is State.ABANDONED
        )
    else:
        call.tell(events.LeaseLost, claimed.attempt, claimed.token)


def _offer_again(
    call: Call, op: Complete, result: Any, error: StoreError, about: str = ""
) -> Generator[Request, Any, tuple[Complete, Any, NotSerializable | None]]:
    """The store has not taken a finished outcome. What it took in the end, what it said, and what was left out: where
    it cannot hold so much, the result, for the effect has happened and must not happen again.
    """
    try:
        if not isinstance(error, RecordTooLarge):
            return op, (yield from _settle(call, op, result, error)), None
    except RecordTooLarge as too_large:
        error = too_large
    reason = f"{about}{error}"
    for less, lost in call.shorter_completions(op, result, reason):
        if lost is None:
            call.tell(events.ResultDropped, reason)
        try:
            try:
                return less, (yield less), lost
            except RecordTooLarge:
                raise
            except StoreError as failure:
                return less, (yield from _settle(call, less, result, failure)), lost
        except RecordTooLarge as again:
            error = again
    if call.policy.fails_open and type(op) is Complete:
        return op, None, None
    raise _unsettled(call, result, error) from error


def _settle(call: Call, op: Complete, result: Any, error: StoreError) -> Generator[Request, Any, bool | None]:
    """Offer a finished outcome to a failing store until it takes it, for ``completion_timeout`` at most.

    None where it was not stored and the policy is open: the caller gets its answer all the same.
    """
    left = call.policy.completion_seconds
    pauses = iter(SETTLE_PAUSES)
    pause = 0.0
    while True:
        call.tell(events.StoreFailed, "complete", str(error))
        pause = next(pauses, pause)
        if pause > left:
            if call.policy.fails_open and type(op) is Complete:  # without its writes it has had no effect
                return None
            raise _unsettled(call, result, error) from error
        left -= pause
        yield Pause(pause)
        try:
            held: bool = yield op
            return held
        except RecordTooLarge:
            raise
        except StoreError as again:
            error = again


def _unsettled(call: Call, result: Any, error: StoreError) -> StoreError:
    """Not the store's own words alone: they speak of the last Op, and the effect has happened."""
    unsettled = type(error)(f"{call} ran, but its outcome could not be stored: {error}")
    unsettled.result = result
    return unsettled


def superseded(call: Call, claimed: Claimed) -> Flow:
    """Another owner has the operation: its outcome is the answer, where there is one."""
    call.tell(events.LeaseLost, claimed.attempt, claimed.token)
    record = yield Lookup(call.id)
    if record is not None and record.state is State.DONE:
        return replay(call, record)
    raise LeaseLost(f"{call}: attempt {claimed.attempt} outlived its lease and another owner took over")


def replay(call: Call, record: Record) -> Outcome[Any]:
    call.tell(events.Replayed, record.age, record.attempt)
    return Outcome(call.open_snapshot(record.snapshot), True, record.attempt)
