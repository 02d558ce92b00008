"""The memory store: what Semel itself costs, beside the unprotected call and the peer. In microseconds per call."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, Final

from prometheus_client import CollectorRegistry

from bench import guarded, job, peer
from bench.contest import Contestant, Match, Pace
from bench.turns import threads
from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.observe.prometheus import PrometheusMetrics

__all__ = ["WITH_METRICS", "Cost", "matches", "overhead"]

WITH_METRICS: Final = "Semel with Prometheus"
EVENTS: Final = {"first": 2, "replay": 1}
"""How many events a call has."""


@contextmanager
def matches(callers: int) -> Iterator[list[Match]]:
    """Operations per second, as of the other stores; there is no driver, so the peer is the measure."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        found = guarded.sync_contestants(MemoryStore(max_records=50_000_000), (1, callers))
        notes = [peer.WHERE_NOT]
        guard = peer.powertools()
        if guard is None:
            notes.append("aws-lambda-powertools is not installed: `pip install --group bench`")
        else:
            for number in range(job.KNOWN):
                guard(job.known_key(number))
            found += [
                Contestant(peer.NAME, kind, count, threads(call, count), peer=True)
                for count in (1, callers)
                for kind, call in (
                    ("first", lambda number: guard(job.fresh_key())),
                    ("replay", lambda number: guard(job.known_key(number))),
                )
            ]
        async_store = AsyncMemoryStore(max_records=50_000_000)
        yield [
            Match("memory", "Memory, threads", found, notes),
            Match("memory", "Memory, asyncio", guarded.async_contestants(runner, async_store, (1, callers))),
        ]


@dataclass
class Cost:
    """What guarding one call costs, in microseconds: the guarded call less the bare one, the best of several rounds."""

    name: str
    job: str
    shell: str
    bests: list[float] = field(default_factory=list)
    microseconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "contestant": self.name, "job": self.job, "shell": self.shell,
            "microseconds": round(self.microseconds, 2), "median": round(statistics.median(self.bests), 2),
        }  # fmt: skip


def overhead(pace: Pace, progress: Callable[[str], object]) -> list[Cost]:
    """One caller, the garbage collector on, as in a service. The time of the processor: nothing here waits."""
    guard, async_guard = Semel(MemoryStore(), sweep_every=None), AsyncSemel(AsyncMemoryStore(), sweep_every=None)
    counted = Semel(MemoryStore(), sweep_every=None, on_event=PrometheusMetrics(CollectorRegistry()))
    aws = peer.powertools()

    def bare(key: str) -> object:
        return job.handler()

    async def async_bare(key: str) -> object:
        return await job.async_handler()

    def semel(key: str) -> object:
        return guard.run(job.OPERATION, key=key, call=job.handler)

    def semel_with_metrics(key: str) -> object:
        return counted.run(job.OPERATION, key=key, call=job.handler)

    async def async_semel(key: str) -> object:
        return await async_guard.run(job.OPERATION, key=key, call=job.async_handler)

    costs: list[tuple[Cost, Callable[[list[str]], float]]] = []
    with asyncio.Runner() as runner:
        timed_async = _timed_async(runner)
        for kind in ("first", "replay"):
            costs.append((Cost("unprotected", kind, "sync"), _timed(bare)))
            costs.append((Cost("Semel", kind, "sync"), _timed(semel)))
            costs.append((Cost(WITH_METRICS, kind, "sync"), _timed(semel_with_metrics)))
            if aws is not None:
                costs.append((Cost(peer.NAME, kind, "sync"), _timed(aws)))
            costs.append((Cost("unprotected", kind, "async"), timed_async(async_bare)))
            costs.append((Cost("Semel", kind, "async"), timed_async(async_semel)))
        for number in range(pace.rounds + 1):
            progress(f"Engine overhead: round {number + 1} of {pace.rounds + 1}")
            for cost, measure in costs:
                keys = [job.fresh_key() if cost.job == "first" else job.known_key(n) for n in range(pace.count)]
                taken = measure(keys) * 1e6 / len(keys)
                if number:  # the first round warms up
                    cost.bests.append(taken)
    floor = {(cost.job, cost.shell): min(cost.bests) for cost, _ in costs if cost.name == "unprotected"}
    for cost, _ in costs:
        cost.microseconds = min(cost.bests) - (0.0 if cost.name == "unprotected" else floor[cost.job, cost.shell])
    return [cost for cost, _ in costs]


def _timed(call: Callable[[str], object]) -> Callable[[list[str]], float]:
    def measure(keys: list[str]) -> float:
        began = thread_time()
        for key in keys:
            call(key)
        return thread_time() - began

    return measure


def _timed_async(
    runner: asyncio.Runner,
) -> Callable[[Callable[[str], Awaitable[object]]], Callable[[list[str]], float]]:
    def timed(call: Callable[[str], Awaitable[object]]) -> Callable[[list[str]], float]:
        async def measure(keys: list[str]) -> float:
            began = thread_time()
            for key in keys:
                await call(key)
            return thread_time() - began

        return lambda keys: runner.run(measure(keys))

    return timed
