"""The argument parser, and the one place where an error becomes a message and an exit code.

A command is a module with ``NAME``, ``HELP``, ``configure(parser)`` and ``run(args) -> exit code``. It raises
``SemelError`` and never prints an error itself. It imports what it needs inside ``run``, so that ``--version`` and the
help stay fast.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from semel import __version__
from semel.cli import demo, describe, diagram, lookup, migrate, recover, release, resolve, size, stores, sweep
from semel.cli.exits import INTERRUPTED, USAGE, exit_code
from semel.errors import SemelError

__all__ = ["COMMANDS", "main", "make_parser"]


class Command(Protocol):
    NAME: str
    HELP: str

    def configure(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: Final = tuple(
    cast(Command, module)
    for module in (demo, migrate, sweep, lookup, resolve, release, recover, describe, size, stores, diagram)
)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="semel", description="Writes that happen once.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"semel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        described = commands.add_parser(command.NAME, help=command.HELP, description=command.HELP, allow_abbrev=False)
        command.configure(described)
        described.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)  # a person wants the help; to a script it is an error
        return USAGE
    args = parser.parse_args(argv)
    try:
        code = cast(int, args.run(args))
        sys.stdout.flush()
        return code
    except SemelError as error:
        print(f"semel: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print("semel: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`semel … | head`). That is no error, but nothing more may be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
