"""How an attempt under a lease ends otherwise than well. ``core/flows.py`` continues here.

- The handler returned: Complete.
- It raised an exception that the policy remembers: Complete, with the exception.
- It raised another exception: Release to ABSENT, or to ABANDONED if steps were saved.
- It was interrupted by a cancellation, Ctrl-C or a shutdown, which says nothing about the effect. If an abandoned
  attempt may be run again anyway, this is like an exception. Otherwise it is like a crash: Release to ABANDONED, so
  that the recover hook can look, or to UNKNOWN if nobody may run it again.
- Another owner took over: the caller gets the outcome of that owner.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from semel.core.call import Call, Failed, Flow, Outcome, Pause, Request, describe_error
from semel.core.encoding.serializers import NotSerializable
from semel.core.ops import Claimed, Complete, Lookup, NotWritten, Release
from semel.core.states import State
from semel.errors import LeaseLost, NotUndone, RecordTooLarge, ResultNotStored, StoreError
from semel.observe import events

__all__ = ["SETTLE_PAUSES", "fail", "lose", "not_completed", "release", "send_again"]

SETTLE_PAUSES: Final = (0.02, 0.05, 0.1, 0.25, 0.5)
"""Seconds between the tries to store an outcome. The last one repeats, up to the policy's ``completion_timeout``."""


def not_completed(call: Call, claimed: Claimed, result: Any, stored: Any, loss: NotSerializable | None) -> Flow:
    """The completion was not accepted, or the result is not in it.

    :param stored: the store's answer; None if it could not be stored, and the policy fails open.
    :param loss: why the result could not be stored. Then ResultNotStored is raised.
    """
    if type(stored) is NotWritten:
        return (yield from fail(call, claimed, stored.error))
    if stored is False:
        return (yield from lose(call, claimed))
    if stored is None:
        return Outcome(result, False, claimed.attempt)
    call.tell(events.ResultDropped, str(loss))
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
            try:
                stored = yield op
            except StoreError as failure:
                about = f"{type(error).__qualname__}, "
                _, stored, _ = yield from send_again(call, op, error, failure, about)
        except StoreError:
            stored = None  # the lease ends by itself, and the handler's own error matters more to the caller
        if stored:
            call.tell(events.FailureRemembered, claimed.attempt, describe_error(error))
        elif stored is False:
            call.tell(events.LeaseLostEvent, claimed.attempt, claimed.token)
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
            events.Released, claimed.attempt, "" if error is None else describe_error(error), to is State.ABANDONED
        )
    else:
        call.tell(events.LeaseLostEvent, claimed.attempt, claimed.token)


def send_again(
    call: Call, op: Complete, result: Any, error: StoreError, about: str = ""
) -> Generator[Request, Any, tuple[Complete, Any, NotSerializable | None]]:
    """Retry a completion that the store has not stored. If it is too large, send smaller ones: the effect has happened
    and must not happen again.

    Returns the Op that was stored, its answer, and the error to raise if the result is lost.
    """
    try:
        if not isinstance(error, RecordTooLarge):
            return op, (yield from _retry(call, op, result, error)), None
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
                return less, (yield from _retry(call, less, result, failure)), lost
        except RecordTooLarge as again:
            error = again
    if call.policy.fails_open and type(op) is Complete:
        return op, None, None
    raise _not_stored(call, result, error) from error


def _retry(call: Call, op: Complete, result: Any, error: StoreError) -> Generator[Request, Any, bool | None]:
    """Send a completion to a failing store until it is stored, for at most the policy's ``completion_timeout``.

    Returns the store's answer, or None if it was not stored and the policy fails open: the caller gets its result
    all the same.
    """
    remaining = call.policy.completion_seconds
    pauses = iter(SETTLE_PAUSES)
    pause = 0.0
    while True:
        call.tell(events.StoreFailed, "complete", str(error))
        pause = next(pauses, pause)
        if pause > remaining:
            # Not for CompleteWith: without its writes the operation has had no effect.
            if call.policy.fails_open and type(op) is Complete:
                return None
            raise _not_stored(call, result, error) from error
        remaining -= pause
        yield Pause(pause)
        try:
            stored: bool = yield op
            return stored
        except RecordTooLarge:
            raise
        except StoreError as again:
            error = again


def _not_stored(call: Call, result: Any, error: StoreError) -> StoreError:
    """Return the error to raise. The store's own message does not say that the handler ran, so this one does."""
    failure = type(error)(f"{call} ran, but its outcome could not be stored: {error}")
    failure.result = result
    return failure


def lose(call: Call, claimed: Claimed) -> Flow:
    """Another owner has taken over. Return its outcome, or raise LeaseLost if there is none yet."""
    call.tell(events.LeaseLostEvent, claimed.attempt, claimed.token)
    record = yield Lookup(call.id)
    if record is not None and record.state is State.DONE:
        return call.replay(record)
    raise LeaseLost(f"{call}: attempt {claimed.attempt} outlived its lease and another owner took over")
