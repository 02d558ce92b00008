"""A unit of work on the caller's connection: answers the Ops of the transactional flow, in the caller's transaction.

Stores that can do so hand one out (``store.adopt(conn)``). Where the connection is lost before a commit was sent,
nothing is stored, for certain: the server rolls back what nobody can commit any more.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any, Final

from semel.core.ops import SaveStep
from semel.core.semantics import Row
from semel.core.transactional import HandlersFault, Keep, Lock, Occupied
from semel.errors import (
    ConfigurationError,
    NotMigrated,
    SemelError,
    StoreUnavailable,
    StoreUncertain,
    TransactionConflict,
)
from semel.sql.connections.adopt import AsyncLent, Dialect, Lent, adopt
from semel.sql.connections.driver_errors import is_conflict, is_duplicate, is_stale, is_violation
from semel.sql.connections.places import not_migrated
from semel.sql.connections.postgres_errors import Contended
from semel.sql.connections.sqlite import Busy
from semel.sql.dialects import mysql_transaction, postgres_transaction, sqlite_transaction
from semel.sql.program import Program, Rows, run, run_async

__all__ = ["AsyncUnit", "Unit", "adopt_unit"]

_PROGRAMS: Final[dict[str, ModuleType]] = {
    "postgresql": postgres_transaction, "sqlite": sqlite_transaction, "mysql": mysql_transaction,
}  # fmt: skip
_NAMES: Final = {"postgresql": "PostgreSQL", "sqlite": "SQLite", "mysql": "MySQL"}
_ADVICE: Final = "nothing is stored; roll back and run the unit of work again"


def adopt_unit(raw: object, dialect: Dialect, *, awaited: bool) -> Any:
    """The caller's connection as a unit of work, for a store of this dialect."""
    connection: Lent | AsyncLent = adopt(raw)
    if connection.dialect != dialect:
        raise ConfigurationError(
            f"the guard's store is {_NAMES[dialect]} and {_kind(raw)} is connected to {_NAMES[connection.dialect]}: "
            "a record must be where its guard looks for it. Give the guard a store of that database"
        )
    if connection.awaited is not awaited:
        guard = "AsyncSemel" if connection.awaited else "Semel"
        raise ConfigurationError(f"{_kind(raw)} is {'async' if connection.awaited else 'sync'}: use it with {guard}")
    return AsyncUnit(connection) if connection.awaited else Unit(connection)


def _kind(raw: object) -> str:
    return f"{type(raw).__module__.partition('.')[0]}'s {type(raw).__name__}"


class _Unit:
    """What both share: which programs, and what an error means."""

    connection: Any
    __slots__ = ("_programs",)

    def __init__(self, dialect: Dialect) -> None:
        self._programs = _PROGRAMS[dialect]

    def require(self, own: bool) -> None:
        """Raise unless there is a transaction to work in; or, where we are to open it, unless there is none."""
        connection = self.connection
        if own and connection.begun():
            raise ConfigurationError("own_transaction=True opens a transaction, and one is open already: leave it out")
        if not own and not connection.in_transaction():
            raise ConfigurationError(
                "no transaction is open on this connection, so nothing would commit together. "
                f"Open one: {connection.opening}; or let Semel open and commit it: own_transaction=True"
            )

    def conflicts(self, error: BaseException) -> bool:
        """Whether what a handler raised is the database's word that another transaction stood in its way."""
        return isinstance(error, TransactionConflict) or is_conflict(error)

    def _locked(self, op: Lock, found: Row | Occupied | None) -> Row | Occupied | None:
        """What the guard found; unless the driver has committed it meanwhile, and with it every promise."""
        if not op.own and not self.connection.holds():
            raise ConfigurationError(
                "the driver commits each statement of this connection by itself, so nothing would commit together; "
                f"nothing was run. Open a transaction: {self.connection.opening}; or use own_transaction=True"
            )
        return found

    def _locking(self, error: SemelError, began: float) -> Occupied:
        """What a failed guard means: the file is held by others, or the error that is raised."""
        if isinstance(error, Busy) and not is_stale(error.__cause__):
            return Occupied(error, time.monotonic() - began)
        raise self._conflict(error, "the guard") from error.__cause__

    def _marked(self, held: bool) -> bool:
        if held and not self.connection.holds():
            raise ConfigurationError(
                "the driver commits each statement of this connection by itself, so the step's rows and its mark did "
                f"not commit together. Open a transaction: {self.connection.opening}"
            )
        return held

    def _still_open(self) -> None:
        """Before a commit of ours: raise if there is nothing left that it would commit, as far as the driver tells."""
        if not self.connection.holds():
            raise HandlersFault from ConfigurationError(
                "the handler ended the transaction that Semel opened for it, so nothing would commit together, and no "
                "record is stored: leave commit() and rollback() out, and raise an error to have it rolled back. "
                "(Or the driver commits each statement of this connection by itself: take it out of autocommit)"
            )

    def _unkept(self, error: SemelError, op: Keep) -> SemelError:
        """What it means that the record was not kept."""
        if op.own and is_violation(error.__cause__):
            return HandlersFault(str(error))
        return self._conflict(error, "the record", committing=op.own)

    def _conflict(self, error: SemelError, where: str, *, committing: bool = False) -> SemelError:
        cause = error.__cause__
        if isinstance(error, (Contended, Busy)) or is_conflict(cause) or is_duplicate(cause):
            return TransactionConflict(f"another transaction stood in the way of {where}: {error}; {_ADVICE}")
        if isinstance(error, StoreUncertain) and not committing:
            return StoreUnavailable(f"{error}; the transaction went with it, and nothing was stored")
        return error


class Unit(_Unit):
    """On a sync connection."""

    __slots__ = ("connection",)

    def __init__(self, connection: Lent) -> None:
        super().__init__(connection.dialect)
        self.connection = connection

    def lock(self, op: Lock) -> Row | Occupied | None:
        program: Program[Row | Occupied | None] = self._programs.lock(op)
        began = time.monotonic()
        try:
            statement = next(program)
            send = self.connection.begin_with if op.own else self.connection.execute
            while True:
                try:
                    rows: Rows = send(statement)
                except StoreUnavailable as error:
                    statement = program.throw(error)
                else:
                    statement = program.send(rows)
                send = self.connection.execute
        except StopIteration as stop:
            return self._locked(op, stop.value)
        except NotMigrated as error:
            raise run(not_migrated(self.connection, error), self.connection) from error.__cause__
        except SemelError as error:
            return self._locking(error, began)

    def keep(self, op: Keep) -> None:
        program: Program[bool] = self._programs.keep(op)
        try:
            last = next(program)
            if op.own:
                self._still_open()
                self.connection.commit_with(last)
            else:
                program.send(self.connection.execute(last))
        except StopIteration as stop:
            if not stop.value:
                raise TransactionConflict(f"the record changed while the handler ran; {_ADVICE}") from None
        except SemelError as error:
            raise self._unkept(error, op) from error.__cause__

    def save(self, op: SaveStep) -> bool:
        try:
            return self._marked(run(self._programs.save_step(op), self.connection))
        except NotMigrated as error:
            raise run(not_migrated(self.connection, error), self.connection) from error.__cause__
        except SemelError as error:
            raise self._conflict(error, "the step's mark") from error.__cause__

    def saved(self, id: bytes, name: str) -> bool:
        try:
            return run(self._programs.step_saved(id, name), self.connection)  # type: ignore[no-any-return]
        except SemelError as error:
            raise self._conflict(error, "the step's mark") from error.__cause__

    def finish(self) -> None:
        """Send what the caller's layer still holds back."""
        self.connection.finish()

    def undo(self) -> None:
        """Roll back what we opened; harmless when nothing is open."""
        self.connection.rollback()


class AsyncUnit(_Unit):
    """On an async connection: the same names."""

    __slots__ = ("connection",)

    def __init__(self, connection: AsyncLent) -> None:
        super().__init__(connection.dialect)
        self.connection = connection

    async def lock(self, op: Lock) -> Row | Occupied | None:
        program: Program[Row | Occupied | None] = self._programs.lock(op)
        began = time.monotonic()
        try:
            statement = next(program)
            send = self.connection.begin_with if op.own else self.connection.execute
            while True:
                try:
                    rows: Rows = await send(statement)
                except StoreUnavailable as error:
                    statement = program.throw(error)
                else:
                    statement = program.send(rows)
                send = self.connection.execute
        except StopIteration as stop:
            return self._locked(op, stop.value)
        except NotMigrated as error:
            raise await run_async(not_migrated(self.connection, error), self.connection) from error.__cause__
        except SemelError as error:
            return self._locking(error, began)

    async def keep(self, op: Keep) -> None:
        program: Program[bool] = self._programs.keep(op)
        try:
            last = next(program)
            if op.own:
                self._still_open()
                await self.connection.commit_with(last)
            else:
                program.send(await self.connection.execute(last))
        except StopIteration as stop:
            if not stop.value:
                raise TransactionConflict(f"the record changed while the handler ran; {_ADVICE}") from None
        except SemelError as error:
            raise self._unkept(error, op) from error.__cause__

    async def save(self, op: SaveStep) -> bool:
        try:
            return self._marked(await run_async(self._programs.save_step(op), self.connection))
        except NotMigrated as error:
            raise await run_async(not_migrated(self.connection, error), self.connection) from error.__cause__
        except SemelError as error:
            raise self._conflict(error, "the step's mark") from error.__cause__

    async def saved(self, id: bytes, name: str) -> bool:
        try:
            return await run_async(self._programs.step_saved(id, name), self.connection)
        except SemelError as error:
            raise self._conflict(error, "the step's mark") from error.__cause__

    async def finish(self) -> None:
        """Send what the caller's layer still holds back."""
        await self.connection.finish()

    async def undo(self) -> None:
        """Roll back what we opened; harmless when nothing is open."""
        await self.connection.rollback()
