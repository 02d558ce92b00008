"""The natural helpers as programs: generators that yield statements, written once for sync and async connections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from semel.errors import ConfigurationError, StoreUnavailable
from semel.natural import indexes
from semel.natural import statements as sql
from semel.natural.results import Applied, Change, Inserted
from semel.sql.connections.adopt import Dialect
from semel.sql.connections.refusals import Duplicate
from semel.sql.program import Program, Rows, Statement

TRIES: Final = 3
"""How often a row that was there, and is gone when we look, is tried again."""


def insert_once(
    dialect: Dialect,
    place: str,
    table: str,
    values: Mapping[str, Any],
    key: Iterable[str],
    returning: Iterable[str] | None,
) -> Program[Inserted]:
    columns = _given("values", values)
    keys = sql.names("key", key)
    missing = [name for name in keys if name not in values]
    if not keys or missing:
        raise ConfigurationError(f"key= names columns of the row that are unique together; {missing or keys} are not")
    _known(table, keys, values)
    wanted = columns if returning is None else sql.names("returning", returning)
    insert = sql.insertion(dialect, table, columns, keys)(**_bind("v", values))
    look = sql.selection(dialect, table, wanted, keys)(**_bind("w", {name: values[name] for name in keys}))
    for _ in range(TRIES):
        new = yield from _merged(dialect, place, table, keys, insert)
        rows = yield look
        if rows:
            return Inserted(dict(zip(wanted, rows[0], strict=True)), new)
        if new:
            raise ConfigurationError(
                f"{table}: the row was inserted, and is not found by {', '.join(keys)}: a row policy hides it, or a "
                "trigger or the type of a column has changed the key"
            )
        if dialect == "mysql":  # a row was in the way that does not have this key
            raise _taken(table, keys)
    raise StoreUnavailable(f"{table}: the row was there, and was not found when it was looked up")


def upsert(dialect: Dialect, place: str, table: str, values: Mapping[str, Any], key: Iterable[str]) -> Program[bool]:
    columns = _given("values", values)
    keys = sql.names("key", key)
    if not keys or any(name not in values for name in keys):
        raise ConfigurationError("key= names columns of the row that are unique together")
    _known(table, keys, values)
    if dialect == "mysql":
        return (yield from _upsert_in_mysql(place, table, values, columns, keys))
    merge = sql.merge(dialect, table, columns, keys)(**_bind("v", values))
    return (yield from _merged(dialect, place, table, keys, merge))


def _upsert_in_mysql(
    place: str, table: str, values: Mapping[str, Any], columns: tuple[str, ...], keys: tuple[str, ...]
) -> Program[bool]:
    yield from indexes.require(place, table, keys)
    bound, where = _bind("v", values), _bind("w", {name: values[name] for name in keys})
    rewrite = sql.rewriting(table, columns, keys)(**bound) if len(columns) > len(keys) else None
    look = sql.selection("mysql", table, keys, keys)(**where)
    known = bool((yield sql.presence("mysql", table, keys)(**where)))
    for _ in range(TRIES):
        if known:
            try:
                if rewrite is not None and int((yield rewrite)[0][0]) > 0:
                    return True
            except Duplicate:
                raise _taken(table, keys) from None
            if (yield look):
                return False  # as it was
        try:
            yield sql.insertion("mysql", table, columns, keys)(**bound)
            return True
        except Duplicate:
            if not (yield look):
                raise _taken(table, keys) from None
            known = True
    raise StoreUnavailable(f"{table}: the row was there, and was not found when it was looked up")


def compare_and_set(
    dialect: Dialect,
    table: str,
    where: Mapping[str, Any],
    version: int,
    values: Mapping[str, Any],
    column: str,
    marker: tuple[str, Any] | None,
) -> Program[Change]:
    conditions = _given("where", where)
    (column,) = sql.names("column", column)
    changes = dict(values) if marker is None else {**values, marker[0]: marker[1]}
    sets = _given("values", changes)
    if column in changes:
        raise ConfigurationError(f"{column} is the version: it grows by itself, leave it out of the values")
    change = sql.update(dialect, table, sets, conditions, column, 1, counts=True)
    made = yield from _changed(
        dialect, change(**_bind("s", changes), **_bind("w", where), **_bind("f", {"version": version}))
    )
    if made:
        return Change(Applied.NOW)
    shown = (column, *(sets if marker is None else (marker[0],)))
    rows = yield sql.selection(dialect, table, shown, conditions)(**_bind("w", where))
    if not rows:
        return Change(Applied.ABSENT)
    current, *found = rows[0]
    mine = list(changes.values()) if marker is None else [marker[1]]
    # With a marker a later version may have come on top of ours; without, only the very next one can be known as ours.
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
    conditions = _given("where", where)
    (column,) = sql.names("column", column)
    states = [before] if isinstance(before, str) or not isinstance(before, Iterable) else list(before)
    if not states or after in states:
        raise ConfigurationError(f"a transition leads from one state to another; {after!r} cannot be both")
    changes = {**values, column: after}
    sets = _given("values", changes)
    change = sql.update(dialect, table, sets, conditions, column, len(states), counts=False)
    bound = {f"{at}": state for at, state in enumerate(states)}
    made = yield from _changed(dialect, change(**_bind("s", changes), **_bind("w", where), **_bind("f", bound)))
    if made:
        return Change(Applied.NOW)
    rows = yield sql.selection(dialect, table, (column,), conditions)(**_bind("w", where))
    if not rows:
        return Change(Applied.ABSENT)
    current = rows[0][0]
    return Change(Applied.ALREADY if current == after else Applied.LOST, current)


def append_event(
    dialect: Dialect,
    place: str,
    table: str,
    aggregate: Mapping[str, Any],
    sequence: int,
    event: Mapping[str, Any],
    id: str,
    column: str,
    first: int,
) -> Program[Change]:
    conditions = _given("aggregate", aggregate)
    (column,) = sql.names("column", column)
    sql.names("id", id)
    if id not in event:
        raise ConfigurationError(f"an event is known by its {id!r}: give it among the columns, or name another by id=")
    _known(table, conditions, aggregate)
    if sequence > first:
        before = {**aggregate, column: sequence - 1}
        if not (yield sql.selection(dialect, table, (column,), tuple(before))(**_bind("w", before))):
            return Change(Applied.LOST)  # what this event follows is not there
    key = {**aggregate, column: sequence}
    row = {**key, **event}
    insert = sql.insertion(dialect, table, _given("event", row), (*conditions, column))
    if (yield from _merged(dialect, place, table, (*conditions, column), insert(**_bind("v", row)))):
        return Change(Applied.NOW)
    rows = yield sql.selection(dialect, table, (id,), tuple(key))(**_bind("w", key))
    if not rows:
        raise StoreUnavailable(f"{table}: the event was there, and was not found when it was looked up")
    current = rows[0][0]
    return Change(Applied.ALREADY if _same([current], [event[id]]) else Applied.LOST, current)


def delete(dialect: Dialect, table: str, where: Mapping[str, Any]) -> Program[bool]:
    return (yield from _changed(dialect, sql.deletion(dialect, table, _given("where", where))(**_bind("w", where))))


def _merged(dialect: Dialect, place: str, table: str, key: tuple[str, ...], statement: Statement) -> Program[bool]:
    """As ``_changed``, for a statement that a unique index must stand behind."""
    if dialect == "mysql":
        yield from indexes.require(place, table, key)
    try:
        return (yield from _changed(dialect, statement))
    except StoreUnavailable as error:
        if indexes.refused_for_lack_of_one(error):
            raise indexes.without_index(dialect, table, key) from error.__cause__
        raise


def _changed(dialect: Dialect, statement: Statement) -> Program[bool]:
    """Whether the statement changed a row: it comes back; on MySQL it is counted, and a new one fails where one is."""
    try:
        rows: Rows = yield statement
    except Duplicate:
        return False
    return int(rows[0][0]) > 0 if dialect == "mysql" else bool(rows)


def _known(table: str, keys: Iterable[str], values: Mapping[str, Any]) -> None:
    unknown = [name for name in keys if values[name] is None]
    if unknown:
        raise ConfigurationError(
            f"{table}: {', '.join(unknown)} is None, and no unique index tells two rows without a value apart: "
            "each call would insert another row. Give every column of the key a value"
        )


def _taken(table: str, keys: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(f"{table}: another unique key of this row is taken, and not by {', '.join(keys)}")


def _given(what: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    if not values:
        raise ConfigurationError(f"{what} is empty: name at least one column")
    return sql.names(what, values)


def _bind(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {sql.parameter(kind, at): value for at, value in enumerate(values.values())}


def _same(found: Iterable[Any], mine: Iterable[Any]) -> bool:
    """Equal, also where the driver shows a value in another shape than it was given, such as a UUID as text."""
    return all(a == b or str(a) == str(b) for a, b in zip(found, mine, strict=True))
