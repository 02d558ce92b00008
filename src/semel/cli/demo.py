"""``semel demo``: a retry storm to watch, and a verdict from evidence that Semel did not write."""

from __future__ import annotations

import argparse

from semel.cli.commands import FAILED, OK, Command, add_store, port_number, stop_on_signals
from semel.errors import ConfigurationError, StoreURLError

PORT = 8080
MODES = ("leased", "transactional", "steps")


def configure(parser: argparse.ArgumentParser) -> None:
    add_store(parser, None, "where Semel keeps its records (default: SQLite in a temporary folder)")
    parser.add_argument(
        "--port",
        type=port_number,
        metavar="N",
        help="the port of the service on 127.0.0.1; 0 takes a free one (default: 8080; with --once --http a free one)",
    )
    parser.add_argument("--no-storm", action="store_true", help="only serve; not with --once or --direct")
    parser.add_argument(
        "--once",
        action="store_true",
        help="one storm and its verdict; exit code 1 if that is not clean. Without --http, directly on the store",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--http", action="store_true", help="storms over HTTP, against the service; without --once that is the default"
    )
    way.add_argument(
        "--direct",
        action="store_true",
        help="storms directly on the store, without a service; with --once that is the default",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        help="how a payment is made to happen once; directly on the store, not with --http. transactional: in SQLite, "
        "PostgreSQL, MySQL and MariaDB (default: leased)",
    )
    parser.add_argument(
        "--seconds", type=_positive, default=8.0, metavar="N", help="how long a storm lasts (default: 8)"
    )
    parser.add_argument("--workers", type=_count, metavar="N", help="worker processes (default: 4; of the service 3)")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="repeat the random choices of an earlier run; the scheduling of the machine still differs",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="the verdict as one JSON object over all storms; progress goes to standard error",
    )


def run(args: argparse.Namespace) -> int:
    if args.store and _in_memory(args.store):
        raise StoreURLError("the demo's workers are processes, and cannot share a store in memory")
    if args.mode and (args.http or args.no_storm):
        raise ConfigurationError("--mode is for storms straight on the store: leave out --http and --no-storm")
    if args.no_storm and (args.once or args.direct):
        raise ConfigurationError("--no-storm only serves: leave it out, or leave out --once and --direct")
    from semel.demo.run import run_direct, run_http

    direct = args.mode or args.direct or (args.once and not args.http)
    if direct and args.port is not None:
        raise ConfigurationError("--port is for the service, and straight on the store there is none: leave it out")
    if args.port is None:
        args.port = 0 if args.once else PORT
    with stop_on_signals() as stopping:
        return OK if (run_direct if direct else run_http)(args, stopping) else FAILED


def _in_memory(url: str) -> bool:
    """Whether the records would be in the memory of one process; of a tiered store, those of its primary."""
    from semel.stores.urls import sqlite_path, tiers

    if url.startswith("tiered:"):
        url = tiers(url)[0]
    scheme = url.partition(":")[0]
    return scheme == "memory" or (scheme == "sqlite" and sqlite_path(url) == ":memory:")


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return number


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 64")
    return number


DEMO = Command(
    "demo",
    "Serve payments that happen once, under a retry storm with killed workers; or one storm, with its verdict.",
    configure,
    run,
)
