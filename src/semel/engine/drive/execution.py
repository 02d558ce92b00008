"""One call on its way through an engine: which request of its flow leads to what, and what the call holds meanwhile.

``Execution.steps`` runs the core's flow and adds what all calls of a guard share: single flight, leases, and how errors
get back into the flow. It is a generator that never waits. A driver does what it yields:

- an ``Op``: execute it on the store;
- ``Run``, ``Recover``: run the handler or the recover hook, and send what came of it;
- ``Await``: call ``store.wait``; ``Poll``, ``Pause``: sleep;
- ``Changed``: wait until a flight changes.

``driver.py`` does so in threads and ``aio_driver.py`` in an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, TypeAlias

from semel.core.call import Await, Call, Failed, NotRun, Outcome, Pause, Recover, Run
from semel.core.flows import perform
from semel.core.ops import Claim, Claimed, Complete, Existing, Op
from semel.core.values import value
from semel.engine.drive.flights import Flight, Flights
from semel.engine.drive.leases import Lease, Leases
from semel.errors import StoreError
from semel.observe import events

__all__ = ["Changed", "Execution", "Poll", "as_handler"]


@value
class Changed:
    """Wait until ``flight`` has changed more than ``seen`` times, for ``seconds`` at most."""

    flight: Flight
    seen: int
    seconds: float | None = None


@value
class Poll:
    """Sleep for ``seconds``, then look at the record again. Unlike a ``Pause``, this may be cancelled."""

    seconds: float


Step: TypeAlias = "Op[Any] | Run | Recover | Await | Poll | Pause | Changed"


class Execution:
    """Made for each call. The driver sends answers to ``steps``, and calls ``finish`` at the end in any case."""

    __slots__ = ("_flights", "_wakes", "began", "call", "cancelled", "finished", "flight", "lease", "steps")

    def __init__(self, call: Call, flights: Flights, wakes: bool) -> None:
        self.call = call
        self.began = 0.0
        """When the claim was sent: the lease counts from then, not from the answer."""
        self.flight: Flight | None = None
        self.lease: Lease | None = None
        """The lease of the attempt, once the claim is won: the same for the recover hook and the handler."""
        self.finished = False
        """Whether everything that it held was given back."""
        self.cancelled: BaseException | None = None
        """The caller's cancellation, held back until the record is settled."""
        self._flights = flights
        self._wakes = wakes
        self.steps: Generator[Step, Any, Outcome[Any] | Failed] = self._proceed()

    def finish(self, leases: Leases) -> None:
        """Give back what the call holds. Safe to call again."""
        try:
            if self.lease is not None:
                leases.drop(self.lease)
        finally:
            if self.flight is not None:
                self._flights.land(self.flight)
                self.flight = None
            self.finished = True
            self.steps.close()  # it refers to us, so without this an unfinished one would be left to the collector

    def _proceed(self) -> Generator[Step, Any, Outcome[Any] | Failed]:
        flow = perform(self.call)
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                request = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            error = None
            try:
                if isinstance(request, Claim):
                    answer = yield from self._claim(request)
                elif isinstance(request, Await):
                    answer = yield from self._await(request)
                elif self.cancelled is not None and isinstance(request, (Run, Recover)):
                    answer = NotRun(self.cancelled)  # the caller is gone: start nothing, only settle the record
                else:
                    answer = yield request
                    if answer is True and self.flight is not None and isinstance(request, Complete):
                        self.flight.completed = request
            except GeneratorExit:
                raise
            except BaseException as failure:
                error = failure

    def _claim(self, claim: Claim) -> Generator[Step, Any, Claimed | Existing]:
        """Ask the store, unless another call of this process is asking or running: then learn from that one."""
        flights = self._flights
        while True:
            # Noted before it is entered: if an exception from a signal handler comes between, finish() takes it out.
            self.flight = mine = Flight(claim)
            flight = flights.by_id.setdefault(claim.id, mine)
            if flight is mine:
                break
            self.flight = None
            if flight.landed:  # its caller was interrupted before it could take it out
                flights.by_id.pop(claim.id, None)
                continue
            existing = yield from self._learn(flight)
            if existing is not None:
                return existing
        self.began = mine.began = self.began or monotonic()
        try:
            answer: Claimed | Existing = yield claim
        except BaseException as error:
            mine.error = error if isinstance(error, StoreError) and self.cancelled is None else None
            flights.land(mine)
            raise
        if isinstance(answer, Existing):
            self.began = 0.0  # not won, so the next claim is a new one
            mine.record = answer.record
            flights.land(mine)
            self.flight = None
            return answer
        self.call.has_steps = bool(answer.steps)
        self.lease = Lease(self.call, answer.token, answer.attempt, self.began)
        if self.cancelled is None:  # otherwise the claim is released at once, and others should wait for that
            with flights.lock:
                mine.running = answer
                mine.changes += 1
                if mine.waiters is not None:
                    mine.wake()
        return answer

    def _learn(self, flight: Flight) -> Generator[Step, Any, Existing | None]:
        """Wait until the other call knows something; None if it left the key free."""
        while True:
            # The counter is read first: a change that comes after that is not missed.
            seen, landed = flight.changes, flight.landed
            answer = flight.answer(monotonic())
            if answer is not None or landed:
                return answer
            yield Changed(flight, seen)

    def _await(self, request: Await) -> Generator[Step, Any, float]:
        """Wait for a change: of a flight of this process, by the store's wake-up, or until the next look."""
        if self.cancelled is not None:
            raise self.cancelled
        began = monotonic()
        flight = self._flights.by_id.get(request.id)
        seen = 0 if flight is None else flight.changes
        if flight is not None and not flight.landed:
            yield Changed(flight, seen, request.seconds)
            return monotonic() - began
        if self._wakes:
            try:
                yield request
                return monotonic() - began
            except StoreError as error:  # without a wake-up, poll; the next claim says if the store is down
                self.call.tell(events.StoreFailed, "wait", str(error))
        yield Poll(request.interval)
        return monotonic() - began


def as_handler(hook: Callable[[], Any] | None) -> Callable[[Any], Any]:
    """A recover hook in the place of a handler: it does not take the operation's handle."""
    return lambda op: hook() if hook is not None else None
