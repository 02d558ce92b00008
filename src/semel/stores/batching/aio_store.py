# Twin: store.py is generated from this file by make twins.
# Twin: for one event loop -> for threads
"""What the stores in SQL databases have in common, for one event loop.

A few connections serve all callers. Ops that arrive while these are busy are sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from semel.core.ops import Op
from semel.sql.aio import AsyncSQLUnit, adopt_unit_async
from semel.sql.connections.adopt import Dialect
from semel.stores.batching.aio_combiner import AsyncBatchConnection, AsyncCombiner

R = TypeVar("R")


class AsyncSQLStore:
    """The base of the stores in SQL databases."""

    wakes = False
    counts = True
    resumes = True
    lists = True
    trails = True
    accept = None

    def __init__(self, dialect: Dialect, connections: Sequence[AsyncBatchConnection]) -> None:
        self._dialect: Dialect = dialect
        self._combiner = AsyncCombiner(connections)

    async def execute(self, op: Op[R]) -> R:
        return await self._combiner.execute(op)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._combiner.execute_many(ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        """The engine polls a store that does not wake it, and never calls this."""
        await asyncio.sleep(min(seconds, 0.05))

    def adopt(self, connection: object) -> AsyncSQLUnit:
        """The caller's connection as a unit of work: it writes records in the caller's transaction."""
        return adopt_unit_async(connection, self._dialect)

    def open(self) -> None:
        self._combiner.open()

    async def close(self) -> None:
        await self._combiner.close()
