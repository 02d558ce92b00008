"""`python -m bench`: measure, print the tables, judge the aims. Exit code 0 whatever the figures are."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from bench import (
    aims,
    client,
    environment,
    http_wire,
    inbox,
    large,
    memory,
    outbox,
    postgres,
    redis,
    relay,
    report,
    sqlite,
    transactional,
)
from bench.contest import QUICK, Match, Pace

CALLERS = 32
STORES = (
    "memory",
    "sqlite",
    "postgres",
    "transactional",
    "outbox",
    "relay",
    "kafka",
    "inbox",
    "redis",
    "http",
    "client",
)
ON_REQUEST = ("large",)
"""What takes minutes, and is measured when it is asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    pace = QUICK if options.quick else Pace()
    only = options.only or list(STORES)
    try:
        found = measure(pace, only, callers=CALLERS, url=options.url, records=options.records, progress=_Progress())
    except KeyboardInterrupt:
        print("stopped; nothing was left behind", file=sys.stderr)
        return 130
    print(json.dumps(found.as_json(), indent=2) if options.json else found.as_text())
    return 0


class Findings:
    """All that one run found."""

    def __init__(self, callers: int) -> None:
        self.callers = callers
        self.environment: dict[str, Any] = {}
        self.costs: list[memory.Cost] = []
        self.matches: list[Match] = []
        self.large: list[large.Large] = []
        self.notes: list[str] = []

    def verdicts(self) -> list[aims.Verdict]:
        return aims.judge(self.costs, self.matches, self.callers) + aims.judge_large(self.large)

    def as_text(self) -> str:
        told = [*(one.as_text() for one in self.large), *self.notes]
        return report.text(self.environment, self.costs, self.matches, self.verdicts(), told)

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "overhead": [cost.as_json() for cost in self.costs],
            "matches": [
                {
                    "store": match.store,
                    "title": match.title,
                    "standings": [standing.as_json() for standing in match.standings()],
                    "notes": match.notes,
                }
                for match in self.matches
            ],
            "large": [one.as_json() for one in self.large],
            "aims": [verdict.as_json() for verdict in self.verdicts()],
            "notes": self.notes,
        }


def measure(
    pace: Pace,
    only: Sequence[str],
    *,
    callers: int,
    url: str | None,
    records: int = large.RECORDS,
    progress: Any,
) -> Findings:
    """Measure the stores that are named. Without a URL a PostgreSQL server is started for the while.

    ``records``: how many a large store has.
    """
    found = Findings(callers)
    found.environment = environment.describe()
    if "memory" in only:
        found.costs = memory.overhead(pace, progress)
        with memory.matches(callers) as matches:
            _play(found, matches, pace, progress)
    if "sqlite" in only:
        with sqlite.matches(callers) as matches:
            _play(found, matches, pace, progress)
    if "postgres" in only:
        with ExitStack() as stack:
            here = url or _server(stack, found, progress)
            if here is not None:
                _play(found, stack.enter_context(postgres.matches(here, callers)), pace, progress)
    if "transactional" in only:
        with ExitStack() as stack:
            here = url or _server(stack, found, progress)
            if here is not None:
                _play(found, stack.enter_context(transactional.matches(here)), pace, progress)
    if "outbox" in only:
        with ExitStack() as stack:
            here = url or _server(stack, found, progress)
            if here is not None:
                _play(found, stack.enter_context(outbox.matches(here)), pace, progress)
    if "inbox" in only:
        with ExitStack() as stack:
            here = url or _server(stack, found, progress)
            if here is not None:
                _play(found, stack.enter_context(inbox.matches(here)), pace, progress)
    if "relay" in only:
        with ExitStack() as stack:
            here = url or _server(stack, found, progress)
            if here is not None:
                _play(found, stack.enter_context(relay.matches(here)), pace, progress)
    if "kafka" in only:
        with ExitStack() as stack:
            here = url or _server(stack, found, progress)
            topic = _kafka(stack, found, progress)
            if here is not None and topic is not None:
                _play(found, stack.enter_context(relay.kafka_matches(here, topic)), pace, progress)
    if "redis" in only:
        with ExitStack() as stack:
            there = _redis(stack, found, progress)
            if there is not None:
                _play(found, stack.enter_context(redis.matches(there, callers)), pace, progress)
    if "http" in only:
        with ExitStack() as stack:
            there = _redis(stack, found, progress)
            try:
                if there is not None:
                    routes = stack.enter_context(http_wire.matches(("Starlette", "FastAPI"), there))
                    _play(found, routes, pace, progress)
            except http_wire.WrkMissing as missing:
                found.notes.append(f"HTTP was not measured: {missing}")
    if "client" in only:
        with client.matches(callers) as matches:
            _play(found, matches, pace, progress)
    if "large" in only:
        found.large, missing_servers = large.measure(pace, records, progress)
        found.notes += missing_servers
    progress("")
    return found


def _play(found: Findings, matches: Sequence[Match], pace: Pace, progress: Any) -> None:
    for match in matches:
        match.play(pace, progress)
        found.matches.append(match)


def _server(stack: ExitStack, found: Findings, progress: Any) -> str | None:
    from tests.servers import PostgresServer, ServerMissing

    progress("PostgreSQL: starting a server")
    try:
        return stack.enter_context(PostgresServer()).url
    except ServerMissing as missing:
        found.notes.append(f"PostgreSQL was not measured: {missing}")
        return None


def _redis(stack: ExitStack, found: Findings, progress: Any) -> str | None:
    from tests.servers import RedisServer, ServerMissing

    progress("Redis: starting a server")
    try:
        return stack.enter_context(RedisServer()).url
    except ServerMissing as missing:
        found.notes.append(f"Redis was not measured: {missing}")
        return None


def _kafka(stack: ExitStack, found: Findings, progress: Any) -> str | None:
    from tests.servers import KafkaServer, ServerMissing

    progress("Kafka: starting a server")
    try:
        return stack.enter_context(KafkaServer()).topic()
    except ServerMissing as missing:
        found.notes.append(f"Kafka was not measured: {missing}")
        return None


class _Progress:
    """What is being done, on stderr; one line that changes on a terminal."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._tty = sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        if self._tty:
            sys.stderr.write(f"\r\033[K{time.monotonic() - self._began:5.0f} s  {what}" if what else "\r\033[K")
        elif what:
            sys.stderr.write(f"{time.monotonic() - self._began:5.0f} s  {what}\n")
        sys.stderr.flush()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Semel beside bare drivers and its peer.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: half a minute, rough figures")
    parser.add_argument("--only", action="append", choices=STORES + ON_REQUEST, help="one store; may be given again")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--records", type=int, default=large.RECORDS, help="of a large store, which --only large fills")
    parser.add_argument("--url", help="a PostgreSQL database to fill, instead of a server of our own")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
