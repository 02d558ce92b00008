"""asyncpg: our own connection, and connections that belong to the caller, also from a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Literal

import asyncpg

from semel.errors import ConfigurationError, SemelError, StoreUncertain
from semel.sql.connections.adopt import DatabaseAddress
from semel.sql.connections.errors import postgres_error, rejected
from semel.sql.connections.literals import postgres_text
from semel.sql.effects import EffectStyle, QueryResult, returns_rows
from semel.sql.program import Query, Rows, Statement

_DRIVER_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError, OverflowError)


class AsyncpgConnection:
    """Our own asyncpg.Connection."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    async def execute(self, statement: Statement) -> Rows:
        text, values = statement.values("numeric")
        try:
            rows: Rows = await self.raw.fetch(text, *values)
            return rows
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error


_FOUND: Final = Query(
    "found",
    "SELECT coalesce((SELECT timestamptz_send(statement_timestamp()) || record_send(r) FROM semel_record r "
    "WHERE r.id = :id AND r.state = 2 AND r.expires > statement_timestamp()), semel_guard(:id, :place))",
    False,
)
"""What the guard found: usually a finished record, which is read without asking the guard again."""


class _OutermostTransaction:
    """Stands in for asyncpg's own transaction object. Of the outermost one it only reads the isolation level."""

    _isolation = None


_OUTERMOST: Final = _OutermostTransaction()


class LentAsyncpg(AsyncpgConnection):
    """An asyncpg.Connection of the caller's, or a pool's proxy of one."""

    dialect: Final = "postgresql"
    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with conn.transaction():`"
    style: ClassVar[EffectStyle] = "numeric"
    __slots__ = ("_beginning",)

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._beginning = False
        """A BEGIN was sent and not answered yet, so asyncpg does not know that a transaction is open."""

    def address(self) -> DatabaseAddress:
        params, address = getattr(self.raw, "_params", None), getattr(self.raw, "_addr", "")
        host, port = address if isinstance(address, tuple) else (str(address).rpartition("/")[0], "")
        return DatabaseAddress(getattr(params, "user", ""), host, port, getattr(params, "database", ""))

    async def query(self, text: str, parameters: Any) -> QueryResult:
        if isinstance(parameters, Mapping):
            raise ConfigurationError("parameters= of an asyncpg connection are a list, for $1, $2, … in the statement")
        try:
            if not returns_rows(text):
                words = (await self.raw.execute(text, *parameters)).split()
                return QueryResult(None, (), int(words[-1]) if words[-1].isdigit() else 0)
            rows = await self.raw.fetch(text, *parameters)
            return QueryResult(list(rows[0].keys()) if rows else (), rows, 0)
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return self.begun()

    def begun(self) -> bool:
        return bool(self.raw.is_in_transaction())

    def committers(self) -> tuple[Any, ...]:
        return ()  # it has no commit(), and refuses transaction() within ours

    def holds(self) -> bool:
        return bool(self.raw.is_closed()) or self.begun()  # if it is closed, the next statement fails

    async def begin_with(self, statement: Statement) -> Rows:
        # asyncpg returns no rows of a script, only the status of its last command. So the guard is sent as a condition:
        # "SELECT 0" says that nothing was found. Otherwise it is looked for once more, alone, for its rows.
        self._beginning = True
        condition = postgres_text(statement).removeprefix("SELECT ")
        status = await self._send(f"BEGIN; SELECT WHERE {condition} IS NOT NULL")
        self._beginning = False
        self._set_outermost(_OUTERMOST)
        return () if status == "SELECT 0" else await self.execute(Statement(_FOUND, statement.params))

    async def commit_with(self, statement: Statement) -> None:
        await self._send(f"{postgres_text(statement)}; COMMIT")
        self._set_outermost(None)

    async def rollback(self) -> None:
        if self.raw.is_closed():
            return
        if self._beginning or self.begun():  # where no transaction is open the server only warns
            await self._send("ROLLBACK")
        self._beginning = False
        self._set_outermost(None)

    async def _send(self, text: str) -> str:
        try:
            status: str = await self.raw.execute(text)
            return status
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error

    def _set_outermost(self, transaction: _OutermostTransaction | None) -> None:
        """Tell asyncpg about a transaction that we began. In one it does not know it refuses ``conn.transaction()``,
        and there is no public way to tell it.
        """
        raw = getattr(self.raw, "_con", self.raw)  # behind a pool's proxy
        if hasattr(raw, "_top_xact"):
            raw._top_xact = transaction


def _semel_error(error: Exception) -> SemelError:
    if isinstance(error, asyncpg.PostgresError):
        return postgres_error(getattr(error, "sqlstate", None), str(error))
    if isinstance(error, (ValueError, OverflowError)):  # asyncpg's DataError among them: never sent
        return rejected(error)
    return StoreUncertain(f"the connection to PostgreSQL was lost: {str(error) or type(error).__name__}")
