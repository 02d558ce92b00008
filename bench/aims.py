"""The aims, each judged by the figure of this run. They say what we want, not what we have: never bend them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.contest import Match
from bench.memory import Cost
from bench.sqlite import ONE_COMMIT_PER_OP

__all__ = ["Verdict", "judge"]

OVERHEAD: Final = {"sync": 15.0, "async": 25.0}
POSTGRES: Final = 0.8
SQLITE: Final = 5.0


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
        alone = {s.job: s.rate for s in match.standings() if s.name == ONE_COMMIT_PER_OP and s.callers == callers}
        for standing in match.standings():
            if standing.job != "first" or standing.callers != callers or standing.name != "Semel":
                continue
            ratio = standing.times_bare
            if ratio is None or match.store not in ("sqlite", "postgres"):
                continue
            if match.store == "postgres":
                aim, least = f"at least {POSTGRES:g}× two bare statements", POSTGRES
            else:
                # An Op is what the group commit shares: the same path, one commit for each. Beside it, the bare driver.
                aim, least = f"at least {SQLITE:g}× one commit per Op", SQLITE
                bare = f"{match.title}, {callers} callers: at least {SQLITE:g}× bare statements, one commit each"
                verdicts.append(Verdict(bare, ratio, "×", ratio >= least))
                ratio = standing.rate / alone["first"]
            verdicts.append(Verdict(f"{match.title}, {callers} callers: {aim}", ratio, "×", ratio >= least))
    return verdicts
