"""asyncpg: one statement on one connection, its errors in our words."""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from semel.errors import SemelError, StoreUncertain
from semel.sql.connections.postgres_errors import Refused, from_sqlstate
from semel.sql.program import Rows, Statement

__all__ = ["DRIVER_ERRORS", "AsyncpgConnection", "named_error"]


class AsyncpgConnection:
    """Wraps an asyncpg.Connection, ours or the caller's."""

    __slots__ = ("raw",)

    def __init__(self, raw: asyncpg.Connection[Any]) -> None:
        self.raw = raw

    async def execute(self, statement: Statement) -> Rows:
        text, values = statement.values("numeric")
        try:
            rows: Rows = await self.raw.fetch(text, *values)
            return rows
        except DRIVER_ERRORS as error:
            raise named_error(error) from error


DRIVER_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError, OverflowError)


def named_error(error: Exception) -> SemelError:
    if isinstance(error, asyncpg.PostgresError):
        return from_sqlstate(getattr(error, "sqlstate", None), str(error))
    if isinstance(error, (ValueError, OverflowError)):  # asyncpg's DataError among them: never sent
        return Refused(f"the driver cannot send this: {error}")
    return StoreUncertain(f"the connection to PostgreSQL was lost: {str(error) or type(error).__name__}")
