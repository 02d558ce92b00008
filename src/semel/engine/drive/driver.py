"""``CallDriver``: drives calls over a sync store and runs their handlers in the caller's thread.

Written by hand beside ``aio_driver.py``: threads wait on locks and are interrupted by signals, tasks await and are
cancelled. What both decide is in ``execution.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from time import monotonic
from types import CoroutineType
from typing import Any, TypeAlias, TypeVar

from semel.core.call import (
    Await,
    Call,
    Declined,
    Failed,
    NotRun,
    Outcome,
    Raised,
    Recover,
    Returned,
    Run,
    Stopped,
    StoreLater,
)
from semel.core.flows import begins_plainly, replay
from semel.core.ops import Claimed, Existing, Op
from semel.core.states import DONE
from semel.engine.drive.execution import Changed, Execution, as_handler
from semel.engine.drive.flights import Flight, Flights
from semel.engine.drive.keeper import Keeper
from semel.engine.drive.leases import Lease
from semel.engine.operation import Operation, running
from semel.engine.ports import Store
from semel.errors import PolicyError, StoreError

R = TypeVar("R")
Handler: TypeAlias = Callable[[Operation], Any]


class CallDriver:
    """Drives the calls of one guard."""

    def __init__(self, store: Store, sweep_every: float | None, on_swept: Callable[[int, int], None]) -> None:
        self.store = store
        self.flights = Flights()
        self.keeper = Keeper(store, sweep_every, on_swept, self.flights)

    def drive(
        self,
        call: Call,
        handler: Handler | None = None,
        recover: Callable[[], Any] | None = None,
        execution: Execution | None = None,
        answer: Any = None,
        attempt: object = None,
    ) -> Any:
        """Run ``handler`` once for this call, and return an ``Outcome``, of this or of an earlier call.

        Without a handler, return an ``Attempt`` instead of running it: an adapter runs it, and ends the attempt.

        The first claim is sent from here. If it finds a result, that is returned at once. If it begins a first attempt,
        the handler runs, and the completion of what it returns is sent from here, too. In any other case the flow of
        the call takes over.

        :param recover: calls the policy's hook; defaults to the hook itself.
        :param execution: that of an attempt that an adapter ends.
        :param answer: how the handler of such an attempt has ended.
        :param attempt: that attempt. It stays alive until then, since nobody else may hold it: see its ``__del__``.
        """
        store, flights = self.store, self.flights
        error: StoreError | None = None
        own: Flight | None = None
        outcome: Outcome[Any] | Failed | None = None
        try:
            if execution is None:
                if call.quota is None:
                    claim = call.make_claim()
                    own = Flight()
                    own.claim = claim
                    if flights.by_id.setdefault(claim.id, own) is not own:
                        own = None
                if own is not None:
                    own.began = monotonic()
                    try:
                        answer = store.execute(claim)
                    except StoreError as failure:
                        error = failure
                    else:
                        if type(answer) is Existing and answer.record.state is DONE:
                            own.record = answer.record
                            flights.land(own)
                            return replay(call, own.record)
                execution = Execution(call, flights, store.wakes, own)
                if own is not None and type(answer) is Claimed and begins_plainly(call, answer):
                    execution.begin(answer)
                    if handler is None:
                        assert execution.lease is not None
                        self.keeper.hold(execution.lease)
                        return LeasedAttempt(self, execution, answer)
                    try:
                        answer = self._work(execution, answer, handler)
                    except StoreError as failure:
                        error = failure
            if execution.claimed is not None and error is None and type(answer) is Returned:
                ending, op = answer, execution.completion(answer.value)
                if op is not None:
                    try:
                        answer = store.execute(op)
                    except StoreError as failure:
                        error = failure
                    if error is None and answer is True:
                        if execution.flight is not None:
                            execution.flight.completed = op
                        if call.hook is not None:
                            call.tell_completion(1, op)
                        outcome = Outcome(ending.value, False, 1)
                    else:
                        execution.steps.send(ending)  # asks for the completion, which was sent
            steps = execution.steps if outcome is None else None
            try:
                while steps is not None:
                    request = steps.send(answer) if error is None else steps.throw(error)
                    error = None
                    try:
                        if isinstance(request, Op):
                            answer = store.execute(request)
                        elif isinstance(request, Run):
                            if handler is None:
                                if execution.lease is not None:
                                    self.keeper.hold(execution.lease)
                                return LeasedAttempt(self, execution, request.claimed)
                            answer = self._work(execution, request.claimed, handler)
                        elif isinstance(request, Recover):
                            answer = self._work(execution, request.claimed, as_handler(recover or call.policy.recover))
                        elif isinstance(request, Changed):
                            self._wait_for(request)
                        elif isinstance(request, Await):
                            store.wait(request.id, request.seconds)
                        elif isinstance(request, StoreLater):
                            self.keeper.store_later(execution.hand_over(request))
                        else:
                            time.sleep(request.seconds)
                    except StoreError as failure:
                        error = failure
            except StopIteration as stop:
                outcome = stop.value
            if execution.flight is not None:  # otherwise the claim was not won, and nothing is held
                execution.finish(self.keeper.leases)
        except BaseException:
            if execution is not None:
                execution.finish(self.keeper.leases)
            elif own is not None:
                flights.land(own)
            raise
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    def _work(self, execution: Execution, claimed: Claimed | None, work: Handler) -> Returned | Raised | NotRun:
        """Run the handler in this thread. The keeper renews its lease from now until the call is finished."""
        op = Operation(execution.call, execution.lease, claimed, self.store.execute, self.store)
        if execution.lease is not None:
            self.keeper.hold(execution.lease)
        outer = running.get()
        try:
            running.set(op)
            result = work(op)
            op.leave()
        except BaseException as error:
            return Raised(op.compensate(error))
        finally:
            running.set(outer)  # not by the token of set(): a signal may come before we have it
        if type(result) is CoroutineType:
            result.close()
            return NotRun(
                PolicyError(f"{execution.call}: the handler is async; use AsyncSemel, or decorate the async def")
            )
        return Returned(result)

    def _wait_for(self, change: Changed) -> None:
        gate = threading.Lock()
        gate.acquire()
        if not self.flights.watch(change.flight, change.seen, gate.release):
            return
        if not gate.acquire(timeout=-1 if change.seconds is None else change.seconds):
            self.flights.unwatch(change.flight, gate.release)


class LeasedAttempt:
    """An attempt under a lease: what ``Semel.begin`` returns. See ``Attempt`` for the methods."""

    __slots__ = ("_driver", "_execution", "call", "claimed", "lease", "operation")

    def __init__(self, driver: CallDriver, execution: Execution, claimed: Claimed | None) -> None:
        self._driver = driver
        self._execution = execution
        self.call: Call = execution.call
        self.lease: Lease | None = execution.lease
        self.claimed = claimed
        store = driver.store
        self.operation = Operation(self.call, self.lease, claimed, store.execute, store)

    def __del__(self) -> None:
        # The adapter dropped the attempt without ending it: let the lease expire, as if the process had died.
        if not self._execution.finished:
            self._execution.finish(self._driver.keeper.leases)

    def execute(self, op: Op[R]) -> R:
        return self._driver.store.execute(op)

    def compensate(self, error: BaseException) -> BaseException:
        return self.operation.compensate(error)

    def complete(self, value: Any) -> Outcome[Any]:
        outcome: Outcome[Any] = self._driver.drive(self.call, None, None, self._execution, Returned(value), self)
        return outcome

    def decline(self, value: Any) -> Outcome[Any]:
        outcome: Outcome[Any] = self._driver.drive(self.call, None, None, self._execution, Declined(value), self)
        return outcome

    def lost(self) -> Outcome[Any]:
        outcome: Outcome[Any] = self._driver.drive(self.call, None, None, self._execution, Stopped(), self)
        return outcome

    def conflicts(self, error: BaseException) -> bool:
        return False

    def fail(self, error: BaseException) -> None:
        try:
            self._driver.drive(self.call, None, None, self._execution, Raised(error), self)
        except BaseException as raised:
            if raised is not error:
                raise
