"""The caller's own connection, adopted: whatever kind it is, it runs our programs, inside the transaction it has.

``adopt(raw)`` knows a connection by its class and imports only the module for that kind, so no package is loaded that
the caller has not loaded. What it gives back changes nothing about the connection: no setting, no row factory, no
session state, no prepared statement that the caller's own settings would not make as well.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, Literal, Protocol, TypeAlias

from semel.errors import ConfigurationError
from semel.sql.program import Rows, Statement

__all__ = ["AsyncLent", "Dialect", "Lent", "adopt", "kinds"]

Dialect: TypeAlias = Literal["sqlite", "postgresql", "mysql"]


class Lent(Protocol):
    """A connection that the caller has lent us; its errors come out as ours, ``from`` the driver's."""

    dialect: Dialect
    awaited: Literal[False]
    opening: str
    """How the caller opens a transaction on this kind of connection, in words for an error."""

    def execute(self, statement: Statement) -> Rows: ...

    def finish(self) -> None:
        """Send what the caller's layer still holds back, such as a session's new rows. Its errors are the caller's own:
        they come out as they are.
        """
        ...

    def in_transaction(self) -> bool:
        """Whether a statement sent now belongs to a transaction that the caller ends."""
        ...

    def begun(self) -> bool:
        """Whether a transaction is under way already."""
        ...

    def holds(self) -> bool:
        """After a statement: whether it is part of a transaction that is open still, by the driver's own word."""
        ...

    def begin_with(self, statement: Statement) -> Rows:
        """Open a transaction and run its first statement, in one message where the driver can."""
        ...

    def commit_with(self, statement: Statement) -> None:
        """Run the last statement and commit, in one message where the driver can."""
        ...

    def rollback(self) -> None:
        """Undo what ``begin_with`` opened; does nothing when no transaction is open."""
        ...


class AsyncLent(Protocol):
    """The same, awaited."""

    dialect: Dialect
    awaited: Literal[True]
    opening: str

    async def execute(self, statement: Statement) -> Rows: ...

    async def finish(self) -> None: ...

    def in_transaction(self) -> bool: ...

    def begun(self) -> bool: ...

    def holds(self) -> bool: ...

    async def begin_with(self, statement: Statement) -> Rows: ...

    async def commit_with(self, statement: Statement) -> None: ...

    async def rollback(self) -> None: ...


_HOMES: Final = {
    "sqlite3.Connection": ("lent_sqlite", "LentSQLite"),
    "aiosqlite.core.Connection": ("lent_sqlite", "LentAiosqlite"),
    "psycopg.Connection": ("lent_psycopg", "LentPsycopg"),
    "psycopg.AsyncConnection": ("lent_psycopg", "AsyncLentPsycopg"),
    "asyncpg.connection.Connection": ("lent_asyncpg", "LentAsyncpg"),
    "asyncpg.pool.PoolConnectionProxy": ("lent_asyncpg", "LentAsyncpg"),
    "pymysql.connections.Connection": ("lent_mysql", "LentPyMySQL"),
    "asyncmy.connection.Connection": ("lent_asyncmy", "LentAsyncmy"),
    "sqlalchemy.engine.base.Connection": ("sqlalchemy", "LentConnection"),
    "sqlalchemy.orm.session.Session": ("sqlalchemy", "LentSession"),
    "sqlalchemy.orm.scoping.scoped_session": ("sqlalchemy", "LentSession"),
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": ("sqlalchemy", "AsyncLentConnection"),
    "sqlalchemy.ext.asyncio.session.AsyncSession": ("sqlalchemy", "AsyncLentSession"),
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": ("sqlalchemy", "AsyncLentSession"),
    "django.db.backends.base.base.BaseDatabaseWrapper": ("django", "LentDjango"),
    "django.utils.connection.ConnectionProxy": ("django", "LentDjango"),
}
"""Where each kind of connection is understood: by the name of its class, or of a class it derives from."""

_known: Final[dict[type, Any]] = {}
"""What was found for a class; there are as many as a program has kinds of connections."""


def adopt(raw: object) -> Any:
    """The caller's connection as a ``Lent`` or, where it is awaited, an ``AsyncLent``."""
    cls = type(raw)
    make = _known.get(cls)
    if make is None:
        make = _known[cls] = _find(raw)
    return make(raw)


def kinds() -> list[str]:
    """The classes of connections that can be adopted."""
    return list(_HOMES)


def _find(raw: object) -> Any:
    for cls in type(raw).__mro__:
        home = _HOMES.get(f"{cls.__module__}.{cls.__qualname__}")
        if home is not None:
            return getattr(import_module(f"semel.sql.connections.{home[0]}"), home[1])
    kind = f"{type(raw).__module__}.{type(raw).__qualname__}"
    raise ConfigurationError(
        f"a transaction is on the connection or session that the effect uses, not on a {kind}; "
        f"known are: {', '.join(_HOMES)}"
    )
