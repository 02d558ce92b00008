"""``semel client list`` and ``semel client resume``: look into a client's journal, and finish what is in doubt."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from semel.cli.commands import FAILED, INTERRUPTED, OK, Command, as_json, say, stop_on_signals
from semel.core.policy import duration
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.client import Journal, JournalReport


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show the requests whose answer is not in hand", allow_abbrev=False)
    listing.set_defaults(act=list_entries)
    resuming = actions.add_parser(
        "resume", help="send those again that no living process waits for, with the same keys", allow_abbrev=False
    )
    resuming.set_defaults(act=resume)
    resuming.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VARIABLE",
        help="send this header, with the value of an environment variable, such as Authorization=PAY_TOKEN: a journal "
        "holds no secrets. May be repeated",
    )
    resuming.add_argument(
        "--key-header", default="Idempotency-Key", metavar="NAME", help="the header of the key (default: %(default)s)"
    )
    for action in (listing, resuming):
        action.add_argument("journal", metavar="JOURNAL", help="the path of the journal")
        action.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    code: int = args.act(args)
    return code


def list_entries(args: argparse.Namespace) -> int:
    with _open(args.journal) as journal:
        entries = journal.entries()
    if args.json:
        print(as_json({"entries": [entry.as_dict() for entry in entries]}))
        return OK
    for entry in entries:
        age = time.time() - entry.created
        say(f"{entry.state:9}  {duration(age):>8}  {entry.size:8} bytes  {entry.key}  {entry.method} {entry.url}")
    print(f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}")
    return OK


def resume(args: argparse.Namespace) -> int:
    from semel.client import JournalReport
    from semel.stores.settings import require

    httpx = require("httpx", "httpx")
    headers = dict(_header(text) for text in args.header)
    report = JournalReport()
    with _open(args.journal) as journal, stop_on_signals() as stopping:
        total = sum(entry.state != "in flight" for entry in journal.entries())
        terminal = sys.stderr.isatty()

        def progress(so_far: JournalReport) -> None:
            nonlocal report
            report = so_far
            if terminal:
                print(f"\r{len(so_far)} of {total} ", end="", file=sys.stderr, flush=True)
            if stopping.is_set():
                raise KeyboardInterrupt

        from semel.client.httpx import IdempotencyTransport

        transport = IdempotencyTransport(journal=journal, header=args.key_header)
        with httpx.Client(transport=transport, headers=headers, timeout=30, follow_redirects=True) as client:
            interrupted = False
            try:
                transport.resume(client, progress=progress)
            except KeyboardInterrupt:
                interrupted = True
            finally:
                if terminal and total:
                    print(file=sys.stderr)
    _print(report, args.json)
    if interrupted:
        return INTERRUPTED
    return FAILED if report.unknown or report.expired else OK


def _print(report: JournalReport, json: bool) -> None:
    if json:
        print(as_json(report.as_dict()))
        return
    for name, entries in report.as_dict().items():
        print(f"{name}: {len(entries)}")
        if name != "finished":
            for entry in entries:
                say(f"  {entry['key']}  {entry['method']} {entry['url']}")


def _open(path: str) -> Journal:
    from semel.client import Journal

    if not os.path.exists(path):
        raise ConfigurationError(f"there is no journal {path!r}")
    return Journal(path)


def _header(text: str) -> tuple[str, str]:
    name, _, variable = text.partition("=")
    if variable not in os.environ:
        raise ConfigurationError(f"--header {name}=…: there is no environment variable {variable!r}")
    return name, os.environ[variable]


CLIENT = Command("client", "List or resume the requests in a client's journal.", configure, run)
