"""A background sweep is bounded; where more expires than that, the next one does not wait for its usual time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from semel import AsyncMemoryStore, MemoryStore
from semel.core.ops import Op, Sweep, Swept
from semel.engine.drive import aio_keeper, aio_rounds, keeper, rounds
from semel.engine.drive.aio_keeper import AsyncKeeper
from semel.engine.drive.keeper import Keeper

HOUR = 3600.0


class Backlog:
    """So many records have expired."""

    def __init__(self, expired: int) -> None:
        self.expired = expired
        self.sweeps: list[int] = []

    def sweep(self, op: Op[object]) -> Swept:
        assert isinstance(op, Sweep)
        removed = min(op.limit, self.expired)
        self.expired -= removed
        self.sweeps.append(removed)
        return Swept(removed, 0)


@pytest.fixture(autouse=True)
def small_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rounds, aio_rounds):
        monkeypatch.setattr(module, "SWEEP_LIMIT", 10)
        monkeypatch.setattr(module, "SWEEP_STEPS", 2)
    for module in (keeper, aio_keeper):
        monkeypatch.setattr(module, "SWEEP_AGAIN", 0.001)


@pytest.mark.parametrize(("expired", "sweeps"), [(0, [0]), (15, [10, 5]), (45, [10, 10, 10, 10, 5])])
def test_a_backlog_is_swept_soon(expired: int, sweeps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    backlog, store = Backlog(expired), MemoryStore()
    monkeypatch.setattr(store, "execute", backlog.sweep)
    thread = threading.Thread(target=Keeper(store, HOUR, lambda removed, unknown: None)._sweep, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert backlog.sweeps == sweeps


@pytest.mark.parametrize(("expired", "sweeps"), [(0, [0]), (15, [10, 5]), (45, [10, 10, 10, 10, 5])])
def test_a_backlog_is_swept_soon_by_an_event_loop(
    expired: int, sweeps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backlog, store = Backlog(expired), AsyncMemoryStore()
    over = asyncio.Event()

    async def execute(op: Op[object]) -> Swept:
        swept = backlog.sweep(op)
        if swept.removed < 10:
            over.set()
        return swept

    monkeypatch.setattr(store, "execute", execute)

    async def main() -> None:
        one = AsyncKeeper(store, HOUR, lambda removed, unknown: None)
        one._adopt(asyncio.get_running_loop())
        one._sweep_at = 0.0
        one._ring()
        async with asyncio.timeout(10):
            await over.wait()
        await one.close()

    asyncio.run(main())
    assert backlog.sweeps == sweeps
