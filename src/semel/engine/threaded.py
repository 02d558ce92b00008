"""``async def`` functions under a sync guard: an async guard over its store, whose calls go to threads.

For the odd ``async def`` in a sync program. A program that is async throughout uses an async store.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from semel.core.ops import Op
from semel.engine.aio import AsyncGuard
from semel.engine.declare.declaration import Declaration
from semel.engine.forking import survive_forks
from semel.engine.ports import STORE_CLOSED, Store
from semel.errors import StoreUnavailable

THREADS = 8
R = TypeVar("R")


class ThreadedStore:
    """An AsyncStore over a Store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.wakes = store.wakes
        self.counts = store.counts
        self.resumes = store.resumes
        self.lists = store.lists
        self.trails = store.trails
        self.adopt = None  # the caller's connection belongs to a thread
        self.accept = store.accept
        self._start()
        survive_forks(self._start)

    def _start(self) -> None:
        # Not asyncio's own threads: a lease must be renewed even if the program keeps all of those busy.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="semel-store")

    async def execute(self, op: Op[R]) -> R:
        return await self._in_thread(self._store.execute, op)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await self._in_thread(self._store.execute_many, ops)

    async def wait(self, id: bytes, seconds: float) -> None:
        await asyncio.to_thread(self._store.wait, id, seconds)

    def open(self) -> None:
        self._store.open()
        self._start()

    async def close(self) -> None:
        await asyncio.to_thread(self._store.close)
        self.shut_down()

    def shut_down(self) -> None:
        """End the threads when they are done with what they do now. The store itself is left open."""
        self._threads.shutdown(wait=False)

    async def _in_thread(self, function: Callable[[Any], R], argument: Any) -> R:
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, function, argument)
        except RuntimeError as error:  # the threads have ended
            raise StoreUnavailable(STORE_CLOSED) from error
        return await answer


class ThreadedGuard(AsyncGuard):
    """An async guard over a sync store. It does not sweep: the sync guard does."""

    def __init__(self, store: Store, settings: Mapping[str, Any]) -> None:
        self.threaded_store = ThreadedStore(store)
        super().__init__(self.threaded_store, **settings, sweep_every=None)


class LoopGuards:
    """The guards of the ``async def`` functions that one sync guard protects, one for each event loop."""

    def __init__(self, store: Store, settings: Mapping[str, Any]) -> None:
        self._store = store
        self._settings = settings
        self._guards: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadedGuard] = WeakKeyDictionary()

    def here(self) -> ThreadedGuard:
        """Return the guard of the running event loop."""
        loop = asyncio.get_running_loop()
        guard = self._guards.get(loop)
        if guard is None:
            for closed in [known for known in self._guards if known.is_closed()]:
                # A guard refers to its loop, so neither would ever be collected.
                self._guards.pop(closed).threaded_store.shut_down()
            guard = self._guards[loop] = ThreadedGuard(self._store, self._settings)
        return guard

    def protect(self, declared: Declaration) -> Callable[..., Any]:
        """Return the ``async def`` that calls the declared function once."""

        @functools.wraps(declared.function)
        async def once(*args: Any, **kwargs: Any) -> Any:
            return (await self.here().perform(declared, args, kwargs)).value

        return once

    def restart(self, store: Store) -> None:
        """Make new guards, over this store: the threads of the former ones have ended."""
        self._store = store
        self._guards.clear()

    def close(self) -> None:
        """End the threads and the keepers of all guards. The store itself is left open."""
        for guard in list(self._guards.values()):
            guard.driver.keeper.stop()
            guard.threaded_store.shut_down()
