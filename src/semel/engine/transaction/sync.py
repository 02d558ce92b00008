"""``guard.transaction``: the record commits with the effect, in the transaction that the caller already has.

What the sync guard has for it; ``engine/transaction/aio.py`` has the same names in the same order. What is decided is
decided in ``core/transactional.py``; how a connection is spoken to is the store's affair (``store.adopt``).
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from types import CoroutineType
from typing import Any, Final, ParamSpec, TypeVar, Unpack

from semel.core.call import Call, Failed, Outcome, Pause, Raised, Recover, Returned, Run
from semel.core.encoding.serializers import Serializer
from semel.core.keys import KeyFormat
from semel.core.ops import Claimed
from semel.core.transactional import Flow, HandlerConflict, Keep, Lock, Rollback, transact
from semel.engine.declare.brackets import with_brackets
from semel.engine.declare.declaration import Declaration, Pick, Selector, select
from semel.engine.declare.handlers import with_handle
from semel.engine.drive.drive import ignoring
from semel.engine.guard import Guard, PolicyChanges
from semel.engine.operation.operation import Operation, running
from semel.engine.ports import Store, Unit
from semel.errors import ConfigurationError, InProgress, PolicyError, StoreError
from semel.observe import events

__all__ = ["TRIES", "Transactions"]

P = ParamSpec("P")
T = TypeVar("T")

TRIES: Final = 10
"""How often, at most, a unit of work is run whose transaction Semel opens; it is run again only after a conflict."""


class Transactions(Guard):
    """The transactional mode of ``Semel``."""

    store: Store

    def run_in_transaction(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        call: Callable[[Operation], T] | Callable[[], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> T:
        """Run ``call`` once, its record written in the transaction of ``connection``: both commit, or neither.

        :param connection: the connection or session that ``call`` uses, of a database that the guard's store is in. Its
            transaction is open, and is yours to commit.
        :param call: a function without arguments, or of the operation's handle.
        :param own_transaction: open and commit the transaction here; run ``call`` again after a conflict with another.
        :param tries: how often it is run at most, with ``own_transaction``; 10 unless told.
        """
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        outcome: Outcome[T] = self._transact(
            connection, what, with_handle(call), ignoring(what.policy.recover), own_transaction, tries
        )
        return outcome.value

    def run_in_transaction_outcome(
        self,
        connection: object,
        operation: str,
        *,
        key: object,
        call: Callable[[Operation], T] | Callable[[], T],
        tenant: str | None = None,
        fingerprint: Any = None,
        returns: Any = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Outcome[T]:
        """Like ``run_in_transaction``, and tells whether the answer is a replay."""
        what = self._plain_call(operation, key, tenant, fingerprint, returns, changes)
        return self._transact(
            connection, what, with_handle(call), ignoring(what.policy.recover), own_transaction, tries
        )

    @with_brackets
    def once_in_transaction(
        self,
        *,
        connection: Selector,
        key: Selector,
        operation: str | None = None,
        tenant: Selector | None = None,
        fingerprint: Any = "auto",
        exclude: tuple[str, ...] = (),
        key_format: KeyFormat | str = "any",
        serializer: Serializer | None = None,
        own_transaction: bool = False,
        tries: int | None = None,
        **changes: Unpack[PolicyChanges],
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Decorate a function that takes a connection or session: ``@guard.once_in_transaction(connection="session")``.

        :param connection: the parameter that is the connection, by name or as a function of the arguments.
        """

        def decorate(function: Callable[P, T]) -> Callable[P, T]:
            if inspect.iscoroutinefunction(function):
                raise PolicyError(f"{function.__qualname__} is async: decorate it with an AsyncSemel")
            bounded(own_transaction, tries)
            declared = self._declare(
                function, operation=operation, key=key, tenant=tenant, fingerprint=fingerprint,
                exclude=(*exclude, *connection_parameter(connection)), key_format=key_format, serializer=serializer,
                changes=changes,
            )  # fmt: skip
            pick = pick_connection(declared, connection)

            @functools.wraps(function)
            def once(*args: P.args, **kwargs: P.kwargs) -> T:
                recover = declared.recover
                outcome: Outcome[T] = self._transact(
                    pick(args, kwargs), self._declared_call(declared, args, kwargs),
                    lambda op: declared.invoke(op, args, kwargs),
                    lambda op: recover and recover(args, kwargs), own_transaction, tries,
                )  # fmt: skip
                return outcome.value

            return once

        return decorate

    def _transact(
        self,
        connection: object,
        call: Call,
        handler: Callable[[Operation], Any],
        recover: Callable[[Operation], Any],
        own_transaction: bool,
        tries: int | None,
    ) -> Outcome[Any]:
        unit: Unit = unit_of(self.store, connection)
        unit.require(own_transaction)
        not_within_itself(call)
        flow = transact(call, own_transaction, bounded(own_transaction, tries))
        try:
            step = self._proceed(unit, call, flow, None)
            while isinstance(step, (Run, Recover)):
                work = handler if type(step) is Run else recover
                step = self._proceed(unit, call, flow, self._work(unit, call, step.claimed, work))
        except BaseException:
            if own_transaction:
                self._undo(unit, call)
            raise
        return outcome_of(step)  # type: ignore[no-any-return]

    def _proceed(self, unit: Unit, call: Call, flow: Flow, answer: Any) -> Run | Recover | Outcome[Any] | Failed:
        """Send the answer into the flow and do what it asks, until it asks for work to be done or has an outcome."""
        error: StoreError | None = None
        try:
            while True:
                request = flow.send(answer) if error is None else flow.throw(error)
                answer = error = None
                if isinstance(request, (Run, Recover)):
                    return request
                try:
                    if isinstance(request, Lock):
                        answer = unit.lock(request)
                    elif isinstance(request, Keep):
                        unit.keep(request)
                    elif isinstance(request, Rollback):
                        self._undo(unit, call)
                    elif isinstance(request, Pause):
                        time.sleep(request.seconds)
                    else:
                        answer = self.store.execute(request)
                except StoreError as failure:
                    error = failure
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _work(
        self, unit: Unit, call: Call, claimed: Claimed | None, work: Callable[[Operation], Any]
    ) -> Returned | Raised | HandlerConflict:
        op = Operation(call, None, claimed, self.store.execute)
        outer = running.get()
        try:
            running.set(op)
            result = work(op)
            if type(result) is CoroutineType:
                result.close()
                raise PolicyError(f"{call}: the handler is async; use AsyncSemel")
            unit.finish()
        except Exception as error:
            return HandlerConflict(error) if unit.conflicts(error) else Raised(error)
        except BaseException as error:
            return Raised(error)
        finally:
            running.set(outer)
        return Returned(result)

    def _undo(self, unit: Unit, call: Call) -> None:
        try:
            unit.undo()
        except Exception as error:  # the connection is gone, and the transaction with it
            call.tell(events.StoreFailed, "undo", str(error))


def unit_of(store: Any, connection: object) -> Any:
    """The caller's connection as a unit of work; stores outside of SQL have none."""
    if store.adopt is None:
        raise ConfigurationError(
            f"a transaction needs a guard whose store is in the same database, and {type(store).__name__} is in none: "
            "use SQLiteStore, PostgresStore or MySQLStore (Async… with AsyncSemel)"
        )
    return store.adopt(connection)


def outcome_of(step: Any) -> Any:
    """What a flow has ended with; a failure is raised."""
    if type(step) is Failed:
        raise step.error
    return step


def bounded(own_transaction: bool, tries: int | None) -> int:
    if tries is None:
        return TRIES
    if not own_transaction:
        raise PolicyError("tries= is for own_transaction=True: what runs in your transaction only you can run again")
    if type(tries) is not int or tries < 1:
        raise PolicyError(f"tries is a whole number from 1, not {tries!r}")
    return tries


def not_within_itself(call: Call) -> None:
    outer = running.get()
    if outer is not None and outer.id == call.id:
        raise InProgress(f"{call} is called within itself", retry_after=1.0)


def connection_parameter(connection: Selector) -> tuple[str, ...]:
    """The parameter that holds the connection, where it is named: it is no part of the request."""
    return (connection,) if isinstance(connection, str) and "." not in connection else ()


def pick_connection(declared: Declaration, connection: Selector) -> Pick:
    if declared.inputs is not None:
        raise PolicyError(f"{declared.operation}: nothing is left of a transaction that died: resumable= is for once()")
    signature = inspect.signature(declared.function)
    given = [p for name, p in signature.parameters.items() if name != declared.handle]
    return select("connection", connection, signature.replace(parameters=given))
