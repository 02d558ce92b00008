"""The base of the sync and the async handle of a running operation, and the way a handler finds it.

A handler gets its handle through a parameter annotated ``Operation`` (``AsyncOperation`` under AsyncSemel), as the
argument of ``call=``, or from ``current_operation()`` in any code that it calls. The context variable is visible in
tasks, and in threads that copy the context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from semel.core.call import Call, Failed
from semel.core.keys import check_name, derive
from semel.core.lineage import Lineage, label, read_lineage
from semel.core.ops import Claimed, Op
from semel.core.steps import StepJournal
from semel.engine.forking import survive_forks
from semel.engine.ports import unit_of
from semel.errors import ConfigurationError, PolicyError, StoreUnavailable

T = TypeVar("T")

INJECTED: Any = None
"""A default for the handle's parameter that type checkers accept: ``def ship(order: Order, op: Operation = INJECTED)``.
"""


class HeldLease(Protocol):
    """The part of a lease that a handle uses."""

    token: int
    lost: bool
    ends: float
    maybe_locked: bool


class OperationHandle:
    """The base of ``Operation`` and ``AsyncOperation``."""

    __slots__ = (
        "_call", "_execute", "_journal", "_lease", "_lock", "_store", "_transaction", "attempt", "connection",
        "outgoing",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        lease: HeldLease | None,
        claimed: Claimed | None,
        execute: Callable[[Op[Any]], Any],
        store: Any = None,
    ) -> None:
        """
        :param lease: None if the handler runs unprotected or in a transaction.
        :param execute: executes an Op on the guard's store.
        :param store: the guard's store; None if the handler is bridged to a guard of the other kind.
        """
        self._call = call
        self._lease = lease
        self._execute = execute
        self._lock: Any = None
        self._journal: StepJournal | None = None
        self._store = store
        self._transaction: Any = None
        """The unit of work whose transaction the handler, or the step that is running, writes in."""
        if store is not None:
            call.accept = store.accept
        self.connection: Any = None
        """The connection for the handler's own rows, in a route whose transaction Semel opens and commits."""
        self.outgoing: Any = None
        """The numbers of this attempt's equal calls: see ``semel.engine.operation.propagation``."""
        self.attempt = 1
        """1 for a first try; more when an abandoned attempt was taken over."""
        if claimed is not None:
            self.attempt = claimed.attempt
            if claimed.steps:
                self._journal = StepJournal(call, None if lease is None else lease.token, claimed.steps)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._call} attempt {self.attempt}>"

    @property
    def name(self) -> str:
        """The operation's name."""
        return self._call.operation

    @property
    def key(self) -> str:
        """The idempotency key, as the caller passed it."""
        return self._call.key

    @property
    def tenant(self) -> str:
        """The tenant that the key belongs to; empty if there is none."""
        return self._call.tenant

    @property
    def lineage(self) -> Lineage:
        """Where the request comes from, as its caller says: ``root`` is the key of the first operation of the chain,
        ``parent`` the key of the caller's operation. Empty if the caller says nothing. Do not trust it: a client can
        send anything.
        """
        return read_lineage(self._call.lineage or {})

    @property
    def _next_lineage(self) -> Lineage:
        """The lineage to send with a call of this operation.

        A guard that stores no readable keys sends none either: the record's identity takes the place of the key.
        """
        own = self._call.id.hex() if self._call.stored_key is None else self._call.key
        lineage = self.lineage
        return Lineage(lineage.root or own, own, lineage.trace)

    @property
    def id(self) -> bytes:
        """The record's 16-byte identity."""
        return self._call.id

    @property
    def token(self) -> int:
        """The fencing token of this attempt: pass it to systems that refuse a smaller one. 0 when run unprotected."""
        return self._lease.token if self._lease is not None else 0

    @property
    def lease_lost(self) -> bool:
        """Whether another owner may have taken over. A long sync handler should check this now and then, and stop."""
        return self._lease is not None and (self._lease.lost or time.monotonic() >= self._lease.ends)

    @property
    def compensated(self) -> bool:
        """Whether this attempt has failed, and its steps were undone as far as possible."""
        return self._journal is not None and self._journal.compensated

    def derive(self, step: str) -> str:
        """Return the key for a downstream call of this step. It looks like a UUID and is the same in every attempt."""
        return derive(self._call.id, step)

    @contextmanager
    def propagate(self, step: str | None = None) -> Iterator[None]:
        """``with op.propagate("charge"): …``: requests sent in the block carry this operation's key for that step.

        It is a plain ``with`` in an ``async def`` too. See ``outgoing_headers`` and ``outgoing_metadata``.

        :param step: names one call and its retries. Without it every target has a key of its own.
        """
        if step is not None:
            check_name("a step", step)
        outer = outgoing_scope.get()
        outgoing_scope.set(OutgoingScope(self, step))
        try:
            yield
        finally:
            outgoing_scope.set(outer)

    def write(self, *writes: Mapping[str, Any]) -> None:
        """Make these writes together with the completion, in one transaction.

        For DynamoDB: each is an element of ``TransactItems`` as boto3 takes it, such as ``{"Put": {"TableName":
        "orders", "Item": {"id": {"S": "o-1"}}}}``. Nothing is sent before the handler has returned, and nothing at all
        if it raises. If one of your conditions does not hold, the operation fails with ConditionFailed.
        """
        call = self._call
        if call.accept is None:
            raise ConfigurationError(
                f"{call}: op.write() needs a DynamoDBStore: other stores write nothing of yours with the completion. "
                "For rows of a database use guard.run_in_transaction"
            )
        if self._lease is None:
            raise StoreUnavailable(f"{call} runs unprotected, so there is no completion to write with")
        if self._stepping:
            raise PolicyError(
                f"{call}: op.write() goes with the completion, and a step that is done is not run again: write outside "
                "of steps, or let the step send its own request"
            )
        with _writing.lock:  # threads of a handler may write at the same time
            if call.writes is None:
                raise PolicyError(f"{call} is over: call op.write() before its handler returns")
            call.writes = call.accept(call.writes, writes)

    def leave(self) -> None:
        """The handler has returned. Raises if that does not end the operation: see ``StepJournal.leave``."""
        if self._journal is not None:
            self._journal.leave()

    @property
    def _steps(self) -> StepJournal:
        """The journal. It is created at the first use: most operations have no steps and capture nothing."""
        if self._journal is None:
            self._journal = StepJournal(self._call, None if self._lease is None else self._lease.token)
        return self._journal

    def _unit(self, connection: object) -> Any:
        """Return the step's connection as a unit of work, or None without a lease, because no mark is written then."""
        if connection is None or self._lease is None:
            return None
        if self._store is None:
            raise ConfigurationError(
                f"{self._call}: connection= needs a handler of its guard's own kind, a def under Semel or an async "
                "def under AsyncSemel: this one is bridged to a guard of the other kind"
            )
        return unit_of(self._store, connection)

    def _refuse_nesting(self, name: str) -> None:
        if self._stepping:
            raise PolicyError(f"{self._call}: the step {name!r} is asked for inside another: do one after the other")

    @property
    def _stepping(self) -> bool:
        """Whether the caller is the function of a step, which holds the lock."""
        return stepping.get() is self

    def _end_step(self, result: Any) -> Any:
        if self._lease is not None and self._journal is not None and self._journal.in_transaction:
            self._lease.maybe_locked = True
        if type(result) is Failed:
            raise result.error
        return result


running: ContextVar[OperationHandle | None] = ContextVar("semel_operation", default=None)
stepping: ContextVar[OperationHandle | None] = ContextVar("semel_step", default=None)


class OperationPart(NamedTuple):
    """The step or the undo of an operation that is running. It counts the messages that it adds."""

    operation: bytes
    name: str
    counts: dict[str, int]


part: ContextVar[OperationPart | None] = ContextVar("semel_part", default=None)


class OutgoingScope(NamedTuple):
    """An open block of ``op.propagate``. See ``semel.engine.operation.propagation``."""

    operation: OperationHandle
    step: str | None


outgoing_scope: ContextVar[OutgoingScope | None] = ContextVar("semel_outgoing", default=None)


def set_lineage(call: Call, lines: Mapping[bytes, bytes]) -> None:
    """Give a call the lineage of these header lines. They are not checked yet."""
    call.lineage = lines
    if call.stored_key is not None:
        call.stored_key = label(call.key, call.lineage)


def current_operation() -> OperationHandle | None:
    """Return the operation whose handler this code runs in, or None."""
    return running.get()


class ForkSafeLock:
    """A lock that all operations share and hold only briefly. A forked child gets a new one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        survive_forks(self.renew)

    def renew(self) -> None:
        self.lock = threading.Lock()


_writing: Final = ForkSafeLock()
