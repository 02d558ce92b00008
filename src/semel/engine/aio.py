"""``AsyncSemel``: the async shell. It runs the handler in the caller's task and drives the flow over an async store.

``engine/sync.py`` has the same names in the same order; what can be decided without waiting is in neither, but in the
core. What only this one has is about cancellation: a call that is cancelled still settles its record before it ends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from types import AsyncGeneratorType, GeneratorType, TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from semel.core.flows import Await, Lost, NotRun, Pause, Raised, Recover, Returned, Run, perform
from semel.core.keys import KeyFormat
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Record, Resolve, Sweep, Swept
from semel.core.outcomes import Call, Outcome
from semel.core.policy import Duration, Policy
from semel.core.serializers import Serializer
from semel.core.snapshot import Codec
from semel.engine.aio_keeper import AsyncKeeper
from semel.engine.declare import Selector
from semel.engine.flights import Flight
from semel.engine.guard import Guard, PolicyChanges, unrun
from semel.engine.keeper import SWEEP_LIMIT
from semel.engine.leases import Lease
from semel.engine.operation import AsyncOperation, running
from semel.engine.ports import AsyncStore
from semel.errors import StoreError
from semel.observe import events

__all__ = ["AsyncSemel"]

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[AsyncOperation], Any]


class AsyncSemel(Guard):
    """Makes functions happen once, however often they are called with the same key. One per event loop."""

    def __init__(
        self,
        store: AsyncStore,
        *,
        policy: Policy | None = None,
        tenant: str = "",
        on_event: events.EventHook | None = None,
        codec: Codec | None = None,
        secret: bytes | None = None,
        keep_keys: bool = True,
        sweep_every: Duration | None = "10m",
    ) -> None:
        """The same settings as ``Semel``."""
        super().__init__(
            policy=policy, tenant=tenant, on_event=on_event, codec=codec, secret=secret,
            keep_keys=keep_keys, sweep_every=sweep_every,
        )  # fmt: skip
        self.store = store
        self._flights: dict[bytes, Flight] = {}
        self._keeper = AsyncKeeper(store, self._sweep_every, self._tell_swept)

    # -- what a program asks ---------------------------------------------------------------------------------------

    def once(
        self,
        *,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        without: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
        """Decorate an ``async def``: calls with the same key run it once, and the others get the same answer.

        A plain ``def`` becomes awaitable: it runs in a thread. Parameters as of ``Semel.once``.
        """

        def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint, without=without,
                key_format=key_format, serializer=serializer, changes=changes,
            )  # fmt: skip
            handle, recover = declared.handle, declared.recover
            awaits = inspect.iscoroutinefunction(inspect.unwrap(function))

            @functools.wraps(function)
            async def once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = self._declared_call(declared, args, kwargs)

                def handler(op: AsyncOperation) -> Awaitable[T]:
                    if handle is not None and kwargs.get(handle) is None:
                        kwargs[handle] = op
                    if awaits:
                        return function(*args, **kwargs)
                    return _in_thread(cast("Callable[..., Any]", function), *args, **kwargs)

                outcome: Outcome[T] = await self._drive(call, handler, recover and (lambda: recover(args, kwargs)))
                return outcome.value

            return once

        return decorate

    async def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """The same without a decorator: ``await guard.run("ship", key=order.id, call=lambda: ship(order))``."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = await self._drive(what, lambda op: call(), what.policy.recover)
        return outcome.value

    async def outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run``, and tells whether the answer is a replay."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return await self._drive(what, lambda op: call(), what.policy.recover)

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
        found = await self.store.execute(Resolve(call.id, None, call.policy.ttl_seconds, force))
        self._report(call, found, happened=False, force=force)

    async def sweep(self, limit: int = SWEEP_LIMIT) -> Swept:
        """Remove at most ``limit`` expired records."""
        swept = await self.store.execute(Sweep(limit))
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

    async def _drive(self, call: Call, handler: Handler, recover: Callable[[], Any] | None) -> Outcome[Any]:
        flow = perform(call)
        flight: Flight | None = None
        began = 0.0
        answer: Any = None
        error: BaseException | None = None
        cancelled: asyncio.CancelledError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                error = None
                try:
                    if cancelled is not None and (isinstance(request, (Run, Await, Recover))):
                        # The caller is gone: do not begin anything new, only settle what was begun.
                        if isinstance(request, Await):
                            raise cancelled
                        answer = NotRun(cancelled)
                    elif isinstance(request, Claim):
                        began = time.monotonic()
                        flight, answer = await self._claim(request)
                    elif isinstance(request, Run):
                        answer = await self._run(call, request.claimed, began, handler)
                    elif isinstance(request, Complete):
                        answer = await self.store.execute(request)
                    elif isinstance(request, Await):
                        answer = await self._await(request)
                    elif isinstance(request, Pause):
                        await asyncio.sleep(request.seconds)
                    elif isinstance(request, Recover):
                        assert recover is not None
                        answer = await self._run(call, request.claimed, began, lambda op: recover())
                    else:
                        answer = await self.store.execute(request)
                except StoreError as failure:
                    error = failure
                except asyncio.CancelledError as failure:
                    if isinstance(request, (Await, Lookup)):
                        error = failure
                        continue
                    # The Op may have reached the store or not. Ops may be sent twice: ask again, out of harm's reach.
                    cancelled = failure
                    if isinstance(request, (Pause, Run, Recover)):
                        continue
                    try:
                        answer = await _shielded(self.store.execute(request))
                    except StoreError as second:
                        error = second
                if isinstance(request, Complete) and answer is True and error is None and flight is not None:
                    flight.completed = request
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            return stop.value  # type: ignore[no-any-return]
        except Exception:
            if cancelled is not None:  # whatever the flow found, the caller was cancelled
                raise cancelled from None
            raise
        finally:
            if flight is not None:
                self._land(call.id, flight, None)

    async def _claim(self, op: Claim) -> tuple[Flight | None, Claimed | Existing]:
        """Ask the store, unless another call of this process is asking or running: then learn from that one."""
        while True:
            mine = Flight(op.fingerprint, op.lease)
            flight = self._flights.setdefault(op.id, mine)
            if flight is not mine:
                learned = await self._learn(flight, op.id)
                if learned is not None:
                    return None, learned
                continue
            try:
                answer = await self.store.execute(op)
            except BaseException:
                self._land(op.id, mine, None)
                raise
            if isinstance(answer, Existing):
                self._land(op.id, mine, answer.record)
                return None, answer
            mine.claimed(answer)
            return mine, answer

    async def _learn(self, flight: Flight, id: bytes) -> Existing | None:
        """What the flight knows; waits while it is claiming. None: it left the key free."""
        while True:
            answer = flight.answer(id)
            if answer is not None or flight.landed:
                return answer
            await _change(flight)

    def _land(self, id: bytes, flight: Flight, record: Record | None) -> None:
        if self._flights.get(id) is flight:
            del self._flights[id]
        flight.land(record)

    async def _run(
        self, call: Call, claimed: Claimed | None, began: float, handler: Handler
    ) -> Returned | Raised | Lost | NotRun:
        """Run the handler in this task, its lease kept alive meanwhile; a lost lease cancels it."""
        lease: Lease | None = None
        task: asyncio.Task[Any] | None = None
        if claimed is None:
            op = AsyncOperation(call, None, 1, (), self.store.execute)
        else:
            lease = Lease(call, claimed.token, claimed.attempt, began)
            call.has_steps = bool(claimed.steps)
            op = AsyncOperation(call, lease, claimed.attempt, claimed.steps, self.store.execute)
            task = asyncio.current_task()
            lease.on_lost = task.cancel if task is not None else None
            self._keeper.hold(lease)
        token = running.set(op)
        try:
            work = handler(op)
            if type(work) in (GeneratorType, AsyncGeneratorType):
                return NotRun(unrun(call, work))
            # A plain function given as call= has had its effect by now: what it returned is the result.
            return Returned(await work if inspect.isawaitable(work) else work)
        except asyncio.CancelledError as error:
            if lease is not None and lease.lost and task is not None and task.cancelling() <= 1:
                return Lost()  # our own doing, and nobody else's
            return Raised(error)
        except BaseException as error:
            return Raised(error)
        finally:
            running.reset(token)
            if lease is not None:
                self._keeper.drop(lease)
                if lease.lost and task is not None:
                    task.uncancel()

    async def _await(self, request: Await) -> float:
        """Wait for a change: from a flight of this process, from the store's wake-up, or for the next look."""
        began = time.monotonic()
        flight = self._flights.get(request.id)
        if flight is not None:
            await _change(flight, request.seconds)
        elif self.store.wakes:
            await self.store.wait(request.id, request.seconds)
        else:
            await asyncio.sleep(request.interval)
        return time.monotonic() - began


async def _change(flight: Flight, seconds: float | None = None) -> None:
    """Wait for the flight's next change."""
    changed = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not changed.done():
            changed.set_result(None)

    flight.wait(wake)
    await asyncio.wait([changed], timeout=seconds)


async def _shielded(work: Awaitable[T]) -> T:
    """Wait for it to the end, whoever cancels us: the first cancellation is remembered by the caller."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
        except Exception:
            break  # the task's own error: raised below
    return task.result()


async def _in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return await asyncio.to_thread(function, *args, **kwargs)
