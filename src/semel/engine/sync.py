"""``Semel``: the sync shell. It runs the handler in the caller's thread and drives the flow over a sync store.

``engine/aio.py`` has the same names in the same order; what can be decided without waiting is in neither, but in the
core.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable
from types import CoroutineType, TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from semel.codec import Codec
from semel.core.call import Await, Call, Failed, NotRun, Outcome, Pause, Raised, Recover, Returned, Run
from semel.core.encoding.serializers import Serializer
from semel.core.keys import KeyFormat
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Record, Resolve, Sweep, Swept
from semel.core.policy import Duration, Policy
from semel.core.quota import Quota
from semel.engine.calls import Calls
from semel.engine.declare.brackets import with_brackets
from semel.engine.declare.declaration import Declaration, Selector
from semel.engine.drive.attempts import Attempt, LeasedAttempt
from semel.engine.drive.drive import Drive, ignoring
from semel.engine.drive.flights import Flight
from semel.engine.drive.keeper import SWEEP_LIMIT, Keeper
from semel.engine.forking import survive_forks
from semel.engine.guard import PolicyChanges, at_least_one
from semel.engine.opening import opened
from semel.engine.operation.operation import Operation, running
from semel.engine.ports import Store
from semel.errors import PolicyError, StoreError
from semel.observe import events

__all__ = ["Semel"]

P = ParamSpec("P")
T = TypeVar("T")


class Semel(Calls):
    """Makes functions happen once, however often they are called with the same key."""

    def __init__(
        self,
        store: Store | str,
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
        """
        :param store: where records are kept, or its URL, ``"sqlite:///app.db"``. It is closed with the guard.
        :param policy: the default for every operation; each may change it by keywords.
        :param tenant: whose keys these are, where a call does not say.
        :param on_event: called with every event of ``semel.observe.events``.
        :param codec: compression and encryption of what is stored.
        :param secret: makes fingerprints unguessable (a MAC instead of a hash).
        :param readable_keys: False stores keys hashed only.
        :param sweep_every: how often expired records are removed in the background; None never.
        :param quota: how many live keys each tenant may hold.
        """
        super().__init__(
            policy=policy, tenant=tenant, on_event=on_event, codec=codec, secret=secret,
            readable_keys=readable_keys, sweep_every=sweep_every, quota=quota,
        )  # fmt: skip
        self.store = opened(store, quota, awaited=False)
        self._flights: dict[bytes, Flight] = {}
        self._lock = threading.Lock()
        self._keeper = Keeper(self.store, self.sweep_every, self._tell_swept)
        self._twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        survive_forks(self._forked)

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
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorate a function: calls with the same key run it once, and the others get the same answer.

        :param key: a parameter's name (``"order_id"``, ``"order.id"``) or a function of some of the arguments.
        :param operation: the name that scopes the key; the function's qualified name by default.
        :param tenant: like ``key``; the guard's own tenant by default.
        :param fingerprint: which arguments make it the same request: ``"auto"`` (all that are plain data), ``"all"``,
            names, a function, or None.
        :param exclude: parameters that may differ between retries.
        :param serializer: how the result is kept; by default from the return annotation.
        """

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint, exclude=exclude,
                key_format=key_format, serializer=serializer, changes=changes,
            )  # fmt: skip
            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def once_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                    return (await self._async_twin()._perform(declared, args, kwargs)).value

                return cast("Callable[P, T]", once_async)
            if inspect.iscoroutinefunction(changes.get("recover")):
                raise PolicyError("recover= is async and the function is not: make both async, or neither")

            @functools.wraps(function)
            def once(*args: P.args, **kwargs: P.kwargs) -> T:
                outcome: Outcome[T] = self._perform(declared, args, kwargs)
                return outcome.value

            return once

        return decorate

    def lookup(self, operation: str, key: object, *, tenant: str | None = None) -> Record | None:
        """The record of an operation as the store has it, or None."""
        return self.store.execute(Lookup(self._identity(operation, key, tenant)))

    def resolve(
        self, operation: str, key: object, result: Any, *, tenant: str | None = None, returns: Any = None
    ) -> None:
        """Say that an unknown or abandoned operation did happen, with this result; later calls replay it."""
        call = self._plain_call(operation, key, tenant, None, returns, {})
        self._report(call, self.store.execute(self._resolution(call, result)), happened=True)

    def release(self, operation: str, key: object, *, tenant: str | None = None, force: bool = False) -> None:
        """Say that an unknown or abandoned operation did not happen: the next call is a first call.

        ``force`` does so even while its owner runs; that owner's outcome will be refused.
        """
        call = self._plain_call(operation, key, tenant, None, None, {})
        found = self.store.execute(Resolve(call.id, None, call.policy.retention_seconds, force))
        self._report(call, found, happened=False, force=force)

    def sweep(self, limit: int = SWEEP_LIMIT) -> Swept:
        """Remove at most ``limit`` expired records."""
        swept = self.store.execute(Sweep(at_least_one(limit)))
        self._tell_swept(swept.removed, swept.unknown)
        return swept

    def close(self) -> None:
        """Stop the keeper and close the store."""
        self._keeper.close()
        for twin in list(self._twins.values()):
            twin.store.shut_down()
        self.store.close()

    def __enter__(self) -> Semel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- how a flow is driven --------------------------------------------------------------------------------------

    def _perform(self, declared: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome[Any]:
        """A call of a decorated function."""
        call = self._declared_call(declared, args, kwargs)
        recover = declared.recover
        return self._drive(
            call, lambda op: declared.invoke(op, args, kwargs), recover and (lambda: recover(args, kwargs))
        )

    def _drive(
        self, call: Call, handler: Callable[[Operation], Any], recover: Callable[[], Any] | None
    ) -> Outcome[Any]:
        drive = Drive(call)
        try:
            step = self._advance(drive, None)
            while not isinstance(step, Outcome):
                work = handler if type(step) is Run else ignoring(recover)
                step = self._advance(drive, self._run(drive, step.claimed, work))
            return step
        finally:
            self._finish(drive)

    def begin(self, call: Call) -> Attempt | Outcome[Any]:
        """Claim, for an adapter: an outcome, or an attempt to be ended by it. See ``semel.engine.drive.attempts``."""
        drive = Drive(call)
        try:
            step = self._advance(drive, None)
            while type(step) is Recover:
                work = ignoring(call.policy.recover)
                step = self._advance(drive, self._run(drive, step.claimed, work))
        except BaseException:
            self._finish(drive)
            raise
        if isinstance(step, Outcome):
            self._finish(drive)
            return step
        lease = drive.hold(step.claimed)
        if lease is not None:
            self._keeper.hold(lease)
        return LeasedAttempt(
            self, drive, step.claimed, Operation(call, lease, step.claimed, self.store.execute, self.store)
        )

    def _end(self, drive: Drive, answer: Any) -> Outcome[Any]:
        try:
            step = self._advance(drive, answer)
            assert isinstance(step, Outcome)
            return step
        finally:
            self._finish(drive)

    def _advance(self, drive: Drive, answer: Any) -> Run | Recover | Outcome[Any]:
        """Send the answer into the flow and do what it asks, until it asks for the handler or has an outcome."""
        flow = drive.flow
        error: StoreError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                error = None
                try:
                    if isinstance(request, Claim):
                        answer = self._claim(drive, request)
                    elif isinstance(request, (Run, Recover)):
                        return request
                    elif isinstance(request, Complete):
                        answer = self.store.execute(request)
                        if answer is True and drive.flight is not None:
                            drive.flight.completed = request
                    elif isinstance(request, Await):
                        answer = self._await(drive, request)
                    elif isinstance(request, Pause):
                        time.sleep(request.seconds)
                    else:
                        answer = self.store.execute(request)
                except StoreError as failure:
                    error = failure
        except StopIteration as stop:
            outcome = stop.value
        if type(outcome) is Failed:
            raise outcome.error
        return outcome  # type: ignore[no-any-return]

    def _finish(self, drive: Drive) -> None:
        """Give back what the call holds. May be called again: there is nothing left then."""
        try:
            if drive.lease is not None:
                self._keeper.drop(drive.lease)
        finally:
            if drive.flight is not None:
                self._land(drive.call.id, drive.flight)
                drive.flight = None
            drive.finished = True

    def _claim(self, drive: Drive, op: Claim) -> Claimed | Existing:
        """Ask the store, unless another call of this process is asking or running: then learn from that one."""
        while True:
            drive.flight = mine = Flight(op)  # written down before it is known: see _finish
            flight = self._flights.setdefault(op.id, mine)
            if flight is not mine:
                drive.flight = None
                if flight.landed:  # and still here: its caller was interrupted before it could take it out
                    self._flights.pop(op.id, None)
                    continue
                learned = self._learn(flight)
                if learned is not None:
                    return learned
                continue
            drive.began = mine.began = drive.began or time.monotonic()
            try:
                answer = self.store.execute(op)
            except BaseException as error:
                mine.error = error if isinstance(error, StoreError) else None
                self._land(op.id, mine)
                raise
            if isinstance(answer, Existing):
                drive.began = 0.0  # not won, so the next claim is a new one
                mine.record = answer.record
                self._land(op.id, mine)
                return answer
            with self._lock:
                mine.claimed(answer)
            return answer

    def _learn(self, flight: Flight) -> Existing | None:
        """What the flight knows; waits while it is claiming. None: it left the key free."""
        while True:
            with self._lock:
                answer = flight.answer(time.monotonic())
                if answer is not None or flight.landed:
                    return answer
                gate = threading.Lock()
                gate.acquire()
                flight.wait(gate.release)
            gate.acquire()

    def _land(self, id: bytes, flight: Flight) -> None:
        try:
            if self._flights.get(id) is flight:
                self._flights.pop(id, None)
        finally:
            with self._lock:
                flight.land()

    def _run(
        self, drive: Drive, claimed: Claimed | None, work: Callable[[Operation], Any]
    ) -> Returned | Raised | NotRun:
        """Run the handler in this thread; its lease is kept alive from now until the call is settled."""
        op = Operation(drive.call, drive.hold(claimed), claimed, self.store.execute, self.store)
        if drive.lease is not None:
            self._keeper.hold(drive.lease)
        outer = running.get()
        try:
            running.set(op)
            result = work(op)
            op.leave()
        except BaseException as error:
            return Raised(op.compensate(error))
        finally:
            running.set(outer)  # not by the token of set(): an interruption may come before we hold it
        if type(result) is CoroutineType:
            result.close()
            return NotRun(PolicyError(f"{drive.call}: the handler is async; use AsyncSemel, or decorate the async def"))
        return Returned(result)

    def _await(self, drive: Drive, request: Await) -> float:
        """Wait for a change: from a flight of this process, from the store's wake-up, or for the next look."""
        began = time.monotonic()
        flight = self._flights.get(request.id)
        if flight is not None and flight.wait_in_thread(self._lock, request.seconds):
            return time.monotonic() - began
        wakes = self.store.wakes
        if wakes:
            try:
                self.store.wait(request.id, request.seconds)
            except StoreError as error:  # nobody wakes us, so look for ourselves; that the store is down the claim says
                drive.call.tell(events.StoreFailed, "wait", str(error))
                wakes = False
        if not wakes:
            time.sleep(request.interval)
        return time.monotonic() - began

    def _forked(self) -> None:
        """A forked child has none of its parent's calls in the air."""
        self._flights = {}
        self._lock = threading.Lock()

    def _async_twin(self) -> Any:
        """The guard of ``async def`` functions decorated here, one per event loop; its store calls go to threads."""
        from semel.engine.drive.threaded import twin_in_this_loop

        return twin_in_this_loop(self._twins, self.store, self._settings)
