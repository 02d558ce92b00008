"""What went wrong below a layer that wraps its driver's errors (SQLAlchemy, Django), and what is only a conflict.

No driver is imported: they all carry a SQLSTATE or a number, or are sqlite3's own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final

from semel.errors import SemelError, StoreUnavailable
from semel.sql.connections import mysql_errors, sqlite
from semel.sql.connections.postgres_errors import Refused, from_sqlstate

__all__ = ["causes", "driver_error", "is_conflict", "is_duplicate", "is_stale", "is_violation", "sqlstate"]

_CONFLICTS: Final = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_NAMES_LOST: Final = ("OperationalError", "InterfaceError", "InternalError")
_CODED: Final = ("postgresql", "mysql")
"""Databases whose own errors all have a code: one without came from the driver."""
_DEPTH: Final = 8
"""How far a chain of causes is followed."""


def driver_error(error: BaseException, dialect: str) -> SemelError:
    """The error of our tree for a wrapped one."""
    for cause in causes(error):
        if isinstance(cause, sqlite3.Error):
            return sqlite.named_error(cause)
        code = sqlstate(cause)
        if code is not None:
            return from_sqlstate(code, str(cause))
        number = mysql_errors.error_number(cause)
        if number is not None:
            return mysql_errors.from_number(number, str(cause.args[-1]))
    text = " ".join(str(error).split())[:300]
    if dialect in _CODED and any(isinstance(c, OSError) or type(c).__name__ in _NAMES_LOST for c in causes(error)):
        return mysql_errors.from_number(None, text) if dialect == "mysql" else from_sqlstate(None, text)
    if dialect in _CODED:
        return Refused(f"the driver cannot send this: {text}")
    return StoreUnavailable(f"the database refused: {text}")


def is_conflict(error: BaseException | None) -> bool:
    """Whether the transaction failed only because of others, so that running it again is the cure."""
    return any(
        sqlstate(cause) in _CONFLICTS
        or mysql_errors.error_number(cause) in mysql_errors.CONFLICTS
        or (isinstance(cause, sqlite3.Error) and _busy(getattr(cause, "sqlite_errorname", "")))
        for cause in causes(error)
    )


def is_stale(error: BaseException | None) -> bool:
    """Whether SQLite says that others have written since this transaction began to read: no waiting helps."""
    return any(getattr(cause, "sqlite_errorname", "") == "SQLITE_BUSY_SNAPSHOT" for cause in causes(error))


def is_duplicate(error: BaseException | None) -> bool:
    """Whether a row stood where this one was to be."""
    return any(
        sqlstate(cause) == "23505"
        or getattr(cause, "sqlite_errorname", "") in ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE")
        for cause in causes(error)
    )


def is_violation(error: BaseException | None) -> bool:
    """Whether a constraint of the caller's own tables does not hold, such as one that is checked at the commit."""
    for cause in causes(error):
        if getattr(cause, "sqlite_errorname", "") == "SQLITE_CONSTRAINT_FOREIGNKEY":
            return True  # our tables have none
        if (sqlstate(cause) or "").startswith("23"):
            table = _table(cause)
            return table is not None and not table.startswith("semel_")
    return False


def _table(error: BaseException) -> str | None:
    """The table that an error of PostgreSQL is about."""
    for cause in causes(error):
        name = getattr(cause, "table_name", None) or getattr(getattr(cause, "diag", None), "table_name", None)
        if isinstance(name, str):
            return name
    return None


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE that an error of a PostgreSQL driver carries."""
    if mysql_errors.error_number(error) is not None:  # its number says more, and its SQLSTATE means other things
        return None
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


def _busy(name: object) -> bool:
    return isinstance(name, str) and name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it wraps (SQLAlchemy's ``orig``), and what it was raised from (Django)."""
    found = error
    for _ in range(_DEPTH):
        if found is None:
            return
        yield found
        inner = getattr(found, "orig", None)
        found = inner if isinstance(inner, BaseException) else found.__cause__
