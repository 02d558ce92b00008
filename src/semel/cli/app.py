"""The argument parser, and the one place where an error becomes a message and an exit code.

The parser is argparse of the standard library: the commands are part of the core install, which has no dependencies.
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn, cast

from semel import __version__
from semel.cli.audit import AUDIT
from semel.cli.client import CLIENT
from semel.cli.commands import FAILED, INTERRUPTED, OK, STORE_VARIABLE, USAGE, Command, as_json, exit_code, say
from semel.cli.console import CONSOLE
from semel.cli.demo import DEMO
from semel.cli.describe import DESCRIBE
from semel.cli.doctor import DOCTOR
from semel.cli.listing import LIST, PURGE, STATS
from semel.cli.messages.dlq import DLQ
from semel.cli.messages.relay import OUTBOX, RELAY
from semel.cli.once import ONCE
from semel.cli.records import DIAGRAM, LOOKUP, RELEASE, RESOLVE
from semel.cli.recover import RECOVER
from semel.cli.sizing.size import SIZE
from semel.cli.upkeep import MIGRATE, STORES, SWEEP
from semel.errors import SemelError
from semel.stores.risks import AT_RISK
from semel.stores.settings import require
from semel.stores.urls import SCHEMES

SHELLS: Final = ("bash", "zsh", "fish")


def configure_completions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete commands in")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def completions(args: argparse.Namespace) -> int:
    """Print the script of shtab for a shell."""
    shtab = require("shtab", "cli")
    script = shtab.complete(make_parser(), args.shell)
    print(as_json({"shell": args.shell, "script": script}) if args.json else script)
    return OK


COMPLETIONS: Final = Command(
    "completions", "Print a script that completes commands and options in a shell.", configure_completions, completions
)
COMMANDS: Final = (
    DEMO,
    CONSOLE,
    MIGRATE,
    SWEEP,
    LIST,
    STATS,
    LOOKUP,
    RESOLVE,
    RELEASE,
    PURGE,
    RECOVER,
    ONCE,
    CLIENT,
    RELAY,
    OUTBOX,
    DLQ,
    DESCRIBE,
    AUDIT,
    DOCTOR,
    SIZE,
    STORES,
    DIAGRAM,
    COMPLETIONS,
)
"""All commands, in the order of the help."""


class _UsageError(Exception):
    """The command line cannot be read."""

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would exit, so that the words may be read in another way."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(self, message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="semel", description="Writes that happen once.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"semel {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        described = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        command.configure(described)
        described.set_defaults(run=command.run)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Where the store's URL is missing, it is taken from the environment.

    Exits with a message if the words cannot be read.
    """
    parser = make_parser()
    command: list[str] = []
    if words[0] == "once" and "--" in words:  # what follows is another command's line
        at = list(words).index("--")
        words, command = words[:at], list(words[at + 1 :])
    args = _parse(parser, words)
    if command:
        args.command = command
    return args


def _parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    try:
        return parser.parse_args(words)
    except _UsageError as error:
        store = os.environ.get(STORE_VARIABLE)
        if store:
            for at in (1, 2):  # after the command, or after its action
                with suppress(_UsageError):
                    args = parser.parse_args([*words[:at], store, *words[at:]])
                    # The first word may be a URL, and another word be missing.
                    named = getattr(args, "operation", None) or getattr(args, "message", None) or ""
                    if "url" in args and named.partition(":")[0] not in SCHEMES:
                        return args
        hint = f" (or set {STORE_VARIABLE})" if re.search(r"required: URL\b", str(error)) and not store else ""
        shown = re.sub(r"(?<=://)\S*@", "…@", str(error))  # no passwords
        argparse.ArgumentParser.error(error.parser, shown + hint)


def _escape(error: UnicodeError) -> tuple[str | bytes, int]:
    """Escape what the encoding of the output lacks, in a way that JSON can read."""
    if not isinstance(error, UnicodeEncodeError):  # somebody reads what we print, as a test does
        return codecs.replace_errors(error)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _prepare_output() -> None:
    """Let any text be printed, whatever the locale is, also where a stream was closed (``>&-``)."""
    codecs.register_error("semel", _escape)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="semel")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    _prepare_output()
    words = sys.argv[1:] if argv is None else argv
    if not words:
        make_parser().print_help(sys.stderr)  # a person wants the help; to a script it is an error
        return USAGE
    args = parse(words)
    log = logging.getLogger("semel.redis")
    if not getattr(args, "shows_risks", False):
        log.addFilter(_leave_risks_to_the_doctor)
    try:
        code = cast(int, args.run(args))
        sys.stdout.flush()
        return code
    except SemelError as error:
        say(f"semel: {error}", sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print("semel: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()  # the reader is gone (`semel … | head`), which is no error
        return OK
    except OSError as error:
        _drop_output()
        say(f"semel: {error}", sys.stderr)
        return FAILED
    finally:
        log.removeFilter(_leave_risks_to_the_doctor)


def _leave_risks_to_the_doctor(record: logging.LogRecord) -> bool:
    """Drop the warning that a service logs once. A command would print it each time."""
    return record.msg != AT_RISK


def _drop_output() -> None:
    """Drop what cannot be written. Python would try again when it ends, and fail with a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
