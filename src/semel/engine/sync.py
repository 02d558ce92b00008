"""``Semel``: the sync shell. It runs the handler in the caller's thread and drives the flow over a sync store.

``engine/aio.py`` has the same names in the same order; what can be decided without waiting is in neither, but in the
core.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, Unpack, cast

from semel.core.flows import Await, NotRun, Pause, Raised, Recover, Returned, Run, perform
from semel.core.keys import KeyFormat
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Record, Resolve, Sweep, Swept
from semel.core.outcomes import Call, Outcome
from semel.core.policy import Duration, Policy
from semel.core.serializers import Serializer
from semel.core.snapshot import Codec
from semel.engine.declare import Selector
from semel.engine.flights import Flight
from semel.engine.forking import survive_forks
from semel.engine.guard import UNRUN, Guard, PolicyChanges, unrun
from semel.engine.keeper import SWEEP_LIMIT, Keeper
from semel.engine.leases import Lease
from semel.engine.operation import Operation, running
from semel.engine.ports import Store
from semel.errors import StoreError
from semel.observe import events

__all__ = ["Semel"]

P = ParamSpec("P")
T = TypeVar("T")


class Semel(Guard):
    """Makes functions happen once, however often they are called with the same key."""

    def __init__(
        self,
        store: Store,
        *,
        policy: Policy | None = None,
        tenant: str = "",
        on_event: events.EventHook | None = None,
        codec: Codec | None = None,
        secret: bytes | None = None,
        keep_keys: bool = True,
        sweep_every: Duration | None = "10m",
    ) -> None:
        """
        :param policy: the default for every operation; each may change it by keywords.
        :param tenant: whose keys these are, where a call does not say.
        :param on_event: called with every event of ``semel.observe.events``.
        :param codec: compression and encryption of what is stored.
        :param secret: makes fingerprints unguessable (a MAC instead of a hash).
        :param keep_keys: False stores keys hashed only.
        :param sweep_every: how often expired records are removed in the background; None never.
        """
        super().__init__(
            policy=policy, tenant=tenant, on_event=on_event, codec=codec, secret=secret,
            keep_keys=keep_keys, sweep_every=sweep_every,
        )  # fmt: skip
        self.store = store
        self._flights: dict[bytes, Flight] = {}
        self._lock = threading.Lock()
        self._keeper = Keeper(store, self._sweep_every, self._tell_swept)
        survive_forks(self)

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
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorate a function: calls with the same key run it once, and the others get the same answer.

        :param key: a parameter's name (``"order_id"``, ``"order.id"``) or a function of some of the arguments.
        :param operation: the name that scopes the key; the function's qualified name by default.
        :param tenant: like ``key``, or a fixed text.
        :param fingerprint: which arguments make it the same request: ``"auto"`` (all that are plain data), ``"all"``,
            names, a function, or None.
        :param without: parameters that may differ between retries.
        :param serializer: how the result is kept; by default from the return annotation.
        """

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            if inspect.iscoroutinefunction(function):
                twin: Callable[[Callable[P, T]], Callable[P, T]] = self._async_twin.once(
                    key=key, operation=operation, tenant=tenant, fingerprint=fingerprint, without=without,
                    key_format=key_format, serializer=serializer, **changes,
                )  # fmt: skip
                return twin(cast("Callable[P, T]", function))
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint, without=without,
                key_format=key_format, serializer=serializer, changes=changes,
            )  # fmt: skip
            handle, recover = declared.handle, declared.recover

            @functools.wraps(function)
            def once(*args: P.args, **kwargs: P.kwargs) -> T:
                call = self._declared_call(declared, args, kwargs)

                def handler(op: Operation) -> T:
                    if handle is not None and kwargs.get(handle) is None:
                        kwargs[handle] = op
                    return function(*args, **kwargs)

                outcome: Outcome[T] = self._drive(call, handler, recover and (lambda: recover(args, kwargs)))
                return outcome.value

            return once

        return decorate

    def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """The same without a decorator: ``guard.run("ship", key=order.id, call=lambda: ship(order))``.

        :param fingerprint: plain data that makes it the same request; another one under this key is refused.
        :param returns: the type of the result, where it is to be rebuilt as a dataclass or model.
        """
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = self._drive(what, lambda op: call(), what.policy.recover)
        return outcome.value

    def outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run``, and tells whether the answer is a replay."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return self._drive(what, lambda op: call(), what.policy.recover)

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
        found = self.store.execute(Resolve(call.id, None, call.policy.ttl_seconds, force))
        self._report(call, found, happened=False, force=force)

    def sweep(self, limit: int = SWEEP_LIMIT) -> Swept:
        """Remove at most ``limit`` expired records."""
        swept = self.store.execute(Sweep(limit))
        self._tell_swept(swept.removed, swept.unknown)
        return swept

    def close(self) -> None:
        """Stop the keeper and close the store."""
        self._keeper.close()
        self.store.close()

    def __enter__(self) -> Semel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forked(self) -> None:
        """A forked child has none of its parent's calls in the air."""
        self._flights = {}
        self._lock = threading.Lock()

    # -- how a flow is driven --------------------------------------------------------------------------------------

    def _drive(
        self, call: Call, handler: Callable[[Operation], Any], recover: Callable[[], Any] | None
    ) -> Outcome[Any]:
        flow = perform(call)
        flight: Flight | None = None
        began = 0.0
        answer: Any = None
        error: StoreError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                error = None
                try:
                    if isinstance(request, Claim):
                        began = time.monotonic()
                        flight, answer = self._claim(request)
                    elif isinstance(request, Run):
                        answer = self._run(call, request.claimed, began, handler)
                    elif isinstance(request, Complete):
                        answer = self.store.execute(request)
                        if answer and flight is not None:
                            flight.completed = request
                    elif isinstance(request, Await):
                        answer = self._await(request)
                    elif isinstance(request, Pause):
                        time.sleep(request.seconds)
                    elif isinstance(request, Recover):
                        assert recover is not None
                        answer = self._run(call, request.claimed, began, lambda op: recover())
                    else:
                        answer = self.store.execute(request)
                except StoreError as failure:
                    error = failure
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            if flight is not None:
                self._land(call.id, flight, None)

    def _claim(self, op: Claim) -> tuple[Flight | None, Claimed | Existing]:
        """Ask the store, unless another call of this process is asking or running: then learn from that one."""
        while True:
            mine = Flight(op.fingerprint, op.lease)
            flight = self._flights.setdefault(op.id, mine)
            if flight is not mine:
                learned = self._learn(flight, op.id)
                if learned is not None:
                    return None, learned
                continue
            try:
                answer = self.store.execute(op)
            except BaseException:
                self._land(op.id, mine, None)
                raise
            if isinstance(answer, Existing):
                self._land(op.id, mine, answer.record)
                return None, answer
            with self._lock:
                mine.claimed(answer)
            return mine, answer

    def _learn(self, flight: Flight, id: bytes) -> Existing | None:
        """What the flight knows; waits while it is claiming. None: it left the key free."""
        while True:
            with self._lock:
                answer = flight.answer(id)
                if answer is not None or flight.landed:
                    return answer
                gate = threading.Lock()
                gate.acquire()
                flight.wait(gate.release)
            gate.acquire()

    def _land(self, id: bytes, flight: Flight, record: Record | None) -> None:
        self._flights.pop(id, None)
        with self._lock:
            flight.land(record)

    def _run(
        self, call: Call, claimed: Claimed | None, began: float, handler: Callable[[Operation], Any]
    ) -> Returned | Raised | NotRun:
        """Run the handler in this thread, its lease kept alive meanwhile."""
        if claimed is None:
            lease = None
            op = Operation(call, None, 1, (), self.store.execute)
        else:
            lease = Lease(call, claimed.token, claimed.attempt, began)
            call.has_steps = bool(claimed.steps)
            op = Operation(call, lease, claimed.attempt, claimed.steps, self.store.execute)
            self._keeper.hold(lease)
        token = running.set(op)
        try:
            result = handler(op)
        except BaseException as error:
            return Raised(error)
        finally:
            running.reset(token)
            if lease is not None:
                self._keeper.drop(lease)
        if type(result) in UNRUN:
            return NotRun(unrun(call, result))
        return Returned(result)

    def _await(self, request: Await) -> float:
        """Wait for a change: from a flight of this process, from the store's wake-up, or for the next look."""
        began = time.monotonic()
        flight = self._flights.get(request.id)
        gate = threading.Lock()
        with self._lock:
            if flight is not None and not flight.landed:
                gate.acquire()
                flight.wait(gate.release)
            else:
                flight = None
        if flight is not None:
            gate.acquire(timeout=request.seconds)
        elif self.store.wakes:
            self.store.wait(request.id, request.seconds)
        else:
            time.sleep(request.interval)
        return time.monotonic() - began

    @functools.cached_property
    def _async_twin(self) -> Any:
        """The guard of ``async def`` functions that are decorated here: this store's calls go to threads."""
        from semel.engine.aio import AsyncSemel
        from semel.engine.threaded import ThreadedStore

        return AsyncSemel(ThreadedStore(self.store), **self._settings)
