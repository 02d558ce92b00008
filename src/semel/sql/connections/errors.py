"""What a database's error means: the drivers' errors as errors of our tree.

The classes here are subclasses of ``StoreUnavailable`` ("not stored"). They tell whoever retries what a retry needs::

    StoreUnavailable
    ├── Contention             other transactions were in the way; the same statement may be sent again
    │   └── LockHeld           … and only the statement was undone, not the transaction
    ├── DatabaseBusy           another process held the SQLite file for longer than the busy timeout
    ├── NoConnection           no connection could be opened, so nothing was sent
    └── StatementRejected      the statement is wrong, the connection is fine
        ├── DuplicateRow       a row with this key exists
        └── StatementTooLarge  the statement has more bytes than the server accepts

Drivers are recognised by a SQLSTATE, an error number or sqlite3's own classes, so this module imports none of them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Final

from semel.errors import NotMigrated, RecordTooLarge, SemelError, StoreUnavailable, StoreUncertain

_LONGEST_TEXT: Final = 300
"""Characters of a driver's message that we quote."""
_MAX_CAUSES: Final = 8
"""How far a chain of causes is followed."""


class Contention(StoreUnavailable):
    """Rolled back because of other transactions. The same statement may be sent again."""


class LockHeld(Contention):
    """Another transaction holds what the statement needs. Only the statement was undone."""


class DatabaseBusy(StoreUnavailable):
    """Another process held the SQLite file for longer than the busy timeout."""


class NoConnection(StoreUnavailable):
    """No connection could be opened, so nothing was sent."""


class StatementRejected(StoreUnavailable):
    """The server or the driver refused the statement because something in it is wrong. The connection is fine."""


class DuplicateRow(StatementRejected):
    """A row with this key exists. Only the statement was undone."""


class StatementTooLarge(StatementRejected, RecordTooLarge):
    """The statement has more bytes than the server accepts. The Ops of a batch may still be accepted one by one."""


def rejected(error: Exception) -> StatementRejected:
    """For a value that the driver cannot send, such as a lone surrogate or a number that is too large."""
    return StatementRejected(f"the driver cannot send this: {error}")


def connect_error(database: str, error: BaseException) -> NoConnection:
    """No connection could be opened.

    :param database: the product, as in "PostgreSQL".
    """
    # MySQL's drivers have (number, text); the others have the text alone.
    text = _shortened(str(error.args[1] if mysql_number(error) is not None and len(error.args) > 1 else error))
    return NoConnection(f"{database} cannot be reached: {text or type(error).__name__}")


# PostgreSQL

_CONTENTION: Final = ("40001", "40P01", "55P03")  # serialization failure, deadlock, lock timeout
_CONNECTION_LOST: Final = ("57P01", "57P02", "08", "57P05")  # the server shuts down, or the connection is gone
_CONFLICTS: Final = frozenset({"40001", "40P01"})
_UNAVAILABLE: Final = {
    "53100": "'s disk is full; nothing was stored",
    "25006": " is read-only here (a replica?)",
    "57P03": " does not accept connections now",
    "57014": " took too long and was stopped; nothing was stored",
}


def postgres_error(sqlstate: str | None, text: str) -> SemelError:
    """The error for a SQLSTATE. Without one the connection broke, and the outcome is unknown."""
    text = _shortened(text)
    if sqlstate is None or sqlstate.startswith(_CONNECTION_LOST):
        return StoreUncertain(f"the connection to PostgreSQL was lost: {text}")
    if sqlstate in ("42P01", "42703") or (sqlstate == "42883" and "semel_" in text):
        return NotMigrated(
            f"the database has no Semel tables of this version ({text}): run `semel migrate postgresql://…`"
        )
    if sqlstate in _UNAVAILABLE:
        return StoreUnavailable(f"PostgreSQL{_UNAVAILABLE[sqlstate]}: {text}")
    if sqlstate in _CONTENTION:
        return Contention(f"PostgreSQL could not finish because of others ({sqlstate}): {text}")
    return StatementRejected(f"PostgreSQL refused ({sqlstate}): {text}")


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of an error of a PostgreSQL driver."""
    if mysql_number(error) is not None:  # its number says more, and its SQLSTATE means other things
        return None
    code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return code if isinstance(code, str) else None


# MySQL and MariaDB

_MYSQL_CONFLICTS: Final = frozenset({1213, 1020})  # deadlock; changed since it was read: the transaction is gone
_MYSQL_HELD: Final = frozenset({1205, 3572})  # lock wait timeout; NOWAIT
_MYSQL_DUPLICATE: Final = frozenset({1062, 1586})
_MYSQL_LOST: Final = frozenset({
    0,  # the drivers' own: the connection is closed
    2006, 2013, 2014, 2055,  # gone away, lost, out of sync
    1053, 1077, 1078, 1079,  # the server is shutting down
    1152, 1158, 1159, 1160, 1161, 1184, 4031,  # aborted, network errors, disconnected while idle
    1927, 3169,  # someone killed the connection
})  # fmt: skip
_MYSQL_UNAVAILABLE: Final = {
    **dict.fromkeys((1290, 1836, 1792), "MySQL is read-only here (a replica?)"),
    **dict.fromkeys((1021, 1114, 1030, 3675), "MySQL's disk or table space is full; nothing was stored"),
    # The server's time limit, or someone stopped the statement.
    **dict.fromkeys((1969, 3024, 1317), "MySQL took too long and was stopped; nothing was stored"),
    1047: "this node of the cluster does not accept statements now",
}


def mysql_error(number: int | None, text: str) -> SemelError:
    """The error for an error number. Without one the connection broke, and the outcome is unknown."""
    text = _shortened(text)
    if number is None or number in _MYSQL_LOST:
        return StoreUncertain(f"the connection to MySQL was lost: {text}")
    if number == 1180:
        return StoreUncertain(f"MySQL does not say whether it committed: {text}")
    if number in (1146, 1054):
        return NotMigrated(f"the database has no Semel tables of this version ({text}): run `semel migrate mysql://…`")
    if number in _MYSQL_HELD:
        return LockHeld(f"MySQL could not finish because of others ({number}): {text}")
    if number in _MYSQL_DUPLICATE:
        return DuplicateRow(f"MySQL refused ({number}): {text}")
    if number in _MYSQL_CONFLICTS:
        return Contention(f"MySQL could not finish because of others ({number}): {text}")
    if number in _MYSQL_UNAVAILABLE:
        return StoreUnavailable(f"{_MYSQL_UNAVAILABLE[number]}: {text}")
    return StatementRejected(f"MySQL refused ({number}): {text}")


def mysql_number(error: BaseException) -> int | None:
    """The number of an error of a MySQL driver. All of these drivers call their base class MySQLError."""
    if error.args and isinstance(error.args[0], int) and any(c.__name__ == "MySQLError" for c in type(error).__mro__):
        return error.args[0]
    return None


# SQLite

SQLITE_ERRORS: Final = (sqlite3.Error, UnicodeError, OverflowError, ValueError)
"""The driver's errors, and what it raises about a value that it cannot write."""


def sqlite_error(error: Exception, file: str = "") -> SemelError:
    """The error for one of ``SQLITE_ERRORS``. SQLite is a library: what it refuses is not stored.

    :param file: the path of the database, where it is known.
    """
    if not isinstance(error, sqlite3.Error):
        return StoreUnavailable(f"the driver cannot store this: {error}")
    text, code = str(error), getattr(error, "sqlite_errorname", "")
    database = f"the database {file!r}" if file else "the database"
    if "no such table: semel_" in text or "has no column named" in text:
        return NotMigrated(
            f"{database} has no Semel tables of this version ({text}): run `semel migrate sqlite:///{file or '…'}`"
        )
    if code.startswith("SQLITE_FULL"):
        return StoreUnavailable(f"the disk that holds {database} is full; nothing was stored")
    if code.startswith("SQLITE_READONLY"):
        return StoreUnavailable(f"{database} cannot be written: {text}")
    if _is_busy(error):
        return DatabaseBusy(f"another process held {database} for longer than the busy timeout: {text}")
    if isinstance(error, sqlite3.ProgrammingError):
        return StoreUnavailable(f"the database connection is closed or misused: {text}")
    if code.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return StoreUnavailable(f"the database file {repr(file) + ' ' if file else ''}cannot be used: {text}")
    return StoreUnavailable(f"SQLite refused: {text}")


def _is_busy(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorname", "")
    return isinstance(error, sqlite3.Error) and code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


# Errors that SQLAlchemy or Django have wrapped

_LOST_CLASSES: Final = ("OperationalError", "InterfaceError", "InternalError")


def wrapped_error(error: BaseException, dialect: str) -> SemelError:
    """The error for one that a layer above the driver has wrapped."""
    for cause in causes(error):
        if isinstance(cause, sqlite3.Error):
            return sqlite_error(cause)
        code = sqlstate(cause)
        if code is not None:
            return postgres_error(code, str(cause))
        number = mysql_number(cause)
        if number is not None:
            return mysql_error(number, str(cause.args[-1]))
    text = _shortened(str(error))
    if dialect not in ("postgresql", "mysql"):
        return StoreUnavailable(f"the database refused: {text}")
    # All errors of these servers have a code. One without comes from the driver: it lost the connection, or it could
    # not send the statement.
    if any(isinstance(cause, OSError) or type(cause).__name__ in _LOST_CLASSES for cause in causes(error)):
        return mysql_error(None, text) if dialect == "mysql" else postgres_error(None, text)
    return StatementRejected(f"the driver cannot send this: {text}")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it wraps (SQLAlchemy's ``orig``), and what it was raised from (Django)."""
    found = error
    for _ in range(_MAX_CAUSES):
        if found is None:
            return
        yield found
        inner = getattr(found, "orig", None)
        found = inner if isinstance(inner, BaseException) else found.__cause__


# Questions about an error, whatever the driver


def is_conflict(error: BaseException | None) -> bool:
    """Whether the transaction failed only because of others, so that running it again helps."""
    return any(
        sqlstate(cause) in _CONFLICTS or mysql_number(cause) in _MYSQL_CONFLICTS or _is_busy(cause)
        for cause in causes(error)
    )


def is_stale(error: BaseException | None) -> bool:
    """Whether others have written to SQLite since this transaction began to read. Waiting does not help then."""
    return any(getattr(cause, "sqlite_errorname", "") == "SQLITE_BUSY_SNAPSHOT" for cause in causes(error))


def is_duplicate(error: BaseException | None) -> bool:
    """Whether a row with the same key exists."""
    return any(
        sqlstate(cause) == "23505"
        or getattr(cause, "sqlite_errorname", "") in ("SQLITE_CONSTRAINT_PRIMARYKEY", "SQLITE_CONSTRAINT_UNIQUE")
        for cause in causes(error)
    )


def is_refused_record(error: BaseException | None) -> bool:
    """Whether PostgreSQL refused our record: there is one with this key, or another transaction has locked the key."""
    return any(sqlstate(cause) in ("23505", "23502") for cause in causes(error)) and (
        error is not None and _postgres_table(error) == "semel_record"
    )


def is_violation(error: BaseException | None) -> bool:
    """Whether a constraint of the caller's own tables is violated, such as one that is checked at the commit."""
    for cause in causes(error):
        if getattr(cause, "sqlite_errorname", "") == "SQLITE_CONSTRAINT_FOREIGNKEY":
            return True  # our tables have none
        if (sqlstate(cause) or "").startswith("23"):
            table = _postgres_table(cause)
            return table is not None and not table.startswith("semel_")
    return False


def _postgres_table(error: BaseException) -> str | None:
    """The table that an error of PostgreSQL is about."""
    for cause in causes(error):
        name = getattr(cause, "table_name", None) or getattr(getattr(cause, "diag", None), "table_name", None)
        if isinstance(name, str):
            return name
    return None


def _shortened(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_TEXT]
