"""psycopg 3 connections that belong to the caller, sync and async.

Calls of our functions are written out and sent as they are, past psycopg's cursors: what a cursor does for a statement
takes as long as what the server does with it. Everything else has a cursor of the plain class with tuples for rows,
made each time: the caller's row and cursor factories are for the caller's rows. Whether a statement is prepared is left
to the connection's own ``prepare_threshold``, which is None behind a pooler that cannot have it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, ClassVar, Final, Literal

import psycopg
from psycopg import generators
from psycopg.errors import error_from_result
from psycopg.pq import Escaping, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from semel.sql.connections.postgres_literals import written_out
from semel.sql.connections.psycopg import DRIVER_ERRORS, named_error, prepared, register_arrays
from semel.sql.program import Query, Rows, Statement

__all__ = ["AsyncLentPsycopg", "LentPsycopg"]

_IDLE: Final = int(TransactionStatus.IDLE)  # plain numbers, as libpq answers: asked several times in every transaction
_LOST: Final = int(TransactionStatus.UNKNOWN)
_NO_PIPELINE: Final = int(PipelineStatus.OFF)
_NOT_BEGUN: Final = (_IDLE, _LOST)
_ROWS: Final = int(ExecStatus.TUPLES_OK)
_DONE: Final = int(ExecStatus.COMMAND_OK)
_LEVELS: Final = {1: "READ UNCOMMITTED", 2: "READ COMMITTED", 3: "REPEATABLE READ", 4: "SERIALIZABLE"}


class _Lent:
    """What both share: how a transaction stands, what opens one, and how a text is sent."""

    dialect: Final = "postgresql"
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def in_transaction(self) -> bool:
        return not self.raw.autocommit or self.holds()

    def begun(self) -> bool:
        # In a pipeline the BEGIN of `conn.transaction()` may wait to be sent.
        return self.raw.pgconn.transaction_status not in _NOT_BEGUN or bool(getattr(self.raw, "_num_transactions", 0))

    def holds(self) -> bool:
        # On a connection that is lost the next statement says so.
        return self.begun() or bool(self.raw.pgconn.transaction_status == _LOST)

    def _pipelined(self) -> bool:
        """In a pipeline of the caller's, which takes no text of several statements."""
        return bool(self.raw.pgconn.pipeline_status != _NO_PIPELINE)

    def _goes_as_text(self, query: Query) -> bool:
        """A call does; what a call can stand for does so too, where psycopg is told to prepare nothing."""
        call = query.as_text
        return call is not None and (call is query or self.raw.prepare_threshold is None) and not self._pipelined()

    def _begin(self) -> str:
        raw = self.raw
        if raw.isolation_level is raw.read_only is raw.deferrable is None:
            return "BEGIN"
        words = ["BEGIN"]
        if raw.isolation_level is not None:
            words.append(f"ISOLATION LEVEL {_LEVELS[int(raw.isolation_level)]}")
        if raw.read_only is not None:
            words.append("READ ONLY" if raw.read_only else "READ WRITE")
        if raw.deferrable is not None:
            words.append("DEFERRABLE" if raw.deferrable else "NOT DEFERRABLE")
        return " ".join(words)

    def _text(self, statement: Statement) -> str:
        """A call, behind the BEGIN that psycopg would send on its own where it does not commit by itself."""
        raw = self.raw
        if raw.autocommit or raw.pgconn.transaction_status != _IDLE:
            return written_out(statement)
        return f"{self._begin()}; {written_out(statement)}"

    def _exchange(self, text: str) -> Generator[Any, Any, Rows]:
        """Statements without parameters, in one message: the rows of the last one, which are bytes."""
        pgconn = self.raw.pgconn
        pgconn.send_query(text.encode())
        last = (yield from generators.execute(pgconn))[-1]
        if last.status == _ROWS:
            found = [last.get_value(row, 0) for row in range(last.ntuples)]
            return [(None if value is None else Escaping().unescape_bytea(value),) for value in found]
        if last.status != _DONE:
            raise error_from_result(last, encoding=self.raw.info.encoding)
        return ()


class LentPsycopg(_Lent):
    """A psycopg.Connection."""

    awaited: Literal[False] = False
    opening: ClassVar[str] = "`with conn.transaction():`, or a connection without autocommit"
    __slots__ = ()

    def execute(self, statement: Statement) -> Rows:
        if self._goes_as_text(statement.query):
            return self._script(self._text(statement))
        text, values = prepared(statement)
        return self._send(text, values or None, bool(statement.query.arrays))

    def finish(self) -> None:
        """Nothing is held back here."""

    def begin_with(self, statement: Statement) -> Rows:
        if not self._pipelined():
            return self._script(f"{self._begin()}; {written_out(statement)}")
        if self.raw.autocommit:
            self._send(self._begin())
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        if not self._pipelined():
            self._script(f"{written_out(statement)}; COMMIT")
            return
        self.execute(statement)
        self._send("COMMIT")

    def rollback(self) -> None:
        try:
            self.raw.rollback()
        except psycopg.Error as error:
            raise named_error(error) from error

    def _script(self, text: str) -> Rows:
        raw = self.raw
        try:
            with raw.lock:
                rows: Rows = raw.wait(self._exchange(text))
                return rows
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    def _send(self, text: Any, values: list[Any] | None = None, arrays: bool = False) -> Rows:
        try:
            cursor = psycopg.Cursor(self.raw, row_factory=tuple_row)
            if arrays:
                register_arrays(cursor.adapters)
            cursor.execute(text, values, binary=True)
            if self._pipelined():  # have the answer now
                with self.raw.pipeline() as pipeline:
                    pipeline.sync()
            return cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error


class AsyncLentPsycopg(_Lent):
    """A psycopg.AsyncConnection: the same, awaited."""

    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with conn.transaction():`, or a connection without autocommit"
    __slots__ = ()

    async def execute(self, statement: Statement) -> Rows:
        if self._goes_as_text(statement.query):
            return await self._script(self._text(statement))
        text, values = prepared(statement)
        return await self._send(text, values or None, bool(statement.query.arrays))

    async def finish(self) -> None:
        """Nothing is held back here."""

    async def begin_with(self, statement: Statement) -> Rows:
        if not self._pipelined():
            return await self._script(f"{self._begin()}; {written_out(statement)}")
        if self.raw.autocommit:
            await self._send(self._begin())
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        if not self._pipelined():
            await self._script(f"{written_out(statement)}; COMMIT")
            return
        await self.execute(statement)
        await self._send("COMMIT")

    async def rollback(self) -> None:
        try:
            await self.raw.rollback()
        except psycopg.Error as error:
            raise named_error(error) from error

    async def _script(self, text: str) -> Rows:
        raw = self.raw
        try:
            async with raw.lock:
                rows: Rows = await raw.wait(self._exchange(text))
                return rows
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    async def _send(self, text: Any, values: list[Any] | None = None, arrays: bool = False) -> Rows:
        try:
            cursor = psycopg.AsyncCursor(self.raw, row_factory=tuple_row)
            if arrays:
                register_arrays(cursor.adapters)
            await cursor.execute(text, values, binary=True)
            if self._pipelined():  # have the answer now
                async with self.raw.pipeline() as pipeline:
                    await pipeline.sync()
            return await cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error
