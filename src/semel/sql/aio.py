# Twin: sync.py is generated from this file by make twins.
# Twin: connection.awaited is True -> connection.awaited is False
# Twin: on async connections -> on sync connections
"""Run SQL programs on async connections: alone, as a migration, or as a unit of work in the caller's transaction.

A store that supports transactions hands out a unit of work (``store.adopt(connection)``). It answers the Ops of the
transactional flow in the caller's transaction. If the connection is lost before a commit was sent, certainly nothing is
stored: the server rolls back what nobody can commit any more.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final, NoReturn, Protocol, TypeVar

from semel.core.call import Raised
from semel.core.messaging.messages import NewMessage
from semel.core.ops import SaveStep
from semel.core.semantics import Row
from semel.core.transactional import ExecuteOnce, HandlerConflict, HandlersFault, Keep, Lock, Occupied, SQLEffect
from semel.errors import (
    ConfigurationError,
    NotMigrated,
    SemelError,
    StoreUnavailable,
    StoreUncertain,
    TransactionConflict,
)
from semel.sql import migrations
from semel.sql.connections.adopt import WRAPPERS_FOUND, AsyncLentConnection, Dialect, adopt, not_migrated
from semel.sql.connections.errors import (
    Contention,
    DatabaseBusy,
    is_conflict,
    is_duplicate,
    is_refused_record,
    is_stale,
    is_violation,
)
from semel.sql.dialects import mysql, postgres, sqlite
from semel.sql.effects import as_plain, bind_record, stands_in_with
from semel.sql.outbox import add_message
from semel.sql.program import Program, Query, Rows, Statement, TransactionPrograms

R = TypeVar("R")


class AsyncConnection(Protocol):
    """A driver's connection, wrapped: it runs one statement and raises StoreErrors."""

    async def execute(self, statement: Statement) -> Rows: ...


async def run_async(program: Program[R], connection: AsyncConnection) -> R:
    """Run a program to its end and return its result."""
    try:
        statement = next(program)
        while True:
            try:
                rows = await connection.execute(statement)
            except (StoreUnavailable, NotMigrated) as error:  # the program may have a transaction to roll back
                statement = program.throw(error)
            else:
                statement = program.send(rows)
    except StopIteration as stop:
        result: R = stop.value
        return result


# Migrations


async def migrate_async(connection: AsyncConnection, schema: migrations.Schema) -> list[str]:
    """Bring the database up to date; return the names of the migrations that were applied."""
    return await _run_or_roll_back(migrations.migrate_program(schema), connection)


async def check_async(connection: AsyncConnection, schema: migrations.Schema) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly what the migrations make."""
    await _run_or_roll_back(migrations.check_program(schema), connection)


async def _run_or_roll_back(program: Program[R], connection: AsyncConnection) -> R:
    try:
        return await run_async(program, connection)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            await connection.execute(migrations.statement("ROLLBACK"))
        raise


# Units of work


_PROGRAMS: Final[dict[Dialect, TransactionPrograms]] = {"postgresql": postgres, "sqlite": sqlite, "mysql": mysql}
_PRODUCTS: Final = {"postgresql": "PostgreSQL", "sqlite": "SQLite", "mysql": "MySQL"}
_NOTHING: Final = Query("nothing", "SELECT :nothing", False)
"""Does nothing, where a connection wants a statement together with a BEGIN or a COMMIT. It has a parameter because
asyncpg sends the BEGIN with the parameters."""
_ADVICE: Final = "nothing is stored; roll back and run the unit of work again"


def adopt_unit_async(raw: object, dialect: Dialect) -> AsyncSQLUnit:
    """The caller's connection as a unit of work, for a store of this dialect."""
    wrapper = WRAPPERS_FOUND.get(type(raw))
    connection: AsyncLentConnection = adopt(raw) if wrapper is None else wrapper(raw)
    if connection.dialect == dialect and connection.awaited is True:
        return AsyncSQLUnit(connection)
    kind = f"{type(raw).__module__.partition('.')[0]}'s {type(raw).__name__}"
    if connection.dialect == dialect:
        # sync: raise ConfigurationError(f"{kind} is async: use it with AsyncSemel, AsyncOutbox and AsyncInbox")
        raise ConfigurationError(f"{kind} is sync: use it with Semel, Outbox and Inbox")
    raise ConfigurationError(
        f"the store is {_PRODUCTS[dialect]} and {kind} is connected to {_PRODUCTS[connection.dialect]}: records and "
        "messages must be where their store looks for them. Use a store of that database"
    )


def _refuse_commit() -> NoReturn:
    raise ConfigurationError(
        "the handler called commit() in a transaction whose record is not written yet, so a crash would leave its rows "
        "without the record, and a retry would write them again. Nothing was committed. Leave commit() out: Semel, or "
        "whoever opened the transaction, commits when the handler has returned"
    )


class AsyncSQLUnit:
    """A unit of work on the caller's connection."""

    __slots__ = ("_programs", "_watched", "connection", "finish", "undo")

    def __init__(self, connection: AsyncLentConnection) -> None:
        self.connection = connection
        self._programs = _PROGRAMS[connection.dialect]
        self.finish = connection.finish
        """Send what the caller's layer still holds back."""
        self.undo = connection.rollback
        """Roll back what ``lock`` opened. Does nothing when no transaction is open."""
        self._watched: list[Any] = []

    def require(self, own: bool) -> None:
        """Raise unless a transaction is open; with ``own``, which opens one, raise if one is open already."""
        connection = self.connection
        if own and connection.begun():
            raise ConfigurationError("own_transaction=True opens a transaction, and one is open already: leave it out")
        if not own and not connection.in_transaction():
            raise ConfigurationError(
                "no transaction is open on this connection, so nothing would commit together. "
                f"Open one: {connection.opening}; or let Semel open and commit it: own_transaction=True"
            )

    def conflicts(self, error: BaseException) -> bool:
        """Whether a handler's error says that another transaction was in its way."""
        return isinstance(error, TransactionConflict) or is_conflict(error)

    async def lock(self, op: Lock) -> Row | Occupied | None:
        program = self._programs.lock(op)
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
            found: Row | Occupied | None = stop.value
        except NotMigrated as error:
            raise await run_async(not_migrated(self.connection, error), self.connection) from error.__cause__
        except SemelError as error:
            if isinstance(error, DatabaseBusy) and not is_stale(error.__cause__):
                return Occupied(error, time.monotonic() - began)
            raise self._conflict(error, "the guard") from error.__cause__
        if not op.own and not op.looks and not self.connection.holds():
            raise ConfigurationError(
                "the driver commits each statement of this connection by itself, so nothing would commit together; "
                f"nothing was run. Open a transaction: {self.connection.opening}; or use own_transaction=True"
            )
        return found

    async def keep(self, op: Keep) -> None:
        program = self._programs.keep(op)
        try:
            last = next(program)
            if op.own:
                self._require_open()
                await self.connection.commit_with(last)
            else:
                program.send(await self.connection.execute(last))
        except StopIteration as stop:
            if not stop.value:
                raise TransactionConflict(f"the record changed while the handler ran; {_ADVICE}") from None
        except SemelError as error:
            if op.own and is_violation(error.__cause__):
                raise HandlersFault(str(error)) from error.__cause__
            raise self._conflict(error, "the record", committing=op.own) from error.__cause__

    def plan(self, statement: str) -> tuple[bool, bool]:
        """Whether a statement sent now commits by itself, and whether this one can write its own record."""
        connection = self.connection
        return not connection.in_transaction(), connection.dialect == "postgresql" and stands_in_with(statement)

    async def execute(self, op: ExecuteOnce) -> bytes | Raised | HandlerConflict | None:
        connection, own = self.connection, op.keep.own
        try:
            await connection.finish()  # a session's new rows go first: the statement may be about them
        except Exception as error:
            return HandlerConflict(error) if is_conflict(error) else Raised(error)
        try:
            found = await connection.query(*bind_record(op.effect, op.keep, connection.style))
            return bytes(found.rows[0][0])
        except SemelError as error:
            # No local name for the cause: its traceback holds this frame, and both would wait for the collector.
            if own and is_refused_record(error.__cause__):
                return None
            cause = error.__cause__
            if is_refused_record(cause):
                raise TransactionConflict(
                    f"another transaction stood in the way of the record: {error}; {_ADVICE}"
                ) from cause
            if isinstance(error, NotMigrated) and "semel_record" in str(error):
                raise await run_async(not_migrated(connection, error), connection) from cause
            if isinstance(error, StoreUncertain) or not isinstance(cause, Exception):
                raise self._conflict(error, "the record", committing=own) from cause
            return HandlerConflict(cause) if is_conflict(cause) else Raised(cause)

    async def perform(self, effect: SQLEffect) -> Any:
        """Run the effect alone. Returns its rows as plain data, or how many it changed. The driver's errors are raised
        unchanged.
        """
        await self.connection.finish()
        try:
            return as_plain(await self.connection.query(effect.statement, effect.parameters))
        except SemelError as error:
            cause = error.__cause__
            if cause is None:
                raise
        raise cause

    async def save(self, op: SaveStep) -> bool:
        """Save a step in the caller's transaction; False if another attempt owns the record by now."""
        saved = await self._run(self._programs.save_step(op), "the step's mark")
        if saved and not self.connection.holds():
            raise ConfigurationError(
                "the driver commits each statement of this connection by itself, so the step's rows and its mark did "
                f"not commit together. Open a transaction: {self.connection.opening}"
            )
        return saved

    async def saved(self, id: bytes, name: str) -> bool:
        """Whether the caller's transaction sees this step as saved."""
        return await self._run(self._programs.step_saved(id, name), "the step's mark")

    async def add(self, message: NewMessage) -> None:
        """Add a message to the outbox, in the caller's transaction. Raises ConfigurationError if none is open."""
        connection = self.connection
        if not connection.in_transaction():
            raise ConfigurationError(
                "no transaction is open on this connection, so the message would not commit together with your rows. "
                f"Open one: {connection.opening}"
            )
        await self.run(add_message(connection.dialect, message, connection.prepares), "the message")

    async def begin(self) -> None:
        """Open a transaction of our own. End it with ``commit`` or ``undo``.

        Raises ConfigurationError if the driver commits each statement nevertheless, before one of them writes.
        """
        await self.connection.begin_with(_NOTHING(nothing=None))
        if not self.connection.in_transaction():
            raise ConfigurationError(
                "the driver commits each statement of this connection by itself, so nothing would commit together; "
                f"nothing was run. A transaction is possible with: {self.connection.opening}"
            )

    async def commit(self) -> None:
        """Send what the caller's session still holds back, and commit what ``begin`` opened."""
        await self.connection.finish()
        self._require_open()
        try:
            await self.connection.commit_with(_NOTHING(nothing=None))
        except SemelError as error:
            raise self._conflict(error, "the transaction", committing=True) from error.__cause__

    async def run(self, program: Program[R], what: str) -> R:
        """Run a program in the caller's transaction, after what the caller's session still holds back.

        :param what: what the program writes, for the error if another transaction stands in its way.
        """
        connection = self.connection
        await connection.finish()
        found = await self._run(program, what)
        if not connection.holds():
            raise ConfigurationError(
                f"the driver commits each statement of this connection by itself, so {what} did not commit together "
                f"with your rows. Open a transaction: {connection.opening}"
            )
        return found

    async def nest(self) -> Any:
        """Open a savepoint of the caller's session or framework, and return it. None if there is nothing above the
        driver; then a statement does.
        """
        session: Any = self.connection
        return await session.nest() if session.nests else None

    async def release(self, savepoint: Any, what: str) -> None:
        """Release what ``nest`` has returned."""
        session: Any = self.connection
        try:
            await session.release(savepoint)
        except SemelError as error:
            raise self._conflict(error, what) from error.__cause__

    async def _run(self, program: Program[R], what: str) -> R:
        try:
            return await run_async(program, self.connection)
        except NotMigrated as error:
            raise await run_async(not_migrated(self.connection, error), self.connection) from error.__cause__
        except SemelError as error:
            raise self._conflict(error, what) from error.__cause__

    def watch(self) -> None:
        """Refuse ``commit()`` while the handler runs: its rows would be durable without the record."""
        for raw in self.connection.committers():
            if "commit" not in raw.__dict__:  # an outer call on the same connection watches it already
                raw.commit = _refuse_commit
                self._watched.append(raw)

    def unwatch(self) -> None:
        """Allow ``commit()`` again. Does nothing if it is not refused."""
        while self._watched:
            del self._watched.pop().commit

    def _require_open(self) -> None:
        """Before a commit of ours: raise if, as far as the driver knows, there is no transaction left to commit."""
        if not self.connection.holds():
            raise HandlersFault from ConfigurationError(
                "the handler ended the transaction that Semel opened for it, so nothing would commit together, and no "
                "record is stored: leave commit() and rollback() out, and raise an error to have it rolled back. "
                "(Or the driver commits each statement of this connection by itself: take it out of autocommit)"
            )

    def _conflict(self, error: SemelError, where: str, *, committing: bool = False) -> SemelError:
        """The error as a TransactionConflict, if running the unit of work again helps.

        :param committing: a commit was sent, so a lost connection leaves the outcome unknown.
        """
        cause = error.__cause__
        if isinstance(error, (Contention, DatabaseBusy)) or is_conflict(cause) or is_duplicate(cause):
            return TransactionConflict(f"another transaction stood in the way of {where}: {error}; {_ADVICE}")
        if isinstance(error, StoreUncertain) and not committing:
            return StoreUnavailable(f"{error}; the transaction went with it, and nothing was stored")
        return error
