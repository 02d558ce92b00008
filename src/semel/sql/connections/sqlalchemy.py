"""SQLAlchemy's connections and sessions, sync and async: a statement goes to the driver through ``exec_driver_sql``.

So it is seen by SQLAlchemy's logging and events, and a lost connection is noticed by its pool. What is in a session and
not flushed yet commits with the rest.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

from sqlalchemy.exc import SQLAlchemyError

from semel.errors import ConfigurationError, SemelError
from semel.sql.connections.adopt import Dialect, adopt
from semel.sql.connections.driver_errors import driver_error
from semel.sql.connections.mysql_text import inlined, kept
from semel.sql.program import Rows, Statement

__all__ = ["AsyncLentConnection", "AsyncLentSession", "LentConnection", "LentSession"]

_DIALECTS: Final[dict[str, Dialect]] = {
    "sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip


def _dialect(engine: Any) -> Dialect:
    name = engine.dialect.name
    if name not in _DIALECTS:
        raise ConfigurationError(f"transactions are kept on {', '.join(_DIALECTS)}, not on {name}")
    return _DIALECTS[name]


def _autocommits(connection: Any) -> bool:
    """Whether SQLAlchemy's transaction on it would be one in name only."""
    level = connection.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return bool(level == "AUTOCOMMIT")


def _bind(session: Any) -> Any:
    try:
        return session.get_bind()
    except SQLAlchemyError as error:
        raise ConfigurationError(
            f"the session has no single engine ({error}): pass session.connection(bind_arguments=…) instead"
        ) from error


def _for_driver(statement: Statement, engine: Any) -> tuple[str, Any]:
    """Text and parameters in the style of the driver below."""
    if engine.dialect.name == "sqlite":
        return statement.query.sql, dict(statement.params)
    if _DIALECTS.get(engine.dialect.name) == "mysql":
        return inlined(statement)
    text, values = statement.values("numeric" if engine.dialect.paramstyle == "numeric_dollar" else "format")
    return text, tuple(values) or None


def _error(error: Exception, engine: Any) -> SemelError:
    return driver_error(error, _DIALECTS.get(engine.dialect.name, ""))


def _held(connection: Any) -> bool:
    """What the driver says: SQLAlchemy may be told to believe in a transaction where the driver commits by itself."""
    try:
        return bool(adopt(connection.connection.driver_connection).holds())
    except ConfigurationError:  # a driver that we do not know
        return True
    except SQLAlchemyError:  # the connection is lost: the next statement says so
        return True


def _rows(result: Any, dialect: Dialect) -> Rows:
    """The rows; on MySQL, where a change shows none, how many it touched."""
    if result.returns_rows:
        return [tuple(row) for row in result]
    return ((result.rowcount,),) if dialect == "mysql" else ()


_ERRORS: Final = (SQLAlchemyError, UnicodeError, OverflowError, ValueError, OSError)
"""SQLAlchemy's, what a driver raises before anything is sent, and what asyncpg leaves as it is: no connection."""


class LentConnection:
    """A sqlalchemy.Connection."""

    awaited: Literal[False] = False
    opening: ClassVar[str] = "`with engine.begin() as conn:`, or a connection that is not in AUTOCOMMIT"
    __slots__ = ("_ours", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.dialect = _dialect(raw)
        self._ours: Any = None

    def execute(self, statement: Statement) -> Rows:
        try:
            return _rows(self.raw.exec_driver_sql(*_for_driver(statement, self.raw)), self.dialect)
        except _ERRORS as error:
            raise _error(error, self.raw) from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return not _autocommits(self.raw)  # it begins by itself

    def begun(self) -> bool:
        return bool(self.raw.in_transaction())

    def holds(self) -> bool:
        return self._ours in (None, self.raw.get_transaction()) and _held(self.raw)

    def begin_with(self, statement: Statement) -> Rows:
        try:
            self._ours = self.raw.begin()
        except _ERRORS as error:
            raise _error(error, self.raw) from error
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        rows = self.execute(statement)
        if self.dialect == "mysql":
            kept(rows)
        try:
            self.raw.commit()
        except _ERRORS as error:
            raise _error(error, self.raw) from error

    def rollback(self) -> None:
        try:
            self.raw.rollback()
        except _ERRORS as error:
            raise _error(error, self.raw) from error


class LentSession:
    """A sqlalchemy.orm.Session, also behind a scoped_session."""

    awaited: Literal[False] = False
    opening: ClassVar[str] = "`with session.begin():`, on an engine that is not in AUTOCOMMIT"
    __slots__ = ("_ours", "bind", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw() if type(raw).__name__ == "scoped_session" else raw
        self.bind = _bind(self.raw)
        self.dialect = _dialect(self.bind)
        self._ours: Any = None

    def execute(self, statement: Statement) -> Rows:
        try:
            return LentConnection(self.raw.connection()).execute(statement)
        except _ERRORS as error:
            raise _error(error, self.bind) from error

    def finish(self) -> None:
        self.raw.flush()

    def in_transaction(self) -> bool:
        return not _autocommits(self.bind) and (self.begun() or self.raw.autobegin)

    def begun(self) -> bool:
        return bool(self.raw.in_transaction())

    def holds(self) -> bool:
        if self._ours not in (None, self.raw.get_transaction()):
            return False
        try:
            return _held(self.raw.connection())
        except SQLAlchemyError:  # as above
            return True

    def begin_with(self, statement: Statement) -> Rows:
        try:
            self._ours = self.raw.begin()
        except _ERRORS as error:
            raise _error(error, self.bind) from error
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        rows = self.execute(statement)
        if self.dialect == "mysql":
            kept(rows)
        try:
            self.raw.commit()
        except _ERRORS as error:
            raise _error(error, self.bind) from error

    def rollback(self) -> None:
        try:
            self.raw.rollback()
        except _ERRORS as error:
            raise _error(error, self.bind) from error


class AsyncLentConnection:
    """A sqlalchemy.ext.asyncio.AsyncConnection: the same, awaited."""

    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with engine.begin() as conn:`, or a connection that is not in AUTOCOMMIT"
    __slots__ = ("_ours", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.dialect = _dialect(raw)
        self._ours: Any = None

    async def execute(self, statement: Statement) -> Rows:
        try:
            return _rows(await self.raw.exec_driver_sql(*_for_driver(statement, self.raw)), self.dialect)
        except _ERRORS as error:
            raise _error(error, self.raw) from error

    async def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return not _autocommits(self.raw.sync_connection or self.raw)

    def begun(self) -> bool:
        return bool(self.raw.in_transaction())

    def holds(self) -> bool:
        connection = self.raw.sync_connection
        return self._ours in (None, connection.get_transaction()) and _held(connection)

    async def begin_with(self, statement: Statement) -> Rows:
        try:
            self._ours = (await self.raw.begin()).sync_transaction
        except _ERRORS as error:
            raise _error(error, self.raw) from error
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        rows = await self.execute(statement)
        if self.dialect == "mysql":
            kept(rows)
        try:
            await self.raw.commit()
        except _ERRORS as error:
            raise _error(error, self.raw) from error

    async def rollback(self) -> None:
        try:
            await self.raw.rollback()
        except _ERRORS as error:
            raise _error(error, self.raw) from error


class AsyncLentSession:
    """A sqlalchemy.ext.asyncio.AsyncSession, also behind an async_scoped_session."""

    awaited: Literal[True] = True
    opening: ClassVar[str] = "`async with session.begin():`, on an engine that is not in AUTOCOMMIT"
    __slots__ = ("_ours", "_used", "bind", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw() if type(raw).__name__ == "async_scoped_session" else raw
        self.bind = _bind(self.raw)
        self.dialect = _dialect(self.bind)
        self._ours: Any = None
        self._used: Any = None

    async def execute(self, statement: Statement) -> Rows:
        try:
            self._used = await self.raw.connection()
            return await AsyncLentConnection(self._used).execute(statement)
        except _ERRORS as error:
            raise _error(error, self.bind) from error

    async def finish(self) -> None:
        await self.raw.flush()

    def in_transaction(self) -> bool:
        return not _autocommits(self.bind) and (self.begun() or self.raw.sync_session.autobegin)

    def begun(self) -> bool:
        return bool(self.raw.in_transaction())

    def holds(self) -> bool:
        if self._ours not in (None, self.raw.sync_session.get_transaction()):
            return False
        return self._used is None or _held(self._used.sync_connection)

    async def begin_with(self, statement: Statement) -> Rows:
        try:
            self._ours = (await self.raw.begin()).sync_transaction
        except _ERRORS as error:
            raise _error(error, self.bind) from error
        return await self.execute(statement)

    async def commit_with(self, statement: Statement) -> None:
        rows = await self.execute(statement)
        if self.dialect == "mysql":
            kept(rows)
        try:
            await self.raw.commit()
        except _ERRORS as error:
            raise _error(error, self.bind) from error

    async def rollback(self) -> None:
        try:
            await self.raw.rollback()
        except _ERRORS as error:
            raise _error(error, self.bind) from error
