"""The handle of the operation that runs now: its key, its attempt, keys for the next hop, values to remember.

A handler gets it through a parameter annotated ``Operation`` (``AsyncOperation`` under AsyncSemel), or from
``current_operation()`` anywhere below it: the context variable follows tasks and threads that copy the context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from semel.core.keys import derive, normalize_key
from semel.core.ops import Claimed, Op, SaveStep
from semel.core.outcomes import Call
from semel.core.serializers import PLAIN, NotSerializable, decode_result
from semel.core.snapshot import Kind
from semel.engine.leases import Lease
from semel.errors import LeaseLost, PolicyError, RequestError
from semel.observe import events

__all__ = ["INJECTED", "AsyncOperation", "Operation", "OperationHandle", "current_operation"]

T = TypeVar("T")

INJECTED: Any = None
"""A default for the handle's parameter, for the type checker's sake: ``def ship(order: Order, op: Operation =
INJECTED)``.
"""


class OperationHandle:
    """What both handles share."""

    __slots__ = ("_call", "_lease", "_made", "_steps", "attempt")

    def __init__(self, call: Call, lease: Lease | None, claimed: Claimed | None) -> None:
        self._call = call
        self._lease = lease
        self._steps: dict[str, bytes] = {}
        self._made: dict[str, Any] = {}
        self.attempt = 1
        """1 for a first try; more when an abandoned attempt was taken over."""
        if claimed is not None:
            self.attempt = claimed.attempt
            if claimed.steps:
                self._steps.update(claimed.steps)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._call} attempt {self.attempt}>"

    @property
    def name(self) -> str:
        """The operation's name."""
        return self._call.operation

    @property
    def key(self) -> str:
        return self._call.key

    @property
    def tenant(self) -> str:
        return self._call.tenant

    @property
    def id(self) -> bytes:
        """The record's 16-byte identity."""
        return self._call.id

    @property
    def token(self) -> int:
        """The fencing token of this attempt: hand it to systems that refuse a smaller one. 0 when run unprotected."""
        return self._lease.token if self._lease is not None else 0

    @property
    def lease_lost(self) -> bool:
        """Whether another owner may have taken over: a long sync handler should look now and then, and stop."""
        return self._lease is not None and (self._lease.lost or time.monotonic() >= self._lease.ends)

    def derive(self, step: str) -> str:
        """The key to send on for this step: the same in every attempt, UUID-shaped, and no one else's."""
        return derive(self._call.id, step)

    def _recall(self, name: str) -> tuple[Any] | None:
        blob = self._steps.get(name)
        if blob is None:
            return None
        snapshot = self._call.codec.open(blob, self._call.id)
        return (decode_result(PLAIN, snapshot.serializer, snapshot.payload),)

    def _save(self, name: str, value: Any) -> SaveStep:
        try:
            normalize_key(name)
        except RequestError as error:
            raise PolicyError(f"a step has a name of 1 to 255 printable characters, not {str(name)[:40]!r}") from error
        try:
            payload = PLAIN.encode(value)
        except NotSerializable as error:
            kind = type(value).__name__
            raise PolicyError(f"the value captured as {name!r} cannot be stored: a {kind} is no plain data") from error
        blob = self._call.codec.seal(Kind.VALUE, PLAIN.name, payload, self._call.id)
        return SaveStep(self._call.id, self.token, name, blob, len(self._steps))

    def _saved(self, op: SaveStep, held: bool) -> None:
        if not held:
            raise LeaseLost(f"{self._call}: another owner took over before {op.name!r} was saved")
        self._steps[op.name] = op.value
        self._call.has_steps = True
        self._call.tell(events.StepSaved, op.name)


class Operation(OperationHandle):
    """The handle under ``Semel``."""

    __slots__ = ("_execute", "_lock")

    def __init__(
        self, call: Call, lease: Lease | None, claimed: Claimed | None, execute: Callable[[Op[bool]], bool]
    ) -> None:
        super().__init__(call, lease, claimed)
        self._execute = execute
        self._lock: Any = None

    def capture(self, name: str, make: Callable[[], T]) -> T:
        """A value that would differ from attempt to attempt, made once: stored before it is returned, then reused."""
        with self._one_at_a_time():
            known = self._recall(name)
            if known is not None:
                return known[0]  # type: ignore[no-any-return]
            if name not in self._made:  # made before, and the store's answer was lost: the same value is sent again
                self._made[name] = make()
            if self._lease is not None:
                op = self._save(name, self._made[name])
                self._saved(op, self._execute(op))
            return self._made[name]  # type: ignore[no-any-return]

    def _one_at_a_time(self) -> Any:
        """Made when first asked for: most operations capture nothing."""
        with _MAKING:
            if self._lock is None:
                self._lock = threading.RLock()
            return self._lock


_MAKING = threading.Lock()


class AsyncOperation(OperationHandle):
    """The handle under ``AsyncSemel``: the same names."""

    __slots__ = ("_execute", "_locks")

    def __init__(
        self, call: Call, lease: Lease | None, claimed: Claimed | None, execute: Callable[[Op[bool]], Awaitable[bool]]
    ) -> None:
        super().__init__(call, lease, claimed)
        self._execute = execute
        self._locks: dict[str, Any] = {}

    async def capture(self, name: str, make: Callable[[], T]) -> T:
        """A value that would differ from attempt to attempt, made once: stored before it is returned, then reused."""
        import asyncio

        async with self._locks.setdefault(name, asyncio.Lock()):
            known = self._recall(name)
            if known is not None:
                return known[0]  # type: ignore[no-any-return]
            if name not in self._made:  # made before, and the store's answer was lost: the same value is sent again
                self._made[name] = make()
            if self._lease is not None:
                op = self._save(name, self._made[name])
                self._saved(op, await self._execute(op))
            return self._made[name]  # type: ignore[no-any-return]


running: ContextVar[OperationHandle | None] = ContextVar("semel_operation", default=None)


def current_operation() -> OperationHandle | None:
    """The operation whose handler this code runs in, or None."""
    return running.get()
