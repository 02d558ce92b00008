"""The natural helpers as SQL programs, written once for sync and async connections.

A helper needs a unique index: without it a repeat would be a second row. SQLite and PostgreSQL refuse the statement if
there is none, and we explain their error. MySQL would insert the row again, so the program reads the table's indexes
first, once for each table, key and database.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Final

from semel.errors import ConfigurationError, NotMigrated, SemelError, StoreUnavailable
from semel.natural import statements as sql
from semel.natural.results import Applied, Change, Inserted
from semel.sql.connections.adopt import AsyncLentConnection, Dialect, LentConnection, database_url
from semel.sql.connections.errors import DuplicateRow, causes, sqlstate
from semel.sql.program import Program, Rows, Statement

__all__ = [
    "append_event", "compare_and_set", "database_of", "delete", "insert_once", "missing_table", "transition", "upsert",
]  # fmt: skip

TRIES: Final = 3
"""How often to try again when the insert met a row that is gone when we read it."""
MAX_KNOWN_INDEXES: Final = 1024
"""How many tables and keys are known to have an index; when there are more, all are forgotten."""
_NO_UNIQUE_INDEX: Final = "42P10"

_known_indexes: Final[set[tuple[str, str, frozenset[str]]]] = set()
"""(database, table, key) of MySQL tables that have a unique index."""


def database_of(connection: LentConnection | AsyncLentConnection) -> str:
    """The URL of the connection's database, where the indexes are remembered by it; otherwise empty."""
    return database_url(connection) if connection.dialect == "mysql" else ""


def insert_once(
    dialect: Dialect,
    database: str,
    table: str,
    values: Mapping[str, Any],
    key: Iterable[str],
    returning: Iterable[str] | None,
) -> Program[Inserted]:
    columns = _columns("values", values)
    keys = sql.names("key", key)
    missing = [name for name in keys if name not in values]
    if not keys or missing:
        raise ConfigurationError(
            f"key= names columns of the row that are unique together; {missing or keys} are missing"
        )
    _require_values(table, keys, values)
    wanted = columns if returning is None else sql.names("returning", returning)
    insert = sql.insertion(dialect, table, columns, keys)(**_bind("v", values))
    look = sql.selection(dialect, table, wanted, keys)(**_bind("w", {name: values[name] for name in keys}))
    for _ in range(TRIES):
        new = yield from _changed_by_key(dialect, database, table, keys, insert)
        rows = yield look
        if rows:
            return Inserted(dict(zip(wanted, rows[0], strict=True)), new)
        if new:
            raise ConfigurationError(
                f"{table}: the row was inserted, and is not found by {', '.join(keys)}: a row policy hides it, or a "
                "trigger or the type of a column has changed the key"
            )
        if dialect == "mysql":  # another row, without this key, was in the way
            raise _other_key_taken(table, keys)
    raise StoreUnavailable(f"{table}: the row existed, and was gone when it was read")


def upsert(dialect: Dialect, database: str, table: str, values: Mapping[str, Any], key: Iterable[str]) -> Program[bool]:
    columns = _columns("values", values)
    keys = sql.names("key", key)
    if not keys or any(name not in values for name in keys):
        raise ConfigurationError("key= names columns of the row that are unique together")
    _require_values(table, keys, values)
    if dialect == "mysql":
        return (yield from _upsert_in_mysql(database, table, values, columns, keys))
    merge = sql.merge(dialect, table, columns, keys)(**_bind("v", values))
    return (yield from _changed_by_key(dialect, database, table, keys, merge))


def _upsert_in_mysql(
    database: str, table: str, values: Mapping[str, Any], columns: tuple[str, ...], keys: tuple[str, ...]
) -> Program[bool]:
    yield from _require_index(database, table, keys)
    bound, where = _bind("v", values), _bind("w", {name: values[name] for name in keys})
    rewrite = sql.rewriting(table, columns, keys)(**bound) if len(columns) > len(keys) else None
    look = sql.selection("mysql", table, keys, keys)(**where)
    known = bool((yield sql.presence("mysql", table, keys)(**where)))
    for _ in range(TRIES):
        if known:
            try:
                if rewrite is not None and int((yield rewrite)[0][0]) > 0:
                    return True
            except DuplicateRow:
                raise _other_key_taken(table, keys) from None
            if (yield look):
                return False  # it has these values already
        try:
            yield sql.insertion("mysql", table, columns, keys)(**bound)
            return True
        except DuplicateRow:
            if not (yield look):
                raise _other_key_taken(table, keys) from None
            known = True
    raise StoreUnavailable(f"{table}: the row existed, and was gone when it was read")


def compare_and_set(
    dialect: Dialect,
    table: str,
    where: Mapping[str, Any],
    version: int,
    values: Mapping[str, Any],
    column: str,
    marker: tuple[str, Any] | None,
) -> Program[Change]:
    conditions = _columns("where", where)
    (column,) = sql.names("column", column)
    changes = dict(values) if marker is None else {**values, marker[0]: marker[1]}
    sets = _columns("values", changes)
    if column in changes:
        raise ConfigurationError(f"{column} is the version: it grows by itself, leave it out of the values")
    change = sql.update(dialect, table, sets, conditions, column, 1, counts=True)
    changed = yield from _changed(
        dialect, change(**_bind("s", changes), **_bind("w", where), **_bind("f", {"version": version}))
    )
    if changed:
        return Change(Applied.NOW)
    shown = (column, *(sets if marker is None else (marker[0],)))
    rows = yield sql.selection(dialect, table, shown, conditions)(**_bind("w", where))
    if not rows:
        return Change(Applied.ABSENT)
    current, *found = rows[0]
    mine = list(changes.values()) if marker is None else [marker[1]]
    # With a marker the change is recognised under any later version; without, only under the next one.
    same = _same(found, mine) and (current > version if marker is not None else current == version + 1)
    return Change(Applied.ALREADY if same else Applied.LOST, current)


def transition(
    dialect: Dialect,
    table: str,
    where: Mapping[str, Any],
    column: str,
    before: Iterable[Any],
    after: Any,
    values: Mapping[str, Any],
) -> Program[Change]:
    conditions = _columns("where", where)
    (column,) = sql.names("column", column)
    states = [before] if isinstance(before, str) or not isinstance(before, Iterable) else list(before)
    if not states or after in states:
        raise ConfigurationError(f"a transition leads from one state to another; {after!r} cannot be both")
    changes = {**values, column: after}
    sets = _columns("values", changes)
    change = sql.update(dialect, table, sets, conditions, column, len(states), counts=False)
    bound = {f"{at}": state for at, state in enumerate(states)}
    changed = yield from _changed(dialect, change(**_bind("s", changes), **_bind("w", where), **_bind("f", bound)))
    if changed:
        return Change(Applied.NOW)
    rows = yield sql.selection(dialect, table, (column,), conditions)(**_bind("w", where))
    if not rows:
        return Change(Applied.ABSENT)
    current = rows[0][0]
    return Change(Applied.ALREADY if current == after else Applied.LOST, current)


def append_event(
    dialect: Dialect,
    database: str,
    table: str,
    aggregate: Mapping[str, Any],
    sequence: int,
    event: Mapping[str, Any],
    id: str,
    column: str,
    first: int,
) -> Program[Change]:
    conditions = _columns("aggregate", aggregate)
    (column,) = sql.names("column", column)
    sql.names("id", id)
    if id not in event:
        raise ConfigurationError(f"an event is identified by its {id!r}: add it to the columns, or name another by id=")
    _require_values(table, conditions, aggregate)
    if sequence > first:
        before = {**aggregate, column: sequence - 1}
        if not (yield sql.selection(dialect, table, (column,), tuple(before))(**_bind("w", before))):
            return Change(Applied.LOST)  # the event before this one is missing
    key = {**aggregate, column: sequence}
    row = {**key, **event}
    insert = sql.insertion(dialect, table, _columns("event", row), (*conditions, column))
    if (yield from _changed_by_key(dialect, database, table, (*conditions, column), insert(**_bind("v", row)))):
        return Change(Applied.NOW)
    rows = yield sql.selection(dialect, table, (id,), tuple(key))(**_bind("w", key))
    if not rows:
        raise StoreUnavailable(f"{table}: the event existed, and was gone when it was read")
    current = rows[0][0]
    return Change(Applied.ALREADY if _same([current], [event[id]]) else Applied.LOST, current)


def delete(dialect: Dialect, table: str, where: Mapping[str, Any]) -> Program[bool]:
    return (yield from _changed(dialect, sql.deletion(dialect, table, _columns("where", where))(**_bind("w", where))))


def _changed_by_key(
    dialect: Dialect, database: str, table: str, key: tuple[str, ...], statement: Statement
) -> Program[bool]:
    """Same as ``_changed``, for a statement that needs a unique index."""
    if dialect == "mysql":
        yield from _require_index(database, table, key)
    try:
        return (yield from _changed(dialect, statement))
    except StoreUnavailable as error:
        if _refused_without_index(error):
            raise _no_index(dialect, table, key) from error.__cause__
        raise


def _changed(dialect: Dialect, statement: Statement) -> Program[bool]:
    """Whether the statement changed a row: it returns the row; on MySQL it returns the number of rows."""
    try:
        rows: Rows = yield statement
    except DuplicateRow:
        return False
    return int(rows[0][0]) > 0 if dialect == "mysql" else bool(rows)


def _require_values(table: str, keys: Iterable[str], values: Mapping[str, Any]) -> None:
    """Raise if a column of the key is None."""
    unknown = [name for name in keys if values[name] is None]
    if unknown:
        raise ConfigurationError(
            f"{table}: {', '.join(unknown)} is None, and a unique index allows any number of rows without a value: "
            "each call would insert another row. Set every column of the key"
        )


def _other_key_taken(table: str, keys: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(f"{table}: another unique key of this row is taken, and not by {', '.join(keys)}")


def _columns(what: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the columns, checked."""
    if not values:
        raise ConfigurationError(f"{what} is empty: name at least one column")
    return sql.names(what, values)


def _bind(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {sql.parameter(kind, at): value for at, value in enumerate(values.values())}


def _same(found: Iterable[Any], mine: Iterable[Any]) -> bool:
    """Whether the values are equal, also if the driver returns another type, such as a UUID as text."""
    return all(a == b or str(a) == str(b) for a, b in zip(found, mine, strict=True))


# Unique indexes


def _require_index(database: str, table: str, key: Iterable[str]) -> Program[None]:
    """On MySQL: raise unless the key, or a part of it, is unique.

    :param database: tells tables of the same name apart; if empty, the indexes are read each time.
    """
    wanted = frozenset(name.lower() for name in key)
    known = (database, table, wanted)
    if known in _known_indexes:
        return
    indexes: dict[str, set[str]] = {}
    # Not from information_schema, which does not show temporary tables.
    for row in (yield sql.unique_indexes(table)()):
        indexes.setdefault(str(row[2]), set()).add(str(row[4]).lower())
    if not any(columns <= wanted for columns in indexes.values()):
        raise _no_index("mysql", table, tuple(key))
    if database:
        if len(_known_indexes) >= MAX_KNOWN_INDEXES:
            _known_indexes.clear()
        _known_indexes.add(known)


def _refused_without_index(error: StoreUnavailable) -> bool:
    """Whether the database says that the key is not unique."""
    return any(
        sqlstate(cause) == _NO_UNIQUE_INDEX or "ON CONFLICT clause does not match" in str(cause)
        for cause in causes(error)
    )


def _no_index(dialect: Dialect, table: str, key: tuple[str, ...]) -> ConfigurationError:
    columns = ", ".join(key)
    together = f"{columns} are not unique together" if len(key) > 1 else f"{columns} is not unique"
    partial = "" if dialect == "mysql" else " (an index of some rows only, by WHERE, does not count)"
    return ConfigurationError(
        f"{table}: {together}, so a repeat would be a second row; nothing was changed. "
        f"Make it so{partial}: {sql.unique_index(dialect, table, key)}"
    )


def missing_table(error: SemelError, table: str) -> SemelError:
    """A ConfigurationError if the caller's table or column is missing, which no migration of ours makes; otherwise the
    error itself.
    """
    if isinstance(error, NotMigrated):
        text = re.search(r"\((.*)\): run ", str(error), re.DOTALL)
        return ConfigurationError(f"{table}: {text[1] if text else error}")
    cause = next((str(cause) for cause in causes(error) if isinstance(cause, sqlite3.OperationalError)), "")
    return ConfigurationError(f"{table}: {cause}") if cause.startswith(("no such table", "no such column")) else error
