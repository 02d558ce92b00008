"""A batch on its way to a server, and how it is tried again; and the two lanes that do so, sync and async.

Knows errors of our tree and what they mean for another try, but no server and no driver.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from semel.core.ops import Op, Resolve
from semel.errors import RecordTooLarge, SemelError, StoreUnavailable, StoreUncertain
from semel.sql.batches import PENDING
from semel.sql.connections.refusals import Contended, Refused, Unreachable

__all__ = ["CONTENTION_TRIES", "AsyncTripLane", "Trip", "TripLane"]

FIRST_PAUSE: Final = 0.02
SLOWEST_PAUSE: Final = 0.25
CONTENTION_TRIES: Final = 5
"""How often a batch is sent that fails because of others: a deadlock, a lock held for too long."""


class Trip:
    """One batch on its way: what is answered, and how often the rest is tried. The lane does the sending and waiting.

    A batch is several statements, each committed by itself, so answers are kept as they come and only the rest is sent
    again. A lost connection is opened again and the rest sent again, for Ops may be sent twice, until ``patience`` is
    used up. Contention (a deadlock) is tried again at once, a few times. What is refused in a batch of several is found
    out by sending each Op by itself, so that one bad Op does not fail its neighbours.
    """

    __slots__ = ("_contention", "_left", "_ops", "_pause", "_sent", "_until", "answers", "found")

    def __init__(self, ops: Sequence[Op[Any]], patience: float) -> None:
        self._ops = ops
        self._until = time.monotonic() + patience
        self._pause = FIRST_PAUSE
        self._contention = 0
        self._sent = False
        self._left: list[int] = []
        self.answers: list[Any] = [PENDING] * len(ops)
        self.found: list[Any] = []
        """The answers to the try in hand, filled in as they come."""

    def begin(self) -> list[Op[Any]]:
        """The Ops that have no answer yet, to be sent now; none when the trip is over."""
        for i, answer in zip(self._left, self.found, strict=True):
            self.answers[i] = answer
        self._left = [i for i, answer in enumerate(self.answers) if answer is PENDING]
        self.found = [PENDING] * len(self._left)
        return [self._ops[i] for i in self._left]

    def unanswered(self) -> list[tuple[int, Op[Any]]]:
        """Of the try in hand: positions in ``found``, and the Ops."""
        return [(at, self._ops[i]) for at, i in enumerate(self._left) if self.found[at] is PENDING]

    def apart(self, error: SemelError) -> bool:
        """Whether each Op should be sent by itself, to find the one that is refused."""
        return isinstance(error, Refused) and len(self._ops) > 1

    def pause_after(self, error: SemelError) -> float | None:
        """Seconds to wait before the next try; None where it is given up: each Op left is answered by the error."""
        pause = self._next_pause(error)
        if isinstance(error, StoreUncertain) and any(type(op) is Resolve for _, op in self.unanswered()):
            pause = None  # the one Op that may not be sent twice: by then the record may be another owner's
        if pause is None:
            public: type[SemelError] = type(error)
            if isinstance(error, RecordTooLarge):
                public = RecordTooLarge  # and it was so whenever it was sent before
            elif self._sent:
                public = StoreUncertain  # once anything was sent, nobody can say that nothing was stored
            elif isinstance(error, StoreUnavailable):
                public = StoreUnavailable
            for at, _ in self.unanswered():
                self.found[at] = public(str(error))
                self.found[at].__cause__ = error.__cause__
        return pause

    def _next_pause(self, error: SemelError) -> float | None:
        if isinstance(error, Contended):
            self._contention += 1
            return 0.0 if self._contention < CONTENTION_TRIES else None
        if isinstance(error, StoreUncertain):
            self._sent = True
        elif not isinstance(error, Unreachable):
            return None
        pause = self._pause
        if time.monotonic() + pause > self._until:
            return None
        self._pause = min(pause * 2, SLOWEST_PAUSE)
        return pause


class TripLane(ABC):
    """A lane of a combiner that tries its trips again. The store writes how a batch is sent once."""

    gathers = True

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._down = False

    @abstractmethod
    def _once(self, ops: Sequence[Op[Any]], found: list[Any]) -> None:
        """Send the Ops, and fill in ``found`` as answers come."""

    @abstractmethod
    def _is_open(self) -> bool:
        """Whether there is a connection."""

    def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        trip = Trip(ops, 0.0 if self._down else self._patience)
        while left := trip.begin():
            try:
                self._once(left, trip.found)
                self._down = False
            except SemelError as error:
                if trip.apart(error):
                    for at, op in trip.unanswered():
                        trip.found[at] = self.run([op])[0]
                    continue
                pause = trip.pause_after(error)
                if pause is None:
                    self._down = not self._is_open()
                elif pause:
                    time.sleep(pause)
        return trip.answers


class AsyncTripLane(ABC):
    """The same, for an event loop."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._down = False

    @abstractmethod
    async def _once(self, ops: Sequence[Op[Any]], found: list[Any]) -> None: ...

    @abstractmethod
    def _is_open(self) -> bool: ...

    async def run(self, ops: Sequence[Op[Any]]) -> list[Any]:
        trip = Trip(ops, 0.0 if self._down else self._patience)
        while left := trip.begin():
            try:
                await self._once(left, trip.found)
                self._down = False
            except SemelError as error:
                if trip.apart(error):
                    for at, op in trip.unanswered():
                        trip.found[at] = (await self.run([op]))[0]
                    continue
                pause = trip.pause_after(error)
                if pause is None:
                    self._down = not self._is_open()
                elif pause:
                    await asyncio.sleep(pause)
        return trip.answers
