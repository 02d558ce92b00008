"""``semel release``: declare that an operation did not happen. The next call runs it as a first call."""

from __future__ import annotations

import argparse

from semel.cli.exits import OK

NAME = "release"
HELP = "Say that an unknown or abandoned operation did not happen: the next call runs it."


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.cli.targets import add_record

    add_record(parser)
    parser.add_argument(
        "--force", action="store_true", help="also while its owner runs; that owner's outcome will be refused"
    )


def run(args: argparse.Namespace) -> int:
    from semel.cli.targets import open_guard

    with open_guard(args.url) as guard:
        guard.release(args.operation, args.key, tenant=args.tenant or None, force=args.force)
    print(f"released {args.operation}[{args.key}]: the next call runs it")
    return OK
