"""The handle of the operation that runs now: its key, its attempt, its steps, keys for the next hop, values to keep.

A handler gets it through a parameter annotated ``Operation`` (``AsyncOperation`` under AsyncSemel), as the argument of
``call=``, or from ``current_operation()`` anywhere below it: the context variable follows tasks and threads that
copy the context.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar, overload

from semel.core.call import describe_error
from semel.core.flows import claim_of
from semel.core.ops import SaveStep
from semel.core.steps import Undo, digest_of, mark_of
from semel.engine.operation.handle import (
    INJECTED,
    NO_FAILURE,
    OperationHandle,
    current_operation,
    result_serializer,
    running,
    undo_pauses,
)
from semel.errors import RecordTooLarge, StoreError, StoreUncertain
from semel.observe import events

__all__ = ["INJECTED", "AsyncOperation", "Operation", "OperationHandle", "current_operation", "running"]

T = TypeVar("T")


class Operation(OperationHandle):
    """The handle under ``Semel``."""

    __slots__ = ()

    def capture(self, name: str, make: Callable[[], T]) -> T:
        """A value that would differ from attempt to attempt, made once: stored before it is returned, then reused."""
        with self._one_at_a_time():
            known = self._recall(name)
            if known is not None:
                return known[0]  # type: ignore[no-any-return]
            if name not in self._made:  # made before, and the store's answer was lost: the same value is sent again
                self._made[name] = make()
            self._keep(self.journal.capture, name, self._made[name])
            return self._made[name]  # type: ignore[no-any-return]

    def step(
        self,
        name: str,
        function: Callable[..., T],
        *args: Any,
        undo: Callable[[T], Any] | None = None,
        connection: object = None,
        **kwargs: Any,
    ) -> T:
        """Do one part of the work: remembered when it returns, so that a re-run goes on after it.

        :param args: for the function; a re-run that gives it others is refused.
        :param undo: called with what the step returned, when the operation fails later on.
        :param connection: the connection or session, in a transaction, that the function writes its rows on. The step
            is remembered in that transaction: a commit keeps both, a rollback undoes both.
        """
        self._alone(name)
        with self._one_at_a_time():
            digest = digest_of(self._call, args, kwargs)
            serializer = result_serializer(function)
            unit = self._unit(connection)
            lent = connection is not None and name in self.journal.lent
            if lent and (unit is None or not unit.saved(self.id, mark_of(name))):
                self.journal.forget(name)  # it was rolled back, so it is not done
            known = self._enter(name, digest)
            if known is not None:
                result: T = self.journal.value(known, serializer)
            elif connection is not None:
                with self._in_step(name):
                    if unit is not None:
                        unit.require(False)
                    result = function(*args, **kwargs)
                    if unit is not None:
                        unit.finish()
                        op = self.journal.finish(self.token, name, result, serializer, digest, undo is not None)
                        self._saved(op, unit.save(op))
                    self._lend(name)
            else:
                with self._in_step(name):
                    if ("step", name) not in self._made:  # done before, and the store's answer was lost: not done again
                        self._made["step", name] = function(*args, **kwargs)
                    result = self._made["step", name]
                    self._keep(self.journal.finish, name, result, serializer, digest, undo is not None)
            if undo is not None:
                self.journal.can_undo(name, result, undo)
            return result

    def compensate(self, error: BaseException) -> BaseException:
        """The handler raised ``error``: undo its steps, the last first. What is to be raised."""
        if self._in_doubt(error):
            try:
                self._settled(self._execute(claim_of(self._call)))
            except NO_FAILURE as interrupted:
                return interrupted
        if not self.undoes(error):
            return error
        self.compensated = True
        failed: list[tuple[str, str]] = []
        try:
            if self.journal.failing:
                error = self.journal.failure()
            else:
                self._keep(self.journal.fail, error)
            for each in self.journal.to_undo():
                why = self._undo(each)
                if why is not None:
                    failed.append((each.name, why))
        except NO_FAILURE as interrupted:  # the rest is the next attempt's
            return interrupted
        return self._undone(error, failed)

    def _undo(self, what: Undo) -> str | None:
        """Undo a step, trying again for a while; why it failed, if it did."""
        for pause in (*undo_pauses(self._call.policy), None):
            try:
                what.function(what.value)
                break
            except Exception as error:
                self._call.tell(events.UndoFailed, what.name, describe_error(error))
                if pause is None:
                    return describe_error(error)
            time.sleep(pause)
        self._keep(self.journal.undone, what.name)
        return None

    def _keep(self, entry: Callable[..., SaveStep], *details: Any) -> None:
        if self._lease is not None:  # without a lease it runs unprotected, and there is nothing to keep it in
            op = entry(self.token, *details)
            try:
                try:
                    held = self._execute(op)
                except RecordTooLarge as too_large:
                    op = self._shortened(op, too_large)
                    held = self._execute(op)
            except StoreError as error:
                if isinstance(error, StoreUncertain):
                    self._call.has_steps = True  # it may be saved: the end of this attempt must not forget it
                self._blocked(error)
                raise
            self._saved(op, held)

    def _one_at_a_time(self) -> Any:
        """A lock, made when first asked for: most operations have no steps. The function of a step holds it already."""
        if self._stepping:
            return nullcontext()
        with _MAKING:
            if self._lock is None:
                self._lock = threading.RLock()
            return self._lock


_MAKING = threading.Lock()


class AsyncOperation(OperationHandle):
    """The handle under ``AsyncSemel``: the same names."""

    __slots__ = ()

    async def capture(self, name: str, make: Callable[[], T]) -> T:
        """A value that would differ from attempt to attempt, made once: stored before it is returned, then reused."""
        async with self._one_at_a_time():
            known = self._recall(name)
            if known is not None:
                return known[0]  # type: ignore[no-any-return]
            if name not in self._made:  # made before, and the store's answer was lost: the same value is sent again
                self._made[name] = make()
            await self._keep(self.journal.capture, name, self._made[name])
            return self._made[name]  # type: ignore[no-any-return]

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
    ) -> Any:
        """Do one part of the work: remembered when it returns, so that a re-run goes on after it.

        :param function: an ``async def``, or a plain function that does not block.
        :param args: for the function; a re-run that gives it others is refused.
        :param undo: called with what the step returned, when the operation fails later on.
        :param connection: the connection or session, in a transaction, that the function writes its rows on. The step
            is remembered in that transaction: a commit keeps both, a rollback undoes both.
        """
        self._alone(name)
        async with self._one_at_a_time():
            digest = digest_of(self._call, args, kwargs)
            serializer = result_serializer(function)
            unit = self._unit(connection)
            lent = connection is not None and name in self.journal.lent
            if lent and (unit is None or not await unit.saved(self.id, mark_of(name))):
                self.journal.forget(name)  # it was rolled back, so it is not done
            known = self._enter(name, digest)
            if known is not None:
                result = self.journal.value(known, serializer)
            elif connection is not None:
                with self._in_step(name):
                    if unit is not None:
                        unit.require(False)
                    given = function(*args, **kwargs)
                    result = await given if inspect.isawaitable(given) else given
                    if unit is not None:
                        await unit.finish()
                        op = self.journal.finish(self.token, name, result, serializer, digest, undo is not None)
                        self._saved(op, await unit.save(op))
                    self._lend(name)
            else:
                with self._in_step(name):
                    if ("step", name) not in self._made:  # done before, and the store's answer was lost: not done again
                        given = function(*args, **kwargs)
                        self._made["step", name] = await given if inspect.isawaitable(given) else given
                    result = self._made["step", name]
                    await self._keep(self.journal.finish, name, result, serializer, digest, undo is not None)
            if undo is not None:
                self.journal.can_undo(name, result, undo)
            return result

    async def compensate(self, error: BaseException) -> BaseException:
        """The handler raised ``error``: undo its steps, the last first. What is to be raised."""
        from asyncio import CancelledError

        if self._in_doubt(error):
            try:
                self._settled(await self._execute(claim_of(self._call)))
            except (*NO_FAILURE, CancelledError) as interrupted:
                return interrupted
        if not self.undoes(error):
            return error
        self.compensated = True
        failed: list[tuple[str, str]] = []
        try:
            if self.journal.failing:
                error = self.journal.failure()
            else:
                await self._keep(self.journal.fail, error)
            for each in self.journal.to_undo():
                why = await self._undo(each)
                if why is not None:
                    failed.append((each.name, why))
        except (*NO_FAILURE, CancelledError) as interrupted:  # the rest is the next attempt's
            return interrupted
        return self._undone(error, failed)

    async def _undo(self, what: Undo) -> str | None:
        """Undo a step, trying again for a while; why it failed, if it did."""
        from asyncio import sleep

        for pause in (*undo_pauses(self._call.policy), None):
            try:
                given = what.function(what.value)
                if inspect.isawaitable(given):
                    await given
                break
            except Exception as error:
                self._call.tell(events.UndoFailed, what.name, describe_error(error))
                if pause is None:
                    return describe_error(error)
            await sleep(pause)
        await self._keep(self.journal.undone, what.name)
        return None

    async def _keep(self, entry: Callable[..., SaveStep], *details: Any) -> None:
        if self._lease is not None:  # without a lease it runs unprotected, and there is nothing to keep it in
            op = entry(self.token, *details)
            try:
                try:
                    held = await self._execute(op)
                except RecordTooLarge as too_large:
                    op = self._shortened(op, too_large)
                    held = await self._execute(op)
            except StoreError as error:
                if isinstance(error, StoreUncertain):
                    self._call.has_steps = True  # it may be saved: the end of this attempt must not forget it
                self._blocked(error)
                raise
            self._saved(op, held)

    def _one_at_a_time(self) -> Any:
        """A lock, made when first asked for: most operations have no steps. The function of a step holds it already."""
        from asyncio import Lock

        if self._stepping:
            return nullcontext()
        if self._lock is None:
            self._lock = Lock()
        return self._lock
