"""Outcomes that the store has not taken yet: bookkeeping without I/O, for both keepers.

The handler has ended, and its caller has the result. Until the outcome is stored, the lease is renewed, so that nobody
runs the operation again. When the lease has ended although the store could not be reached, storing is still tried: if
nobody has taken over, the outcome counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from semel.core.call import StoreLater
from semel.engine.drive.flights import Flight, Flights
from semel.engine.drive.leases import Lease, Leases
from semel.observe import events

FIRST_PAUSE: Final = 0.1
SLOWEST_PAUSE: Final = 1.0
"""Seconds between two tries to store everything. The pause is doubled while nothing is stored."""
KEEP_TRYING: Final = 600.0
"""Seconds until an outcome is given up. Its lease is no longer renewed then."""
CLOSE_TIMEOUT: Final = 2.0
"""Seconds that a guard waits for the last try when it is closed."""


class UnstoredOutcome:
    """One outcome, and what its call holds until it is stored."""

    __slots__ = ("began", "flight", "lease", "request")

    def __init__(self, request: StoreLater, lease: Lease, flight: Flight | None, began: float) -> None:
        self.request = request
        self.lease = lease
        self.flight = flight
        self.began = began


class Backlog:
    """The outcomes of one guard that are not stored yet."""

    __slots__ = ("_flights", "_leases", "_pause", "_waiting")

    def __init__(self, leases: Leases, flights: Flights) -> None:
        self._leases = leases
        self._flights = flights
        self._waiting: list[UnstoredOutcome] = []
        self._pause = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, outcome: UnstoredOutcome) -> None:
        self._waiting.append(outcome)
        self._pause = FIRST_PAUSE

    def next_pause(self) -> float:
        """Seconds until the next try."""
        pause, self._pause = self._pause, min(self._pause * 2, SLOWEST_PAUSE)
        return pause

    def due(self) -> list[UnstoredOutcome]:
        """The outcomes to send now."""
        return list(self._waiting)

    def note_answers(self, sent: Sequence[UnstoredOutcome], answers: Sequence[Any], now: float) -> None:
        """Note the store's answers. Whatever is neither True nor False is a failure, and tried again."""
        for outcome, answer in zip(sent, answers, strict=True):
            call = outcome.lease.call
            if answer is True:
                if outcome.flight is not None:
                    outcome.flight.completed = outcome.request.op
                call.tell(*outcome.request.report, call.elapsed())
            elif answer is False:
                call.alert(events.LeaseLostEvent, outcome.lease.attempt, outcome.lease.token)
            elif now - outcome.began < KEEP_TRYING:
                continue
            else:
                call.alert(events.StoreFailed, "complete", f"given up: {answer}")
            self._end(outcome)

    def give_up(self) -> None:
        """Release what is left, when the guard is closed: the leases end by themselves."""
        for outcome in self.due():
            outcome.lease.call.alert(events.StoreFailed, "complete", "given up: the guard is closed")
            self._end(outcome)

    def _end(self, outcome: UnstoredOutcome) -> None:
        self._waiting.remove(outcome)
        self._leases.drop(outcome.lease)
        if outcome.flight is not None:
            self._flights.land(outcome.flight)
