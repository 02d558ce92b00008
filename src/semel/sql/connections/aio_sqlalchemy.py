# Twin: sqlalchemy.py is generated from this file by make twins.
# Twin: Literal[True] = True -> Literal[False] = False
# Twin: sqlalchemy.ext.asyncio.AsyncConnection -> sqlalchemy.Connection
# Twin: sqlalchemy.ext.asyncio.AsyncSession -> sqlalchemy.orm.Session
# Twin: an async_scoped_session -> a scoped_session
# Twin: "async_scoped_session" -> "scoped_session"
# Twin: SQLAlchemy's async connections -> SQLAlchemy's connections
"""SQLAlchemy's async connections and sessions. A statement is sent through ``exec_driver_sql``.

So SQLAlchemy's logging and events see it, and its pool notices a lost connection. What a session has not flushed yet
commits together with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal

from sqlalchemy import text as sqlalchemy_text
from sqlalchemy.exc import SQLAlchemyError

from semel.errors import ConfigurationError, SemelError
from semel.sql.connections.adopt import DatabaseAddress, Dialect, adopt
from semel.sql.connections.errors import wrapped_error
from semel.sql.connections.literals import mysql_text, require_change
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Rows, Statement


class _SupportedDialects(dict[str, Dialect]):
    def __missing__(self, name: str) -> Dialect:
        raise ConfigurationError(f"transactions are supported on {', '.join(self)}, not on {name}")


_DIALECTS: Final = _SupportedDialects(sqlite="sqlite", postgresql="postgresql", mysql="mysql", mariadb="mysql")
_ADOPTED: Final = "semel.adopted"
_ERRORS: Final = (SQLAlchemyError, UnicodeError, OverflowError, ValueError, OSError)
"""SQLAlchemy's errors; what a driver raises about a value it cannot send; asyncpg's error when it cannot connect, which
SQLAlchemy does not wrap."""


class AsyncLentSQLAlchemy:
    """A sqlalchemy.ext.asyncio.AsyncConnection of the caller's."""

    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with engine.begin() as conn:`, or a connection that is not in AUTOCOMMIT"
    style: ClassVar[EffectStyle] = "named"
    nests: ClassVar[bool] = False
    __slots__ = ("_engine", "_transaction", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.dialect = _DIALECTS[raw.dialect.name]
        self._engine = raw
        self._transaction: Any = None
        """The transaction that ``begin_with`` opened."""

    @property
    def prepares(self) -> bool:
        return bool(self._engine.dialect.paramstyle == "numeric_dollar")  # asyncpg

    def address(self) -> DatabaseAddress:
        url = self._engine.engine.url
        return DatabaseAddress(url.username, url.host or url.query.get("host", ""), url.port, url.database)

    async def execute(self, statement: Statement) -> Rows:
        try:
            return await self._execute(self.raw, statement)
        except _ERRORS as error:
            raise self._error(error) from error

    async def _execute(self, connection: Any, statement: Statement) -> Rows:
        parameters: Any
        if self.dialect == "sqlite":
            text, parameters = statement.query.sql, dict(statement.params)
        elif self.dialect == "mysql":
            text, parameters = mysql_text(statement)
        else:
            style = self._engine.dialect.paramstyle
            text, values = statement.values("numeric" if style == "numeric_dollar" else "format")
            parameters = tuple(values) or None
        result = await connection.exec_driver_sql(text, parameters)
        if result.returns_rows:
            return list(map(tuple, result))
        return ((result.rowcount,),) if self.dialect == "mysql" else ()  # MySQL returns no rows of a change

    async def query(self, text: str, parameters: Any) -> QueryResult:
        """Same as ``connection.execute(text("…"), parameters)``."""
        if not isinstance(parameters, Mapping) and parameters:
            raise ConfigurationError("parameters= of a SQLAlchemy connection are a dict, for :name in the statement")
        try:
            result = await (await self._current()).execute(_text(text), dict(parameters))
            if not result.returns_rows:
                return QueryResult(None, (), result.rowcount)
            return QueryResult(list(result.keys()), list(map(tuple, result)), 0)
        except _ERRORS as error:
            raise self._error(error) from error

    async def _current(self) -> Any:
        return self.raw

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return not _autocommits(self.raw.sync_connection or self.raw)  # sync: return not _autocommits(self.raw)

    def begun(self) -> bool:
        return bool(self.raw.in_transaction())

    def committers(self) -> tuple[Any, ...]:
        return (self.raw.sync_connection,)  # sync: return (self.raw,)

    def holds(self) -> bool:
        connection = self.raw.sync_connection  # sync: connection = self.raw
        return self._transaction in (None, connection.get_transaction()) and _driver_holds(connection)

    async def begin_with(self, statement: Statement) -> Rows:
        try:
            # sync: self._transaction = self.raw.begin()
            self._transaction = (await self.raw.begin()).sync_transaction
        except _ERRORS as error:
            raise self._error(error) from error
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        rows = await self.execute(statement)
        if self.dialect == "mysql":
            require_change(rows)
        try:
            await self.raw.commit()
        except _ERRORS as error:
            raise self._error(error) from error

    async def rollback(self) -> None:
        try:
            await self.raw.rollback()
        except _ERRORS as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> SemelError:
        return wrapped_error(error, self.dialect)


class AsyncLentSQLAlchemySession(AsyncLentSQLAlchemy):
    """A sqlalchemy.ext.asyncio.AsyncSession of the caller's, also behind an async_scoped_session."""

    opening: ClassVar[str] = "`async with session.begin():`, on an engine that is not in AUTOCOMMIT"
    nests: ClassVar[bool] = True
    __slots__ = ("_connection",)

    def __init__(self, raw: Any) -> None:
        session = raw() if type(raw).__name__ == "async_scoped_session" else raw
        try:
            engine = session.get_bind()
        except SQLAlchemyError as error:
            raise ConfigurationError(
                f"the session has no single engine ({error}): pass session.connection(bind_arguments=…) instead"
            ) from error
        self.raw = session
        self.dialect = _DIALECTS[engine.dialect.name]
        self._engine = engine
        self._transaction = None
        self._connection: Any = None
        """The connection that the last statement was sent on."""

    async def execute(self, statement: Statement) -> Rows:
        try:
            self._connection = await self.raw.connection()
            return await self._execute(self._connection, statement)
        except _ERRORS as error:
            raise self._error(error) from error

    async def _current(self) -> Any:
        self._connection = await self.raw.connection()
        return self._connection

    async def finish(self) -> None:
        await self.raw.flush()

    async def nest(self) -> Any:
        """Open a savepoint of the session's own. If it did not know of a rollback, its objects would stay as they were
        before, and its next flush would write some of that again.
        """
        try:
            return await self.raw.begin_nested()
        except _ERRORS as error:
            raise self._error(error) from error

    async def release(self, savepoint: Any) -> None:
        try:
            await savepoint.commit()
        except _ERRORS as error:
            raise self._error(error) from error

    def in_transaction(self) -> bool:
        session = self.raw.sync_session  # sync: session = self.raw
        return not _autocommits(self._engine) and (self.raw.in_transaction() or session.autobegin)

    def committers(self) -> tuple[Any, ...]:
        # sync: return (self.raw, self._connection)
        return (self.raw.sync_session, self._connection.sync_connection)

    def holds(self) -> bool:
        session = self.raw.sync_session  # sync: session = self.raw
        if self._transaction not in (None, session.get_transaction()):
            return False
        # sync: return self._connection is None or _driver_holds(self._connection)
        return self._connection is None or _driver_holds(self._connection.sync_connection)


@lru_cache(maxsize=256)
def _text(statement: str) -> Any:
    return sqlalchemy_text(statement)


def _autocommits(connection: Any) -> bool:
    """Whether the driver commits each statement, although SQLAlchemy shows a transaction."""
    level = connection.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return bool(level == "AUTOCOMMIT")


def _driver_holds(connection: Any) -> bool:
    """Whether the driver, too, has an open transaction: SQLAlchemy may show one where the driver commits by itself."""
    try:
        driver = connection.info.get(_ADOPTED)
        if driver is None:
            # Kept for as long as the pool keeps the driver's connection.
            driver = connection.info[_ADOPTED] = adopt(connection.connection.driver_connection)
        return bool(driver.holds())
    except ConfigurationError:  # a driver that we do not know
        return True
    except SQLAlchemyError:  # the connection is lost: the next statement fails
        return True
