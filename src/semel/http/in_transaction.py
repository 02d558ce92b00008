"""The HTTP form of the transactional mode: the handler's rows and its answer are committed together, then it is sent.

::

    @app.post("/payments", status_code=201)
    @idempotent(connection=sessions, connection_parameter="session")   # sessions = async_sessionmaker(engine)
    async def pay(payment: Payment, session: AsyncSession):
        session.add(Row(...))                              # no commit: Semel commits, before the answer leaves
        return {...}

The connection is opened for the request, the transaction on it begun and the key locked in it, just before the handler.
An answer that is stored and is no error commits. An error (4xx) that is stored rolls the handler's rows back and keeps
the answer. Whatever frees the key rolls back. A crash at any moment leaves nothing. There is no lease. A conflict with
another transaction runs the request again: see ``rerun.py``.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast, runtime_checkable

from semel.core.call import Call, Outcome
from semel.engine.drive.attempts import AsyncAttempt
from semel.engine.operation.operation import current_operation
from semel.engine.transaction.aio import AsyncTransactionAttempt
from semel.engine.transaction.aio import begin_attempt as begin_async_attempt
from semel.engine.transaction.sync import TransactionAttempt, begin_attempt
from semel.errors import PolicyError, SemelError, StoreUnavailable, TransactionConflict
from semel.http.contract.rerun import Rerun
from semel.http.contract.rules import Idempotent, Rule

if TYPE_CHECKING:
    from semel.engine.aio import AsyncGuard
    from semel.stores.guard import Semel

__all__ = [
    "AsyncInTransaction", "InTransaction", "OpensInLoop", "connected", "open_async_transaction", "open_transaction",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("semel.http")

_MISTAKES: Final = (SemelError, TypeError, AttributeError)
"""What opening a connection raises that is not the database's word: it is shown as it is."""


class InTransaction:
    """An attempt on a connection that was opened for it; ending it closes the connection."""

    lease = None

    def __init__(self, attempt: TransactionAttempt, stack: ExitStack) -> None:
        self._attempt = attempt
        self._stack = stack
        self.call = attempt.call
        self.claimed = attempt.claimed
        self.operation = attempt.operation
        self.execute = attempt.execute
        self.compensate = attempt.compensate
        self.conflicts = attempt.conflicts

    def complete(self, answer: Any) -> Outcome[Any]:
        """Commit and remember; an error is remembered without the handler's rows."""
        end = self._attempt.reject if answer.status >= 400 else self._attempt.complete
        try:
            return end(answer)
        finally:
            self._close()

    def decline(self, answer: Any) -> Outcome[Any]:
        try:
            return self._attempt.decline(answer)
        finally:
            self._close()

    def lost(self) -> Outcome[Any]:
        return self.decline(None)

    def fail(self, error: BaseException) -> None:
        try:
            self._attempt.fail(error)
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._stack.close()
        except Exception:  # the outcome stands, whatever becomes of the connection
            _log.exception("the connection of a finished request could not be given back")


class AsyncInTransaction:
    """The same, awaited."""

    lease = None

    def __init__(self, attempt: AsyncTransactionAttempt, stack: AsyncExitStack) -> None:
        self._attempt = attempt
        self._stack = stack
        self.call = attempt.call
        self.claimed = attempt.claimed
        self.operation = attempt.operation
        self.execute = attempt.execute
        self.compensate = attempt.compensate
        self.conflicts = attempt.conflicts

    async def complete(self, answer: Any) -> Outcome[Any]:
        """Commit and remember; an error is remembered without the handler's rows."""
        end = self._attempt.reject if answer.status >= 400 else self._attempt.complete
        try:
            return await end(answer)
        finally:
            await self._close()

    async def decline(self, answer: Any) -> Outcome[Any]:
        try:
            return await self._attempt.decline(answer)
        finally:
            await self._close()

    async def lost(self) -> Outcome[Any]:
        return await self.decline(None)

    async def fail(self, error: BaseException) -> None:
        try:
            await self._attempt.fail(error)
        finally:
            await self._close()

    async def _close(self) -> None:
        try:
            await self._stack.aclose()
        except Exception:  # the outcome stands, whatever becomes of the connection
            _log.exception("the connection of a finished request could not be given back")


@runtime_checkable
class OpensInLoop(Protocol):
    """A ``connection=`` that knows by itself how to be begun from an event loop, as a sync connection has to be."""

    async def open_in_loop(self, call: Call) -> AsyncAttempt | Outcome[Any]: ...


def connected(function: F, rule: Rule) -> F:
    """The handler with its connection filled in, where the rule names a parameter for it."""
    if isinstance(rule, Idempotent) and rule.connection is not None and not callable(rule.connection):
        raise PolicyError(
            f"connection= is a function that opens a connection or session, such as engine.connect, not "
            f"{rule.connection!r}"
        )
    parameter = rule.connection_parameter if isinstance(rule, Idempotent) else None
    if parameter is None:
        return function
    signature = inspect.signature(function)
    if parameter not in signature.parameters:
        raise PolicyError(
            f"connection_parameter={parameter!r} names no parameter; there are: "
            f"{', '.join(signature.parameters) or 'none'}"
        )
    inner: Any
    if inspect.iscoroutinefunction(function):

        async def inner(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **{**kwargs, parameter: _connection()})

    else:

        def inner(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{**kwargs, parameter: _connection()})

    functools.update_wrapper(inner, function)
    inner.__signature__ = signature.replace(
        parameters=[p for p in signature.parameters.values() if p.name != parameter]
    )
    inner.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if name != parameter}
    return cast(F, inner)


def _connection() -> Any:
    operation = current_operation()
    return None if operation is None else operation.connection  # None: a GET of the same endpoint


def open_transaction(
    guard: Semel, opened: Callable[[], Any], call: Call, rerun: Rerun | None = None
) -> InTransaction | Outcome[Any]:
    """Open a connection, begin, and take the key: an attempt, or an outcome that is known.

    A conflict here is met before the handler has run, so it is only tried again; ``rerun`` counts.
    """
    while True:
        try:
            return _opened(guard, opened, call)
        except TransactionConflict:
            pause = None if rerun is None else rerun.met(call)
            if pause is None:
                raise
        time.sleep(pause)


def _opened(guard: Semel, opened: Callable[[], Any], call: Call) -> InTransaction | Outcome[Any]:
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(opened())
        except _MISTAKES:
            raise
        except Exception as error:
            raise _unopened(error) from error
        begun = begin_attempt(guard.store, connection, call)
        if isinstance(begun, Outcome):
            return begun
        begun.operation.connection = connection
        return InTransaction(begun, stack.pop_all())


def _unopened(error: Exception) -> StoreUnavailable:
    """Nothing was sent, so nothing is stored. The driver's own text may hold a URL, and stays in the cause."""
    return StoreUnavailable(f"the connection of this route could not be opened ({type(error).__name__})")


async def open_async_transaction(
    guard: AsyncGuard, opened: Callable[[], Any], call: Call, rerun: Rerun | None = None
) -> AsyncAttempt | Outcome[Any]:
    """The same, awaited."""
    while True:
        try:
            return await _opened_async(guard, opened, call)
        except TransactionConflict:
            pause = None if rerun is None else rerun.met(call)
            if pause is None:
                raise
        await asyncio.sleep(pause)


async def _opened_async(guard: AsyncGuard, opened: Callable[[], Any], call: Call) -> AsyncAttempt | Outcome[Any]:
    in_loop: object = opened
    if isinstance(in_loop, OpensInLoop):
        return await in_loop.open_in_loop(call)
    async with AsyncExitStack() as stack:
        try:
            connection = await stack.enter_async_context(opened())
        except _MISTAKES:
            raise
        except Exception as error:
            raise _unopened(error) from error
        begun = await begin_async_attempt(guard.store, connection, call)
        if isinstance(begun, Outcome):
            return begun
        begun.operation.connection = connection
        return AsyncInTransaction(begun, stack.pop_all())
