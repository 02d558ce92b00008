"""From counted minutes to the figures of the overview: asked, ran, absorbed, refused, and how long it took. Pure.

A call ends in one of three ways: its handler ran, it was a duplicate and was absorbed, or it was refused. So what was
asked for is the sum of the three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

from semel.trail import Minute, quantile

HOUR: Final = 3600
MINUTES: Final = 60
YOUNG: Final = 15
RAN: Final = frozenset({"started", "taken_over"})
ABSORBED: Final = frozenset({"replayed", "turned_away"})
REFUSED: Final = frozenset(
    {"mismatched", "went_unknown", "expired", "over_quota", "key_missing", "key_invalid", "body_too_large"}
)
FIRST: Final = frozenset({"completed", "prepared", "failure_remembered"})
REPLAY: Final = frozenset({"replayed"})
APPLIED: Final = frozenset({"applied", "skipped"})
MOST_OPERATIONS: Final = 100
"""Rows of the table. Those that are asked for most are shown."""


def start_of_hour(now: float) -> int:
    """The beginning of the first of sixty minutes, the last of which is the present one."""
    return int(now) // 60 * 60 - (MINUTES - 1) * 60


def summarize(counted: Iterable[tuple[str, Minute]], now: float) -> dict[str, Any]:
    """Return the totals and a row for each operation, from (store, minute) of the last hour."""
    since = start_of_hour(now)
    by_route: dict[tuple[str, str], list[Minute]] = defaultdict(list)
    dropped = 0
    for store, minute in counted:
        if minute.kind == "dropped":
            dropped += minute.count
        elif since <= minute.at <= now and minute.route:
            by_route[store, minute.route].append(minute)
    rows = [_row(store, route, minutes, since, now) for (store, route), minutes in by_route.items()]
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
        "operations": rows[:MOST_OPERATIONS],
        "more_operations": max(0, len(rows) - MOST_OPERATIONS),
        "dropped": dropped,
    }


def _minutes_to_show(series: dict[str, list[int]]) -> int:
    """Return how many minutes the chart shows: fewer while the history is young, so that its bars can be seen."""
    if any(any(values[:-YOUNG]) for values in series.values()):
        return MINUTES
    return YOUNG


def _row(store: str, route: str, minutes: list[Minute], since: int, now: float) -> dict[str, Any]:
    series = {
        name: _series(minutes, kinds, since)
        for name, kinds in (("ran", RAN), ("absorbed", ABSORBED), ("refused", REFUSED))
    }
    ran, absorbed, refused = (sum(series[name]) for name in ("ran", "absorbed", "refused"))
    asked = ran + absorbed + refused
    first_minute = min(minute.at for minute in minutes)
    return {
        "store": store,
        "operation": route,
        "asked": asked,
        "ran": ran,
        "absorbed": absorbed,
        "refused": refused,
        "rate": asked / max(1.0, now - first_minute),
        "hit_rate": absorbed / asked if asked else None,
        "first": _latency(minutes, FIRST),
        "replay": _latency(minutes, REPLAY),
        "series": series,
    }


def _series(minutes: list[Minute], kinds: frozenset[str], since: int) -> list[int]:
    series = [0] * MINUTES
    for minute in minutes:
        at = (minute.at - since) // 60
        if minute.kind in kinds and 0 <= at < MINUTES:
            series[at] += minute.count
    return series


def _latency(minutes: list[Minute], kinds: frozenset[str]) -> dict[str, float | None]:
    timed = [minute for minute in minutes if minute.kind in kinds]
    return {"p50": quantile(timed, 0.5), "p99": quantile(timed, 0.99)}


def first_runs_per_second(counted: Iterable[Minute], now: float) -> float | None:
    """Return how many new keys came each second, in the minutes that were counted; None if there were none."""
    started = [minute for minute in counted if minute.kind == "started"]
    if not started:
        return None
    return sum(minute.count for minute in started) / max(1.0, now - min(minute.at for minute in started))
