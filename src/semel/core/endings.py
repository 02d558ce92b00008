"""How an attempt under a lease ends if it does not simply succeed. ``core/flows.py`` continues here.

- The handler returned: Complete.
- It raised an exception that the policy remembers: Complete, with the exception.
- It raised another exception: Release to ABSENT, or to ABANDONED if steps were saved.
- It was interrupted by a cancellation, Ctrl-C or a shutdown, which says nothing about the effect. If an abandoned
  attempt may be run again anyway, this is like an exception. Otherwise it is like a crash: Release to ABANDONED, so
  that the recover hook can look, or to UNKNOWN if nobody may run it again.
- Another owner took over: the caller gets the outcome of that owner.
- The store does not take the outcome: the caller gets its result all the same, unless the policy withholds it, and the
  engine goes on trying to store it. Nobody is told to retry: that would make the effect happen again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import chain, repeat
from typing import Any, Final

from semel.core.call import Call, Failed, Flow, Outcome, Pause, Request, StoreLater, describe_error
from semel.core.encoding.snapshot import NotSerializable
from semel.core.ops import Claimed, Complete, CompleteWith, Lookup, NotWritten, Release
from semel.core.policy import Policy
from semel.core.states import State
from semel.errors import LeaseLost, NotUndone, OutcomeUnknown, RecordTooLarge, ResultNotStored, StoreError
from semel.observe import events

SETTLE_PAUSES: Final = (0.02, 0.05, 0.1, 0.25, 0.5)
"""Seconds between the tries to store an outcome, or to undo a step. The last one repeats."""


def end_uncompleted(
    call: Call, claimed: Claimed, op: Complete, result: Any, stored: Any, loss: NotSerializable | None
) -> Flow:
    """The completion was not accepted, or the result is not in it.

    :param op: the completion that was sent last.
    :param stored: the store's answer or error. After an error, ``on_unstored`` decides what the caller gets.
    :param loss: why the result could not be stored. Then ResultNotStored is raised: the record is done all the same.
    """
    if isinstance(stored, StoreError):
        return (yield from _deliver_or_withhold(call, claimed, op, result, stored))
    if type(stored) is NotWritten:
        return (yield from fail(call, claimed, stored.error))
    if stored is False:
        return (yield from lose(call, claimed))
    call.alert(events.ResultDropped, str(loss))
    raise ResultNotStored(
        f"{call} is done and will not run again, but its result is lost: {loss}", result=result
    ) from loss


def fail(call: Call, claimed: Claimed, error: BaseException) -> Flow:
    """The handler raised. Store an exception that the policy remembers; for any other one, release the key."""
    policy = call.policy
    if isinstance(error, NotUndone):  # some steps are not undone: it must not run again before someone has looked
        yield from release(call, claimed, error, to=State.UNKNOWN)
        return Failed(error)
    if isinstance(error, policy.remembered):
        op = Complete(call.id, claimed.token, call.seal_error(error), policy.retention_seconds)
        try:
            stored = yield op
        except StoreError as failure:
            op, stored, _ = yield from send_again(call, op, error, failure, f"{type(error).__qualname__}, ")
        if isinstance(stored, StoreError):  # the handler's own error matters more to the caller
            yield from _store_later(call, claimed, op, stored, events.FailureRemembered, describe_error(error))
        elif stored:
            call.tell(events.FailureRemembered, claimed.attempt, describe_error(error), call.elapsed())
        else:
            call.alert(events.LeaseLostEvent, claimed.attempt, claimed.token)
        return Failed(error)
    to = State.ABANDONED if call.has_steps else State.ABSENT
    if policy.interrupted_to is not None and not isinstance(error, Exception):
        to = policy.interrupted_to
    yield from release(call, claimed, error, to=to)
    return Failed(error)


def release(call: Call, claimed: Claimed, error: BaseException | None, *, to: State) -> Generator[Request, Any, None]:
    """End the attempt without a result. Errors of the store are only reported."""
    try:
        stored = yield Release(call.id, claimed.token, to)
    except StoreError as failure:
        # Not fatal: the lease ends by itself. The caller must see the handler's error, not this one.
        call.tell(events.StoreFailed, "release", str(failure))
        return
    if stored:
        if to is State.ABSENT and call.quota is not None:
            call.quota.remove_key(call.tenant)
        call.tell(
            events.Released, claimed.attempt, "" if error is None else describe_error(error), to is State.ABANDONED,
            call.elapsed(),
        )  # fmt: skip
    else:
        call.alert(events.LeaseLostEvent, claimed.attempt, claimed.token)


def send_again(
    call: Call, op: Complete, result: Any, error: StoreError, about: str = ""
) -> Generator[Request, Any, tuple[Complete, Any, NotSerializable | None]]:
    """Retry a completion that the store has not stored. If it is too large, send smaller ones: the effect has happened
    and must not happen again.

    Returns the Op that was sent last, the store's answer or error, and the error to raise if the result is lost.
    """
    if not isinstance(error, RecordTooLarge):
        answer = yield from _retry(call, op, error)
        if not isinstance(answer, RecordTooLarge):
            return op, answer, None
        error = answer
    reason = f"{about}{error}"
    for less, lost in call.shorter_completions(op, result, reason):
        if lost is None:
            call.alert(events.ResultDropped, reason)
        try:
            answer = yield less
        except RecordTooLarge as again:
            answer = again
        except StoreError as failure:
            answer = yield from _retry(call, less, failure)
        if not isinstance(answer, RecordTooLarge):
            return less, answer, lost
        error = answer
    return op, error, None


def _retry(call: Call, op: Complete, error: StoreError) -> Generator[Request, Any, bool | StoreError]:
    """Send a completion to a failing store until it is stored, for at most the policy's ``completion_timeout``.

    Returns the store's answer, or its last error.
    """
    call.tell(events.StoreFailed, "complete", str(error))
    for pause in settle_pauses(call.policy):
        yield Pause(pause)
        try:
            stored: bool = yield op
            return stored
        except RecordTooLarge as too_large:
            return too_large
        except StoreError as again:
            error = again
            call.tell(events.StoreFailed, "complete", str(error))
    return error


def settle_pauses(policy: Policy) -> Iterator[float]:
    """Yield the pauses between the tries to settle something, together at most the policy's ``completion_timeout``."""
    remaining = policy.completion_seconds
    for pause in chain(SETTLE_PAUSES, repeat(SETTLE_PAUSES[-1])):
        if pause > remaining:
            return
        remaining -= pause
        yield pause


def _deliver_or_withhold(call: Call, claimed: Claimed, op: Complete, result: Any, error: StoreError) -> Flow:
    """The handler returned, and the store does not take the result: deliver it, or withhold it."""
    # The store's own message does not say that the handler ran.
    message = f"{call} ran, but its outcome could not be stored: {error}"
    if isinstance(op, CompleteWith):  # without its writes the operation has had no effect, so a retry is right
        failure = type(error)(message)
        failure.result = result
        raise failure from error
    yield from _store_later(call, claimed, op, error, events.Completed, len(op.snapshot))
    if call.policy.on_unstored == "withhold":
        raise OutcomeUnknown(message, result=result) from error
    return Outcome(result, False, claimed.attempt, stored=False)


def _store_later(
    call: Call, claimed: Claimed, op: Complete, error: StoreError, event: type[events.Event], detail: Any
) -> Generator[Request, Any, None]:
    """Report that the outcome is not stored, and leave it to the engine. More tries cannot help if it is too large."""
    call.alert(events.Unstored, claimed.attempt, str(error))
    if not isinstance(error, RecordTooLarge):
        yield StoreLater(op, (event, claimed.attempt, detail))


def lose(call: Call, claimed: Claimed) -> Flow:
    """Another owner has taken over. Return its outcome, or raise LeaseLost if there is none yet."""
    call.alert(events.LeaseLostEvent, claimed.attempt, claimed.token)
    record = yield Lookup(call.id)
    if record is not None and record.state is State.DONE:
        call.tell_replay(record)
        return call.open_outcome(record.snapshot, record.attempt)
    raise LeaseLost(f"{call}: attempt {claimed.attempt} outlived its lease and another owner took over")
