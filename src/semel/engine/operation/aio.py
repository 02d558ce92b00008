# Twin: sync.py is generated from this file by make twins.
# Twin: function: Callable[..., Any], -> function: Callable[..., T],
# Twin: undo: Callable[[Any], Any] | None = None, -> undo: Callable[[T], Any] | None = None,
# Twin: Any:  # the result of the step -> T:
# Twin: self._drive(flow, unit))  # of type T -> self._drive(flow, unit))  # type: ignore[no-any-return]
# Twin: an ``async def``, or a plain function that does not block. -> called with ``args`` and ``kwargs``.
"""``AsyncOperation``: the handle under ``AsyncSemel``.

What a step or an undo does is decided in ``core/steps.py``. The handle only drives those flows: it calls functions,
executes Ops and sleeps.
"""

from __future__ import annotations

import inspect

# sync only: import threading
# sync only: import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, overload

from semel.core.call import Pause, Raised, Returned
from semel.core.ops import Op
from semel.core.policy import Duration
from semel.core.steps import FindMark, RunStep, RunUndo, StepFlow, WriteMark

# sync only: from semel.engine.operation.handle import ForkSafeLock
from semel.engine.operation.handle import OperationHandle, OperationPart, part, stepping

# sync only: _locks = ForkSafeLock()  # held only while a lock is created
T = TypeVar("T")


class AsyncOperation(OperationHandle):
    """The handle under ``AsyncSemel``."""

    __slots__ = ()

    async def capture(self, name: str, make: Callable[[], T]) -> T:
        """Return a value that would differ between attempts, such as a random id.

        ``make`` is called once. Its result is stored and reused.
        """
        async with self._one_at_a_time():
            return self._end_step(await self._drive(self._steps.capture(name, make)))  # type: ignore[no-any-return]

    # async only
    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        undo: Callable[[T], Any] | None = None,
        connection: object = None,
        **kwargs: Any,
    ) -> T: ...

    # async only
    @overload
    async def step(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        undo: Callable[[T], Any] | None = None,
        connection: object = None,
        **kwargs: Any,
    ) -> T: ...

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        undo: Callable[[Any], Any] | None = None,
        connection: object = None,
        **kwargs: Any,
    ) -> Any:  # the result of the step
        """Run one part of the work. Its result is stored when it returns, so that a re-run continues after it.

        :param function: an ``async def``, or a plain function that does not block.
        :param args: arguments for the function. A re-run with other arguments raises StepMismatch.
        :param undo: called with the step's result if the operation fails later on.
        :param connection: the connection or session on which the function writes its rows, in a transaction. The step
            is stored in that transaction, so both are committed or rolled back together.
        """
        self._refuse_nesting(name)
        async with self._one_at_a_time():
            unit = self._unit(connection)
            flow = self._steps.step(name, function, args, kwargs, undo=undo, in_transaction=connection is not None)
            return self._end_step(await self._drive(flow, unit))  # of type T

    async def emit(
        self,
        type: str,
        data: Any,
        *,
        stream: str | None = None,
        id: str | None = None,
        dedup: str | None = None,
        destination: str = "",
        subject: str = "",
        source: str = "",
        content_type: str | None = None,
        delay: Duration | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Add a message to the outbox, in the transaction of the operation. Returns its id.

        The message is sent if the transaction commits, and only then. It works in ``guard.run_in_transaction``, in
        routes with ``connection=``, and in a step with ``connection=``. The message is inserted at once, so a savepoint
        that is rolled back takes it along. The parameters are those of ``AsyncOutbox.add``.

        :param id: by default made of the operation and the message's place among its messages of this type and stream,
            so that a re-run of the handler adds the same message.
        """
        from semel.engine.operation.emitting import make_message, tell_emitted, unit_for_messages

        unit = unit_for_messages(self)
        message = make_message(
            type, data, self, stream=stream, id=id, dedup=dedup, destination=destination, subject=subject,
            source=source, content_type=content_type, delay=delay, headers=headers,
        )  # fmt: skip
        await unit.add(message)
        tell_emitted(message, self)
        return message.id

    async def compensate(self, error: BaseException) -> BaseException:
        """Undo the steps of a handler that raised ``error``, the last one first. Returns the error to raise."""
        from asyncio import CancelledError  # async only

        if self._journal is None:
            return error
        # sync: return self._drive(self._journal.compensate(error))  # type: ignore[no-any-return]
        try:
            return await self._drive(self._journal.compensate(error))  # type: ignore[no-any-return]
        except CancelledError as cancelled:  # the next attempt undoes the rest
            return cancelled

    async def _drive(self, flow: StepFlow, unit: Any = None) -> Any:
        try:
            request = next(flow)
            while True:
                try:
                    answer = await self._answer(request, unit)
                except BaseException as error:
                    request = flow.throw(error)
                else:
                    request = flow.send(answer)
        except StopIteration as stop:
            return stop.value

    async def _answer(self, request: Any, unit: Any) -> Any:
        if isinstance(request, Op):
            return await self._execute(request)
        if isinstance(request, RunStep):
            token, outer = stepping.set(self), self._transaction
            whole = part.set(OperationPart(self.id, f"step {request.name}", {}))
            try:
                if unit is not None:
                    unit.require(False)
                    self._transaction = unit
                result = request.function(*request.args, **request.kwargs)
                # async only
                if inspect.isawaitable(result):
                    result = await result
                if unit is not None:
                    await unit.finish()
                return Returned(result)
            except BaseException as error:
                return Raised(error)
            finally:
                self._transaction = outer
                part.reset(whole)
                stepping.reset(token)
        if isinstance(request, RunUndo):
            whole = part.set(OperationPart(self.id, f"undo {request.name}", {}))
            try:
                result = request.function(request.value)
                return Returned(
                    await result if inspect.isawaitable(result) else result
                )  # sync: return Returned(result)
            except BaseException as error:
                return Raised(error)
            finally:
                part.reset(whole)
        if isinstance(request, FindMark):
            return await unit.saved(request.id, request.name)
        if isinstance(request, WriteMark):
            return await unit.save(request.op)
        assert isinstance(request, Pause)
        from asyncio import sleep  # async only

        return await sleep(request.seconds)  # sync: return time.sleep(request.seconds)

    def _one_at_a_time(self) -> Any:
        """Return the lock for steps, which is created at the first use. A step's own function already holds it."""
        from asyncio import Lock  # async only

        if self._stepping:
            return nullcontext()
        # sync: with _locks.lock:
        # sync:     if self._lock is None:
        # sync:         self._lock = threading.RLock()
        if self._lock is None:
            self._lock = Lock()
        return self._lock
