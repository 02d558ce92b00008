"""asyncpg connections that belong to the caller, also through a pool."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from semel.sql.connections.asyncpg import DRIVER_ERRORS, named_error
from semel.sql.connections.postgres_literals import written_out
from semel.sql.program import Rows, Statement

__all__ = ["LentAsyncpg"]


class _Outermost:
    """Stands for a transaction that we began: all that asyncpg asks of the outermost one is its isolation level."""

    _isolation = None


_OUTERMOST: Final = _Outermost()


class LentAsyncpg:
    """An asyncpg.Connection, or a pool's proxy of one."""

    dialect: Final = "postgresql"
    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with conn.transaction():`"
    __slots__ = ("_beginning", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._beginning = False
        """A BEGIN was sent, and asyncpg has not heard the answer: it does not know yet that one is open."""

    async def execute(self, statement: Statement) -> Rows:
        text, values = statement.values("numeric")
        try:
            rows: Rows = await self.raw.fetch(text, *values)
            return rows
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun()

    def begun(self) -> bool:
        return bool(self.raw.is_in_transaction())

    def holds(self) -> bool:
        return bool(self.raw.is_closed()) or self.begun()  # where it is closed, the next statement says so

    async def begin_with(self, statement: Statement) -> Rows:
        # A script has no rows in asyncpg, only the word of its last command: asked as a condition, "SELECT 0" is all
        # there is to know when nothing was found. Otherwise the statement is asked again, alone.
        self._beginning = True
        said = await self._script(f"BEGIN; SELECT WHERE {written_out(statement).removeprefix('SELECT ')} IS NOT NULL")
        self._beginning = False
        self._mark(_OUTERMOST)
        return () if said == "SELECT 0" else await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        await self._script(f"{written_out(statement)}; COMMIT")
        self._mark(None)

    async def rollback(self) -> None:
        if self.raw.is_closed():
            return
        if self._beginning or self.begun():  # where none is open, the server only warns
            await self._script("ROLLBACK")
        self._beginning = False
        self._mark(None)

    async def _script(self, text: str) -> str:
        try:
            said: str = await self.raw.execute(text)
            return said
        except DRIVER_ERRORS as error:
            raise named_error(error) from error

    def _mark(self, outermost: Any) -> None:
        """Tell asyncpg of a transaction that we began: it refuses ``conn.transaction()``, a savepoint, in any other."""
        raw = getattr(self.raw, "_con", self.raw)  # behind a pool's proxy
        if hasattr(raw, "_top_xact"):
            raw._top_xact = outermost
