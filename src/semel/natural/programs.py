"""The natural helpers: their results, and their SQL programs, written once for sync and async connections.

A helper needs a unique index: without it a repeat would be a second row. SQLite and PostgreSQL refuse the statement if
there is none, and we explain their error. MySQL would insert the row again, so the program reads the table's indexes
first, once for each table, key and database. The tables are the caller's own: their names are checked and quoted, and
values are bound.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Final, NamedTuple

from semel.core.values import value
from semel.errors import ConfigurationError, NotMigrated, SemelError, StoreUnavailable
from semel.sql.connections.adopt import AsyncLentConnection, Dialect, LentConnection, database_url
from semel.sql.connections.errors import DuplicateRow, causes, sqlstate
from semel.sql.program import Program, Query, Rows, Statement

TRIES: Final = 3
"""How often to try again when the insert met a row that is gone when we read it."""
MAX_KNOWN_INDEXES: Final = 1024
"""How many tables and keys are known to have an index; when there are more, all are forgotten."""
_NO_UNIQUE_INDEX: Final = "42P10"

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
SHAPES: Final = 512
"""How many shapes are cached; a program has as many as it has calls of these helpers."""


class Applied(Enum):
    """How a conditional change ended."""

    NOW = "now"
    """This call made the change."""
    ALREADY = "already"
    """The change had been made before: this is a repeat."""
    LOST = "lost"
    """Someone else has changed the row: read it again and decide."""
    ABSENT = "absent"
    """There is no such row."""


@value
class Change:
    """The result of ``compare_and_set``, ``transition`` and ``append_event``."""

    applied: Applied
    current: Any = None
    """What the row has if the change is LOST: the version, the status, or the id of the other event."""

    def __bool__(self) -> bool:
        """Whether the row is as the caller wants it, changed now or before."""
        return self.applied in (Applied.NOW, Applied.ALREADY)


class Inserted(NamedTuple):
    """The result of ``insert_once``."""

    row: Mapping[str, Any]
    """The row in the table: the new one, or the one that existed."""
    new: bool


class Table(NamedTuple):
    """A table of the caller's, and where it is."""

    dialect: Dialect
    database: str
    """Tells tables of the same name apart on MySQL, where their indexes are remembered. Otherwise empty."""
    name: str
    """``orders`` or ``shop.orders``."""

    @classmethod
    def on(cls, connection: LentConnection | AsyncLentConnection, name: str) -> Table:
        return cls(connection.dialect, database_url(connection) if connection.dialect == "mysql" else "", name)

    @property
    def quoted(self) -> str:
        parts = self.name.split(".")
        if len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
            raise ConfigurationError(f"{self.name[:80]!r} is not a table name: write orders, or shop.orders")
        return ".".join(map(self.quote, parts))

    def quote(self, name: str) -> str:
        """Return the name of a column, in quotation marks."""
        # SQLite takes a name in double quotes for text if there is no such column: "colour" = 'colour' is always true.
        return f'"{name}"' if self.dialect == "postgresql" else f"`{name}`"

    def quote_all(self, columns: Iterable[str]) -> str:
        """Return the names as a list: ``"id", "status"``."""
        return ", ".join(map(self.quote, columns))

    def equal(self, columns: Iterable[str]) -> str:
        """Return the condition that these columns have the values of the parameters ``w_…``."""
        return " AND ".join(f"{self.quote(c)} = :{parameter('w', at)}" for at, c in enumerate(columns))


_known_indexes: Final[set[tuple[Table, frozenset[str]]]] = set()
"""(table, key) of MySQL tables that have a unique index."""


def insert_once(
    table: Table,
    values: Mapping[str, Any],
    key: Iterable[str],
    returning: Iterable[str] | None,
) -> Program[Inserted]:
    columns = _columns("values", values)
    keys = _keys(table, key, values)
    wanted = columns if returning is None else names("returning", returning)
    insert = insertion(table, columns, keys)(**_bind("v", values))
    look = _look(table, wanted, {name: values[name] for name in keys})
    for _ in range(TRIES):
        new = yield from _changed_by_key(table, keys, insert)
        rows = yield look
        if rows:
            return Inserted(dict(zip(wanted, rows[0], strict=True)), new)
        if new:
            raise ConfigurationError(
                f"{table.name}: the row was inserted, and is not found by {', '.join(keys)}: a row policy hides it, or "
                "a trigger or the type of a column has changed the key"
            )
        if table.dialect == "mysql":  # another row, without this key, was in the way
            raise _other_key_taken(table, keys)
    raise StoreUnavailable(f"{table.name}: the row existed, and was gone when it was read")


def upsert(table: Table, values: Mapping[str, Any], key: Iterable[str]) -> Program[bool]:
    columns = _columns("values", values)
    keys = _keys(table, key, values)
    if table.dialect == "mysql":
        return (yield from _upsert_in_mysql(table, values, columns, keys))
    statement = merge(table, columns, keys)(**_bind("v", values))
    return (yield from _changed_by_key(table, keys, statement))


def _upsert_in_mysql(
    table: Table, values: Mapping[str, Any], columns: tuple[str, ...], keys: tuple[str, ...]
) -> Program[bool]:
    yield from _require_index(table, keys)
    bound, where = _bind("v", values), {name: values[name] for name in keys}
    rewrite = rewriting(table, columns, keys)(**bound) if len(columns) > len(keys) else None
    look = _look(table, keys, where)
    known = bool((yield presence(table, keys)(**_bind("w", where))))
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
            yield insertion(table, columns, keys)(**bound)
            return True
        except DuplicateRow:
            if not (yield look):
                raise _other_key_taken(table, keys) from None
            known = True
    raise StoreUnavailable(f"{table.name}: the row existed, and was gone when it was read")


def compare_and_set(
    table: Table,
    where: Mapping[str, Any],
    version: int,
    values: Mapping[str, Any],
    column: str,
    marker: tuple[str, Any] | None,
) -> Program[Change]:
    (column,) = names("column", column)
    changes = changes_of(values, column, marker)
    mine = changes if marker is None else {marker[0]: marker[1]}
    row = yield from _change_row(table, where, changes, column, [version], (column, *mine), counts=True)
    if isinstance(row, Change):
        return row
    current, *found = row
    # With a marker the change is recognised under any later version; without, only under the next one.
    same = _same(found, mine.values()) and (current > version if marker is not None else current == version + 1)
    return Change(Applied.ALREADY if same else Applied.LOST, current)


def changes_of(values: Mapping[str, Any], column: str, marker: tuple[str, Any] | None) -> dict[str, Any]:
    """The columns that ``compare_and_set`` changes, beside the version. Raises if the version is among them."""
    changes = dict(values) if marker is None else {**values, marker[0]: marker[1]}
    if column in changes:
        raise ConfigurationError(f"{column} is the version: it grows by itself, leave it out of the values")
    return changes


def transition(
    table: Table,
    where: Mapping[str, Any],
    column: str,
    before: Iterable[Any],
    after: Any,
    values: Mapping[str, Any],
) -> Program[Change]:
    (column,) = names("column", column)
    states = [before] if isinstance(before, str) or not isinstance(before, Iterable) else list(before)
    if not states or after in states:
        raise ConfigurationError(f"a transition leads from one state to another; {after!r} cannot be both")
    row = yield from _change_row(table, where, {**values, column: after}, column, states, (column,), counts=False)
    if isinstance(row, Change):
        return row
    return Change(Applied.ALREADY if row[0] == after else Applied.LOST, row[0])


def _change_row(
    table: Table,
    where: Mapping[str, Any],
    changes: Mapping[str, Any],
    column: str,
    choices: list[Any],
    shown: tuple[str, ...],
    *,
    counts: bool,
) -> Program[Change | Sequence[Any]]:
    """Change the row if ``column`` has one of the ``choices``. If it has another value, return the columns ``shown``.

    :param counts: also increase ``column`` by one.
    """
    change = update(table, _columns("values", changes), _columns("where", where), column, len(choices), counts)
    bound = {**_bind("s", changes), **_bind("w", where), **_bind("f", dict(enumerate(choices)))}
    if (yield from _changed(table, change(**bound))):
        return Change(Applied.NOW)
    rows = yield _look(table, shown, where)
    return rows[0] if rows else Change(Applied.ABSENT)


def append_event(
    table: Table,
    aggregate: Mapping[str, Any],
    sequence: int,
    event: Mapping[str, Any],
    id: str,
    column: str,
    first: int,
) -> Program[Change]:
    conditions = _columns("aggregate", aggregate)
    (column,) = names("column", column)
    names("id", id)
    if id not in event:
        raise ConfigurationError(f"an event is identified by its {id!r}: add it to the columns, or name another by id=")
    _require_values(table, conditions, aggregate)
    if sequence > first:
        before = {**aggregate, column: sequence - 1}
        if not (yield _look(table, (column,), before)):
            return Change(Applied.LOST)  # the event before this one is missing
    key = {**aggregate, column: sequence}
    row = {**key, **event}
    insert = insertion(table, _columns("event", row), (*conditions, column))
    if (yield from _changed_by_key(table, (*conditions, column), insert(**_bind("v", row)))):
        return Change(Applied.NOW)
    rows = yield _look(table, (id,), key)
    if not rows:
        raise StoreUnavailable(f"{table.name}: the event existed, and was gone when it was read")
    current = rows[0][0]
    return Change(Applied.ALREADY if _same([current], [event[id]]) else Applied.LOST, current)


def delete(table: Table, where: Mapping[str, Any]) -> Program[bool]:
    return (yield from _changed(table, deletion(table, _columns("where", where))(**_bind("w", where))))


def _changed_by_key(table: Table, key: tuple[str, ...], statement: Statement) -> Program[bool]:
    """Same as ``_changed``, for a statement that needs a unique index."""
    if table.dialect == "mysql":
        yield from _require_index(table, key)
    try:
        return (yield from _changed(table, statement))
    except StoreUnavailable as error:
        if _refused_without_index(error):
            raise _no_index(table, key) from error.__cause__
        raise


def _changed(table: Table, statement: Statement) -> Program[bool]:
    """Whether the statement changed a row: it returns the row; on MySQL it returns the number of rows."""
    try:
        rows: Rows = yield statement
    except DuplicateRow:
        return False
    return int(rows[0][0]) > 0 if table.dialect == "mysql" else bool(rows)


def _keys(table: Table, key: Iterable[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of the key, checked: all of them are in the row, and none is None."""
    keys = names("key", key)
    missing = [name for name in keys if name not in values]
    if not keys or missing:
        raise ConfigurationError(
            f"key= names columns of the row that are unique together; {missing or keys} are missing"
        )
    _require_values(table, keys, values)
    return keys


def _require_values(table: Table, keys: Iterable[str], values: Mapping[str, Any]) -> None:
    """Raise if a column of the key is None."""
    unknown = [name for name in keys if values[name] is None]
    if unknown:
        raise ConfigurationError(
            f"{table.name}: {', '.join(unknown)} is None, and a unique index allows any number of rows without a "
            "value: each call would insert another row. Set every column of the key"
        )


def _other_key_taken(table: Table, keys: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(f"{table.name}: another unique key of this row is taken, and not by {', '.join(keys)}")


def _columns(what: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the columns, checked."""
    if not values:
        raise ConfigurationError(f"{what} is empty: name at least one column")
    return names(what, values)


def _bind(kind: str, values: Mapping[Any, Any]) -> dict[str, Any]:
    return {parameter(kind, at): value for at, value in enumerate(values.values())}


def _look(table: Table, columns: tuple[str, ...], where: Mapping[str, Any]) -> Statement:
    """Read these columns of the row that has these values."""
    return selection(table, columns, tuple(where))(**_bind("w", where))


def _same(found: Iterable[Any], mine: Iterable[Any]) -> bool:
    """Whether the values are equal, also if the driver returns another type, such as a UUID as text."""
    return all(a == b or str(a) == str(b) for a, b in zip(found, mine, strict=True))


# Unique indexes


def _require_index(table: Table, key: Iterable[str]) -> Program[None]:
    """On MySQL: raise unless the key, or a part of it, is unique. The answer is remembered if the database is known."""
    wanted = frozenset(name.lower() for name in key)
    known = (table, wanted)
    if known in _known_indexes:
        return
    indexes: dict[str, set[str]] = {}
    # Not from information_schema, which does not show temporary tables.
    for row in (yield unique_indexes(table)()):
        indexes.setdefault(str(row[2]), set()).add(str(row[4]).lower())
    if not any(columns <= wanted for columns in indexes.values()):
        raise _no_index(table, tuple(key))
    if table.database:
        if len(_known_indexes) >= MAX_KNOWN_INDEXES:
            _known_indexes.clear()
        _known_indexes.add(known)


def _refused_without_index(error: StoreUnavailable) -> bool:
    """Whether the database says that the key is not unique."""
    return any(
        sqlstate(cause) == _NO_UNIQUE_INDEX or "ON CONFLICT clause does not match" in str(cause)
        for cause in causes(error)
    )


def _no_index(table: Table, key: tuple[str, ...]) -> ConfigurationError:
    columns = ", ".join(key)
    together = f"{columns} are not unique together" if len(key) > 1 else f"{columns} is not unique"
    partial = "" if table.dialect == "mysql" else " (an index of some rows only, by WHERE, does not count)"
    return ConfigurationError(
        f"{table.name}: {together}, so a repeat would be a second row; nothing was changed. "
        f"Make it so{partial}: {unique_index(table, key)}"
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


# The statements. Those for a shape (table, columns) and dialect are made once and cached.


def names(what: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Column names as a tuple. Raises if one is not plain: they become part of the statement."""
    found = (columns,) if isinstance(columns, str) else tuple(columns)
    for name in found:
        if not _NAME.fullmatch(str(name)):
            raise ConfigurationError(f"{what}: {str(name)[:60]!r} is not a column name of letters, digits and _")
    return found


def parameter(kind: str, at: int) -> str:
    """``v_a``, ``v_b``, … ``v_ba``: the names of parameters have letters only."""
    letters = ""
    while True:
        at, digit = divmod(at, 26)
        letters = chr(ord("a") + digit) + letters
        if at == 0:
            return f"{kind}_{letters}"


@lru_cache(maxsize=SHAPES)
def insertion(table: Table, columns: tuple[str, ...], key: tuple[str, ...]) -> Query:
    """Insert a row unless its key exists. Returns the key if it was inserted."""
    text = _insert(table, columns)
    if table.dialect != "mysql":  # MySQL refuses the row if its key exists: no other failure is taken for that
        text = f"{text} ON CONFLICT ({table.quote_all(key)}) DO NOTHING RETURNING {table.quote_all(key)}"
    return Query("insert_once", text, True)


@lru_cache(maxsize=SHAPES)
def rewriting(table: Table, columns: tuple[str, ...], key: tuple[str, ...]) -> Query:
    """On MySQL: update the row that has this key, unless it has these values already.

    ``ON DUPLICATE KEY UPDATE`` would write to the row of any unique index that is in the way.
    """

    def compare(chosen: Sequence[str], operator: str, separator: str) -> str:
        return separator.join(
            f"{table.quote(c)} {operator} :{parameter('v', at)}" for at, c in enumerate(columns) if c in chosen
        )

    rest = [c for c in columns if c not in key]
    sets, mine, same = compare(rest, "=", ", "), compare(key, "=", " AND "), compare(rest, "<=>", " AND ")
    return Query("upsert", f"UPDATE {table.quoted} SET {sets} WHERE {mine} AND NOT ({same})", True)


@lru_cache(maxsize=SHAPES)
def merge(table: Table, columns: tuple[str, ...], key: tuple[str, ...]) -> Query:
    """Insert a row or update it. Returns its key if that changed something."""
    rest = [table.quote(c) for c in columns if c not in key]
    if not rest:
        return insertion(table, columns, key)
    sets = ", ".join(f"{c} = excluded.{c}" for c in rest)
    other = "IS NOT" if table.dialect == "sqlite" else "IS DISTINCT FROM"
    differs = " OR ".join(f"{table.quoted}.{c} {other} excluded.{c}" for c in rest)
    keys = table.quote_all(key)
    conflict = f"ON CONFLICT ({keys}) DO UPDATE SET {sets} WHERE {differs} RETURNING {keys}"
    return Query("upsert", f"{_insert(table, columns)} {conflict}", True)


def _insert(table: Table, columns: tuple[str, ...]) -> str:
    bound = ", ".join(f":{parameter('v', at)}" for at in range(len(columns)))
    return f"INSERT INTO {table.quoted} ({table.quote_all(columns)}) VALUES ({bound})"


@lru_cache(maxsize=SHAPES)
def selection(table: Table, columns: tuple[str, ...], where: tuple[str, ...]) -> Query:
    """Read a row as it is now. On MySQL a plain read would show it as it was when the transaction began to read."""
    text = f"SELECT {table.quote_all(columns)} FROM {table.quoted} WHERE {table.equal(where)}"
    return Query("look", f"{text} LOCK IN SHARE MODE" if table.dialect == "mysql" else text, False)


@lru_cache(maxsize=SHAPES)
def presence(table: Table, where: tuple[str, ...]) -> Query:
    """Whether the row exists, without locking it or the gap where it would be."""
    return Query("present", f"SELECT 1 FROM {table.quoted} WHERE {table.equal(where)}", False)


@lru_cache(maxsize=SHAPES)
def update(
    table: Table,
    sets: tuple[str, ...],
    where: tuple[str, ...],
    column: str,
    choices: int,
    counts: bool,
) -> Query:
    """Change a row if ``column`` has one of this many values. With ``counts`` also increase it by one."""
    assignments = [f"{table.quote(c)} = :{parameter('s', at)}" for at, c in enumerate(sets)]
    name = table.quote(column)
    if counts:
        assignments.append(f"{name} = {name} + 1")
    wanted = ", ".join(f":{parameter('f', at)}" for at in range(choices))
    text = f"UPDATE {table.quoted} SET {', '.join(assignments)} WHERE {table.equal(where)} AND {name} IN ({wanted})"
    return Query("change", _returning(table, text), True)


@lru_cache(maxsize=SHAPES)
def deletion(table: Table, where: tuple[str, ...]) -> Query:
    return Query("delete", _returning(table, f"DELETE FROM {table.quoted} WHERE {table.equal(where)}"), True)


def _returning(table: Table, text: str) -> str:
    """The statement with a row for each one that it changes. On MySQL the driver returns their number anyway."""
    return text if table.dialect == "mysql" else f"{text} RETURNING 1"


@lru_cache(maxsize=SHAPES)
def unique_indexes(table: Table) -> Query:
    """On MySQL: a row for each column of each unique index."""
    return Query("indexes", f"SHOW INDEX FROM {table.quoted} WHERE Non_unique = 0", False)


def unique_index(table: Table, key: Sequence[str]) -> str:
    """The statement that creates a unique index, for an error message."""
    *schema, name = table.name.split(".")
    index, columns = table.quote(f"{'_'.join((name, *key))[:58]}_once"), table.quote_all(key)
    if schema and table.dialect == "sqlite":  # SQLite puts the schema before the index, not before the table
        return f"CREATE UNIQUE INDEX {table.quote(schema[0])}.{index} ON {table.quote(name)} ({columns})"
    return f"CREATE UNIQUE INDEX {index} ON {table.quoted} ({columns})"
