"""``guard.run`` and ``guard.outcome``: a call without a decorator. ``engine/aio_calls.py`` is the async twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack, overload

from semel.core.call import Call, Outcome
from semel.engine.declare.handlers import with_handle
from semel.engine.guard import PolicyChanges
from semel.engine.operation.operation import Operation
from semel.engine.transaction.sync import Transactions

__all__ = ["Calls"]

T = TypeVar("T")


class Calls(Transactions):
    """What ``Semel`` does with a function that is given as ``call=``."""

    @overload
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
    ) -> T: ...

    @overload
    def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[Operation], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T: ...

    def run(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], T] | Callable[[Operation], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """The same without a decorator: ``guard.run("ship", key=order.id, call=lambda: ship(order))``.

        :param call: a function without arguments, or of the operation's handle: ``lambda op: ship(order, op)``.
        :param fingerprint: plain data that makes it the same request; another one under this key is refused.
        :param returns: the type of the result, where it is to be rebuilt as a dataclass or model.
        """
        handler = with_handle(call)
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = self._drive(what, handler, what.policy.recover)
        return outcome.value

    @overload
    def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]: ...

    @overload
    def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[Operation], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]: ...

    def run_outcome(
        self,
        operation: str,
        *,
        key: object,
        call: Callable[[], T] | Callable[[Operation], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run``, and tells whether the answer is a replay."""
        handler = with_handle(call)
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return self._drive(what, handler, what.policy.recover)

    def _drive(
        self, call: Call, handler: Callable[[Operation], Any], recover: Callable[[], Any] | None
    ) -> Outcome[Any]:
        raise NotImplementedError
