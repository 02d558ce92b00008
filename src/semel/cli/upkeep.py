"""``semel stores``, ``semel migrate`` and ``semel sweep``: choose a store, and keep it in order."""

from __future__ import annotations

import argparse
import json
import sys

from semel.cli.commands import (
    FAILED,
    INTERRUPTED,
    OK,
    Command,
    Progress,
    add_url,
    as_json,
    open_guard,
    positive,
    say,
    stop_on_signals,
    ticking,
)
from semel.errors import NotMigrated, SchemaDrift, StoreURLError


def configure_stores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def stores(args: argparse.Namespace) -> int:
    """What each kind of store promises, side by side."""
    from semel.stores.urls import KINDS, TRAITS

    if args.json:
        print(json.dumps({kind.name: {"urls": kind.schemes, **kind.traits()} for kind in KINDS}))
        return OK
    rows = [("", *(kind.name for kind in KINDS))]
    rows.append(("URL", *(kind.example for kind in KINDS)))
    for trait, words in TRAITS.items():
        rows.append((words, *(_word(kind.traits()[trait]) for kind in KINDS)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return OK


def _word(promise: bool | str) -> str:
    return promise if isinstance(promise, str) else ("yes" if promise else "no")


def configure_migrate(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 unless the tables are as they should be"
    )
    instead.add_argument(
        "--print",
        dest="text",
        choices=("iam", "cloudformation", "terraform"),
        help="for DynamoDB: print the rights on the table, or the table itself, and change nothing",
    )
    instead.add_argument(
        "--partition-inbox",
        action="store_true",
        help="for PostgreSQL: divide the inbox by the time in its ids, for ids that are UUIDs of version 7",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def migrate(args: argparse.Namespace) -> int:
    from semel.stores.urls import check_store, has_tables, migrate_store, open_store

    if args.text:
        from semel.stores.dynamodb import render_template

        if not args.url.startswith("dynamodb:"):
            raise StoreURLError(
                "--print is for a table of DynamoDB: write semel migrate dynamodb://region/table --print …"
            )
        text = render_template(args.text, args.url)
        print(as_json({"text": text}) if args.json else text)
        return OK
    if args.partition_inbox and not args.url.startswith("postgres"):
        raise StoreURLError("--partition-inbox is for PostgreSQL: other databases divide no table by such ids")
    if not has_tables(args.url):
        open_store(args.url).close()  # connects to nothing, but checks the URL
        if args.json:
            print(as_json({"applied": [], "up_to_date": True}))
        else:
            print(f"nothing to {'check' if args.check else 'migrate'}: this store has no tables")
        return OK
    if args.check:
        try:
            check_store(args.url)
        except (NotMigrated, SchemaDrift) as error:
            if args.json:
                print(as_json({"applied": [], "up_to_date": False, "problem": str(error)}))
            say(f"semel: {error}", sys.stderr)
            return FAILED
        print(as_json({"applied": [], "up_to_date": True}) if args.json else "up to date")
        return OK
    with ticking("migrating"):
        applied = migrate_store(args.url)
        if args.partition_inbox:
            from semel.stores.postgres import partition_inbox

            applied += ["partitions of the inbox"] if partition_inbox(args.url) else []
    if args.json:
        print(as_json({"applied": applied, "up_to_date": True}))
        return OK
    for name in applied:
        print(f"applied {name}")
    if not applied:
        print("up to date")
    return OK


def configure_sweep(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--limit", type=positive, default=1000, metavar="N", help="records in one step (default: 1000)")
    parser.add_argument("--all", action="store_true", help="step after step, until nothing is left to remove")
    parser.add_argument(
        "--inbox-keep",
        metavar="TIME",
        help="also forget messages that consumers applied longer ago than this: the keep= of their inbox, such as 15d",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def sweep(args: argparse.Namespace) -> int:
    from semel.core.messaging.messages import PurgeInbox
    from semel.core.policy import seconds
    from semel.stores.urls import has_outbox

    removed = unknown = forgotten = 0
    keep = None if args.inbox_keep is None else seconds(args.inbox_keep, "--inbox-keep")
    if keep is not None and not has_outbox(args.url):
        raise StoreURLError("--inbox-keep is for PostgreSQL, MySQL and SQLite: other stores have no inbox")
    progress = Progress()
    with open_guard(args.url) as guard, stop_on_signals() as stopping:
        try:
            while not stopping.is_set():
                swept = guard.sweep(args.limit)
                removed += swept.removed
                unknown += swept.unknown
                progress.show(f"{removed:,} removed …")
                if not args.all or swept.removed + swept.unknown < args.limit:
                    break
            while keep is not None and not stopping.is_set():
                gone = guard.store.execute(PurgeInbox(keep, args.limit))
                forgotten += gone
                progress.show(f"{forgotten:,} messages forgotten …")
                if not args.all or gone < args.limit:
                    break
        finally:
            progress.clear()
    if args.json:
        messages = {} if keep is None else {"forgotten": forgotten}
        print(as_json({"removed": removed, "unknown": unknown, **messages}))
        return INTERRUPTED if stopping.is_set() else OK
    records = "record" if removed == 1 else "records"
    print(f"removed {removed} expired {records}" + (f"; {unknown} became unknown" if unknown else ""))
    if keep is not None:
        print(f"forgot {forgotten} messages of the inbox")
    return INTERRUPTED if stopping.is_set() else OK


STORES = Command("stores", "Show what each kind of store can do, side by side.", configure_stores, stores)
MIGRATE = Command(
    "migrate", "Make or update the tables of a store; safe to run twice, and at once.", configure_migrate, migrate
)
SWEEP = Command("sweep", "Remove expired records, a bounded batch or all of them.", configure_sweep, sweep)
