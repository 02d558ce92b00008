"""The two protocols that the engines ask of a store: the same names, sync and async.

A store is anything with these few methods. ``semel.testing.conformance`` proves one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from semel.core.ops import Op

__all__ = ["AsyncStore", "Store"]

R = TypeVar("R")


class Store(Protocol):
    """Answers Ops, from any thread. Every Op is one atomic step; what fails raises a StoreError."""

    wakes: bool
    """Whether ``wait`` is woken by a change made elsewhere; if not, the engine polls and never calls it."""

    def execute(self, op: Op[R]) -> R:
        """Do the Op, or raise StoreUnavailable (not done) or StoreUncertain (cannot tell)."""
        ...

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Do several Ops, sharing round trips where possible; an Op that failed is answered with its StoreError."""
        ...

    def wait(self, id: bytes, seconds: float) -> None:
        """Return once the record may no longer be running, and after ``seconds`` at the latest. May return early."""
        ...

    def close(self) -> None:
        """Give back connections and threads. Safe to call twice."""
        ...


class AsyncStore(Protocol):
    """The same, for one event loop. A cancelled call may or may not have reached the store: the engine asks again."""

    wakes: bool

    async def execute(self, op: Op[R]) -> R: ...

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    async def wait(self, id: bytes, seconds: float) -> None: ...

    async def close(self) -> None: ...
