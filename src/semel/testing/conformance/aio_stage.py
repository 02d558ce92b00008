# Twin: stage.py is generated from this file by make twins.
# Twin: an async store -> a sync store
# Twin: play_proof_async -> play
"""Play scripts on an async store, and check what it declares and how it opens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from semel.core.ops import Lookup
from semel.engine.ports import AsyncStore
from semel.errors import StoreError
from semel.testing.conformance.script import (
    Batch,
    Elapse,
    Elsewhere,
    Linger,
    MovableClock,
    Proof,
    Request,
    Script,
    Together,
    WaitForChange,
)
from semel.testing.conformance.together import run_together_async


class AsyncStage:
    """Plays scripts on an async store."""

    def __init__(self, store: AsyncStore, second: AsyncStore | None = None, clock: MovableClock | None = None) -> None:
        self._store = store
        self._second = second or store
        self._clock = clock

    async def play(self, script: Script) -> Any:
        """Run the script to its end. Returns what the script returns, or raises its AssertionError."""
        try:
            request = next(script)
            while True:
                try:
                    answer = await self._perform(request, self._store)
                except StoreError as error:
                    request = script.throw(error)
                else:
                    request = script.send(answer)
        except StopIteration as stop:
            return stop.value

    async def _perform(self, request: Request, store: AsyncStore) -> Any:
        match request:
            case Elsewhere(inner):
                return await self._perform(inner, self._second)
            case Elapse(seconds):
                self._clock.advance(seconds) if self._clock is not None else await asyncio.sleep(seconds)
            case Linger(seconds):
                await asyncio.sleep(seconds)
            case Batch(ops):
                return await store.execute_many(ops)
            case WaitForChange(id, seconds):
                began = time.monotonic()
                await store.wait(id, seconds)
                return time.monotonic() - began
            case Together(parts):
                return await run_together_async([partial(self._play_part, part) for part in parts])
            case op:
                return await store.execute(op)
        return None

    async def _play_part(self, part: Request | Script) -> Any:
        return await (self.play(part) if isinstance(part, Generator) else self._perform(part, self._store))


async def play_proof_async(
    proof: Proof, open_store: Callable[[], AsyncStore], *, shared: bool = True, clock: MovableClock | None = None
) -> None:
    """Play one proof on a store that is opened for it. The store is closed twice afterwards, as the contract allows."""
    store = open_store()
    second = open_store() if shared else None
    try:
        await AsyncStage(store, second, clock).play(proof.script())
    finally:
        for opened in (store, second, store):
            if opened is not None:
                await opened.close()


async def declared_async(open_store: Callable[[], AsyncStore]) -> tuple[bool, ...]:
    """Return what the store says that it can do."""
    store = open_store()
    found = store.wakes, store.counts, store.resumes, store.lists
    await store.close()
    return found


async def check_opens_again_async(open_store: Callable[[], AsyncStore]) -> None:
    """Check that the store works again after ``close`` and ``open``."""
    store = open_store()
    for _ in range(2):
        assert await store.execute(Lookup(bytes(16))) is None
        await store.close()
        store.open()
    await store.close()
