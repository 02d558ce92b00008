"""A trail in memory: what the Ops of a trail mean. The memory store is this, and tests compare other stores with it.

It knows no clock: it counts the age of a moment from the newest one.
"""

from __future__ import annotations

from bisect import insort
from itertools import islice
from typing import Any, Final

from semel.core.ops import Op
from semel.core.trail.minutes import MinuteRow, sum_rows
from semel.core.trail.moments import (
    FindLinked,
    ForgetTrail,
    KeepTrail,
    Moment,
    ReadMinutes,
    ReadRecent,
    ReadStories,
    when,
)

MOST_MOMENTS: Final = 100_000


class TrailBook:
    """Moments and minutes in memory. If there are too many moments, the oldest go. Not thread-safe."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        """All of them, by time."""
        self._numbers: set[bytes] = set()
        self._stories: dict[bytes, list[Moment]] = {}
        self._minutes: dict[tuple[int, bytes, str], MinuteRow] = {}

    def execute(self, op: Op[Any]) -> Any:
        """Execute an Op of ``TRAIL_OPS``."""
        match op:
            case KeepTrail():
                self._keep(op)
                return None
            case ForgetTrail():
                return self._forget(op)
            case FindLinked():
                linked = dict.fromkeys(each.id for each in self._moments if each.root == op.root)
                return tuple(islice(linked, op.limit))
            case ReadStories():
                found = [each for id in op.ids for each in self._stories.get(id, ())[: op.limit]]
                return tuple(sorted(found, key=when)[: op.limit])
            case ReadRecent():
                return self._recent(op)
            case ReadMinutes():
                rows = (row for row in self._minutes.values() if op.since <= row.at < op.until)
                return sum_rows((row.at, row.route, row.kinds) for row in rows)
        raise AssertionError(f"{op} is no Op of a trail")

    def _keep(self, op: KeepTrail) -> None:
        for moment in op.moments:
            if moment.number not in self._numbers:
                self._numbers.add(moment.number)
                insort(self._moments, moment, key=when)
                insort(self._stories.setdefault(moment.id, []), moment, key=when)
        for row in op.minutes:
            place = (row.at, op.writer, row.route)
            known = self._minutes.get(place)
            if known is None or known.count < row.count:
                self._minutes[place] = row
        self._remove(len(self._moments) - MOST_MOMENTS)

    def _forget(self, op: ForgetTrail) -> int:
        if not self._moments:
            return 0
        newest = self._moments[-1].at
        old = sum(1 for each in islice(self._moments, op.limit) if each.at < newest - op.older)
        self._remove(old)
        places = [place for place in self._minutes if place[0] < newest - op.older_minutes][: op.limit]
        for place in places:
            del self._minutes[place]
        return old + len(places)

    def _remove(self, count: int) -> None:
        for moment in self._moments[: max(0, count)]:
            self._numbers.discard(moment.number)
            story = self._stories[moment.id]
            story.remove(moment)
            if not story:
                del self._stories[moment.id]
        del self._moments[: max(0, count)]

    def _recent(self, op: ReadRecent) -> tuple[Moment, ...]:
        newest = (each for each in reversed(self._moments) if not op.kinds or each.kind in op.kinds)
        looked = islice(newest, op.look * max(1, len(op.kinds)))
        return tuple(islice((each for each in looked if op.route in (None, each.route)), op.limit))
