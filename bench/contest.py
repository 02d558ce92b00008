"""A match: contestants that do the same job take turns, round after round, so that what disturbs the machine disturbs
all of them. A ratio is taken within each round; what is reported is the median of the rounds, and the spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.turns import Turn

__all__ = ["Contestant", "Match", "Pace", "Standing"]

BARE_FIRST: Final = "two bare statements"
BARE_REPLAY: Final = "one bare select"


@dataclass(frozen=True)
class Pace:
    """How long and how often. ``count`` is for what is measured in calls instead of time."""

    rounds: int = 5
    seconds: float = 0.3
    count: int = 2000


QUICK: Final = Pace(rounds=3, seconds=0.15, count=500)


@dataclass
class Contestant:
    """Who does what: ``name`` does ``job`` ("first" or "replay") for so many callers."""

    name: str
    job: str
    callers: int
    turn: Turn
    yardstick: bool = False
    """Whether the others at this job are measured against it. With several, the fastest of a round counts."""
    peer: bool = False
    """Another library, against which Semel is measured as well."""
    rates: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Standing:
    """What came out for one contestant: operations per second, and how they compare."""

    name: str
    job: str
    callers: int
    rate: float
    low: float
    high: float
    yardstick: bool
    times_bare: float | None
    times_peer: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "contestant": self.name, "job": self.job, "callers": self.callers,
            "per_second": round(self.rate, 1), "low": round(self.low, 1), "high": round(self.high, 1),
            "times_bare": self.times_bare and round(self.times_bare, 3),
            "times_peer": self.times_peer and round(self.times_peer, 3),
        }  # fmt: skip


class Match:
    """The contestants of one store."""

    def __init__(self, store: str, title: str, contestants: Sequence[Contestant], notes: Sequence[str] = ()) -> None:
        self.store = store
        self.title = title
        self.contestants = list(contestants)
        self.notes = list(notes)

    def play(self, pace: Pace, progress: Callable[[str], object]) -> None:
        """One short turn each to warm up, then the rounds, each begun by another contestant."""
        progress(f"{self.title}: warming up")
        for contestant in self.contestants:
            contestant.turn(pace.seconds / 3)
        for number in range(pace.rounds):
            progress(f"{self.title}: round {number + 1} of {pace.rounds}")
            start = number * len(self.contestants) // pace.rounds
            for contestant in self.contestants[start:] + self.contestants[:start]:
                contestant.rates.append(contestant.turn(pace.seconds))
        for contestant in self.contestants:
            contestant.turn = _over  # lets go of its store: a full heap would slow down those who come after

    def standings(self) -> list[Standing]:
        return [self._standing(contestant) for contestant in self.contestants]

    def _standing(self, one: Contestant) -> Standing:
        rivals = [rival for rival in self.contestants if (rival.job, rival.callers) == (one.job, one.callers)]
        return Standing(
            one.name,
            one.job,
            one.callers,
            statistics.median(one.rates),
            min(one.rates),
            max(one.rates),
            one.yardstick,
            _ratio(one, [rival for rival in rivals if rival.yardstick]),
            None if one.peer or one.yardstick else _ratio(one, [rival for rival in rivals if rival.peer]),
        )


def _over(seconds: float) -> float:
    raise RuntimeError("the match is over")


def _ratio(one: Contestant, against: Sequence[Contestant]) -> float | None:
    if not against:
        return None
    return statistics.median(
        rate / max(rival.rates[number] for rival in against) for number, rate in enumerate(one.rates)
    )
