"""From counted minutes to the figures of the overview: asked, ran, absorbed, refused, and how long it took. Pure.

A call ends in one of three ways: its handler ran, it was a duplicate and was absorbed, or it was refused. So what was
asked for is the sum of the three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from semel.trail import Minute, quantile

MINUTES: Final = 60
YOUNG: Final = 15
_SERIES: Final = {
    "ran": ("started", "taken_over", "applied"),
    "absorbed": ("absorbed", "skipped"),
    "refused": ("refused",),
}
_NAMES: Final = {
    **dict.fromkeys(("started", "taken_over", "applied", "skipped", "dropped")),
    **dict.fromkeys(("replayed", "turned_away"), "absorbed"),
    **dict.fromkeys(("mismatched", "went_unknown", "expired", "over_quota"), "refused"),
    **dict.fromkeys(("key_missing", "key_invalid", "body_too_large"), "refused"),
}
"""Under which name an event is counted; None: under its own."""
_TIMED: Final = {
    **dict.fromkeys(("completed", "prepared", "failure_remembered", "applied"), "first"),
    **dict.fromkeys(("replayed", "skipped"), "replay"),
}
MOST_OPERATIONS: Final = 100
"""Rows of the table. Those that are asked for most are shown."""


def start_of_hour(now: float) -> int:
    """The beginning of the first of sixty minutes, the last of which is the present one."""
    return int(now) // 60 * 60 - (MINUTES - 1) * 60


class HourCounts:
    """What was counted on each route: calls by the minute, and durations by the bucket.

    Minutes can be added, and taken away again when they are over or have been counted anew: so an hour is never added
    up at once.
    """

    def __init__(self, minutes: Iterable[Minute] = ()) -> None:
        self.routes: dict[str, dict[str, dict[int, int]]] = {}
        for minute in minutes:
            if minute.kind in _NAMES:
                self._count(minute.route, _NAMES[minute.kind] or minute.kind, {minute.at: minute.count}, 1)
            if minute.kind in _TIMED:
                self._count(minute.route, _TIMED[minute.kind], minute.buckets, 1)

    def add(self, other: HourCounts) -> None:
        """Add what another one has counted."""
        for route, names in other.routes.items():
            for name, counts in names.items():
                self._count(route, name, counts, 1)

    def remove(self, other: HourCounts) -> None:
        """Take away what was added."""
        for route, names in other.routes.items():
            for name, counts in names.items():
                self._count(route, name, counts, -1)
                left = {at: count for at, count in self.routes[route][name].items() if count}
                self.routes[route][name] = left
            self.routes[route] = {name: counts for name, counts in self.routes[route].items() if counts}
            if not self.routes[route]:
                del self.routes[route]

    def _count(self, route: str, name: str, counts: Mapping[int, int], sign: int) -> None:
        known = self.routes.setdefault(route, {}).setdefault(name, {})
        for at, count in counts.items():
            known[at] = known.get(at, 0) + sign * count


def summarize(counted: Iterable[tuple[str, HourCounts]], now: float) -> dict[str, Any]:
    """Return the totals and a row for each operation, from what each store has counted in the last hour."""
    since = start_of_hour(now)
    by_store: dict[str, HourCounts] = {}
    for store, tally in counted:
        by_store.setdefault(store, HourCounts()).add(tally)
    dropped = sum(sum(tally.routes.get("", {}).get("dropped", {}).values()) for tally in by_store.values())
    rows = [
        _row(store, route, names, since, now)
        for store, tally in by_store.items()
        for route, names in tally.routes.items()
        if route
    ]
    rows = sorted((row for row in rows if row["asked"]), key=lambda row: (-row["asked"], row["operation"]))
    totals = {name: sum(row[name] for row in rows) for name in ("asked", "ran", "absorbed", "refused")}
    series = {
        name: [sum(column) for column in zip(*(row["series"][name] for row in rows), strict=True)] or [0] * MINUTES
        for name in ("ran", "absorbed", "refused")
    }
    return {
        "totals": totals,
        "series": series,
        "minutes": _minutes_to_show(series),
        "peak": max(map(sum, zip(*series.values(), strict=True))),
        "operations": rows[:MOST_OPERATIONS],
        "more_operations": max(0, len(rows) - MOST_OPERATIONS),
        "dropped": dropped,
    }


def _minutes_to_show(series: dict[str, list[int]]) -> int:
    """Return how many minutes the chart shows: fewer while the history is young, so that its bars can be seen."""
    if any(any(values[:-YOUNG]) for values in series.values()):
        return MINUTES
    return YOUNG


def _row(store: str, route: str, counts: Mapping[str, Mapping[int, int]], since: int, now: float) -> dict[str, Any]:
    series = {name: _series([counts.get(part, {}) for part in parts], since) for name, parts in _SERIES.items()}
    ran, absorbed, refused = (sum(values) for values in series.values())
    asked = ran + absorbed + refused
    quiet = next((at for at, calls in enumerate(zip(*series.values(), strict=True)) if any(calls)), 0)
    return {
        "store": store,
        "operation": route,
        "message": "applied" in counts or "skipped" in counts,
        "asked": asked,
        "ran": ran,
        "absorbed": absorbed,
        "refused": refused,
        "rate": asked / max(1.0, now - since - 60 * quiet),
        "hit_rate": absorbed / asked if asked else None,
        "first": _latency(counts.get("first", {})),
        "replay": _latency(counts.get("replay", {})),
        "series": series,
    }


def _series(parts: Iterable[Mapping[int, int]], since: int) -> list[int]:
    series = [0] * MINUTES
    for counts in parts:
        for at, count in counts.items():
            if 0 <= at - since < MINUTES * 60:
                series[(at - since) // 60] += count
    return series


def _latency(buckets: Mapping[int, int]) -> dict[str, float | None]:
    timed = [Minute(0, "", "", 0, 0.0, buckets)]
    return {"p50": quantile(timed, 0.5), "p99": quantile(timed, 0.99)}


def new_keys_per_second(counted: Iterable[HourCounts], now: float) -> float | None:
    """Return how many new keys came each second, in the minutes that were counted; None if there were none."""
    routes = (names for tally in counted for names in tally.routes.values())
    started = [item for names in routes for item in names.get("started", {}).items()]
    if not started:
        return None
    return sum(count for _, count in started) / max(1.0, now - min(at for at, _ in started))
