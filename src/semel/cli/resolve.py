"""``semel resolve``: declare that an operation did happen, and with which result."""

from __future__ import annotations

import argparse
import json
from typing import Any

from semel.cli.exits import OK
from semel.errors import PolicyError

NAME = "resolve"
HELP = "Say that an unknown or abandoned operation did happen: later calls are answered with the result given here."


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.cli.targets import add_record

    add_record(parser)
    parser.add_argument(
        "--result", default="null", metavar="JSON", help="what later calls are answered (default: null)"
    )


def run(args: argparse.Namespace) -> int:
    from semel.cli.targets import open_guard

    result = _json(args.result)
    with open_guard(args.url) as guard:
        guard.resolve(args.operation, args.key, result, tenant=args.tenant or None)
    print(f"resolved {args.operation}[{args.key}]: later calls get {json.dumps(result)}")
    return OK


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PolicyError(f"--result is not JSON ({error}); a text needs its quotes: --result '\"paid\"'") from error
