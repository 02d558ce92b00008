# Twin: sync.py is generated from this file by make twins.
# Twin: aiosqlite, psycopg, asyncpg, asyncmy or SQLAlchemy -> sqlite3, psycopg, PyMySQL, SQLAlchemy or Django
# Twin: For sync connections use ``semel.natural`` -> For async connections use ``semel.natural.aio``
# Twin: aiobotocore -> boto3
# Twin: awaited=True -> awaited=False
# Twin: target.awaited is False -> target.awaited
# Twin: is not async: use the functions of semel.natural -> is async: use the functions of semel.natural.aio
"""Changes that a repeat does not make again, on the caller's own table and connection.

::

    payment, new = await insert_once(connection, "payment", {"order_id": 7, "amount": 5}, key="order_id")
    await transition(connection, "orders", {"id": 7}, "status", "new", "paid")

Every function runs in whatever transaction the connection has, on any connection that
``guard.run_in_transaction`` accepts: aiosqlite, psycopg, asyncpg, asyncmy or SQLAlchemy.
``insert_once`` and ``compare_and_set`` also accept a DynamoDB client of aiobotocore.
For sync connections use ``semel.natural``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from semel.errors import ConfigurationError, NotMigrated, StoreUnavailable
from semel.natural import dynamodb, programs
from semel.natural.programs import Applied, Change, Inserted, Table
from semel.sql.aio import run_async
from semel.sql.connections.adopt import adopt
from semel.sql.program import Program

__all__ = [
    "Applied", "Change", "Inserted", "append_event", "compare_and_set", "delete", "insert_once", "transition", "upsert",
]  # fmt: skip

R = TypeVar("R")
P = ParamSpec("P")


async def insert_once(
    connection: Any,
    table: str,
    values: Mapping[str, Any],
    *,
    key: str | Iterable[str],
    returning: Iterable[str] | None = None,
) -> Inserted:
    """Insert a row, or find the one that has its key. Returns ``(row, new)``.

    :param key: the columns that are unique together, such as the order that a payment is for.
    :param returning: the columns of the row to return; by default those of ``values``.
    """
    if dynamodb.is_client(connection, awaited=True):
        return await _call(connection, dynamodb.insert_once(table, values, key, returning))
    return await _run(connection, table, programs.insert_once, values, key, returning)


async def upsert(connection: Any, table: str, values: Mapping[str, Any], *, key: str | Iterable[str]) -> bool:
    """Bring a row to these values, whether it exists or not. Returns whether that changed anything.

    Pass absolute values: a balance of 100, not ten more.
    """
    return await _run(connection, table, programs.upsert, values, key)


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
    """Change a row if it still has this version, and increase the version by one.

    A repeat gets ALREADY if the row has the next version and these values. With a ``marker`` a repeat is recognised for
    certain, even if others have changed the row since.

    :param column: the column of the version.
    :param marker: a column and a unique value that is written with the change, such as
        ``("changed_by", op.derive("rename"))``.
    """
    if dynamodb.is_client(connection, awaited=True):
        return await _call(connection, dynamodb.compare_and_set(table, where, version, values, column, marker))
    return await _run(connection, table, programs.compare_and_set, where, version, values, column, marker)


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

    :param before: a state, or several.
    :param values: other columns to set with it.
    """
    return await _run(connection, table, programs.transition, where, column, before, after, values or {})


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
    """Append an event to the history of an aggregate. The aggregate and the sequence must be unique together.

    The same event again is ALREADY. Another event with this sequence, or a gap before it, is LOST.

    :param sequence: the place of this event: one more than the last event that the caller has seen.
    :param id: the column that identifies an event.
    """
    return await _run(connection, table, programs.append_event, aggregate, sequence, event, id, column, first)


async def delete(connection: Any, table: str, where: Mapping[str, Any]) -> bool:
    """Delete rows. Returns whether there were any; it is no error if there were none."""
    return await _run(connection, table, programs.delete, where)


async def _run(
    connection: Any,
    table: str,
    program: Callable[Concatenate[Table, P], Program[R]],
    *arguments: P.args,
    **options: P.kwargs,
) -> R:
    """Run the program on the table of this name."""
    if dynamodb.is_client(connection, awaited=True):
        raise ConfigurationError("for DynamoDB there are insert_once and compare_and_set, and no others")
    target = adopt(connection)
    if target.awaited is False:
        raise ConfigurationError("this connection is not async: use the functions of semel.natural")
    await target.finish()  # a session's new rows go first: the statement may be about them
    try:
        return await run_async(program(Table.on(target, table), *arguments, **options), target)
    except (NotMigrated, StoreUnavailable) as error:
        raise programs.missing_table(error, table) from error.__cause__


async def _call(client: Any, program: dynamodb.Program[R]) -> R:
    """Run a program on a DynamoDB client."""
    try:
        call = next(program)
        while True:
            try:
                reply: dynamodb.Reply = await getattr(client, call.action)(**call.params)
            except Exception as error:
                reply = dynamodb.failed_condition(error, call)
            call = program.send(reply)
    except StopIteration as stop:
        result: R = stop.value
        return result
