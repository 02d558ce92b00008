"""The execution of one call: it passes the requests of the core's flow to a driver, and tracks what the call holds.

``Execution.steps`` runs the core's flow and adds single flight, leases, and the way errors get back into the flow. It
is a generator that never waits. A driver carries out what it yields:

- an ``Op``: execute it on the store;
- ``Run``, ``Recover``: run the handler or the recover hook, and send the result;
- ``Await``: call ``store.wait``; ``Poll``, ``Pause``: sleep;
- ``Changed``: wait until a flight changes;
- ``StoreLater``: pass what ``hand_over`` returns to the keeper.

``driver.py`` does so in threads and ``aio_driver.py`` in an event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, TypeAlias

from semel.core.call import Await, Call, Failed, NotRun, Outcome, Pause, Recover, Run, StoreLater
from semel.core.encoding.snapshot import NotSerializable
from semel.core.flows import perform
from semel.core.ops import Claim, Claimed, Complete, Existing, Op
from semel.core.values import value
from semel.engine.drive.backlog import UnstoredOutcome
from semel.engine.drive.flights import Flight, Flights
from semel.engine.drive.leases import Lease, Leases
from semel.errors import StoreError
from semel.observe import events


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


Step: TypeAlias = "Op[Any] | Run | Recover | Await | Poll | Pause | Changed | StoreLater"


class Execution:
    """The state of one call. The driver sends answers to ``steps``, and always calls ``finish`` at the end."""

    __slots__ = ("_flights", "_steps", "_wakes", "began", "call", "cancelled", "claimed", "finished", "flight", "lease")

    def __init__(self, call: Call, flights: Flights, wakes: bool, flight: Flight | None = None) -> None:
        """
        :param flight: the flight of a claim that the driver has sent already. The steps then wait for its answer.
        """
        self.call = call
        self.began = 0.0
        """When the claim was sent. The lease counts from then, not from the answer."""
        self.flight = flight
        self.lease: Lease | None = None
        """The lease of the attempt, once the claim is won. The recover hook and the handler share it."""
        self.finished = False
        """Whether ``finish`` has released the lease and the flight."""
        self.cancelled: BaseException | None = None
        """The caller's cancellation, held back until the record is settled."""
        self.claimed: Claimed | None = None
        """The answer to the claim, if the attempt has begun without steps: see ``begin``."""
        self._flights = flights
        self._wakes = wakes
        self._steps: Generator[Step, Any, Outcome[Any] | Failed] | None = None
        if flight is not None:
            self.began = flight.began

    @property
    def steps(self) -> Generator[Step, Any, Outcome[Any] | Failed]:
        """The steps of the call. After ``begin`` they wait for the ending of the handler."""
        steps = self._steps
        if steps is None:
            steps = self._steps = self._proceed()
            if self.flight is not None:
                next(steps)
            if self.claimed is not None:
                cancelled, self.cancelled = self.cancelled, None  # it came later: the handler has run
                steps.send(self.claimed)
                self.cancelled = cancelled
        return steps

    def begin(self, claimed: Claimed) -> None:
        """Begin an attempt after the driver's own claim, without steps: see ``begins_plainly``."""
        self.claimed = claimed
        assert self.flight is not None
        self._win(self.flight, claimed)
        if self.call.hook is not None:
            self.call.tell_start(claimed.token)

    def completion(self, result: Any) -> Complete | None:
        """Return the Op that ends an attempt without steps; None if the flow must store that the result is lost."""
        call, claimed = self.call, self.claimed
        assert claimed is not None
        try:
            call.completion = op = call.make_completion(claimed.token, call.seal_value(result), result)
        except NotSerializable:
            return None
        return op

    def finish(self, leases: Leases) -> None:
        """Release the lease and the flight of the call. May be called again."""
        try:
            if self.lease is not None:
                leases.held.pop(id(self.lease), None)
        finally:
            if self.flight is not None:
                self._flights.land(self.flight)
                self.flight = None
            self.finished = True
            if self._steps is not None:
                self._steps.close()  # breaks the reference cycle of an unfinished call

    def hand_over(self, request: StoreLater) -> UnstoredOutcome:
        """Leave the lease and the flight to the keeper: the call ends, and its outcome is stored in the background."""
        lease, self.lease = self.lease, None
        flight, self.flight = self.flight, None
        assert lease is not None
        lease.latest = float("inf")  # the handler has ended, so the limit on its time no longer counts
        return UnstoredOutcome(request, lease, flight, monotonic())

    def _proceed(self) -> Generator[Step, Any, Outcome[Any] | Failed]:
        call, flights = self.call, self._flights
        flow = perform(call)
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                request = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            error = None
            try:
                if type(request) is Claim:
                    own = self.flight
                    if own is None or own.landed:
                        # Set before it is registered: if a signal handler raises in between, finish() removes it.
                        self.flight = own = Flight()
                        own.claim = request
                        if flights.by_id.setdefault(request.id, own) is not own:
                            existing = yield from self._join(own)
                            if existing is not None:
                                answer = existing
                                continue
                        self.began = own.began = self.began or monotonic()
                    try:
                        answer = yield request
                    except GeneratorExit:
                        raise  # whoever ends the call before its answer lands the flight
                    except BaseException as failure:
                        own.error = failure if isinstance(failure, StoreError) and self.cancelled is None else None
                        flights.land(own)
                        raise
                    if isinstance(answer, Existing):
                        self.began = 0.0  # not won, so the next claim is a new one
                        own.record = answer.record
                        flights.land(own)
                        self.flight = None
                    elif self.claimed is None:
                        self._win(own, answer)
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

    def _win(self, own: Flight, claimed: Claimed) -> None:
        """Take the lease that the claim has won, and tell those who wait for the flight that it runs."""
        self.call.has_steps = bool(claimed.steps)
        self.lease = own.lease = Lease(self.call, claimed.token, claimed.attempt, self.began)
        if self.cancelled is None:  # else the claim is released at once, and others wait for that
            with self._flights.lock:
                own.running = claimed
                own.changes += 1
                if own.waiters is not None:
                    own.wake()

    def _join(self, own: Flight) -> Generator[Step, Any, Existing | None]:
        """Another call of this process has the same key: wait for its result. Returns None if it has left the key free,
        and ``own`` is registered now.
        """
        flights, id = self._flights, own.claim.id
        while True:
            self.flight = own  # before it is registered, as above
            flight = flights.by_id.setdefault(id, own)
            if flight is own:
                return None
            self.flight = None
            if flight.landed or flight.is_stale(monotonic()):
                flights.forget(flight)  # its caller was interrupted before it could do so, or it has lost its lease
                continue
            existing = yield from self._learn(flight)
            if existing is not None:
                return existing

    def _learn(self, flight: Flight) -> Generator[Step, Any, Existing | None]:
        """Wait for the result of the other call. Returns None if it left the key free, or has lost its lease."""
        while True:
            # Read the counter first, so that no later change is missed.
            seen, landed, now = flight.changes, flight.landed, monotonic()
            if flight.is_stale(now):
                return None
            answer = flight.answer(now)
            if answer is not None or landed:
                return answer
            yield Changed(flight, seen)

    def _await(self, request: Await) -> Generator[Step, Any, float]:
        """Wait for another call of this process, for the store's wake-up, or for the next poll. Returns the seconds."""
        if self.cancelled is not None:
            raise self.cancelled
        began = monotonic()
        flight = self._flights.by_id.get(request.id)
        seen = 0 if flight is None else flight.changes
        if flight is not None and not flight.landed and not flight.is_stale(began):
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
    """Return a recover hook in the form of a handler. The hook itself does not take the operation's handle."""
    return lambda op: hook() if hook is not None else None
