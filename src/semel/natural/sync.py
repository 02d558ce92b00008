"""Natural idempotency: changes that a repeat does not make again, on the caller's own table and connection.

::

    payment, new = insert_once(conn, "payment", {"order_id": 7, "amount": 5}, key="order_id")
    transition(conn, "orders", {"id": 7}, "status", "new", "paid")

Each works in whatever transaction the connection has, on any connection that ``guard.transaction`` takes: sqlite3,
psycopg, PyMySQL, SQLAlchemy, Django. Those of async connections are in ``semel.natural.aio``, with the same names.
``insert_once`` and ``compare_and_set`` also take a DynamoDB client of boto3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from semel.errors import ConfigurationError, NotMigrated, StoreUnavailable
from semel.natural import dynamodb, indexes, programs
from semel.natural.results import Applied, Change, Inserted
from semel.sql.connections.adopt import adopt
from semel.sql.program import Program, run

__all__ = [
    "Applied", "Change", "Inserted", "append_event", "compare_and_set", "delete", "insert_once", "transition", "upsert",
]  # fmt: skip

R = TypeVar("R")


def insert_once(
    conn: Any,
    table: str,
    values: Mapping[str, Any],
    *,
    key: str | Iterable[str],
    returning: Iterable[str] | None = None,
) -> Inserted:
    """Insert a row, or find the one that has its key: ``(row, new)``.

    :param key: columns with a unique constraint together, such as the order that a payment is for.
    :param returning: columns to be told of the row; those of ``values`` by default.
    """
    if dynamodb.is_client(conn, awaited=False):
        return dynamodb.run(conn, dynamodb.insert_once(table, values, key, returning))
    lent = _adopted(conn)
    return _run(lent, table, programs.insert_once(lent.dialect, indexes.place(lent), table, values, key, returning))


def upsert(conn: Any, table: str, values: Mapping[str, Any], *, key: str | Iterable[str]) -> bool:
    """Bring a row to these values, whether it is there or not; whether that changed anything.

    Give absolute values: a balance of 100, not ten more.
    """
    lent = _adopted(conn)
    return _run(lent, table, programs.upsert(lent.dialect, indexes.place(lent), table, values, key))


def compare_and_set(
    conn: Any,
    table: str,
    where: Mapping[str, Any],
    *,
    version: int,
    values: Mapping[str, Any],
    column: str = "version",
    marker: tuple[str, Any] | None = None,
) -> Change:
    """Change a row if it is still of this version, which then grows by one.

    A repeat is told ALREADY when the row is of the next version and has these values; with a ``marker`` it is sure,
    also when others have changed the row since.

    :param column: where the version is kept.
    :param marker: a column and a value of one's own that is written with the change, such as
        ``("changed_by", op.derive("rename"))``.
    """
    if dynamodb.is_client(conn, awaited=False):
        return dynamodb.run(conn, dynamodb.compare_and_set(table, where, version, values, column, marker))
    lent = _adopted(conn)
    return _run(lent, table, programs.compare_and_set(lent.dialect, table, where, version, values, column, marker))


def transition(
    conn: Any,
    table: str,
    where: Mapping[str, Any],
    column: str,
    before: Any,
    after: Any,
    *,
    values: Mapping[str, Any] | None = None,
) -> Change:
    """Move a row from one state to another: ``UPDATE … SET status = after WHERE … AND status = before``.

    :param before: a state, or several to come from.
    :param values: other columns to be set with it.
    """
    lent = _adopted(conn)
    return _run(lent, table, programs.transition(lent.dialect, table, where, column, before, after, values or {}))


def append_event(
    conn: Any,
    table: str,
    aggregate: Mapping[str, Any],
    sequence: int,
    event: Mapping[str, Any],
    *,
    id: str = "id",
    column: str = "sequence",
    first: int = 1,
) -> Change:
    """Append an event at its place in an aggregate's history; the aggregate and the sequence are unique together.

    The same event again is ALREADY; another event at that place, or a gap before it, is LOST.

    :param sequence: the place that this event is to have: one more than the last that the caller has seen.
    :param id: the column that an event is known by.
    """
    lent = _adopted(conn)
    return _run(
        lent,
        table,
        programs.append_event(lent.dialect, indexes.place(lent), table, aggregate, sequence, event, id, column, first),
    )


def delete(conn: Any, table: str, where: Mapping[str, Any]) -> bool:
    """Delete rows; whether there were any. That there were none is no error: it is what was asked for."""
    lent = _adopted(conn)
    return _run(lent, table, programs.delete(lent.dialect, table, where))


def _adopted(conn: Any) -> Any:
    if dynamodb.is_client(conn, awaited=False):
        raise ConfigurationError("for DynamoDB there are insert_once and compare_and_set, and no others")
    lent = adopt(conn)
    if lent.awaited:
        raise ConfigurationError("this connection is async: from semel.natural.aio import insert_once, …, and await it")
    return lent


def _run(lent: Any, table: str, program: Program[R]) -> R:
    lent.finish()  # a session's new rows go first: they may be what this is about
    try:
        return run(program, lent)
    except (NotMigrated, StoreUnavailable) as error:
        raise indexes.not_there(error, table) from error.__cause__
