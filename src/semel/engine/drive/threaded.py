"""A sync store for an async engine: each call goes to a thread, so the event loop never blocks.

For the odd ``async def`` in a sync program. A program that is async throughout uses an async store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from semel.core.ops import Op
from semel.engine.forking import survive_forks
from semel.engine.ports import Store
from semel.errors import StoreUnavailable

__all__ = ["ThreadedStore", "twin_in_this_loop"]

THREADS = 8
R = TypeVar("R")


class ThreadedStore:
    """An AsyncStore over a Store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.wakes = store.wakes
        self.counts = store.counts
        self.resumes = store.resumes
        self.adopt = None  # the caller's connection belongs to a thread
        self.accept = store.accept
        self._start()
        survive_forks(self._start)

    def _start(self) -> None:
        # Threads of our own: asyncio's are the program's, and a lease must be renewed also while all of them are busy.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="semel-store")

    async def execute(self, op: Op[R]) -> R:
        return await self._in_thread(self._store.execute, op)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._in_thread(self._store.execute_many, ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await asyncio.to_thread(self._store.wait, id, seconds)

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)
        self.shut_down()

    def shut_down(self) -> None:
        """Let the threads go; what they are doing is done first. The store itself is left open."""
        self._threads.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[Any], R], argument: Any) -> R:
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, function, argument)
        except RuntimeError as error:  # they were let go
            raise StoreUnavailable("the store is closed") from error
        return await answer


def twin_in_this_loop(twins: MutableMapping[Any, Any], store: Store, settings: Mapping[str, Any]) -> Any:
    """The async guard over a sync guard's store, for the event loop that runs; ``twins`` are those made so far."""
    from semel.engine.aio import AsyncSemel

    loop = asyncio.get_running_loop()
    twin = twins.get(loop)
    if twin is None:
        for dead in [known for known in twins if known.is_closed()]:
            twins.pop(dead).store.shut_down()  # a twin holds its loop, so neither would ever go by itself
        twin = twins[loop] = AsyncSemel(ThreadedStore(store), **settings, sweep_every=None)
    return twin
