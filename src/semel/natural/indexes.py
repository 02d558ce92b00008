"""The unique index that makes a helper's insert happen once: without it there is nothing for a repeat to run into.

SQLite and PostgreSQL refuse the statement then, and their refusal is put in words. MySQL says nothing and inserts the
row again, so it is asked: once for each table, key and database.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from typing import Any, Final

from semel.errors import ConfigurationError, NotMigrated, SemelError, StoreUnavailable
from semel.natural import statements as sql
from semel.sql.connections.adopt import Dialect
from semel.sql.connections.driver_errors import causes, sqlstate
from semel.sql.connections.places import place_of
from semel.sql.program import Program

__all__ = ["not_there", "place", "refused_for_lack_of_one", "require", "without_index"]

REMEMBERED: Final = 1024
"""How many tables and keys are known to have theirs; begun anew when there are more."""
_NO_TARGET: Final = "42P10"
_known: Final[set[tuple[str, str, frozenset[str]]]] = set()


def place(connection: Any) -> str:
    """The database of a connection, where it matters."""
    return place_of(connection) if connection.dialect == "mysql" else ""


def require(place: str, table: str, key: Iterable[str]) -> Program[None]:
    """On MySQL: raise unless the key, or a part of it, is unique.

    :param place: the database, so that another's table of the same name is asked about as well; empty: asked each time.
    """
    wanted = frozenset(name.lower() for name in key)
    asked = (place, table, wanted)
    if asked in _known:
        return
    indexes: dict[str, set[str]] = {}
    # Not from information_schema, which does not show temporary tables.
    for row in (yield sql.unique_indexes(table)()):
        indexes.setdefault(str(row[2]), set()).add(str(row[4]).lower())
    if not any(columns <= wanted for columns in indexes.values()):
        raise without_index("mysql", table, tuple(key))
    if place:
        if len(_known) >= REMEMBERED:
            _known.clear()
        _known.add(asked)


def refused_for_lack_of_one(error: StoreUnavailable) -> bool:
    """Whether the database says that the key is not unique."""
    return any(
        sqlstate(cause) == _NO_TARGET or "ON CONFLICT clause does not match" in str(cause) for cause in causes(error)
    )


def without_index(dialect: Dialect, table: str, key: tuple[str, ...]) -> ConfigurationError:
    columns = ", ".join(key)
    together = f"{columns} are not unique together" if len(key) > 1 else f"{columns} is not unique"
    partial = "" if dialect == "mysql" else " (an index of some rows only, by WHERE, does not count)"
    return ConfigurationError(
        f"{table}: {together}, so a repeat would be a second row; nothing was changed. "
        f"Make it so{partial}: {sql.unique_index(dialect, table, key)}"
    )


def not_there(error: SemelError, table: str) -> SemelError:
    """A table or column that is missing here is the caller's, and no migration of ours makes it. Else the error."""
    if isinstance(error, NotMigrated):
        said = re.search(r"\((.*)\): run ", str(error), re.DOTALL)
        return ConfigurationError(f"{table}: {said[1] if said else error}")
    cause = next((str(cause) for cause in causes(error) if isinstance(cause, sqlite3.OperationalError)), "")
    return ConfigurationError(f"{table}: {cause}") if cause.startswith(("no such table", "no such column")) else error
