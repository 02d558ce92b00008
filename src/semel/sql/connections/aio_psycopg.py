# Twin: psycopg.py is generated from this file by make twins.
# Twin: Literal[True] = True -> Literal[False] = False
# Twin: our own async connection -> our own connection
"""psycopg 3: our own async connection, and connections that belong to the caller.

On a lent connection the calls of our SQL functions are sent as text, past psycopg's cursors: a cursor takes as long for
a statement as the server does. Every other statement gets a cursor of the plain class with tuples for rows, because the
caller's row and cursor factories are for the caller's rows. Past the cursors we use psycopg's private parts, in the
versions where we know them; in others, text is sent by a cursor too.

Whether a statement is prepared is decided by the connection's ``prepare_threshold``, which is None behind a pooler that
does not support it. If nobody has set it, and the pooler runs a statement in a session where it is not prepared, the
statement is sent again without being prepared.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Generator
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from typing import Any, ClassVar, Final, Literal
from weakref import WeakKeyDictionary

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, Escaping, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from semel.errors import SemelError
from semel.sql.connections.adopt import DatabaseAddress, is_known_version
from semel.sql.connections.errors import postgres_error, rejected
from semel.sql.connections.literals import postgres_text
from semel.sql.connections.psycopg_arrays import register_arrays, values_for_psycopg
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Rows, Statement

_INTERNALS_KNOWN: Final = is_known_version(psycopg.__version__, (3, 2), (3, 4))
_generators: Final[Any] = import_module("psycopg.generators") if _INTERNALS_KNOWN else None
_DRIVER_ERRORS: Final = (psycopg.Error, UnicodeError, OverflowError, ValueError, struct.error)
"""psycopg's own errors, and values that cannot be sent: a lone surrogate, a NUL, a number that is too large."""

# Plain numbers, as libpq returns them: they are compared several times in every transaction.
_IDLE: Final = int(TransactionStatus.IDLE)
_LOST: Final = int(TransactionStatus.UNKNOWN)
_NOT_BEGUN: Final = (_IDLE, _LOST)
_NO_PIPELINE: Final = int(PipelineStatus.OFF)
_HAS_ROWS: Final = int(ExecStatus.TUPLES_OK)
_DONE: Final = int(ExecStatus.COMMAND_OK)
_MOST_STATEMENTS: Final = 100
"""How many statements are prepared on a connection at most."""
_NOT_PREPARED: Final = b"26000"
_PREPARED_ALREADY: Final = b"42P05"
_PREPARED: Final = -1
_NEVER_PREPARED: Final = -2
_statements: Final[WeakKeyDictionary[Any, dict[Any, int]]] = WeakKeyDictionary()
"""How often each text was used on a connection, until it is prepared there, or known not to stay prepared."""
_LEVELS: Final = {1: "READ UNCOMMITTED", 2: "READ COMMITTED", 3: "REPEATABLE READ", 4: "SERIALIZABLE"}


@lru_cache(maxsize=_MOST_STATEMENTS)
def _numbered(text: str) -> str | None:
    """The text with ``$1`` for each ``%s``; None if it has other placeholders."""
    count = itertools.count(1)
    found = re.sub(r"%(s|%)", lambda match: "%%" if match[1] == "%" else f"${next(count)}", text)
    return None if re.search(r"(?<!%)(?:%%)*%(?!%)", found) else found.replace("%%", "%")


@lru_cache(maxsize=_MOST_STATEMENTS)
def _statement_name(query: bytes, types: tuple[int, ...]) -> bytes:
    """One name for one statement: in a session that programs share by a pooler, it never means another one."""
    return b"semel_" + sha256(b"%r %r" % (query, types)).hexdigest()[:24].encode()


class AsyncPsycopgConnection:
    """Our own psycopg.AsyncConnection."""

    __slots__ = ("raw",)

    def __init__(self, raw: psycopg.AsyncConnection[Any]) -> None:
        self.raw = raw
        register_arrays(raw.adapters)

    async def execute(self, statement: Statement) -> Rows:
        try:
            text, values = values_for_psycopg(statement)
            cursor = await self.raw.execute(text, values or None, binary=True)
            # Not by `description`, which makes an object for each column.
            return await cursor.fetchall() if cursor.rownumber is not None else ()
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error


class AsyncLentPsycopg:
    """A psycopg.AsyncConnection of the caller's."""

    dialect: Final = "postgresql"
    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with conn.transaction():`, or a connection without autocommit"
    style: ClassVar[EffectStyle] = "format"
    prepares: ClassVar[bool] = False
    nests: ClassVar[bool] = False
    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def address(self) -> DatabaseAddress:
        info = self.raw.info
        return DatabaseAddress(info.user, info.host, info.port, info.dbname)

    async def execute(self, statement: Statement) -> Rows:
        raw = self.raw
        # A cursor costs more than the plan of a prepared statement saves. A pipeline accepts no plain text.
        if statement.query.as_text is not None and raw.pgconn.pipeline_status == _NO_PIPELINE:
            text = postgres_text(statement)
            if not raw.autocommit and raw.pgconn.transaction_status == _IDLE:
                text = self._after_begin(text)
            return await self._send_text(text)
        text, values = values_for_psycopg(statement)
        return await self._send(text, values or None, bool(statement.query.arrays))

    async def query(self, text: str, parameters: Any) -> QueryResult:
        raw = self.raw
        try:
            # Only where the statement is a transaction of its own: there it can be sent again if it was not prepared.
            if raw.autocommit and raw.pgconn.transaction_status == _IDLE and type(parameters) is list:
                prepared = self._prepared(text, parameters)
                if prepared is not None:
                    async with raw.lock:
                        answer: QueryResult = await raw.wait(prepared)
                        return answer
            cursor = await self._cursor(text, parameters or None, False)
            if cursor.rownumber is None:
                return QueryResult(None, (), cursor.rowcount)
            found = cursor.pgresult  # not `description`, which makes an object for each column
            names = [found.fname(at).decode(self.raw.info.encoding) for at in range(found.nfields)]
            return QueryResult(names, await cursor.fetchall(), 0)
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return not self.raw.autocommit or self.holds()

    def begun(self) -> bool:
        # In a pipeline the BEGIN of `conn.transaction()` may not be sent yet.
        return self.raw.pgconn.transaction_status not in _NOT_BEGUN or bool(getattr(self.raw, "_num_transactions", 0))

    def committers(self) -> tuple[Any, ...]:
        return (self.raw,)

    def holds(self) -> bool:
        # If the connection is lost, the next statement fails.
        return self.raw.pgconn.transaction_status != _IDLE or bool(getattr(self.raw, "_num_transactions", 0))

    async def begin_with(self, statement: Statement) -> Rows:
        if not self._in_pipeline():
            return await self._send_text(self._after_begin(postgres_text(statement)))
        if self.raw.autocommit:
            await self._send(self._begin())
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        if not self._in_pipeline():
            await self._send_text(f"{postgres_text(statement)}; COMMIT")
            return
        await self.execute(statement)
        await self._send("COMMIT")

    async def rollback(self) -> None:
        if not self._in_pipeline():
            # Not rollback(), which throws away every prepared statement of the connection.
            if self.raw.pgconn.transaction_status != _IDLE:
                await self._send_text("ROLLBACK")
            return
        try:
            await self.raw.rollback()
        except psycopg.Error as error:
            raise _semel_error(error) from error

    def _in_pipeline(self) -> bool:
        """Whether the caller has opened a pipeline, which accepts no text of several statements."""
        return bool(self.raw.pgconn.pipeline_status != _NO_PIPELINE)

    def _after_begin(self, text: str) -> str:
        """The text after a BEGIN. Without autocommit a cursor sends BEGIN by itself, as a message of its own."""
        return f"{self._begin()}; {text}" if _INTERNALS_KNOWN or self.raw.autocommit else text

    def _begin(self) -> str:
        """The BEGIN that psycopg would send, with the characteristics that the caller has set."""
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

    async def _send_text(self, text: str) -> Rows:
        raw = self.raw
        try:
            if not _INTERNALS_KNOWN:
                cursor = psycopg.AsyncCursor(raw, row_factory=tuple_row)
                await cursor.execute(text.encode(), prepare=False)
                while cursor.nextset():
                    pass
                return await cursor.fetchall() if cursor.rownumber is not None else ()
            async with raw.lock:
                rows: Rows = await raw.wait(self._exchange(text))
                return rows
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error

    def _exchange(self, text: str) -> Generator[Any, Any, Rows]:
        """Send statements without parameters in one message; return the rows of the last one, which are bytes."""
        pgconn = self.raw.pgconn
        pgconn.send_query(text.encode())
        last = (yield from _generators.execute(pgconn))[-1]
        if last.status == _HAS_ROWS:
            found = []
            for row in range(last.ntuples):
                value = last.get_value(row, 0)
                found.append((None if value is None else Escaping().unescape_bytea(value),))
            return found
        if last.status != _DONE:
            raise error_from_result(last, encoding=self.raw.info.encoding)
        return ()

    def _prepared(self, text: str, values: list[Any]) -> Generator[Any, Any, QueryResult] | None:
        """Return a generator that runs the text as a prepared statement, without psycopg's cursor: that costs more than
        the rest of the call. Returns None in a pipeline, and until the text was used ``prepare_threshold`` times.
        """
        threshold = self.raw.prepare_threshold
        numbered = _numbered(text)
        if not _INTERNALS_KNOWN or threshold is None or numbered is None or self._in_pipeline():
            return None
        dumped = Transformer(self.raw)
        params = dumped.dump_sequence(values, [PyFormat.AUTO] * len(values))
        known = _statements.setdefault(self.raw, {})
        key = (text, dumped.types)
        used = known.get(key)
        if used is None:
            if len(known) == _MOST_STATEMENTS:
                return None
            used = known[key] = 0
        if 0 <= used < threshold:
            known[key] = used + 1
            return None
        return self._run_prepared(known, key, numbered, params, dumped)

    def _run_prepared(
        self, known: dict[Any, int], key: Any, text: str, params: Any, dumped: Any
    ) -> Generator[Any, Any, QueryResult]:
        """Run a statement that is a transaction of its own: if it was not prepared, nothing has happened."""
        pgconn, query = self.raw.pgconn, text.encode(self.raw.info.encoding)
        name = _statement_name(query, dumped.types)
        result: Any = None
        for tries_left in (1, 0):
            if known[key] == _NEVER_PREPARED:
                break
            if known[key] != _PREPARED:
                pgconn.send_prepare(name, query, param_types=dumped.types)
                result = (yield from _generators.execute(pgconn))[-1]
                if result.status != _DONE and result.error_field(DiagnosticField.SQLSTATE) != _PREPARED_ALREADY:
                    raise error_from_result(result, encoding=self.raw.info.encoding)
                known[key] = _PREPARED
            pgconn.send_query_prepared(name, params, param_formats=dumped.formats, result_format=1)
            result = (yield from _generators.execute(pgconn))[-1]
            if result.status == _HAS_ROWS or result.error_field(DiagnosticField.SQLSTATE) != _NOT_PREPARED:
                break
            # Someone threw the session's statements away, as psycopg's rollback() does. If that is not it, a pooler
            # runs each statement in another session.
            known[key] = 0 if tries_left else _NEVER_PREPARED
        if known[key] == _NEVER_PREPARED:
            pgconn.send_query_params(
                query, params, param_types=dumped.types, param_formats=dumped.formats, result_format=1
            )
            result = (yield from _generators.execute(pgconn))[-1]
        if result.status != _HAS_ROWS:
            raise error_from_result(result, encoding=self.raw.info.encoding)
        dumped.set_pgresult(result)
        names = [(result.fname(at) or b"").decode() for at in range(result.nfields)]
        return QueryResult(names, dumped.load_rows(0, result.ntuples, tuple), 0)

    async def _send(self, text: Any, values: list[Any] | None = None, arrays: bool = False) -> Rows:
        try:
            cursor = await self._cursor(text, values, True, arrays)
            return await cursor.fetchall() if cursor.rownumber is not None else ()
        except _DRIVER_ERRORS as error:
            raise _semel_error(error) from error

    async def _cursor(self, text: Any, values: Any, binary: bool, arrays: bool = False) -> Any:
        cursor = psycopg.AsyncCursor(self.raw, row_factory=tuple_row)
        if arrays:
            register_arrays(cursor.adapters)
        await cursor.execute(text, values, binary=binary)
        if self._in_pipeline():  # get the answer now
            async with self.raw.pipeline() as pipeline:
                await pipeline.sync()
        return cursor


def _semel_error(error: Exception) -> SemelError:
    if not isinstance(error, psycopg.Error) or (isinstance(error, psycopg.DataError) and error.sqlstate is None):
        return rejected(error)
    return postgres_error(error.sqlstate, error.diag.message_primary or str(error))
