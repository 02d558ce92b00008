"""Minutes: how often each event came on each route in one minute, and how long it took.

Durations are counted in buckets, four for each doubling, so a quantile is exact to about 10 %. Each writer has its own
row for a minute and a route, and replaces it by its newest numbers: a row that is written twice counts once. Readers
add the rows of all writers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import log2
from typing import Final, TypeAlias

from semel.core.values import value

MINUTE: Final = 60
MOST_ROUTES: Final = 1000
"""Routes of one minute. Further ones are counted together, as the route ``""``: a program may make up names."""
MOST_MINUTES: Final = 120
"""Minutes that a writer holds while its store takes none. Then the oldest go."""
MOST_ROWS: Final = 2000
"""Rows that are written at once."""
_LAST_BUCKET: Final = 160
"""The last bucket ends at twelve days. Longer durations are counted in it, too."""

RouteCounts: TypeAlias = tuple[int, str, list[tuple[str, float, float, dict[int, int]]]]
"""A minute, a route, and for each kind: how often, seconds in all, and the buckets."""
_Count: TypeAlias = list[int]
"""How often, microseconds in all, and then each bucket with its own count: flat, to be short in JSON."""


@value
class Minute:
    """How often one event came on one route in one minute, summed over all processes."""

    at: int
    """When it began, in seconds since 1970: a multiple of 60."""
    route: str
    kind: str
    """The name of the event, such as ``replayed``; ``dropped`` counts moments that were not kept."""
    count: int
    seconds: float
    """The sum of what they took; 0 for events that take no time."""
    buckets: Mapping[int, int]
    """How many of them took up to ``bucket_end(bucket)`` seconds, and longer than the bucket before."""


@value
class MinuteRow:
    """What one writer has counted for one route in one minute."""

    at: int
    route: str
    count: int
    """All events together. It only grows, so the greater one of two rows is the newer one."""
    kinds: str
    """The counts by kind, as JSON."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration."""
    micros = seconds * 1e6
    return 0 if micros <= 1.0 else min(int(log2(micros) * 4) + 1, _LAST_BUCKET)


def bucket_end(bucket: int) -> float:
    """Return the longest duration of a bucket, in seconds."""
    return float(2 ** (bucket / 4) / 1e6)


def quantile(minutes: Iterable[Minute], share: float) -> float | None:
    """Return the duration that this share of the events did not exceed, such as 0.99; None if none took time."""
    buckets: dict[int, int] = {}
    for minute in minutes:
        for bucket, count in minute.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + count
    left = share * sum(buckets.values())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0:
            return bucket_end(bucket) / 2**0.125  # the middle of the bucket
    return None


class MinuteCounter:
    """Counts the events of one writer, from any thread if the caller holds a lock."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, dict[str, tuple[list[float], dict[int, int]]]]] = {}
        self._changed: set[tuple[int, str]] = set()

    def add(self, at: float, route: str, kind: str, seconds: float | None) -> None:
        """Count an event."""
        minute = int(at) // MINUTE * MINUTE
        try:
            numbers, buckets = self._counts[minute][route][kind]
        except KeyError:
            if minute not in self._counts and len(self._counts) >= MOST_MINUTES:
                self._remove(min(self._counts))
            routes = self._counts.setdefault(minute, {})
            if route not in routes and len(routes) >= MOST_ROUTES:
                route = ""
            numbers, buckets = routes.setdefault(route, {}).setdefault(kind, ([0, 0.0], {}))
        numbers[0] += 1
        if seconds is not None:
            numbers[1] += seconds
            bucket = bucket_of(seconds)
            buckets[bucket] = buckets.get(bucket, 0) + 1
        self._changed.add((minute, route))

    def take_changed(self) -> list[RouteCounts]:
        """Return a copy of the counts that have changed since the last time, not too many at once. ``minute_row`` makes
        rows of them.
        """
        changed = [self._changed.pop() for _ in range(min(len(self._changed), MOST_ROWS))]
        return [
            (at, route, [(kind, count, took, b.copy()) for kind, ((count, took), b) in self._counts[at][route].items()])
            for at, route in changed
        ]

    def put_back(self, rows: Iterable[MinuteRow]) -> None:
        """Mark rows that could not be written as changed, so that they are written again."""
        self._changed.update((row.at, row.route) for row in rows if row.at in self._counts)

    def forget(self, before: float) -> None:
        """Forget the minutes that ended before that time and have not changed since."""
        waiting = {at for at, _ in self._changed}
        for at in [at for at in self._counts if at + MINUTE <= before and at not in waiting]:
            del self._counts[at]

    def _remove(self, at: int) -> None:
        self._changed -= {(at, route) for route in self._counts.pop(at)}


def minute_row(counts: RouteCounts) -> MinuteRow:
    """Return the row of a writer for one route and minute."""
    at, route, kinds = counts
    packed = {
        kind: [int(count), round(seconds * 1e6), *(number for pair in buckets.items() for number in pair)]
        for kind, count, seconds, buckets in kinds
    }
    total = sum(count[0] for count in packed.values())
    return MinuteRow(at, route, total, json.dumps(packed, separators=(",", ":")))


def sum_rows(rows: Iterable[tuple[int, str, str]]) -> tuple[Minute, ...]:
    """Add the rows of all writers: (at, route, kinds) of each. They are sorted by time, route and kind."""
    ordered = sorted(rows)
    # One long text is parsed in less time than many short ones.
    parsed = json.loads(f"[{','.join(kinds for _, _, kinds in ordered)}]")
    sums: dict[tuple[int, str, str], _Count] = {}
    for (at, route, _), kinds in zip(ordered, parsed, strict=True):
        for kind, count in kinds.items():
            known = sums.setdefault((at, route, kind), count)
            if known is not count:
                known[0] += count[0]
                known[1] += count[1]
                known += count[2:]  # a bucket may come twice now
    return tuple(_minute(*place, count) for place, count in sorted(sums.items()))


def _minute(at: int, route: str, kind: str, count: _Count) -> Minute:
    buckets = dict(zip(count[2::2], count[3::2], strict=True))
    if 2 * len(buckets) < len(count) - 2:  # of several writers
        buckets = dict.fromkeys(buckets, 0)
        for bucket, times in zip(count[2::2], count[3::2], strict=True):
            buckets[bucket] += times
    return Minute(at, route, kind, count[0], count[1] / 1e6, buckets)
