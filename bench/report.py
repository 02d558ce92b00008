"""The tables that people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.aims import Verdict
from bench.contest import Match, Standing
from bench.memory import Cost

__all__ = ["text"]


def text(
    environment: Mapping[str, Any],
    costs: Sequence[Cost],
    matches: Iterable[Match],
    verdicts: Sequence[Verdict],
    notes: Sequence[str],
) -> str:
    parts = [_environment(environment)]
    if costs:
        parts.append(_overhead(costs))
    parts += [_match(match) for match in matches]
    parts += notes
    parts.append(_verdicts(verdicts))
    return "\n\n".join(parts)


def _environment(found: Mapping[str, Any]) -> str:
    lines = ["Where"]
    lines.append(f"  {found['python']}, {found['system']}, {found['cores']} cores, load {found['load']} at the start")
    lines.append(f"  one fsync of the temporary folder: {found['fsync_us']} µs; SQLite {found['sqlite']}")
    known = ("python", "system", "cores", "load", "gil_switch_ms", "sqlite", "fsync_us")
    lines.append("  " + ", ".join(f"{name} {version or '–'}" for name, version in found.items() if name not in known))
    return "\n".join(lines)


def _overhead(costs: Sequence[Cost]) -> str:
    lines = ["Engine overhead: µs a call over the unprotected one, memory store, 1 caller, best of the rounds (GC on)"]
    lines.append(f"  {'':<24}{'sync first':>12}{'sync replay':>13}{'async first':>13}{'async replay':>14}")
    table: dict[str, dict[tuple[str, str], float]] = {}
    for cost in costs:
        table.setdefault(cost.name, {})[cost.shell, cost.job] = cost.microseconds
    for name, row in table.items():
        label = f"{name} (in all)" if name == "unprotected" else name
        cells = [row.get(where) for where in _COLUMNS]
        lines.append(
            f"  {label:<24}"
            + "".join(
                f"{'–' if cell is None else format(cell, '.2f'):>{width}}"
                for cell, width in zip(cells, (12, 13, 13, 14), strict=True)
            )
        )
    return "\n".join(lines)


_COLUMNS = (("sync", "first"), ("sync", "replay"), ("async", "first"), ("async", "replay"))


def _match(match: Match) -> str:
    standings = match.standings()
    compared = any(standing.times_bare is not None for standing in standings)
    peered = any(standing.times_peer is not None for standing in standings)
    lines = [match.title]
    head = f"  {'callers':<9}{'job':<8}{'':<46}{'op/s':>9}{'lowest – highest':>22}"
    lines.append(head + ("   × bare" if compared else "") + ("   × peer" if peered else ""))
    before: tuple[int, str] | None = None
    for standing in sorted(standings, key=lambda one: (one.callers, one.job)):
        here = (standing.callers, standing.job)
        lines.append(_line(standing, here != before, compared, peered))
        before = here
    lines += [f"  ({note})" for note in match.notes]
    return "\n".join(lines)


def _line(one: Standing, new: bool, compared: bool, peered: bool) -> str:
    callers, job = (str(one.callers), one.job) if new else ("", "")
    spread = f"{one.low:,.0f} – {one.high:,.0f}"
    line = f"  {callers:<9}{job:<8}{one.name:<46}{one.rate:>9,.0f}{spread:>22}"
    if compared:
        line += f"{_times(one.times_bare):>9}"
    if peered:
        line += f"{_times(one.times_peer):>9}"
    return line


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "Aims: none of them is about what was measured"
    width = max(len(verdict.aim) for verdict in verdicts)
    lines = ["Aims"]
    for verdict in verdicts:
        said = "met" if verdict.met else "NOT MET"
        lines.append(f"  {verdict.aim:<{width}}  {verdict.figure:7.2f} {verdict.unit:<3} {said}")
    return "\n".join(lines)
