"""sqlite3: one statement on one connection, its errors in our words."""

from __future__ import annotations

import sqlite3

from semel.errors import NotMigrated, SemelError, StoreError, StoreUnavailable
from semel.sql.program import Rows, Statement

__all__ = ["SQLiteConnection", "named_error"]


class Busy(StoreUnavailable):
    """The file was locked for longer than the busy timeout."""


class SQLiteConnection:
    """Wraps a sqlite3.Connection, ours or the caller's."""

    __slots__ = ("file", "raw")

    def __init__(self, raw: sqlite3.Connection, file: str = "") -> None:
        self.raw = raw
        self.file = file
        """Where it is known, for the words of an error."""

    def execute(self, statement: Statement) -> Rows:
        try:
            return self.raw.execute(statement.query.sql, statement.params).fetchall()
        except sqlite3.Error as error:
            raise named_error(error, self.file) from error
        except (UnicodeError, OverflowError, ValueError) as error:
            raise StoreUnavailable(f"the driver cannot store this: {error}") from error


def named_error(error: sqlite3.Error, file: str = "") -> SemelError:
    """What went wrong, in the words of our tree. SQLite is a library: what it refuses is not stored.

    :param file: the one that it is about, where that is known.
    """
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
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Busy(f"another process held {database} for longer than the busy timeout: {text}")
    if isinstance(error, sqlite3.ProgrammingError):
        return StoreUnavailable(f"the database connection is closed or misused: {text}")
    if code.startswith(("SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return StoreUnavailable(f"the database file {repr(file) + ' ' if file else ''}cannot be used: {text}")
    return StoreUnavailable(f"SQLite refused: {text}") if not isinstance(error, StoreError) else error
