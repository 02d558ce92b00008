"""The protocols that the engine needs a store to implement, sync and async, with the same names.

A store declares what it can do by attributes; nothing is found out by trying. ``semel.testing.conformance`` tests a
store against these protocols.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from semel.core.call import Raised
from semel.core.ops import Op, SaveStep
from semel.core.semantics import Row
from semel.core.transactional import ExecuteOnce, HandlerConflict, Keep, Lock, Occupied, SQLEffect
from semel.errors import ConfigurationError, SemelError

if TYPE_CHECKING:
    from semel.core.messaging.messages import NewMessage

R = TypeVar("R")
Accept: TypeAlias = Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]
STORE_MEMBERS: Final = (
    "wakes",
    "counts",
    "resumes",
    "lists",
    "trails",
    "adopt",
    "accept",
    "execute",
    "execute_many",
    "wait",
    "open",
    "close",
)
"""What a store declares, sync or async."""
STORE_CLOSED: Final = "the store is closed; open() of its guard opens it again"


class Store(Protocol):
    """Executes Ops, from any thread. Every Op is one atomic step; one that fails raises a StoreError."""

    wakes: bool
    """Whether ``wait`` returns early when another process changes the record. If False, the engine polls instead."""
    counts: bool
    """Whether the store executes ``Count``. A guard with a quota needs that."""
    resumes: bool
    """Whether the store executes ``Resumable``. A resumer needs that."""
    lists: bool
    """Whether the store executes ``ListRecords`` and ``Measure``. ``semel list`` and the console need that."""
    trails: bool
    """Whether the store keeps the history of events: it executes the Ops of ``core/trail``. A trail needs that."""

    @property
    def adopt(self) -> Callable[[object], Unit] | None:
        """``adopt(connection)`` returns a unit of work on the caller's connection.

        None if the store cannot write into the caller's transactions.
        """
        ...

    @property
    def accept(self) -> Accept | None:
        """``accept(writes, new)`` joins a handler's new writes to those it has asked for before.

        Raises ConfigurationError if a write is malformed. None if the store does not execute ``CompleteWith``.
        """
        ...

    def execute(self, op: Op[R]) -> R:
        """Execute the Op. Raises StoreUnavailable if it was not done, StoreUncertain if that is not known."""
        ...

    def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        """Execute several Ops, sharing round trips where possible. The result of a failed Op is its error.

        It raises no SemelError itself, neither a StoreError nor a ConfigurationError. If all Ops fail for one reason,
        because the store is closed or a table is missing, each of them is answered with the error.
        """
        ...

    def wait(self, id: bytes, seconds: float) -> None:
        """Wait until the record may have changed, ``seconds`` at most. May return early."""
        ...

    def open(self) -> None:
        """Make the store usable again after ``close``, without connecting yet. Does nothing while it is open."""
        ...

    def close(self) -> None:
        """Close connections and end threads. Safe to call twice. Ops raise StoreUnavailable until ``open``."""
        ...


class AsyncStore(Protocol):
    """Executes Ops in one event loop. See ``Store`` for the members.

    A cancelled call may or may not have reached the store: the engine sends the Op again.
    """

    wakes: bool
    counts: bool
    resumes: bool
    lists: bool
    trails: bool

    @property
    def adopt(self) -> Callable[[object], AsyncUnit] | None: ...

    @property
    def accept(self) -> Accept | None: ...

    async def execute(self, op: Op[R]) -> R: ...

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]: ...

    async def wait(self, id: bytes, seconds: float) -> None: ...

    def open(self) -> None: ...

    async def close(self) -> None: ...


class Unit(Protocol):
    """A unit of work on the caller's connection, as returned by a store's ``adopt``."""

    def require(self, own: bool) -> None:
        """Raise ConfigurationError if no transaction is open; with ``own``, if one is open."""
        ...

    def conflicts(self, error: BaseException) -> bool:
        """Whether a handler's error means that its transaction conflicted with another one."""
        ...

    def lock(self, op: Lock) -> Row | Occupied | None:
        """Lock the key for the transaction and return what is stored under it."""
        ...

    def keep(self, op: Keep) -> None:
        """Write the finished record."""
        ...

    def plan(self, statement: str) -> tuple[bool, bool]:
        """Whether a statement sent now commits by itself, and whether this one can write its own record."""
        ...

    def execute(self, op: ExecuteOnce) -> bytes | Raised | HandlerConflict | None:
        """Run a statement that writes its own record."""
        ...

    def perform(self, effect: SQLEffect) -> Any:
        """Run the effect alone and return its rows, or how many it changed. Its errors are raised unchanged."""
        ...

    def save(self, op: SaveStep) -> bool:
        """Write a step's mark in the caller's transaction. Returns False if another owner has taken over."""
        ...

    def saved(self, id: bytes, name: str) -> bool:
        """Whether the caller's transaction sees the mark of this step."""
        ...

    def add(self, message: NewMessage) -> None:
        """Add a message to the outbox, in the caller's transaction. Raises ConfigurationError if none is open."""
        ...

    def finish(self) -> None:
        """Flush what the caller's session has not sent yet. Its errors are raised unchanged."""
        ...

    def undo(self) -> None:
        """Roll back the transaction that ``lock`` opened; does nothing if none is open."""
        ...

    def watch(self) -> None:
        """Refuse ``commit()`` on the caller's connection from now on, where its class permits that."""
        ...

    def unwatch(self) -> None:
        """Allow ``commit()`` again."""
        ...


class AsyncUnit(Protocol):
    """A unit of work on an async connection. See ``Unit`` for the methods."""

    def require(self, own: bool) -> None: ...

    def conflicts(self, error: BaseException) -> bool: ...

    async def lock(self, op: Lock) -> Row | Occupied | None: ...

    async def keep(self, op: Keep) -> None: ...

    def plan(self, statement: str) -> tuple[bool, bool]: ...

    async def execute(self, op: ExecuteOnce) -> bytes | Raised | HandlerConflict | None: ...

    async def perform(self, effect: SQLEffect) -> Any: ...

    async def save(self, op: SaveStep) -> bool: ...

    async def saved(self, id: bytes, name: str) -> bool: ...

    async def add(self, message: NewMessage) -> None: ...

    async def finish(self) -> None: ...

    async def undo(self) -> None: ...

    def watch(self) -> None: ...

    def unwatch(self) -> None: ...


def execute_each(execute: Callable[[Op[Any]], Any], ops: Sequence[Op[Any]]) -> list[Any]:
    """``execute_many`` of a store that does not share round trips: run Ops one after the other."""
    answers: list[Any] = []
    for op in ops:
        try:
            answers.append(execute(op))
        except SemelError as error:
            answers.append(error)
    return answers


async def execute_each_async(execute: Callable[[Op[Any]], Awaitable[Any]], ops: Sequence[Op[Any]]) -> list[Any]:
    """The same of an async store: run Ops at the same time, but those on one record in their order."""
    import asyncio  # sync programs do without it

    answers: list[Any] = [None] * len(ops)
    by_record: dict[bytes, list[int]] = {}
    for at, op in enumerate(ops):
        by_record.setdefault(op.id, []).append(at)

    async def in_order(positions: list[int]) -> None:
        for at in positions:
            try:
                answers[at] = await execute(ops[at])
            except SemelError as error:
                answers[at] = error

    await asyncio.gather(*map(in_order, by_record.values()))
    return answers


def has_members(value: object, names: Sequence[str]) -> bool:
    """Whether it declares all of these, also by a ``__getattr__`` that passes them on.

    ``isinstance`` with a protocol does not see those from Python 3.12 on.
    """
    return all(hasattr(value, name) for name in names)


def is_async_store(store: Any) -> bool:
    """Whether its Ops are awaited: it is an ``AsyncStore``, and not a ``Store``."""
    return iscoroutinefunction(store.execute)


def check_awaited(store: Any, kind: str, *, awaited: bool) -> None:
    """Raise ConfigurationError if the store is async and its user is not, or the other way round.

    :param kind: the class that uses it, such as ``"Semel"``.
    :param awaited: it is the async one, ``AsyncSemel``.
    """
    if is_async_store(store) is not awaited:
        user, other = _user_and_other(kind, awaited)
        name = type(store).__name__
        raise ConfigurationError(
            f"{name} is {'a sync' if awaited else 'an async'} store: {user} cannot use it; use {other}"
        )


def _user_and_other(kind: str, awaited: bool) -> tuple[str, str]:
    return (f"Async{kind}", kind) if awaited else (kind, f"Async{kind}")


def check_sql_store(store: Any, kind: str, *, awaited: bool) -> None:
    """Raise ConfigurationError if a class cannot use the store, instead of failing at its first call.

    :param kind: the class, such as ``"Outbox"``.
    :param awaited: it is the async one, ``AsyncOutbox``.
    """
    user, _ = _user_and_other(kind, awaited)
    if not has_members(store, ("adopt", "execute")):
        # Never quote a string: it may be a URL with a password.
        wrong = "a string: open_store(URL) opens one" if isinstance(store, str) else type(store).__name__
        raise ConfigurationError(f"{user} takes a store, such as PostgresStore(URL), not {wrong}")
    if store.adopt is None:
        raise ConfigurationError(
            f"{user} uses tables in the database of your rows, and {type(store).__name__} is in none: use SQLiteStore, "
            "PostgresStore or MySQLStore (Async… in an event loop)"
        )
    check_awaited(store, kind, awaited=awaited)


def unit_of(store: Any, connection: object) -> Any:
    """Return a unit of work on the caller's connection. Raises ConfigurationError for a store outside of SQL."""
    if store.adopt is None:
        raise ConfigurationError(
            f"a transaction needs a guard whose store is in the same database, and {type(store).__name__} is in none: "
            "use SQLiteStore, PostgresStore or MySQLStore (Async… with AsyncSemel)"
        )
    return store.adopt(connection)


def check_trails(store: Store | AsyncStore | type[Any]) -> None:
    """Raise ConfigurationError if the store, or its class, cannot keep the history of events."""
    if not store.trails:
        kind = store if isinstance(store, type) else type(store)
        raise ConfigurationError(
            f"{kind.__name__} keeps no history of events: use a MemoryStore, SQLiteStore, PostgresStore, MySQLStore or "
            "RedisStore. It may be another store than that of the records"
        )
