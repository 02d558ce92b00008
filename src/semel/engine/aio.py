"""``AsyncSemel``: the async shell. It runs the handler in the caller's task and drives the flow over an async store.

``engine/sync.py`` has the same names in the same order; what can be decided without waiting is in neither, but in the
core. What only this one has is about cancellation: a call that is cancelled still settles its record before it ends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, Unpack, cast

from semel.codec import Codec
from semel.core.call import Await, Call, Failed, NotRun, Outcome, Pause, Raised, Recover, Returned, Run, Stopped
from semel.core.encoding.serializers import Serializer
from semel.core.keys import KeyFormat
from semel.core.ops import Claim, Claimed, Complete, Count, Existing, Lookup, Op, Record, Release, Resolve, Sweep, Swept
from semel.core.policy import Duration, Policy
from semel.core.quota import Quota
from semel.engine.aio_calls import AsyncCalls
from semel.engine.declare.brackets import with_brackets
from semel.engine.declare.declaration import AsyncOnce, Declaration, Selector
from semel.engine.drive.aio_keeper import AsyncKeeper
from semel.engine.drive.attempts import AsyncAttempt, AsyncLeasedAttempt
from semel.engine.drive.drive import Drive, ignoring
from semel.engine.drive.flights import Flight
from semel.engine.drive.keeper import SWEEP_LIMIT
from semel.engine.drive.tasks import Late, change, in_thread, shielded
from semel.engine.guard import PolicyChanges, at_least_one
from semel.engine.opening import opened
from semel.engine.operation.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore
from semel.errors import StoreError
from semel.observe import events

__all__ = ["AsyncSemel"]

T = TypeVar("T")
Handler = Callable[[AsyncOperation], Any]


class AsyncSemel(AsyncCalls):
    """Makes functions happen once, however often they are called with the same key. One per event loop."""

    def __init__(
        self,
        store: AsyncStore | str,
        *,
        policy: Policy | None = None,
        tenant: str = "",
        on_event: events.EventHook | None = None,
        codec: Codec | None = None,
        secret: bytes | None = None,
        readable_keys: bool = True,
        sweep_every: Duration | None = "10m",
        quota: Quota | None = None,
    ) -> None:
        """The same settings as ``Semel``."""
        super().__init__(
            policy=policy, tenant=tenant, on_event=on_event, codec=codec, secret=secret,
            readable_keys=readable_keys, sweep_every=sweep_every, quota=quota,
        )  # fmt: skip
        self.store = opened(store, quota, awaited=True)
        self._flights: dict[bytes, Flight] = {}
        self._keeper = AsyncKeeper(self.store, self.sweep_every, self._tell_swept)

    # -- what a program asks ---------------------------------------------------------------------------------------

    @with_brackets
    def once(
        self,
        *,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        exclude: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> AsyncOnce:
        """Decorate an ``async def``: calls with the same key run it once, and the others get the same answer.

        A plain ``def`` becomes awaitable: it runs in a thread. Parameters as of ``Semel.once``.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint, exclude=exclude,
                key_format=key_format, serializer=serializer, changes=changes,
            )  # fmt: skip

            @functools.wraps(function)
            async def once(*args: Any, **kwargs: Any) -> Any:
                return (await self._perform(declared, args, kwargs)).value

            return once

        return cast("AsyncOnce", decorate)

    async def lookup(self, operation: str, key: object, *, tenant: str | None = None) -> Record | None:
        """The record of an operation as the store has it, or None."""
        return await self.store.execute(Lookup(self._identity(operation, key, tenant)))

    async def resolve(
        self, operation: str, key: object, result: Any, *, tenant: str | None = None, returns: Any = None
    ) -> None:
        """Say that an unknown or abandoned operation did happen, with this result; later calls replay it."""
        call = self._plain_call(operation, key, tenant, None, returns, {})
        self._report(call, await self.store.execute(self._resolution(call, result)), happened=True)

    async def release(self, operation: str, key: object, *, tenant: str | None = None, force: bool = False) -> None:
        """Say that an unknown or abandoned operation did not happen: the next call is a first call.

        ``force`` does so even while its owner runs; that owner's outcome will be refused.
        """
        call = self._plain_call(operation, key, tenant, None, None, {})
        found = await self.store.execute(Resolve(call.id, None, call.policy.retention_seconds, force))
        self._report(call, found, happened=False, force=force)

    async def sweep(self, limit: int = SWEEP_LIMIT) -> Swept:
        """Remove at most ``limit`` expired records."""
        swept = await self.store.execute(Sweep(at_least_one(limit)))
        self._tell_swept(swept.removed, swept.unknown)
        return swept

    async def close(self) -> None:
        """Stop the keeper and close the store."""
        await self._keeper.close()
        await self.store.close()

    async def __aenter__(self) -> AsyncSemel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- how a flow is driven --------------------------------------------------------------------------------------

    async def _perform(self, declared: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome[Any]:
        """A call of a decorated function."""
        call = self._declared_call(declared, args, kwargs)
        recover = declared.recover

        def handler(op: AsyncOperation) -> Any:
            if declared.awaits:
                return declared.invoke(op, args, kwargs)
            return in_thread(declared.invoke, op, args, kwargs)

        return await self._drive(call, handler, recover and (lambda: recover(args, kwargs)))

    async def _drive(self, call: Call, handler: Handler, recover: Callable[[], Any] | None) -> Outcome[Any]:
        drive = Drive(call)
        try:
            step = await self._advance(drive, None)
            while not isinstance(step, Outcome):
                work = handler if type(step) is Run else ignoring(recover)
                step = await self._advance(drive, await self._run(drive, step.claimed, work))
        except Exception:
            if drive.cancelled is not None:  # whatever the flow found, the caller was cancelled
                raise drive.cancelled from None
            raise
        finally:
            self._finish(drive)
        if drive.cancelled is not None:
            raise drive.cancelled
        return step

    async def begin(self, call: Call) -> AsyncAttempt | Outcome[Any]:
        """Claim, for an adapter: an outcome, or an attempt to be ended by it. See ``semel.engine.drive.attempts``."""
        drive = Drive(call)
        try:
            step = await self._advance(drive, None)
            while type(step) is Recover:
                work = ignoring(call.policy.recover)
                step = await self._advance(drive, await self._run(drive, step.claimed, work))
        except BaseException:
            self._finish(drive)
            raise
        if isinstance(step, Outcome):
            self._finish(drive)
            return step
        lease = drive.hold(step.claimed)
        if lease is not None:
            self._keeper.hold(lease)
        return AsyncLeasedAttempt(
            self, drive, step.claimed, AsyncOperation(call, lease, step.claimed, self.store.execute, self.store)
        )

    async def _end(self, drive: Drive, answer: Any) -> Outcome[Any]:
        try:
            step = await self._advance(drive, answer)
            assert isinstance(step, Outcome)
        except Exception:
            if drive.cancelled is not None:
                raise drive.cancelled from None
            raise
        finally:
            self._finish(drive)
        if drive.cancelled is not None:
            raise drive.cancelled
        return step

    async def _advance(self, drive: Drive, answer: Any) -> Run | Recover | Outcome[Any]:
        """Send the answer into the flow and do what it asks, until it asks for the handler or has an outcome."""
        flow = drive.flow
        error: BaseException | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                error = None
                try:
                    if isinstance(request, Claim):
                        answer = await self._claim(drive, request)
                    elif isinstance(request, (Run, Recover)):
                        if drive.cancelled is None:
                            return request
                        answer = NotRun(drive.cancelled)  # the caller is gone: begin nothing, only settle
                    elif isinstance(request, Complete):
                        try:
                            answer = await self.store.execute(request)
                        except asyncio.CancelledError as cancelled:
                            answer = await self._send_again(drive, request, cancelled)
                        if answer is True and drive.flight is not None:
                            drive.flight.completed = request
                    elif isinstance(request, Await):
                        answer = await self._await(drive, request)
                    elif isinstance(request, Pause):
                        await shielded(asyncio.sleep(request.seconds), drive)
                    elif isinstance(request, (Lookup, Count)):
                        answer = await self.store.execute(request)
                    else:
                        try:
                            answer = await self.store.execute(request)
                        except asyncio.CancelledError as cancelled:
                            answer = await self._send_again(drive, request, cancelled)
                except (StoreError, asyncio.CancelledError) as failure:
                    error = failure
        except StopIteration as stop:
            outcome = stop.value
        if type(outcome) is Failed:
            raise outcome.error
        return outcome  # type: ignore[no-any-return]

    def _finish(self, drive: Drive) -> None:
        """Give back what the call holds. May be called again: there is nothing left then."""
        if drive.lease is not None:
            self._keeper.drop(drive.lease)
        if drive.flight is not None:
            self._land(drive.call.id, drive.flight)
            drive.flight = None
        drive.finished = True

    async def _send_again(self, drive: Drive, op: Op[Any], cancelled: asyncio.CancelledError) -> Any:
        """Do an Op that must not be left half done, and was cancelled: the cancellation waits until it is settled.

        It may have reached the store or not. Ops may be sent twice: ask again, out of harm's reach.
        """
        drive.cancelled = cancelled
        answer = await shielded(self.store.execute(op), drive)
        return True if isinstance(op, Release) else answer  # a record that is gone was released by the first one

    async def _claim(self, drive: Drive, op: Claim) -> Claimed | Existing:
        """Ask the store, unless another call of this process is asking or running: then learn from that one."""
        while True:
            mine = Flight(op)
            flight = self._flights.setdefault(op.id, mine)
            if flight is not mine:
                learned = await self._learn(flight)
                if learned is not None:
                    return learned
                continue
            drive.began = mine.began = drive.began or time.monotonic()
            answer: Claimed | Existing
            try:
                try:
                    answer = await self.store.execute(op)
                except asyncio.CancelledError as cancelled:
                    answer = await self._send_again(drive, op, cancelled)
            except BaseException as error:
                mine.error = error if isinstance(error, StoreError) and drive.cancelled is None else None
                self._land(op.id, mine)
                raise
            if isinstance(answer, Existing):
                drive.began = 0.0  # not won, so the next claim is a new one
                mine.record = answer.record
                self._land(op.id, mine)
                return answer
            drive.flight = mine
            if drive.cancelled is None:  # else it is given back at once, and others should wait for that
                mine.claimed(answer)
            return answer

    async def _learn(self, flight: Flight) -> Existing | None:
        """What the flight knows; waits while it is claiming. None: it left the key free."""
        while True:
            answer = flight.answer(time.monotonic())
            if answer is not None or flight.landed:
                return answer
            await change(flight)

    def _land(self, id: bytes, flight: Flight) -> None:
        if self._flights.get(id) is flight:
            del self._flights[id]
        flight.land()

    async def _run(self, drive: Drive, claimed: Claimed | None, work: Handler) -> Returned | Raised | Stopped:
        """Run the handler in this task; its lease is kept alive until the call is settled, and if lost, cancels it."""
        lease = drive.hold(claimed)
        op = AsyncOperation(drive.call, lease, claimed, self.store.execute, self.store)
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        outer = running.get()
        try:
            running.set(op)
            if lease is not None:
                lease.on_lost = task.cancel if task is not None else None
                self._keeper.hold(lease)
            result = work(op)
            # A plain function given as call= has had its effect by now: what it returned is the result.
            returned = await result if inspect.isawaitable(result) else result
            op.leave()
            return Returned(returned)
        except Late as late:
            ours = 1 if lease is not None and lease.lost else 0
            if task is None or task.cancelling() > cancels + ours:
                drive.cancelled = late.cancelled
            return late.outcome
        except asyncio.CancelledError as error:
            if lease is not None and lease.lost and task is not None and task.cancelling() == cancels + 1:
                return Stopped()  # our own doing, and nobody else's
            return Raised(error)
        except BaseException as error:
            return Raised(await op.compensate(error))
        finally:
            running.set(outer)  # not by the token of set(): an interruption may come before we hold it
            if lease is not None:
                lease.on_lost = None  # from here on only the record is settled, which must not be cancelled
                if lease.lost and task is not None:
                    task.uncancel()

    async def _await(self, drive: Drive, request: Await) -> float:
        """Wait for a change: from a flight of this process, from the store's wake-up, or for the next look."""
        if drive.cancelled is not None:
            raise drive.cancelled
        began = time.monotonic()
        flight = self._flights.get(request.id)
        if flight is not None:
            await change(flight, request.seconds)
            return time.monotonic() - began
        wakes = self.store.wakes
        if wakes:
            try:
                await self.store.wait(request.id, request.seconds)
            except StoreError as error:  # nobody wakes us, so look for ourselves; that the store is down the claim says
                drive.call.tell(events.StoreFailed, "wait", str(error))
                wakes = False
        if not wakes:
            await asyncio.sleep(request.interval)
        return time.monotonic() - began
