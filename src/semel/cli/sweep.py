"""``semel sweep``: remove expired records now, in bounded steps. Ctrl-C and SIGTERM let the current step finish."""

from __future__ import annotations

import argparse
import sys

from semel.cli.commands import INTERRUPTED, OK, Command, positive, stop_on_signals
from semel.cli.targets import add_url, open_guard

__all__ = ["SWEEP"]


def configure(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--limit", type=positive, default=1000, metavar="N", help="records in one step (default: 1000)")
    parser.add_argument("--all", action="store_true", help="step after step, until nothing is left to remove")


def run(args: argparse.Namespace) -> int:
    removed = unknown = 0
    with open_guard(args.url) as guard, stop_on_signals() as stopping:
        try:
            while not stopping.is_set():
                swept = guard.sweep(args.limit)
                removed += swept.removed
                unknown += swept.unknown
                if args.all and sys.stderr.isatty():
                    print(f"\r{removed} removed ", end="", file=sys.stderr, flush=True)
                if not args.all or swept.removed + swept.unknown < args.limit:
                    break
        finally:
            if args.all and sys.stderr.isatty():
                print(file=sys.stderr)
    records = "record" if removed == 1 else "records"
    print(f"removed {removed} expired {records}" + (f"; {unknown} became unknown" if unknown else ""))
    return INTERRUPTED if stopping.is_set() else OK


SWEEP = Command("sweep", "Remove expired records, a bounded batch or all of them.", configure, run)
