"""Wake-up: the store wakes a waiter when the record is no longer running, whichever instance ended the attempt.

Only for stores that declare ``wakes``. ``SOON`` is so generous that a loaded machine still meets it, and ``LONG`` is so
long that a waiter meets ``SOON`` only if it is woken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semel.core.ops import Complete, Op, Release, Renew, Resolve, SaveStep
from semel.core.states import State
from semel.testing.conformance.phrases import abandoned, done, running, unknown
from semel.testing.conformance.script import (
    LIVE,
    TTL,
    Elsewhere,
    Family,
    Linger,
    Script,
    Together,
    WaitForChange,
    new_id,
)

FAMILY = Family("wakeup")
LONG = 20.0
SOON = 10.0

ENDINGS: tuple[Callable[[bytes, int], Op[Any]], ...] = (
    lambda id, token: Complete(id, token, b"answer", TTL),
    lambda id, token: Release(id, token, State.ABSENT),
    lambda id, token: Release(id, token, State.ABANDONED),
    lambda id, token: Release(id, token, State.UNKNOWN),
    lambda id, token: Resolve(id, b"forced", TTL, True),
    lambda id, token: Resolve(id, None, TTL, True),
)


def _after_a_while(request: Op[Any] | Elsewhere) -> Script:
    """Send the request when the others are probably waiting. One that comes later must not wait at all."""
    yield Linger(0.1)
    return (yield request)


@FAMILY(wakes=True)
def nobody_waits_for_what_is_not_running() -> Script:
    assert (yield WaitForChange(new_id(), LONG)) < SOON
    for make in (done, unknown, abandoned):
        id, _ = yield from make()
        assert (yield WaitForChange(id, LONG)) < SOON
        assert (yield Elsewhere(WaitForChange(id, LONG))) < SOON


@FAMILY(wakes=True)
def a_wait_ends_by_its_limit() -> Script:
    id, claimed = yield from running()
    assert (yield WaitForChange(id, 0.1)) < SOON
    assert (yield WaitForChange(id, 0)) < SOON
    assert (yield Complete(id, claimed.token, b"answer", TTL)) is True
    assert (yield WaitForChange(id, LONG)) < SOON


@FAMILY(wakes=True)
def whatever_ends_an_attempt_wakes_its_waiters() -> Script:
    for ending in ENDINGS:
        id, claimed = yield from running()
        *waited, _ = yield Together(
            [WaitForChange(id, LONG), WaitForChange(id, LONG), _after_a_while(ending(id, claimed.token))]
        )
        assert max(waited) < SOON


@FAMILY(wakes=True, second=True)
def an_attempt_ended_elsewhere_wakes_its_waiters() -> Script:
    for ending in ENDINGS:
        id, claimed = yield from running()
        *waited, _ = yield Together(
            [
                WaitForChange(id, LONG),
                Elsewhere(WaitForChange(id, LONG)),
                _after_a_while(Elsewhere(ending(id, claimed.token))),
            ]
        )
        assert max(waited) < SOON


@FAMILY(wakes=True)
def an_attempt_that_carries_on_does_not_lose_its_waiters() -> Script:
    """A waiter that a renewal or a step wakes early, and that waits again, must still be woken at the end."""
    id, claimed = yield from running()

    def carries_on() -> Script:
        yield Linger(0.05)
        assert (yield Renew(id, claimed.token, LIVE)) is True
        assert (yield SaveStep(id, claimed.token, "charge", b"1", 0)) is True
        yield Linger(0.05)
        return (yield Complete(id, claimed.token, b"answer", TTL))

    waited, completed = yield Together([WaitForChange(id, LONG), carries_on()])
    assert completed is True
    assert waited < SOON


@FAMILY(wakes=True)
def each_waits_for_its_own_record() -> Script:
    attempts = []
    for _ in range(8):
        attempts.append((yield from running()))
    waits = [WaitForChange(id, LONG) for id, _ in attempts]
    ends = [_after_a_while(Complete(id, claimed.token, b"answer", TTL)) for id, claimed in attempts]
    answers = yield Together([*waits, *ends])
    assert max(answers[:8]) < SOON
    assert answers[8:] == [True] * 8


@FAMILY(wakes=True)
def a_waiter_that_went_away_harms_nobody() -> Script:
    id, claimed = yield from running()
    assert (yield WaitForChange(id, 0.05)) < SOON
    waited, completed = yield Together(
        [WaitForChange(id, LONG), _after_a_while(Complete(id, claimed.token, b"answer", TTL))]
    )
    assert completed is True
    assert waited < SOON
