"""What an operator must know, in the log of every guard: once per cause, with the record's id and never with the key.

A hook that logs all events (``log_events``) takes its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from semel.core.call import Call
from semel.observe import events
from semel.observe.events import Event

QUIET: Final = 60.0
"""Seconds in which a cause that was logged is only counted."""
MOST_CAUSES: Final = 1000
_log = logging.getLogger("semel.guard")

_TEXTS: Final[dict[type[Event], str]] = {
    events.StoreFailed: "the store failed at {0}, so the call was refused or left to a retry: {1}",
    events.Unprotected: "the call runs without protection, because the store cannot be reached",
    events.Unstored: "the handler has ended, but its outcome is not stored yet: {1}",
    events.LeaseLostEvent: "attempt {0} lost its lease, so another one may run; its outcome may be refused",
    events.WentUnknown: "nobody knows what attempt {0} did: find out, then resolve or release the operation",
    events.UndoFailed: "the step {0!r} cannot be undone, so somebody has to look: {1}",
    events.RecoveryFailed: "attempt {0} to resume it failed, and is repeated later: {1}",
    events.RecoveryGivenUp: "it is still abandoned after attempt {0}, so no resumer tries again: somebody has to look",
    events.ResultDropped: "the operation is done, but its result could not be stored: {0}",
    events.BodyOmitted: "an answer is longer than max_stored_body ({0} bytes), so replays of it have no body",
    events.Resolved: "someone has resolved or released the operation (it happened: {0})",
    events.OutcomeReleased: "someone has released the stored outcome ({0}, token {1}): the next call runs it again",
}


class ProblemLog:
    """The log of one guard."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._causes: dict[tuple[Any, ...], tuple[float, int]] = {}
        """When each cause was logged last, and how often it has come since."""

    def __call__(self, call: Call, event: type[Event], details: tuple[Any, ...]) -> None:
        """Log a problem of this call, unless its cause was logged a moment ago."""
        if event is events.StoreFailed:  # an outage is one cause, however many calls it meets
            cause: tuple[Any, ...] = (event, details[-1])
        elif event is events.Unprotected:
            cause = (event, call.operation)
        elif event is events.BodyOmitted:  # a limit of a route, which may have a path for each order
            cause = (event, details)
        elif event is events.OutcomeReleased:  # each is a cause of its own
            cause = (event, call.id, details)
        else:
            cause = (event, call.id)
        self._write(event, call.operation, call.id, details, cause)

    def report(self, event: Event) -> None:
        """Log a problem of a resumer."""
        if type(event) in _TEXTS:
            common = {each.name for each in fields(Event)}
            details = tuple(getattr(event, each.name) for each in fields(event) if each.name not in common)
            self._write(type(event), event.operation, event.id, details, (type(event), event.id or details))

    def _write(
        self, event: type[Event], operation: str, id: bytes, details: tuple[Any, ...], cause: tuple[Any, ...]
    ) -> None:
        now = self._clock()
        logged, missed = self._causes.get(cause, (-QUIET, 0))
        if now - logged < QUIET:
            self._causes[cause] = (logged, missed + 1)
            return
        if len(self._causes) >= MOST_CAUSES:
            self._causes.clear()
        self._causes[cause] = (now, 0)
        text = _TEXTS[event].format(*details)
        more = f" ({missed} more like this in between)" if missed else ""
        about = f"{operation!r}, record {id.hex()}: " if id else ""
        _log.log(event.level, "%s%s%s", about, text, more)
