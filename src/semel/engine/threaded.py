"""A sync store for an async engine: each call goes to a thread, so the event loop never blocks.

For the odd ``async def`` in a sync program. A program that is async throughout uses an async store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from semel.core.ops import Op
from semel.engine.ports import Store

__all__ = ["ThreadedStore"]

R = TypeVar("R")


class ThreadedStore:
    """An AsyncStore over a Store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.wakes = store.wakes

    async def execute(self, op: Op[R]) -> R:
        return await asyncio.to_thread(self._store.execute, op)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await asyncio.to_thread(self._store.execute_many, ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await asyncio.to_thread(self._store.wait, id, seconds)

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)
