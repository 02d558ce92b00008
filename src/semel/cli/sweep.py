"""``semel sweep``: remove expired records now, in bounded steps. Ctrl-C and SIGTERM finish the step in hand."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from semel.cli.exits import INTERRUPTED, OK

NAME = "sweep"
HELP = "Remove expired records, a bounded batch or all of them."


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.cli.targets import add_url

    add_url(parser)
    parser.add_argument(
        "--limit", type=_positive, default=1000, metavar="N", help="records in one step (default: 1000)"
    )
    parser.add_argument("--all", action="store_true", help="step after step, until nothing is left to remove")


def run(args: argparse.Namespace) -> int:
    from semel.cli.targets import open_guard

    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    removed = unknown = 0
    with open_guard(args.url) as guard:
        before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            while not stopped:
                swept = guard.sweep(args.limit)
                removed += swept.removed
                unknown += swept.unknown
                if args.all and sys.stderr.isatty():
                    print(f"\r{removed} removed ", end="", file=sys.stderr, flush=True)
                if not args.all or swept.removed + swept.unknown < args.limit:
                    break
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            if args.all and sys.stderr.isatty():
                print(file=sys.stderr)
    records = "record" if removed == 1 else "records"
    print(f"removed {removed} expired {records}" + (f"; {unknown} became unknown" if unknown else ""))
    return INTERRUPTED if stopped else OK


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
