"""``guard.run`` and ``guard.outcome`` for an event loop: the same names in the same order as ``engine/calls.py``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar, Unpack, overload

from semel.core.call import Call, Outcome
from semel.engine.declare.handlers import with_handle
from semel.engine.guard import PolicyChanges
from semel.engine.operation.operation import AsyncOperation
from semel.engine.transaction.aio import AsyncTransactions

__all__ = ["AsyncCalls"]

T = TypeVar("T")


class AsyncCalls(AsyncTransactions):
    """What ``AsyncSemel`` does with a function that is given as ``call=``."""

    _awaited: ClassVar[bool] = True

    @overload
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
    ) -> T: ...

    @overload
    async def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T: ...

    async def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]] | Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """The same without a decorator: ``await guard.run("ship", key=order.id, call=lambda: ship(order))``.

        Parameters as of ``Semel.run``; ``call`` may be of the handle here too: ``lambda op: ship(order, op)``.
        """
        handler = with_handle(call)
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = await self._drive(what, handler, what.policy.recover)
        return outcome.value

    @overload
    async def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]: ...

    @overload
    async def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]: ...

    async def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], Awaitable[T]] | Callable[[AsyncOperation], Awaitable[T]],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run``, and tells whether the answer is a replay."""
        handler = with_handle(call)
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return await self._drive(what, handler, what.policy.recover)

    async def _drive(
        self, call: Call, handler: Callable[[AsyncOperation], Any], recover: Callable[[], Any] | None
    ) -> Outcome[Any]:
        raise NotImplementedError
