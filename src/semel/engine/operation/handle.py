"""What the sync and the async handle share: what an operation says of itself, and what it knows of its steps."""

from __future__ import annotations

import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final

from semel.core.call import Call, describe_error
from semel.core.encoding.serializers import PLAIN, Serializer, serializer_for
from semel.core.endings import SETTLE_PAUSES
from semel.core.keys import derive
from semel.core.ops import Claimed, Op, SaveStep
from semel.core.policy import Policy
from semel.core.steps import Journal, label
from semel.engine.drive.leases import Lease
from semel.engine.forking import survive_forks
from semel.errors import (
    ConfigurationError,
    LeaseLost,
    NotUndone,
    PolicyError,
    RecordTooLarge,
    StepMismatch,
    StoreError,
    StoreUnavailable,
)
from semel.observe import events

__all__ = ["INJECTED", "OperationHandle", "current_operation", "running"]

INJECTED: Any = None
"""A default for the handle's parameter, for the type checker's sake: ``def ship(order: Order, op: Operation =
INJECTED)``.
"""

NO_FAILURE: Final = (LeaseLost, StepMismatch, StoreError)
"""Errors that say nothing about the work itself: its steps stay as they are, for the attempt that goes on."""


class OperationHandle:
    """What both handles share."""

    __slots__ = (
        "_call", "_execute", "_journal", "_lease", "_lock", "_made", "_store", "attempt", "compensated", "connection",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        lease: Lease | None,
        claimed: Claimed | None,
        execute: Callable[[Op[Any]], Any],
        store: Any = None,
    ) -> None:
        self._call = call
        self._lease = lease
        self._execute = execute
        self._lock: Any = None
        self._journal: Journal | None = None
        self._store = store
        if store is not None:
            call.accept = store.accept
        self._made: dict[Any, Any] = {}
        self.connection: Any = None
        """Where the handler's own rows go, in a route whose transaction Semel opens and commits."""
        self.compensated = False
        """Whether this attempt has failed, and undone what it could."""
        self.attempt = 1
        """1 for a first try; more when an abandoned attempt was taken over."""
        if claimed is not None:
            self.attempt = claimed.attempt
            if claimed.steps:
                self._journal = Journal(call, claimed.steps)

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

    def propagate(self, step: str | None = None) -> AbstractContextManager[None]:
        """``with op.propagate("charge"): …``: what is sent in it carries this operation's key for that step.

        In an ``async def`` it is a plain ``with`` too. See ``outgoing_headers`` and ``outgoing_metadata``.

        :param step: one call, and its retries. Without it every target has a key of its own.
        """
        from semel.engine.operation.propagation import propagating

        return propagating(self, step)

    def write(self, *writes: Mapping[str, Any]) -> None:
        """Have these made together with the completion, in one transaction: all of it happens, or nothing does.

        For DynamoDB: each is an element of ``TransactItems`` in boto3's own words, such as ``{"Put": {"TableName":
        "orders", "Item": {"id": {"S": "o-1"}}}}``. Nothing is sent before the handler has returned, and nothing at all
        when it raises. A condition of yours that does not hold ends the operation with ConditionFailed.
        """
        call = self._call
        if call.accept is None:
            raise ConfigurationError(
                f"{call}: its store makes no writes of a handler's own with the completion: DynamoDBStore does. "
                "For rows of a database there is guard.transaction"
            )
        if self._lease is None:
            raise StoreUnavailable(f"{call} runs unprotected, so there is no completion that its writes could go with")
        if self._stepping:
            raise PolicyError(
                f"{call}: op.write() goes with the completion, and a step that is done is not run again: write outside "
                "of steps, or let the step send its own request"
            )
        with _writing.lock:  # a handler's threads may write at once
            if call.writes is None:
                raise PolicyError(f"{call} is over: write before its handler returns, for what comes later is not made")
            call.writes = call.accept(call.writes, writes)

    @property
    def journal(self) -> Journal:
        """Made when first asked for: most operations have no steps and capture nothing."""
        if self._journal is None:
            self._journal = Journal(self._call)
        return self._journal

    def _recall(self, name: str) -> tuple[Any] | None:
        """A value that is captured already. While the operation is being undone there are no new ones."""
        known = self.journal.captured(name)
        if known is None and self.journal.failing:
            raise self.journal.failure()
        return known

    def _enter(self, name: str, digest: bytes) -> bytes | None:
        """What a finished step has left, or None: run it. While the operation is being undone none is run."""
        known = self.journal.enter(name, digest)
        if known is None and self.journal.failing:
            raise self.journal.failure()
        return known

    def _shortened(self, op: SaveStep, error: RecordTooLarge) -> SaveStep:
        """That the step is done, without what it returned: it has happened, and must not happen again."""
        less = self.journal.shortened(op, str(error))
        if less is None:
            raise error
        self._call.tell(events.ResultDropped, f"{label(op.name)}: {error}")
        return less

    def _saved(self, op: SaveStep, held: bool) -> None:
        if not held:
            raise LeaseLost(f"{self._call}: another owner took over before {label(op.name)!r} was saved")
        self.journal.saved(op)
        self._call.has_steps = True
        self._call.tell(events.StepSaved, label(op.name))

    def _unit(self, connection: object) -> Any:
        """The connection that a step is given as a unit of work; None where there is no lease, and no mark to write."""
        if connection is None or self._lease is None:
            return None
        if self._store is None:
            raise ConfigurationError(
                f"{self._call}: connection= needs a handler of its guard's own kind, a def under Semel or an async "
                "def under AsyncSemel: this one is bridged to a guard of the other kind"
            )
        from semel.engine.transaction.sync import unit_of

        return unit_of(self._store, connection)

    def _lend(self, name: str) -> None:
        """The step is marked in a transaction of the caller's."""
        self.journal.lend(name)
        if self._lease is not None:
            self._lease.lent = True

    def _in_doubt(self, error: BaseException) -> bool:
        """Whether what this failure leaves behind depends on the end of a transaction of the caller's."""
        lent = self._journal is not None and bool(self._journal.lent)
        return lent and self._lease is not None and isinstance(error, Exception) and not isinstance(error, NO_FAILURE)

    def _settled(self, answer: Any) -> None:
        """The answer to our own claim, made again: it has what is committed."""
        if type(answer) is not Claimed or answer.token != self.token:
            raise LeaseLost(f"{self._call}: another owner took over")
        self.journal.settle(answer.steps)
        self._call.has_steps = not self.journal.empty

    def _blocked(self, error: StoreError) -> None:
        if self.journal.lent:
            names = ", ".join(map(repr, sorted(self.journal.lent)))
            error.add_note(
                f"The transaction in which {names} was marked may be open still, and then it holds the record: commit "
                "it before anything else is kept, or give that connection= too"
            )

    def leave(self) -> None:
        """The handler has returned. Raises where that does not end the operation: see ``Journal.leave``."""
        if self._journal is not None:
            self._journal.leave()
            if self._journal.failing:
                raise self._journal.failure()
            if self._call.writes and self._journal.to_undo():
                raise PolicyError(
                    f"{self._call}: op.write() and undo= do not go together: writes are made when the handler is over, "
                    "too late to undo a step if they are refused. Let a step of its own send them instead"
                )

    def undoes(self, error: BaseException) -> bool:
        """Whether a handler that raised this has steps to be undone. What the store says is no failure of the steps."""
        if self._journal is None or self.compensated or not isinstance(error, Exception):
            return False
        if isinstance(error, NO_FAILURE):
            return False
        journal = self._journal
        return journal.failing or bool(journal.to_undo() or journal.out_of_reach())

    def _undone(self, error: BaseException, failed: list[tuple[str, str]]) -> BaseException:
        """All was tried: the failure to be raised."""
        failed += [(name, "this attempt did not get to it") for name in self.journal.out_of_reach()]
        if not failed:
            self._call.has_steps = False  # nothing is left of it: the next call is a first call
            return error
        names = ", ".join(f"{name!r} ({why})" for name, why in failed)
        left = NotUndone(
            f"{self._call} failed with {describe_error(error)}, and could not be undone: {names}. "
            "See to these by hand, then release() it",
            tuple(name for name, _ in failed),
        )
        left.__cause__ = error
        return left

    def _alone(self, name: str) -> None:
        if self._stepping:
            raise PolicyError(f"{self._call}: the step {name!r} is asked for inside another: do one after the other")

    @contextmanager
    def _in_step(self, name: str) -> Iterator[None]:
        """What a step's function does, and the tasks it starts."""
        token = _stepping.set(self)
        try:
            yield
        except BaseException:
            self.journal.retract(name)
            raise
        finally:
            _stepping.reset(token)

    @property
    def _stepping(self) -> bool:
        """Whether this is asked by the function of a step, which holds the lock."""
        return _stepping.get() is self


running: ContextVar[OperationHandle | None] = ContextVar("semel_operation", default=None)
_stepping: ContextVar[OperationHandle | None] = ContextVar("semel_step", default=None)


def current_operation() -> OperationHandle | None:
    """The operation whose handler this code runs in, or None."""
    return running.get()


def undo_pauses(policy: Policy) -> Iterator[float]:
    """Between the tries to undo one step; together no longer than the policy's ``completion_timeout``."""
    left, pauses, pause = policy.completion_seconds, iter(SETTLE_PAUSES), 0.0
    while (pause := next(pauses, pause)) <= left and pause > 0:
        left -= pause
        yield pause


def result_serializer(function: Callable[..., Any]) -> Serializer:
    """How a step's result is kept: by its function's return annotation, as with ``once``."""
    if not getattr(function, "__annotations__", None):
        return PLAIN
    try:
        hint = typing.get_type_hints(function).get("return", Any)
        return _serializer(hint)
    except (NameError, TypeError):  # a name that only the type checker knows; an annotation that has no hash
        return PLAIN


_serializer = lru_cache(maxsize=256)(serializer_for)


class _Writing:
    """One lock for all operations: it is held for as long as it takes to look at a few writes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        survive_forks(self.renew)

    def renew(self) -> None:
        self.lock = threading.Lock()


_writing: Final = _Writing()
