"""psycopg 3 connections that belong to the caller, sync and async.

A cursor of the plain class with tuples for rows is made each time: the caller's row and cursor factories are for the
caller's rows. Whether a statement is prepared is left to the connection's own ``prepare_threshold``, which is None
behind a pooler that cannot have it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from semel.sql.connections.postgres_literals import written_out
from semel.sql.connections.psycopg import DRIVER_ERRORS, named_error, prepared, register_arrays
from semel.sql.program import Rows, Statement

__all__ = ["AsyncLentPsycopg", "LentPsycopg"]

_IDLE: Final = TransactionStatus.IDLE
_NO_PIPELINE: Final = PipelineStatus.OFF
_LEVELS: Final = {1: "READ UNCOMMITTED", 2: "READ COMMITTED", 3: "REPEATABLE READ", 4: "SERIALIZABLE"}


class _Lent:
    """What both share: how a transaction stands, and what opens one."""

    dialect: Final = "postgresql"
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def in_transaction(self) -> bool:
        return not self.raw.autocommit or self.begun()

    def begun(self) -> bool:
        # In a pipeline the BEGIN of `conn.transaction()` may wait to be sent.
        return bool(self.raw.pgconn.transaction_status != _IDLE or getattr(self.raw, "_num_transactions", 0))

    def holds(self) -> bool:
        return self.begun()

    def _joins(self) -> bool:
        """Whether BEGIN is ours to send: without autocommit psycopg sends its own, and a pipeline takes no script."""
        return bool(self.raw.autocommit and self.raw.pgconn.pipeline_status == _NO_PIPELINE)

    def _begin(self) -> str:
        words = ["BEGIN"]
        if self.raw.isolation_level is not None:
            words.append(f"ISOLATION LEVEL {_LEVELS[int(self.raw.isolation_level)]}")
        if self.raw.read_only is not None:
            words.append("READ ONLY" if self.raw.read_only else "READ WRITE")
        if self.raw.deferrable is not None:
            words.append("DEFERRABLE" if self.raw.deferrable else "NOT DEFERRABLE")
        return " ".join(words)


class LentPsycopg(_Lent):
    """A psycopg.Connection."""

    awaited: Literal[False] = False
    opening: ClassVar[str] = "`with conn.transaction():`, or a connection without autocommit"
    __slots__ = ()

    def execute(self, statement: Statement) -> Rows:
        try:
            cursor = psycopg.Cursor(self.raw, row_factory=tuple_row)
            if statement.query.arrays:
                register_arrays(cursor.adapters)
            text, values = prepared(statement)
            cursor.execute(text, values or None, binary=True)
            self._hear()
            return cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def begin_with(self, statement: Statement) -> Rows:
        if not self._joins():
            if self.raw.autocommit:
                self._script(self._begin())
            return self.execute(statement)
        return self._script(f"{self._begin()}; {written_out(statement)}")

    def commit_with(self, statement: Statement) -> None:
        if self.raw.pgconn.pipeline_status == _NO_PIPELINE:
            self._script(f"{written_out(statement)}; COMMIT")
            return
        self.execute(statement)
        self._script("COMMIT")

    def rollback(self) -> None:
        try:
            self.raw.rollback()
        except psycopg.Error as error:
            raise named_error(error) from error

    def _script(self, text: str) -> Rows:
        """Statements without parameters, in one message; the rows of the last one."""
        try:
            cursor = psycopg.Cursor(self.raw, row_factory=tuple_row)
            cursor.execute(text.encode(), None, prepare=False)
            self._hear()
            while cursor.nextset():
                pass
            return cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    def _hear(self) -> None:
        """In a pipeline of the caller's: have the answer now."""
        if self.raw.pgconn.pipeline_status != _NO_PIPELINE:
            with self.raw.pipeline() as pipeline:
                pipeline.sync()


class AsyncLentPsycopg(_Lent):
    """A psycopg.AsyncConnection: the same, awaited."""

    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with conn.transaction():`, or a connection without autocommit"
    __slots__ = ()

    async def execute(self, statement: Statement) -> Rows:
        try:
            cursor = psycopg.AsyncCursor(self.raw, row_factory=tuple_row)
            if statement.query.arrays:
                register_arrays(cursor.adapters)
            text, values = prepared(statement)
            await cursor.execute(text, values or None, binary=True)
            await self._hear()
            return await cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    async def begin_with(self, statement: Statement) -> Rows:
        if not self._joins():
            if self.raw.autocommit:
                await self._script(self._begin())
            return await self.execute(statement)
        return await self._script(f"{self._begin()}; {written_out(statement)}")

    async def commit_with(self, statement: Statement) -> None:
        if self.raw.pgconn.pipeline_status == _NO_PIPELINE:
            await self._script(f"{written_out(statement)}; COMMIT")
            return
        await self.execute(statement)
        await self._script("COMMIT")

    async def rollback(self) -> None:
        try:
            await self.raw.rollback()
        except psycopg.Error as error:
            raise named_error(error) from error

    async def _script(self, text: str) -> Rows:
        """Statements without parameters, in one message; the rows of the last one."""
        try:
            cursor = psycopg.AsyncCursor(self.raw, row_factory=tuple_row)
            await cursor.execute(text.encode(), None, prepare=False)
            await self._hear()
            while cursor.nextset():
                pass
            return await cursor.fetchall() if cursor.rownumber is not None else ()
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    async def _hear(self) -> None:
        """In a pipeline of the caller's: have the answer now."""
        if self.raw.pgconn.pipeline_status != _NO_PIPELINE:
            async with self.raw.pipeline() as pipeline:
                await pipeline.sync()
