# Twin: driver.py is generated from this file by make twins.
# Twin: over an async store -> over a sync store
# Twin: in the caller's task -> in the caller's thread
# Twin: (StoreError, asyncio.CancelledError) -> StoreError
# Twin: except BaseException as failure: -> except BaseException:
# Twin: , in one event loop. -> .
# Twin: aio_work.py -> work.py
"""``AsyncCallDriver``: drives calls over an async store and runs their handlers in the caller's task.

What it decides is in ``execution.py``. How a handler runs and how a call waits is in ``aio_work.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any, TypeVar

from semel.core.call import (
    Await,
    Call,
    Declined,
    Failed,
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
from semel.engine.drive.aio_keeper import AsyncKeeper
from semel.engine.drive.aio_work import (
    Handler,
    run_under_lease_async,
    send_again,
    sleep_async,
    wait_for_change_async,
)
from semel.engine.drive.execution import Changed, Execution, as_handler
from semel.engine.drive.flights import Flight, Flights
from semel.engine.drive.leases import Lease
from semel.engine.operation import AsyncOperation
from semel.engine.ports import AsyncStore
from semel.errors import StoreError

R = TypeVar("R")


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
        :param execution: the execution of an attempt that an adapter ends now.
        :param answer: how the handler of that attempt has ended.
        :param attempt: the attempt itself. This keeps it alive, since nobody else may hold it: see its ``__del__``.
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
                            own.landed = True  # async only
                            # sync: flights.land(own)
                            if own.waiters is not None:
                                flights.land(own)
                            else:  # this is all that it does then
                                flights.by_id.pop(claim.id, None)
                            return replay(call, own.record)
                execution = Execution(call, flights, store.wakes, own)
                # async only
                if isinstance(error, asyncio.CancelledError):
                    try:
                        answer, error = await send_again(store, execution, claim, error), None
                    except (StoreError, asyncio.CancelledError) as failure:
                        error = failure
                if execution.cancelled is None and type(answer) is Claimed and begins_plainly(call, answer):
                    execution.begin(answer)
                    if handler is None:
                        assert execution.lease is not None
                        self.keeper.hold(execution.lease)
                        return AsyncLeasedAttempt(self, execution, answer)
                    try:
                        answer = await run_under_lease_async(store, self.keeper, execution, answer, handler)
                    except (StoreError, asyncio.CancelledError) as failure:
                        error = failure
            if execution.claimed is not None and error is None and type(answer) is Returned:
                ending, op = answer, execution.completion(answer.value)
                if op is not None:
                    try:
                        # sync: answer = store.execute(op)
                        try:
                            answer = await store.execute(op)
                        except asyncio.CancelledError as cancelled:
                            answer = await send_again(store, execution, op, cancelled)
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
                            # sync: answer = store.execute(request)
                            try:
                                answer = await store.execute(request)
                            except asyncio.CancelledError as cancelled:
                                answer = await send_again(store, execution, request, cancelled)
                        elif isinstance(request, Run):
                            if handler is None:
                                if execution.lease is not None:
                                    self.keeper.hold(execution.lease)
                                return AsyncLeasedAttempt(self, execution, request.claimed)
                            answer = await run_under_lease_async(
                                store, self.keeper, execution, request.claimed, handler
                            )
                        elif isinstance(request, Recover):
                            hook = as_handler(recover or call.policy.recover)
                            answer = await run_under_lease_async(store, self.keeper, execution, request.claimed, hook)
                        elif isinstance(request, Changed):
                            await wait_for_change_async(flights, request)
                        elif isinstance(request, Await):
                            await store.wait(request.id, request.seconds)
                        elif isinstance(request, StoreLater):
                            self.keeper.store_later(execution.hand_over(request))
                        else:
                            await sleep_async(request, execution)
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
            # async only
            if execution.cancelled is not None and isinstance(failure, Exception):
                raise execution.cancelled from None  # whatever the flow found, the caller was cancelled
            raise
        # async only
        if execution.cancelled is not None and not (
            isinstance(outcome, Failed) and not isinstance(outcome.error, Exception)
        ):
            raise execution.cancelled
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome


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
        outcome: Awaitable[Outcome[Any]] = self._driver.drive(
            self.call, None, None, self._execution, Returned(value), self
        )
        return outcome

    def decline(self, value: Any) -> Awaitable[Outcome[Any]]:
        outcome: Awaitable[Outcome[Any]] = self._driver.drive(
            self.call, None, None, self._execution, Declined(value), self
        )
        return outcome

    def lost(self) -> Awaitable[Outcome[Any]]:
        outcome: Awaitable[Outcome[Any]] = self._driver.drive(self.call, None, None, self._execution, Stopped(), self)
        return outcome

    def conflicts(self, error: BaseException) -> bool:
        return False

    async def fail(self, error: BaseException) -> None:
        try:
            await self._driver.drive(self.call, None, None, self._execution, Raised(error), self)
        except BaseException as raised:
            if raised is not error:
                raise
