"""The aims, each judged by the figure of this run. They say what we want, not what we have: never bend them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench import http_services
from bench.contest import Match
from bench.http_wire import WireMatch
from bench.large import EXPIRIES, JOBS, Large
from bench.memory import Cost
from bench.redis import STORE_ALONE
from bench.sqlite import ONE_COMMIT_PER_OP
from bench.transactional import IN_THE_CALLERS, ONE_STATEMENT, OPENED_BY_SEMEL

__all__ = ["Verdict", "judge", "judge_large"]

OVERHEAD: Final = {"sync": 15.0, "async": 25.0}
POSTGRES: Final = 0.8
SQLITE: Final = 5.0
TRANSACTIONAL: Final = {ONE_STATEMENT: 1.1, OPENED_BY_SEMEL: 0.75, IN_THE_CALLERS: 0.65}
REPLAYED: Final = {OPENED_BY_SEMEL: 1.2}
REDIS: Final = 4.0
HTTP: Final = {
    ("Starlette", "first"): 0.5,
    ("Starlette", "replay"): 1.1,
    ("FastAPI", "first"): 0.7,
    ("FastAPI", "replay"): 2.0,
}
"""An empty route's unprotected rate, and what is left of it on Redis."""
LARGE: Final = 1.5
SWEPT: Final = 2.0


@dataclass(frozen=True)
class Verdict:
    """One aim and what came of it."""

    aim: str
    figure: float
    unit: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        return {"aim": self.aim, "figure": round(self.figure, 2), "unit": self.unit, "met": self.met}


def judge(costs: Sequence[Cost], matches: Iterable[Match], callers: int) -> list[Verdict]:
    verdicts = [
        Verdict(
            f"engine overhead, memory store, {cost.shell}, {cost.job}: under {OVERHEAD[cost.shell]:g} µs a call",
            cost.microseconds,
            "µs",
            cost.microseconds < OVERHEAD[cost.shell],
        )
        for cost in costs
        if cost.name == "Semel"
    ]
    for match in matches:
        if isinstance(match, WireMatch):
            verdicts += _over_http(match)
            continue
        alone = {s.job: s.rate for s in match.standings() if s.name == ONE_COMMIT_PER_OP and s.callers == callers}
        for standing in match.standings():
            floors = TRANSACTIONAL if standing.job == "first" else REPLAYED
            if match.store == "transactional" and standing.name in floors and standing.times_bare is not None:
                floor = floors[standing.name]
                told = f"{match.title}, {standing.name}, {standing.job}: at least {floor:g}× unprotected"
                verdicts.append(Verdict(told, standing.times_bare, "×", standing.times_bare >= floor))
                continue
            judged = STORE_ALONE if match.store == "redis" else "Semel"
            if standing.job != "first" or standing.callers != callers or standing.name != judged:
                continue
            ratio = standing.times_bare
            if ratio is None or match.store not in ("sqlite", "postgres", "redis"):
                continue
            if match.store == "postgres":
                aim, least = f"at least {POSTGRES:g}× two bare statements", POSTGRES
            elif match.store == "redis":
                aim, least = f"claim and complete, at least {REDIS:g}× the same two commands by redis.asyncio", REDIS
            else:
                # An Op is what the group commit shares: the same path, one commit for each. Beside it, the bare driver.
                aim, least = f"at least {SQLITE:g}× one commit per Op", SQLITE
                bare = f"{match.title}, {callers} callers: at least {SQLITE:g}× bare statements, one commit each"
                verdicts.append(Verdict(bare, ratio, "×", ratio >= least))
                ratio = standing.rate / alone["first"]
            verdicts.append(Verdict(f"{match.title}, {callers} callers: {aim}", ratio, "×", ratio >= least))
    return verdicts


def _over_http(match: WireMatch) -> list[Verdict]:
    """By the clock, for both ways to declare a route: only a claim at the edge can spare a replay the framework."""
    found = []
    for standing in match.standings():
        least = HTTP.get((match.framework, standing.job))
        ours = standing.name in (http_services.SEMEL, http_services.EDGE)
        if match.judged and ours and least is not None and standing.times_bare is not None:
            told = f"{match.framework} on Redis, {standing.name}, {standing.job}: at least {least:g}× unprotected"
            found.append(Verdict(told, standing.times_bare, "×", standing.times_bare >= least))
    return found


def judge_large(found: Iterable[Large]) -> list[Verdict]:
    verdicts = []
    for large in found:
        for job in JOBS:
            for told, name in (("median latency", "p50"), ("CPU", "cpu")):
                times = large.times(job, name)
                aim = f"{large.store}, {large.many:,} records, {job}: {told} at most {LARGE:g}× that of {large.few:,}"
                verdicts.append(Verdict(aim, times, "×", times <= LARGE))
        times = large.sweep_times()
        aim = f"{large.store}, {EXPIRIES:g} expiries a second: the claim's p99 at most {SWEPT:g}× that of a quiet store"
        verdicts.append(Verdict(aim, times, "×", times <= SWEPT))
        if large.sweeps:
            aim = f"{large.store}, {EXPIRIES:g} expiries a second: at the end no more than a second's worth is left"
            verdicts.append(Verdict(aim, large.left, "", large.left <= EXPIRIES))
    return verdicts
