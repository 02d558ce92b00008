"""``semel doctor``: examine a store, and the service that uses it."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from semel.cli.commands import FAILED, OK, Command, add_url, as_json, load, say, ticking
from semel.cli.sizing.size import add_needs, needs_of, seconds_of


def configure(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--app", metavar="MODULE:APP", help="the application, to examine its routes: shop.main:app")
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import it from (default: here)")
    parser.add_argument("--window", metavar="T", help="how long answers are kept: 24h (default: as the routes say)")
    add_needs(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from semel.http.describe.design import find_installation
    from semel.verify import findings
    from semel.verify.doctor import Window, examine

    window = Window(seconds_of(args, "window"), needs_of(args))
    service = None
    if args.app is not None:
        with redirect_stdout(sys.stderr):  # what the application prints does not belong to the report
            service = find_installation(load(args.app, args.app_dir))
    with ticking("examining"):
        found = examine(args.url, window, service)
    if args.json:
        print(as_json({"findings": findings.plain(found)}))
    else:
        say("\n".join([*findings.lines(found), findings.summary(found)]))
    return FAILED if findings.failed(found) else OK


DOCTOR = Command("doctor", "Examine a store and the service that uses it.", configure, run)
