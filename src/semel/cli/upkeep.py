"""``semel stores``, ``semel migrate`` and ``semel sweep``: choose a store, and keep it in order."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

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
    print_table,
    say,
    stop_on_signals,
    ticking,
)
from semel.errors import NotMigrated, SchemaDrift, StoreURLError

if TYPE_CHECKING:
    from semel.core.ops import Op


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
    print_table(rows)
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
    parser.add_argument(
        "--trail-keep",
        metavar="TIME",
        help="also forget events of the history that are older than this: the keep= of its Trail, such as 6h",
    )
    parser.add_argument(
        "--trail-keep-minutes",
        metavar="TIME",
        default="7d",
        help="with --trail-keep: forget minutes that are older than this, the keep_minutes= of its Trail (default: 7d)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def sweep(args: argparse.Namespace) -> int:
    from semel.core.messaging.messages import PurgeInbox
    from semel.core.policy import seconds
    from semel.core.trail.moments import ForgetTrail
    from semel.stores.urls import check_trails_of, has_outbox

    inbox, moments = (
        None if text is None else seconds(text, option)
        for text, option in ((args.inbox_keep, "--inbox-keep"), (args.trail_keep, "--trail-keep"))
    )
    minutes = seconds(args.trail_keep_minutes, "--trail-keep-minutes")
    if inbox is not None and not has_outbox(args.url):
        raise StoreURLError("--inbox-keep is for PostgreSQL, MySQL and SQLite: other stores have no inbox")
    if moments is not None:
        check_trails_of(args.url)
    progress = Progress()
    counts = {"removed": 0, "unknown": 0}

    def sweep_records() -> int:
        swept = guard.sweep(args.limit)
        counts["unknown"] += swept.unknown
        counts["removed"] += swept.removed
        return swept.removed + swept.unknown

    def forget(name: str, op: Op[int]) -> int:
        gone = guard.store.execute(op)
        counts[name] = counts.get(name, 0) + gone
        return gone

    work: list[Callable[[], int]] = [sweep_records]
    if inbox is not None:
        work.append(partial(forget, "forgotten", PurgeInbox(inbox, args.limit)))
    if moments is not None:
        work.append(partial(forget, "history", ForgetTrail(moments, minutes, args.limit)))
    with open_guard(args.url) as guard, stop_on_signals() as stopping:
        try:
            for step in work:
                while not stopping.is_set():
                    gone = step()
                    progress.show(f"{sum(counts.values()):,} removed …")
                    if not args.all or gone < args.limit:
                        break
        finally:
            progress.clear()
    if args.json:
        print(as_json(counts))
        return INTERRUPTED if stopping.is_set() else OK
    records = "record" if counts["removed"] == 1 else "records"
    unknown = f"; {counts['unknown']} became unknown" if counts["unknown"] else ""
    print(f"removed {counts['removed']} expired {records}{unknown}")
    if "forgotten" in counts:
        print(f"forgot {counts['forgotten']} messages of the inbox")
    if "history" in counts:
        print(f"forgot {counts['history']} events and minutes of the history")
    return INTERRUPTED if stopping.is_set() else OK


STORES = Command("stores", "Show what each kind of store can do, side by side.", configure_stores, stores)
MIGRATE = Command(
    "migrate", "Make or update the tables of a store; safe to run twice, and at once.", configure_migrate, migrate
)
SWEEP = Command("sweep", "Remove expired records, a bounded batch or all of them.", configure_sweep, sweep)
