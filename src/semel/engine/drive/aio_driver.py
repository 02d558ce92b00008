"""``AsyncCallDriver``: drives calls over an async store and runs their handlers in the caller's task.

Written by hand beside ``driver.py``: tasks are cancelled, and a call that is cancelled still settles its record before
it ends. What both decide is in ``execution.py``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from semel.core.call import (
    Await,
    Call,
    Declined,
    Failed,
    Outcome,
    Pause,
    Raised,
    Recover,
    Returned,
    Run,
    Stopped,
    StoreLater,
)
from semel.core.flows import begins_plainly, replay
from semel.core.ops import Claimed, Count, Existing, Lookup, Op, Release
from semel.core.states import DONE
from semel.engine.drive.aio_keeper import AsyncKeeper
from semel.engine.drive.execution import Changed, Execution, as_handler
from semel.engine.drive.flights import Flight, Flights
from semel.engine.drive.leases import Lease
from semel.engine.drive.waiting import LateResult, shielded
from semel.engine.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore
from semel.errors import StoreError

R = TypeVar("R")
Handler: TypeAlias = Callable[[AsyncOperation], Any]


class AsyncCallDriver:
    """Drives the calls of one guard, in one event loop."""

    def __init__(self, store: AsyncStore, sweep_every: float | None, on_swept: Callable[[int, int], None]) -> None:
        self.store = store
        self.flights = Flights()
        self.keeper = AsyncKeeper(store, sweep_every, on_swept, self.flights)

    async def drive(
        self,
        call: Call,
        handler: Handler | None = None,
        recover: Callable[[], Any] | None = None,
        execution: Execution | None = None,
        answer: Any = None,
        attempt: object = None,
    ) -> Any:
        """Run ``handler`` once for this call, and return an ``Outcome``, of this or of an earlier call.

        Without a handler, return an ``AsyncAttempt`` instead of running it: an adapter runs it, and ends the attempt.

        The first claim is sent from here. If it finds a result, that is returned at once. If it begins a first attempt,
        the handler runs, and the completion of what it returns is sent from here, too. In any other case the flow of
        the call takes over.

        :param recover: calls the policy's hook; defaults to the hook itself.
        :param execution: that of an attempt that an adapter ends.
        :param answer: how the handler of such an attempt has ended.
        :param attempt: that attempt. It stays alive until then, since nobody else may hold it: see its ``__del__``.
        """
        store, flights = self.store, self.flights
        error: BaseException | None = None
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
                        answer = await store.execute(claim)
                    except (StoreError, asyncio.CancelledError) as failure:
                        error = failure
                    else:
                        if type(answer) is Existing and answer.record.state is DONE:
                            own.record = answer.record
                            own.landed = True
                            if own.waiters is not None:
                                flights.land(own)
                            else:  # this is all that it does then
                                flights.by_id.pop(claim.id, None)
                            return replay(call, own.record)
                execution = Execution(call, flights, store.wakes, own)
                if isinstance(error, asyncio.CancelledError):
                    try:
                        answer, error = await self._send_again(execution, claim, error), None
                    except (StoreError, asyncio.CancelledError) as failure:
                        error = failure
                elif own is not None and type(answer) is Claimed and begins_plainly(call, answer):
                    execution.begin(answer)
                    if handler is None:
                        assert execution.lease is not None
                        self.keeper.hold(execution.lease)
                        return AsyncLeasedAttempt(self, execution, answer)
                    try:
                        answer = await self._work(execution, answer, handler)
                    except (StoreError, asyncio.CancelledError) as failure:
                        error = failure
            if execution.claimed is not None and error is None and type(answer) is Returned:
                ending, op = answer, execution.completion(answer.value)
                if op is not None:
                    try:
                        try:
                            answer = await store.execute(op)
                        except asyncio.CancelledError as cancelled:
                            answer = await self._send_again(execution, op, cancelled)
                    except (StoreError, asyncio.CancelledError) as failure:
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
                            try:
                                answer = await store.execute(request)
                            except asyncio.CancelledError as cancelled:
                                answer = await self._send_again(execution, request, cancelled)
                        elif isinstance(request, Run):
                            if handler is None:
                                if execution.lease is not None:
                                    self.keeper.hold(execution.lease)
                                return AsyncLeasedAttempt(self, execution, request.claimed)
                            answer = await self._work(execution, request.claimed, handler)
                        elif isinstance(request, Recover):
                            answer = await self._work(
                                execution, request.claimed, as_handler(recover or call.policy.recover)
                            )
                        elif isinstance(request, Changed):
                            await self._wait_for(request)
                        elif isinstance(request, Await):
                            await store.wait(request.id, request.seconds)
                        elif isinstance(request, StoreLater):
                            self.keeper.store_later(execution.hand_over(request))
                        elif isinstance(request, Pause):
                            await shielded(asyncio.sleep(request.seconds), execution)
                        else:
                            await asyncio.sleep(request.seconds)
                    except (StoreError, asyncio.CancelledError) as failure:
                        error = failure
            except StopIteration as stop:
                outcome = stop.value
            if execution.flight is not None:  # otherwise the claim was not won, and nothing is held
                execution.finish(self.keeper.leases)
        except BaseException as failure:
            if execution is None:
                if own is not None:
                    flights.land(own)
                raise
            execution.finish(self.keeper.leases)
            if execution.cancelled is not None and isinstance(failure, Exception):
                raise execution.cancelled from None  # whatever the flow found, the caller was cancelled
            raise
        cancelled_before = execution.cancelled
        if isinstance(outcome, Failed):
            if cancelled_before is not None and isinstance(outcome.error, Exception):
                raise cancelled_before
            raise outcome.error
        if cancelled_before is not None:
            raise cancelled_before
        return outcome

    async def _send_again(self, execution: Execution, op: Op[Any], cancelled: asyncio.CancelledError) -> Any:
        """Execute an Op whose execution was cancelled, and hold the cancellation back until the record is settled.

        The Op may have reached the store or not. It may be sent twice, so send it again, shielded. A cancelled read is
        simply cancelled.
        """
        if isinstance(op, (Lookup, Count)):
            raise cancelled
        execution.cancelled = cancelled
        answer = await shielded(self.store.execute(op), execution)
        return True if isinstance(op, Release) else answer  # a record that is gone was released by the first one

    async def _work(self, execution: Execution, claimed: Claimed | None, work: Handler) -> Returned | Raised | Stopped:
        """Run the handler in this task. Its lease is renewed until the call is finished; losing it cancels the task."""
        lease = execution.lease
        op = AsyncOperation(execution.call, lease, claimed, self.store.execute, self.store)
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        outer = running.get()
        try:
            running.set(op)
            if lease is not None:
                lease.on_lost = task.cancel if task is not None else None
                self.keeper.hold(lease)
            result = work(op)
            # A plain function passed as call= has had its effect by now: what it returned is the result.
            returned = await result if inspect.isawaitable(result) else result
            op.leave()
            return Returned(returned)
        except LateResult as late:
            ours = 1 if lease is not None and lease.lost else 0
            if task is None or task.cancelling() > cancels + ours:
                execution.cancelled = late.cancelled
            return late.ending
        except asyncio.CancelledError as error:
            if lease is not None and lease.lost and task is not None and task.cancelling() == cancels + 1:
                return Stopped()  # cancelled by the keeper, and by nobody else
            return Raised(error)
        except BaseException as error:
            return Raised(await op.compensate(error))
        finally:
            running.set(outer)  # not by the token of set(): a signal may come before we have it
            if lease is not None:
                lease.on_lost = None  # from here on only the record is settled, which must not be cancelled
                if lease.lost and task is not None:
                    task.uncancel()

    async def _wait_for(self, change: Changed) -> None:
        changed = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not changed.done():
                changed.set_result(None)

        if self.flights.watch(change.flight, change.seen, wake):
            try:
                await asyncio.wait([changed], timeout=change.seconds)
            finally:
                self.flights.unwatch(change.flight, wake)


class AsyncLeasedAttempt:
    """An attempt under a lease: what ``AsyncSemel.begin`` returns. See ``Attempt`` for the methods."""

    __slots__ = ("_driver", "_execution", "call", "claimed", "lease", "operation")

    def __init__(self, driver: AsyncCallDriver, execution: Execution, claimed: Claimed | None) -> None:
        self._driver = driver
        self._execution = execution
        self.call: Call = execution.call
        self.lease: Lease | None = execution.lease
        self.claimed = claimed
        store = driver.store
        self.operation = AsyncOperation(self.call, self.lease, claimed, store.execute, store)

    def __del__(self) -> None:
        # The adapter dropped the attempt without ending it: let the lease expire, as if the process had died.
        if not self._execution.finished:
            self._execution.finish(self._driver.keeper.leases)

    async def execute(self, op: Op[R]) -> R:
        return await self._driver.store.execute(op)

    async def compensate(self, error: BaseException) -> BaseException:
        return await self.operation.compensate(error)

    def complete(self, value: Any) -> Awaitable[Outcome[Any]]:
        return self._driver.drive(self.call, None, None, self._execution, Returned(value), self)

    def decline(self, value: Any) -> Awaitable[Outcome[Any]]:
        return self._driver.drive(self.call, None, None, self._execution, Declined(value), self)

    def lost(self) -> Awaitable[Outcome[Any]]:
        return self._driver.drive(self.call, None, None, self._execution, Stopped(), self)

    def conflicts(self, error: BaseException) -> bool:
        return False

    async def fail(self, error: BaseException) -> None:
        try:
            await self._driver.drive(self.call, None, None, self._execution, Raised(error), self)
        except BaseException as raised:
            if raised is not error:
                raise
