"""Adopt a connection of the caller, to run our programs inside its transaction.

``adopt(raw)`` recognises a connection by its class and imports only the module for that kind, so it loads no package
that the caller has not loaded. The wrapper changes nothing about the connection: no setting, no row factory, no session
state, and no prepared statement that the caller's own settings would not make as well.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias
from urllib.parse import quote

from semel.errors import ConfigurationError, NotMigrated
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Program, Query, Rows, Statement

Dialect: TypeAlias = Literal["sqlite", "postgresql", "mysql"]


class DatabaseAddress(NamedTuple):
    """The database that a connection is connected to, as its driver reports it."""

    user: Any
    host: Any
    """A name, an IP address, or the folder of a socket."""
    port: Any
    database: Any


class LentConnection(Protocol):
    """A connection that the caller lends us. It raises our errors, ``from`` the driver's."""

    dialect: Dialect
    awaited: Literal[False]
    opening: str
    """How the caller opens a transaction on this kind of connection, for error messages."""
    style: EffectStyle
    """How the parameters of a caller's own statement are written."""

    nests: bool
    """Whether it has ``nest()`` and ``release()``: a session or framework above the driver opens savepoints of its own,
    because what it knows of the transaction has to go back with a savepoint."""

    @property
    def prepares(self) -> bool:
        """Whether the driver prepares each statement, so that the server plans it only once."""
        ...

    def address(self) -> DatabaseAddress | None:
        """Return the database that it is connected to, or None for SQLite and if the driver does not know.

        Sends no query, because none works in a failed transaction.
        """
        ...

    def execute(self, statement: Statement) -> Rows: ...

    def query(self, text: str, parameters: Any) -> QueryResult:
        """Run a statement of the caller's, with parameters in the driver's own style."""
        ...

    def finish(self) -> None:
        """Send what the caller's session still holds back, such as new rows. Its errors are the caller's own, and are
        raised unchanged.
        """
        ...

    def in_transaction(self) -> bool:
        """Whether a statement sent now belongs to a transaction that the caller ends."""
        ...

    def begun(self) -> bool:
        """Whether a transaction has begun already."""
        ...

    def holds(self) -> bool:
        """Whether the statement sent last is part of a transaction that is still open, as far as the driver knows."""
        ...

    def begin_with(self, statement: Statement) -> Rows:
        """Open a transaction and run its first statement, in one message where the driver can."""
        ...

    def commit_with(self, statement: Statement) -> None:
        """Run the last statement and commit, in one message where the driver can."""
        ...

    def rollback(self) -> None:
        """Roll back what ``begin_with`` opened. Does nothing when no transaction is open."""
        ...

    def committers(self) -> tuple[Any, ...]:
        """Return the objects whose ``commit()`` ends the transaction, and on which it can be replaced for a while."""
        ...


class AsyncLentConnection(Protocol):
    """The async counterpart of ``LentConnection``."""

    dialect: Dialect
    awaited: Literal[True]
    opening: str
    style: EffectStyle
    nests: bool

    @property
    def prepares(self) -> bool: ...

    def address(self) -> DatabaseAddress | None: ...

    async def execute(self, statement: Statement) -> Rows: ...

    async def query(self, text: str, parameters: Any) -> QueryResult: ...

    async def finish(self) -> None: ...

    def in_transaction(self) -> bool: ...

    def begun(self) -> bool: ...

    def holds(self) -> bool: ...

    async def begin_with(self, statement: Statement) -> Rows: ...

    async def commit_with(self, statement: Statement) -> None: ...

    async def rollback(self) -> None: ...

    def committers(self) -> tuple[Any, ...]: ...


_WRAPPERS: Final = {
    "sqlite3.Connection": ("sqlite", "LentSQLite"),
    "aiosqlite.core.Connection": ("aio_sqlite", "AsyncLentSQLite"),
    "psycopg.Connection": ("psycopg", "LentPsycopg"),
    "psycopg.AsyncConnection": ("aio_psycopg", "AsyncLentPsycopg"),
    "asyncpg.connection.Connection": ("asyncpg", "LentAsyncpg"),
    "asyncpg.pool.PoolConnectionProxy": ("asyncpg", "LentAsyncpg"),
    "pymysql.connections.Connection": ("pymysql", "LentPyMySQL"),
    "asyncmy.connection.Connection": ("asyncmy", "LentAsyncmy"),
    "sqlalchemy.engine.base.Connection": ("sqlalchemy", "LentSQLAlchemy"),
    "sqlalchemy.orm.session.Session": ("sqlalchemy", "LentSQLAlchemySession"),
    "sqlalchemy.orm.scoping.scoped_session": ("sqlalchemy", "LentSQLAlchemySession"),
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": ("aio_sqlalchemy", "AsyncLentSQLAlchemy"),
    "sqlalchemy.ext.asyncio.session.AsyncSession": ("aio_sqlalchemy", "AsyncLentSQLAlchemySession"),
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": ("aio_sqlalchemy", "AsyncLentSQLAlchemySession"),
    "django.db.backends.base.base.BaseDatabaseWrapper": ("django", "LentDjango"),
    "django.utils.connection.ConnectionProxy": ("django", "LentDjango"),
}
"""The module and wrapper for each kind of connection, by the name of its class or of a base class."""

WRAPPERS_FOUND: Final[dict[type, Any]] = {}
"""The wrapper for each class that was adopted. It stays small: a program has few kinds of connections."""


def adopt(raw: object) -> Any:
    """Wrap the caller's connection as a ``LentConnection`` or, if it is async, an ``AsyncLentConnection``."""
    cls = type(raw)
    wrapper = WRAPPERS_FOUND.get(cls)
    if wrapper is None:
        wrapper = WRAPPERS_FOUND[cls] = _find(raw)
    return wrapper(raw)


def _find(raw: object) -> Any:
    for cls in type(raw).__mro__:
        wrapper = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if wrapper is not None:
            return getattr(import_module(f"semel.sql.connections.{wrapper[0]}"), wrapper[1])
    kind = f"{type(raw).__module__}.{type(raw).__qualname__}"
    raise ConfigurationError(
        f"pass the connection or session that the effect uses, not a {kind}; supported are: {', '.join(_WRAPPERS)}"
    )


def is_known_version(version: str, first: tuple[int, int], before: tuple[int, int]) -> bool:
    """Whether a driver's private parts are known in this version. In others only its public ones are used."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return first <= (major, minor) < before


def database_url(connection: LentConnection | AsyncLentConnection) -> str:
    """Return the database as a URL without the password, such as ``postgresql://app@localhost:5432/shop``.

    Empty for SQLite, and if the driver does not know the database.
    """
    if connection.dialect == "sqlite":
        return ""
    try:
        address = connection.address()
        user, host, port, database = (_decoded(part) for part in address or ())
    except Exception:  # it only completes an error message, or saves a query
        return ""
    if not database:
        return ""
    at = f"{quote(user)}@" if user else ""
    if host.startswith("/"):
        return f"{connection.dialect}://{at}/{quote(database)}?host={host}"
    return f"{connection.dialect}://{at}{host}{f':{port}' if port and host else ''}/{quote(database)}"


def _decoded(part: Any) -> str:
    return part.decode() if isinstance(part, bytes) else str(part or "")


_FILES: Final = Query("files", "PRAGMA database_list", False)


def not_migrated(connection: LentConnection | AsyncLentConnection, error: NotMigrated) -> Program[NotMigrated]:
    """Return the error with the URL of the connection's database, which may not be the one that was migrated."""
    what = str(error).partition(": run ")[0]
    url = database_url(connection)
    if connection.dialect == "sqlite":  # a query works here even in a failed transaction
        rows = yield _FILES()
        file = next((row[2] for row in rows if row[1] == "main"), "")
        if not file:
            return NotMigrated(
                f"{what}. This connection is to a database in memory: use one to the database of the guard's store"
            )
        url = f"sqlite:///{file}"
    if not url:
        return error
    return NotMigrated(
        f"{what}. This connection is to {url}: run `semel migrate {url}`, or use a connection to the database of "
        "the guard's store"
    )
