"""The two protocols that the engines ask of a store: the same names, sync and async.

A store is anything with these few methods. ``semel.testing.conformance`` proves one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from semel.core.ops import Op, SaveStep
from semel.core.semantics import Row
from semel.core.transactional import Keep, Lock, Occupied

__all__ = ["AsyncStore", "AsyncUnit", "Store", "Unit"]

R = TypeVar("R")


class Store(Protocol):
    """Answers Ops, from any thread. Every Op is one atomic step; what fails raises a StoreError."""

    wakes: bool
    """Whether ``wait`` is woken by a change made elsewhere; if not, the engine polls and never calls it.

    A store that also answers ``Count`` says so by ``counts = True``; a guard with a quota takes no other.
    One that answers ``Resumable`` says ``resumes = True``; a resumer takes no other.
    One that answers ``CompleteWith`` has ``accept(kept, new)``: a handler's new writes joined to those it has asked for
    before, or a ConfigurationError that says what is wrong with them.
    """

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


class Unit(Protocol):
    """A unit of work on a connection of the caller's: what a store's ``adopt(conn)`` gives back.

    Only stores that keep their records in a database of transactions have it.
    """

    def require(self, own: bool) -> None:
        """Raise ConfigurationError unless there is a transaction to work in; with ``own``, unless there is none."""
        ...

    def conflicts(self, error: BaseException) -> bool:
        """Whether a handler's error only says that another transaction stood in the way."""
        ...

    def lock(self, op: Lock) -> Row | Occupied | None: ...

    def keep(self, op: Keep) -> None: ...

    def save(self, op: SaveStep) -> bool:
        """Write a step's mark in the caller's transaction; False: the token is another's by now."""
        ...

    def saved(self, id: bytes, name: str) -> bool:
        """Whether the caller's transaction sees the mark of this step."""
        ...

    def finish(self) -> None:
        """Send what the caller's layer still holds back; its errors come out as they are."""
        ...

    def undo(self) -> None:
        """Roll back what ``lock`` opened; harmless when nothing is open."""
        ...


class AsyncUnit(Protocol):
    """The same, awaited."""

    def require(self, own: bool) -> None: ...

    def conflicts(self, error: BaseException) -> bool: ...

    async def lock(self, op: Lock) -> Row | Occupied | None: ...

    async def keep(self, op: Keep) -> None: ...

    async def save(self, op: SaveStep) -> bool: ...

    async def saved(self, id: bytes, name: str) -> bool: ...

    async def finish(self) -> None: ...

    async def undo(self) -> None: ...
