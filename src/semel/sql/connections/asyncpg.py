"""asyncpg: our own connection, and connections that belong to the caller, also from a pool.

asyncpg has no public way to send BEGIN and a statement that returns rows in one message. In the versions that we know
the statement's parameters do it: when asyncpg reads the last one, just before it sends the statement, BEGIN is written
ahead of it. In other versions, and without a statement cache, the public way is used, which needs one more message for
a replay.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import asyncpg

from semel.errors import ConfigurationError, SemelError, StoreUncertain
from semel.sql.connections.adopt import DatabaseAddress, is_known_version
from semel.sql.connections.errors import postgres_error, rejected
from semel.sql.connections.literals import postgres_text
from semel.sql.effects import EffectStyle, QueryResult, returns_rows
from semel.sql.program import Query, Rows, Statement

_DRIVER_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError, OverflowError)


_INTERNALS_KNOWN: Final = is_known_version(asyncpg.__version__, (0, 30), (0, 33))
_BEGIN: Final = (
    b"P\x00\x00\x00\x0d\x00BEGIN\x00\x00\x00"  # Parse, as the statement without a name
    b"B\x00\x00\x00\x0c\x00\x00\x00\x00\x00\x00\x00\x00"  # Bind
    b"E\x00\x00\x00\x09\x00\x00\x00\x00\x00"  # Execute
)
"""A BEGIN without a Sync: the statement that follows it ends the message."""
_MORE: Final = getattr(socket, "MSG_MORE", 0)


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


class _ValuesAfterBegin(Sequence[Any]):
    """The parameters of a statement before which a BEGIN is sent.

    asyncpg reads them when it is about to send the statement: the connection is free, and nothing can come between.
    """

    __slots__ = ("_transport", "_values")

    def __init__(self, values: list[Any], transport: Any) -> None:
        self._values = values
        self._transport = transport

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, at: Any) -> Any:
        if at == len(self._values) - 1:
            _write_ahead(self._transport, _BEGIN)
        return self._values[at]


def _write_ahead(transport: Any, data: bytes) -> None:
    """Write what the next write follows at once, if possible in the same packet: it saves the server from waking twice.

    A transport of asyncio sends each write by itself.
    """
    if _MORE and not transport.get_write_buffer_size() and transport.get_extra_info("ssl_object") is None:
        known = transport.get_extra_info("socket")
        same = socket.socket(known.family, known.type, known.proto, known.fileno())
        try:
            data = data[same.send(data, _MORE) :]
        except BlockingIOError:
            pass
        finally:
            same.detach()
    if data:
        transport.write(data)


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
    prepares: ClassVar[bool] = True
    nests: ClassVar[bool] = False
    __slots__ = ("_beginning",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw
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
        self._beginning = True
        raw = getattr(self.raw, "_con", self.raw)  # behind a pool's proxy
        if _INTERNALS_KNOWN and raw._config.statement_cache_size:
            rows = await self._begin_and_fetch(raw, statement)
        else:
            rows = await self._begin_and_ask(statement)
        self._beginning = False
        self._set_outermost(_OUTERMOST)
        return rows

    async def _begin_and_fetch(self, raw: Any, statement: Statement) -> Rows:
        text, values = statement.values("numeric")
        try:
            # Without the caller's codecs: one that raises would leave the BEGIN without its statement.
            rows: Rows = await raw._execute(
                text, _ValuesAfterBegin(values, raw._transport), 0, None, ignore_custom_codec=True
            )
            return rows
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error

    async def _begin_and_ask(self, statement: Statement) -> Rows:
        # asyncpg returns no rows of a script, only the status of its last command. So the guard is sent as a condition:
        # "SELECT 0" says that nothing was found. Otherwise it is looked for once more, alone, for its rows.
        condition = postgres_text(statement).removeprefix("SELECT ")
        status = await self._send(f"BEGIN; SELECT WHERE {condition} IS NOT NULL")
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
