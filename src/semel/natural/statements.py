"""The SQL of the natural helpers, for the caller's own tables. Names are checked and quoted, values are bound.

The statement for a shape (table, columns) and dialect is made once and cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from semel.errors import ConfigurationError
from semel.sql.connections.adopt import Dialect
from semel.sql.program import Query

__all__ = [
    "deletion", "insertion", "merge", "names", "parameter", "presence", "selection", "unique_index", "unique_indexes",
    "update",
]  # fmt: skip

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$]{0,62}")
SHAPES: Final = 512
"""How many shapes are cached; a program has as many as it has calls of these helpers."""


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
def insertion(dialect: Dialect, table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> Query:
    """Insert a row unless its key exists. Returns the key if it was inserted."""
    q = _quote(dialect)
    head = f"{_table(dialect, table)} ({_list(q, columns)}) VALUES ({_bound('v', columns)})"
    if dialect == "mysql":  # it fails where a row is in the way, and no other failure is taken for that
        return Query("insert_once", f"INSERT INTO {head}", True)
    conflict = f"ON CONFLICT ({_list(q, key)}) DO NOTHING RETURNING {_list(q, key)}"
    return Query("insert_once", f"INSERT INTO {head} {conflict}", True)


@lru_cache(maxsize=SHAPES)
def rewriting(table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> Query:
    """On MySQL: update the row that has this key, unless it has these values already.

    ``ON DUPLICATE KEY UPDATE`` would write to the row of any unique index that is in the way.
    """
    q = _quote("mysql")
    bound = {c: f":{parameter('v', at)}" for at, c in enumerate(columns)}
    rest = [c for c in columns if c not in key]
    sets = ", ".join(f"{q}{c}{q} = {bound[c]}" for c in rest)
    mine = " AND ".join(f"{q}{c}{q} = {bound[c]}" for c in key)
    same = " AND ".join(f"{q}{c}{q} <=> {bound[c]}" for c in rest)
    return Query("upsert", f"UPDATE {_table('mysql', table)} SET {sets} WHERE {mine} AND NOT ({same})", True)


@lru_cache(maxsize=SHAPES)
def merge(dialect: Dialect, table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> Query:
    """Insert a row or update it. Returns its key if that changed something."""
    q = _quote(dialect)
    name = _table(dialect, table)
    rest = tuple(c for c in columns if c not in key)
    head = f"INSERT INTO {name} ({_list(q, columns)}) VALUES ({_bound('v', columns)})"
    returning = f"RETURNING {_list(q, key)}"
    if not rest:
        return Query("upsert", f"{head} ON CONFLICT ({_list(q, key)}) DO NOTHING {returning}", True)
    sets = ", ".join(f"{q}{c}{q} = excluded.{q}{c}{q}" for c in rest)
    other = "IS NOT" if dialect == "sqlite" else "IS DISTINCT FROM"
    differs = " OR ".join(f"{name}.{q}{c}{q} {other} excluded.{q}{c}{q}" for c in rest)
    return Query(
        "upsert", f"{head} ON CONFLICT ({_list(q, key)}) DO UPDATE SET {sets} WHERE {differs} {returning}", True
    )


@lru_cache(maxsize=SHAPES)
def selection(dialect: Dialect, table: str, columns: tuple[str, ...], where: tuple[str, ...]) -> Query:
    """Read a row as it is now. On MySQL a plain read would show it as it was when the transaction began to read."""
    q = _quote(dialect)
    text = f"SELECT {_list(q, columns)} FROM {_table(dialect, table)} WHERE {_equal(q, where)}"
    return Query("look", f"{text} LOCK IN SHARE MODE" if dialect == "mysql" else text, False)


@lru_cache(maxsize=SHAPES)
def presence(dialect: Dialect, table: str, where: tuple[str, ...]) -> Query:
    """Whether the row exists, without locking it or the gap where it would be."""
    return Query("present", f"SELECT 1 FROM {_table(dialect, table)} WHERE {_equal(_quote(dialect), where)}", False)


@lru_cache(maxsize=SHAPES)
def update(
    dialect: Dialect,
    table: str,
    sets: tuple[str, ...],
    where: tuple[str, ...],
    column: str,
    choices: int,
    counts: bool,
) -> Query:
    """Change a row if ``column`` has one of so many values. With ``counts`` also increase it by one."""
    q = _quote(dialect)
    assignments = [f"{q}{c}{q} = :{parameter('s', at)}" for at, c in enumerate(sets)]
    if counts:
        assignments.append(f"{q}{column}{q} = {q}{column}{q} + 1")
    wanted = ", ".join(f":{parameter('f', at)}" for at in range(choices))
    condition = f"{_equal(q, where)} AND {q}{column}{q} IN ({wanted})"
    text = f"UPDATE {_table(dialect, table)} SET {', '.join(assignments)} WHERE {condition}"
    return Query("change", text if dialect == "mysql" else f"{text} RETURNING 1", True)


@lru_cache(maxsize=SHAPES)
def deletion(dialect: Dialect, table: str, where: tuple[str, ...]) -> Query:
    q = _quote(dialect)
    text = f"DELETE FROM {_table(dialect, table)} WHERE {_equal(q, where)}"
    return Query("delete", text if dialect == "mysql" else f"{text} RETURNING 1", True)


@lru_cache(maxsize=SHAPES)
def unique_indexes(table: str) -> Query:
    """On MySQL: a row for each column of each unique index."""
    return Query("indexes", f"SHOW INDEX FROM {_table('mysql', table)} WHERE Non_unique = 0", False)


def unique_index(dialect: Dialect, table: str, key: Sequence[str]) -> str:
    """The statement that creates a unique index, for an error message."""
    q = _quote(dialect)
    *schema, name = table.split(".")
    index = f"{q}{'_'.join((name, *key))[:58]}_once{q}"
    if schema and dialect == "sqlite":  # SQLite puts the schema before the index, not before the table
        return f"CREATE UNIQUE INDEX {q}{schema[0]}{q}.{index} ON {q}{name}{q} ({_list(q, key)})"
    return f"CREATE UNIQUE INDEX {index} ON {_table(dialect, table)} ({_list(q, key)})"


def _quote(dialect: Dialect) -> str:
    # SQLite takes a name in double quotes for text if there is no such column: "colour" = 'colour' is always true.
    return '"' if dialect == "postgresql" else "`"


def _table(dialect: Dialect, table: str) -> str:
    """``orders`` or ``shop.orders``, quoted."""
    q = _quote(dialect)
    parts = table.split(".")
    if len(parts) > 2 or not all(_NAME.fullmatch(part) for part in parts):
        raise ConfigurationError(f"{table[:80]!r} is not a table name: write orders, or shop.orders")
    return ".".join(f"{q}{part}{q}" for part in parts)


def _list(q: str, columns: Sequence[str]) -> str:
    return ", ".join(f"{q}{c}{q}" for c in columns)


def _bound(kind: str, columns: Sequence[str]) -> str:
    return ", ".join(f":{parameter(kind, at)}" for at in range(len(columns)))


def _equal(q: str, columns: Sequence[str]) -> str:
    return " AND ".join(f"{q}{c}{q} = :{parameter('w', at)}" for at, c in enumerate(columns))
