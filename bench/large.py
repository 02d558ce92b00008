"""`python -m bench --only large`: what a claim and a replay cost in a store with millions of live records, and whether
the sweep of those that expire disturbs them.

The same store twice, one with few records and one with many, each in a server of its own; the two take turns. Then the
full one, under a steady rate of claims: as it is, while records expire and are swept, and as it is again.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any, Final

from bench.contest import Pace
from bench.large_postgres import full_postgres
from bench.large_redis import full_redis
from bench.large_store import SNAPSHOT, Full, claim_of, id_of
from semel import AsyncStore
from semel.core.ops import Claimed, Complete, Existing, Lookup, Sweep
from semel.core.states import State

__all__ = ["CALLERS", "RECORDS", "Large", "Measured", "measure"]

RECORDS: Final = 5_000_000
FEW: Final = 50_000
CALLERS: Final = 8
EXPIRIES: Final = 2000.0
"""Records that expire in a second while the sweep is measured."""
CLAIMS: Final = 400.0
"""Claims in a second meanwhile: a steady rate, far from what the store could do."""
LONGER: Final = 3
"""A turn is so many times as long as elsewhere, and a stretch of claims as all turns of a match together."""
SWEEP_EVERY: Final = 1.0
SWEEP_LIMIT: Final = 1000
"""Both as an engine would be told, whose records expire at this rate."""
JOBS: Final = ("claim and complete", "replay")


@dataclass
class Measured:
    """One job at one size: microseconds, round by round."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Of the client and the server together, for one operation."""

    def as_json(self) -> dict[str, float]:
        return {name: round(statistics.median(taken), 1) for name, taken in vars(self).items()}


@dataclass
class Large:
    """What was found of one store."""

    store: str
    few: int
    many: int
    jobs: dict[tuple[str, int], Measured] = field(default_factory=dict)
    quiet: list[float] = field(default_factory=list)
    """Latencies of claims, in seconds, while nothing expires."""
    swept: list[float] = field(default_factory=list)
    """The same while records expire and are swept."""
    expired: int = 0
    left: int = 0
    """Of those, how many were still there at the end."""
    removing: float = 0.0
    """The share of that time which the server itself has spent on removing them, where it tells."""
    sweeps: bool = True
    """Whether it is the sweep that removes them; Redis does so itself, and shows them to nobody until then."""

    def times(self, job: str, figure: str) -> float:
        """How much dearer it is with many records: the median over the rounds."""
        few, many = (vars(self.jobs[job, size])[figure] for size in (self.few, self.many))
        ratio: float = statistics.median(large / small for small, large in zip(few, many, strict=True))
        return ratio

    def sweep_times(self) -> float:
        return percentile(self.swept, 99) / percentile(self.quiet, 99)

    def as_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "jobs": [{"job": job, "records": size, **found.as_json()} for (job, size), found in self.jobs.items()],
            "times": {job: {name: round(self.times(job, name), 2) for name in ("p50", "p99", "cpu")} for job in JOBS},
            "sweep": {
                "expired": self.expired, "left": self.left, "removing": round(self.removing, 4),
                "times_p99": round(self.sweep_times(), 2),
                **{f"{name}_us": {str(p): round(percentile(taken, p) * 1e6) for p in (50, 99)}
                   for name, taken in (("quiet", self.quiet), ("swept", self.swept))},
            },
        }  # fmt: skip

    def as_text(self) -> str:
        lines = [f"{self.store}, {CALLERS} callers: µs an operation, median of the rounds; CPU of client and server"]
        lines.append(f"  {'':<22}{'records':>12}{'p50':>10}{'p99':>10}{'CPU':>10}")
        for job in JOBS:
            for size in (self.few, self.many):
                found = self.jobs[job, size].as_json()
                figures = "".join(f"{found[name]:>10,.0f}" for name in ("p50", "p99", "cpu"))
                lines.append(f"  {job:<22}{size:>12,}{figures}")
            ratios = "".join(f"{self.times(job, name):>9.2f}×" for name in ("p50", "p99", "cpu"))
            lines.append(f"  {'':<34}{ratios}")
        lines.append(f"  {CLAIMS:g} claims a second, with {self.many:,} records: µs until the answer")
        for told, taken in (("nothing expires", self.quiet), (f"{EXPIRIES:g} expire each second", self.swept)):
            lines.append(f"  {told:<34}{percentile(taken, 50) * 1e6:>10,.0f}{percentile(taken, 99) * 1e6:>10,.0f}")
        where = "still there at the end" if self.sweeps else "at the end still in memory, where nobody sees them"
        lines.append(f"  {self.expired:,} expired, {self.left:,} of them {where}")
        if self.removing:
            lines.append(f"  the server was removing them for {self.removing:.1%} of the time, in which claims wait")
        return "\n".join(lines)


def measure(pace: Pace, records: int, progress: Callable[[str], object]) -> tuple[list[Large], list[str]]:
    """Both stores, one after the other; and notes on servers that are missing."""
    from tests.servers import ServerMissing

    found, notes = [], []
    kinds: tuple[Callable[[], AbstractContextManager[Full]], ...] = (full_redis, full_postgres)
    for kind in kinds:
        try:
            with ExitStack() as stack:
                few, many = stack.enter_context(kind()), stack.enter_context(kind())
                found.append(_measured(few, many, records, pace, progress))
        except ServerMissing as missing:
            notes.append(f"a large store was not measured: {missing}")
    return found, notes


def _measured(few: Full, many: Full, records: int, pace: Pace, progress: Callable[[str], object]) -> Large:
    large = Large(many.name, min(FEW, records // 10), records, sweeps=many.sweeps)
    progress(f"{large.store}: writing {large.few:,} and {large.many:,} records")
    sides = ((few, large.few), (many, large.many))
    for side, size in sides:
        side.fill(0, size)
        asyncio.run(_check(side, size))
    for number in range(pace.rounds + 1):
        progress(f"{large.store}: round {number + 1} of {pace.rounds + 1}")
        for side, size in sides if number % 2 else sides[::-1]:
            for job in JOBS:
                figures = asyncio.run(_turn(side, job, size, pace.seconds * LONGER))
                if number:  # the first round warms up
                    measured = large.jobs.setdefault((job, size), Measured())
                    for taken, figure in zip((measured.p50, measured.p99, measured.cpu), figures, strict=True):
                        taken.append(figure)
    _sweep(many, large, pace, progress)
    return large


def _sweep(many: Full, large: Large, pace: Pace, progress: Callable[[str], object]) -> None:
    """Quiet, swept, and quiet again: what changes on the machine meanwhile is so on both sides."""
    seconds = pace.seconds * pace.rounds * LONGER * 3
    progress(f"{large.store}: claims while nothing expires")
    large.quiet += asyncio.run(_claims(many, seconds / 2))
    progress(f"{large.store}: claims while records expire and are swept")
    large.expired = int(EXPIRIES * seconds)
    many.expire(large.many, large.expired, EXPIRIES, delay=0.0)
    before = many.removing(), perf_counter()
    large.swept += asyncio.run(_claims(many, seconds, sweep=True))
    large.removing = (many.removing() - before[0]) / (perf_counter() - before[1])
    large.left = many.left()
    progress(f"{large.store}: claims while nothing expires")
    large.quiet += asyncio.run(_claims(many, seconds / 2))


async def _check(side: Full, size: int) -> None:
    """What was written is what the store reads: a copy that it could not use would be cheap to measure."""
    store = side.store()
    try:
        for number in (0, size // 2, size - 1):
            record = await store.execute(Lookup(id_of(number)))
            if record is None or record.state is not State.DONE or record.snapshot != SNAPSHOT:
                raise RuntimeError(f"{side.name}: record {number} of {size} is not as it was written: {record}")
    finally:
        await store.close()


async def _turn(side: Full, job: str, size: int, seconds: float) -> tuple[float, float, float]:
    """Callers that do nothing else: p50, p99 and CPU of an operation, in µs."""
    store = side.store()
    try:
        call = _first(store) if job == JOBS[0] else _replay(store, size)
        await call()  # opens the connection
        before = side.cpu() + process_time()
        taken: list[float] = []
        end = perf_counter() + seconds

        async def caller() -> None:
            while (began := perf_counter()) < end:
                await call()
                taken.append(perf_counter() - began)

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        used = side.cpu() + process_time() - before
    finally:
        await store.close()
    return percentile(taken, 50) * 1e6, percentile(taken, 99) * 1e6, used / len(taken) * 1e6


async def _claims(side: Full, seconds: float, *, sweep: bool = False) -> list[float]:
    """Claims at a steady rate, each completed afterwards; how long each claim took."""
    store = side.store()
    taken: list[float] = []
    start = perf_counter()

    async def caller(number: int) -> None:
        at = start + number / CLAIMS
        while at < start + seconds:
            await asyncio.sleep(max(0.0, at - perf_counter()))
            claim = claim_of(os.urandom(16))
            began = perf_counter()
            claimed = await store.execute(claim)
            taken.append(perf_counter() - began)
            assert isinstance(claimed, Claimed)
            assert await store.execute(Complete(claim.id, claimed.token, SNAPSHOT, 86400.0))
            at += CALLERS / CLAIMS

    async def sweeper() -> None:
        while True:
            swept = await store.execute(Sweep(SWEEP_LIMIT))
            if swept.removed + swept.unknown < SWEEP_LIMIT:
                await asyncio.sleep(SWEEP_EVERY)

    await store.execute(Lookup(os.urandom(16)))  # opens the connection
    sweeping = asyncio.create_task(sweeper()) if sweep else None
    try:
        await asyncio.gather(*map(caller, range(CALLERS)))
        if sweeping is not None:
            await asyncio.sleep(2 * SWEEP_EVERY)  # the last ones expire when the claims end
            if sweeping.done():
                sweeping.result()
    finally:
        if sweeping is not None:
            sweeping.cancel()
            await asyncio.gather(sweeping, return_exceptions=True)
        await store.close()
    return taken


def _first(store: AsyncStore) -> Callable[[], Awaitable[None]]:
    async def first() -> None:
        claim = claim_of(os.urandom(16))
        claimed = await store.execute(claim)
        assert isinstance(claimed, Claimed)
        assert await store.execute(Complete(claim.id, claimed.token, SNAPSHOT, 86400.0))

    return first


def _replay(store: AsyncStore, size: int) -> Callable[[], Awaitable[None]]:
    """Any of all records, so that none of them is where it was needed a moment ago."""

    async def replay() -> None:
        found: Claimed | Existing = await store.execute(claim_of(id_of(random.randrange(size))))
        assert isinstance(found, Existing)

    return replay


def percentile(taken: Sequence[float], percent: float) -> float:
    """The value that so many percent of them do not exceed."""
    ordered = sorted(taken)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
