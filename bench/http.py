"""`python -m bench.http`: what protection costs an HTTP service, in process and over a socket, beside the peers.

It takes longer than the rest, so it is a command of its own. Exit code 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bench import environment, http_cost, http_services, http_wire, report
from bench.aims import Verdict, judge
from bench.contest import Match, Pace
from bench.http_cost import RequestCost

__all__ = ["Findings", "main", "measure"]

FULL = Pace(rounds=7, seconds=1.0, count=1000)
QUICK = Pace(rounds=3, seconds=1.0, count=300)
ON_REDIS = ("Starlette", "FastAPI")
"""Where the peers can keep their records in Redis."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    frameworks = tuple(options.framework or http_services.FRAMEWORKS)
    try:
        found = measure(
            QUICK if options.quick else FULL,
            frameworks,
            wire=not options.no_wire,
            redis=options.redis,
            progress=lambda what: print(what, file=sys.stderr),
        )
    except KeyboardInterrupt:
        print("stopped; nothing was left behind", file=sys.stderr)
        return 130
    print(json.dumps(found.as_json(), indent=2) if options.json else found.as_text())
    return 0


class Findings:
    """All that one run found."""

    def __init__(self) -> None:
        self.environment: dict[str, Any] = environment.describe()
        self.costs: list[RequestCost] = []
        self.matches: list[Match] = []
        self.notes: list[str] = []

    def verdicts(self) -> list[Verdict]:
        """Cheaper than each peer, framework by framework."""
        found = []
        for ours in self.costs:
            if ours.name != http_services.SEMEL or ours.over is None:
                continue
            where = f"{ours.framework}, in process, memory store, {ours.job}"
            for peer in self.costs:
                if peer.name in http_services.PEERS and (peer.framework, peer.job) == (ours.framework, ours.job):
                    times = ours.microseconds / peer.microseconds
                    found.append(Verdict(f"{where}: less than {peer.name}", times, "×", times < 1))
        return found + judge([], self.matches, http_wire.CONNECTIONS)

    def as_text(self) -> str:
        parts = [report.text(self.environment, [], self.matches, self.verdicts(), self.notes)]
        return "\n\n".join([_table(self.costs), *parts] if self.costs else parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "costs": [cost.as_json() for cost in self.costs],
            "matches": [
                {"title": match.title, "standings": [standing.as_json() for standing in match.standings()]}
                for match in self.matches
            ],
            "aims": [verdict.as_json() for verdict in self.verdicts()],
            "notes": self.notes,
        }


def measure(
    pace: Pace, frameworks: tuple[str, ...], *, wire: bool, redis: str | None, progress: Callable[[str], object]
) -> Findings:
    """``redis``: the URL of a database to fill, or "own": a server is started for the while; None: without."""
    found = Findings()
    found.costs = http_cost.costs(pace, frameworks, progress)
    if not wire:
        return found
    with ExitStack() as stack:
        try:
            found.matches += stack.enter_context(http_wire.matches(frameworks))
            here = _redis(stack, redis, found)
            if here is not None:
                chosen = [framework for framework in ON_REDIS if framework in frameworks]
                found.matches += stack.enter_context(http_wire.matches(chosen, here))
        except http_wire.WrkMissing as missing:
            found.notes.append(f"nothing was measured over a socket: {missing}")
        for match in found.matches:
            match.play(pace, progress)
    return found


def _redis(stack: ExitStack, redis: str | None, found: Findings) -> str | None:
    if redis != "own":
        return redis
    from tests.servers import RedisServer, ServerMissing

    try:
        return stack.enter_context(RedisServer()).url
    except ServerMissing as missing:
        found.notes.append(f"Redis was not measured: {missing}")
        return None


def _table(costs: Sequence[RequestCost]) -> str:
    lines = ["HTTP in process: µs of CPU a request, 1 caller, memory stores, median of the rounds (GC on)"]
    lines.append(f"  {'':<12}{'job':<8}{'':<26}{'in all':>9}{'over unprotected':>18}{'× unprotected':>15}")
    bare = {(cost.framework, cost.job): cost for cost in costs if cost.name == http_services.UNPROTECTED}
    before: tuple[str, str] | None = None
    for cost in sorted(costs, key=lambda one: (http_services.FRAMEWORKS.index(one.framework), one.job)):
        here = (cost.framework, cost.job)
        framework, kind = here if here != before else ("", "")
        over = "–" if cost.over is None else f"{cost.over:.1f}"
        times = cost.microseconds / bare[here].microseconds
        lines.append(f"  {framework:<12}{kind:<8}{cost.name:<26}{cost.microseconds:>9.1f}{over:>18}{times:>15.2f}")
        before = here
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.http", description="Semel over HTTP beside its peers.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rough figures")
    parser.add_argument("--no-wire", action="store_true", help="in process only: no servers, no wrk")
    parser.add_argument("--framework", action="append", choices=http_services.FRAMEWORKS, help="may be given again")
    parser.add_argument(
        "--redis", nargs="?", const="own", help="also on Redis: a database's URL, or a server of our own"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
