"""Semel's contestants: the leased path on any store, first executions and replays, threads and tasks."""

from __future__ import annotations

import asyncio

from bench import job
from bench.contest import Contestant
from bench.turns import tasks, threads
from semel import AsyncSemel, AsyncStore, Semel, Store

__all__ = ["async_contestants", "sync_contestants"]


def sync_contestants(store: Store, callers: tuple[int, ...], name: str = "Semel") -> list[Contestant]:
    guard = Semel(store, sweep_every=None)
    run, handler = guard.run, job.handler

    def first(number: int) -> object:
        return run(job.OPERATION, key=job.fresh_key(), call=handler)

    def replay(number: int) -> object:
        return run(job.OPERATION, key=job.known_key(number), call=handler)

    for number in range(job.KNOWN):
        replay(number)
    return [
        Contestant(name, kind, count, threads(call, count))
        for count in callers
        for kind, call in (("first", first), ("replay", replay))
    ]


def async_contestants(
    runner: asyncio.Runner, store: AsyncStore, callers: tuple[int, ...], name: str = "Semel"
) -> list[Contestant]:
    guard = AsyncSemel(store, sweep_every=None)
    run, handler = guard.run, job.async_handler

    async def first(number: int) -> object:
        return await run(job.OPERATION, key=job.fresh_key(), call=handler)

    async def replay(number: int) -> object:
        return await run(job.OPERATION, key=job.known_key(number), call=handler)

    async def prepare() -> None:
        for start in range(0, job.KNOWN, 32):
            await asyncio.gather(*(replay(number) for number in range(start, min(start + 32, job.KNOWN))))

    runner.run(prepare())
    return [
        Contestant(name, kind, count, tasks(runner, call, count))
        for count in callers
        for kind, call in (("first", first), ("replay", replay))
    ]
