# Twin: sync.py is generated from this file by make twins.
# Twin: aiosqlite, psycopg, asyncpg, asyncmy or SQLAlchemy -> sqlite3, psycopg, PyMySQL, SQLAlchemy or Django
# Twin: For sync connections use ``semel.natural`` -> For async connections use ``semel.natural.aio``
# Twin: aiobotocore -> boto3
# Twin: awaited=True -> awaited=False
# Twin: lent.awaited is False -> lent.awaited
# Twin: is not async: use the functions of semel.natural -> is async: use the functions of semel.natural.aio
"""Changes that a repeat does not make again, on the caller's own table and connection.

::

    payment, new = await insert_once(conn, "payment", {"order_id": 7, "amount": 5}, key="order_id")
    await transition(conn, "orders", {"id": 7}, "status", "new", "paid")

Every function runs in whatever transaction the connection has, on any connection that ``guard.transaction`` accepts:
aiosqlite, psycopg, asyncpg, asyncmy or SQLAlchemy.
``insert_once`` and ``compare_and_set`` also accept a DynamoDB client of aiobotocore.
For sync connections use ``semel.natural``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from semel.errors import ConfigurationError, NotMigrated, StoreUnavailable
from semel.natural import dynamodb, indexes, programs
from semel.natural.results import Applied, Change, Inserted
from semel.sql.connections.adopt import adopt
from semel.sql.program import Program, run_async

__all__ = [
    "Applied", "Change", "Inserted", "append_event", "compare_and_set", "delete", "insert_once", "transition", "upsert",
]  # fmt: skip

R = TypeVar("R")


async def insert_once(
    connection: Any,
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
    if dynamodb.is_client(connection, awaited=True):
        return await dynamodb.run_async(connection, dynamodb.insert_once(table, values, key, returning))
    lent = _adopted(connection)
    return await _run(
        lent, table, programs.insert_once(lent.dialect, indexes.place(lent), table, values, key, returning)
    )


async def upsert(connection: Any, table: str, values: Mapping[str, Any], *, key: str | Iterable[str]) -> bool:
    """Bring a row to these values, whether it is there or not; whether that changed anything.

    Give absolute values: a balance of 100, not ten more.
    """
    lent = _adopted(connection)
    return await _run(lent, table, programs.upsert(lent.dialect, indexes.place(lent), table, values, key))


async def compare_and_set(
    connection: Any,
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
    if dynamodb.is_client(connection, awaited=True):
        return await dynamodb.run_async(
            connection, dynamodb.compare_and_set(table, where, version, values, column, marker)
        )
    lent = _adopted(connection)
    return await _run(
        lent, table, programs.compare_and_set(lent.dialect, table, where, version, values, column, marker)
    )


async def transition(
    connection: Any,
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
    lent = _adopted(connection)
    return await _run(lent, table, programs.transition(lent.dialect, table, where, column, before, after, values or {}))


async def append_event(
    connection: Any,
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
    lent = _adopted(connection)
    return await _run(
        lent,
        table,
        programs.append_event(lent.dialect, indexes.place(lent), table, aggregate, sequence, event, id, column, first),
    )


async def delete(connection: Any, table: str, where: Mapping[str, Any]) -> bool:
    """Delete rows; whether there were any. That there were none is no error: it is what was asked for."""
    lent = _adopted(connection)
    return await _run(lent, table, programs.delete(lent.dialect, table, where))


def _adopted(connection: Any) -> Any:
    if dynamodb.is_client(connection, awaited=True):
        raise ConfigurationError("for DynamoDB there are insert_once and compare_and_set, and no others")
    lent = adopt(connection)
    if lent.awaited is False:
        raise ConfigurationError("this connection is not async: use the functions of semel.natural")
    return lent


async def _run(lent: Any, table: str, program: Program[R]) -> R:
    await lent.finish()  # a session's new rows go first: they may be what this is about
    try:
        return await run_async(program, lent)
    except (NotMigrated, StoreUnavailable) as error:
        raise indexes.not_there(error, table) from error.__cause__
