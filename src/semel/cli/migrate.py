"""``semel migrate``: create or update the tables of a store, or check them."""

from __future__ import annotations

import argparse
import sys

from semel.cli.commands import FAILED, OK, Command, say
from semel.cli.targets import add_url
from semel.errors import NotMigrated, SchemaDrift, StoreURLError

__all__ = ["MIGRATE"]


def configure(parser: argparse.ArgumentParser) -> None:
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


def run(args: argparse.Namespace) -> int:
    from semel.stores.urls import check_store, has_tables, migrate_store, open_store

    if args.text:
        from semel.stores.dynamodb import render_template

        if not args.url.startswith("dynamodb:"):
            raise StoreURLError(
                "--print is for a table of DynamoDB: write semel migrate dynamodb://region/table --print …"
            )
        print(render_template(args.text, args.url))
        return OK
    if not has_tables(args.url):
        open_store(args.url).close()  # connects to nothing, but checks the URL
        print(f"nothing to {'check' if args.check else 'migrate'}: this store has no tables")
        return OK
    if args.check:
        try:
            check_store(args.url)
        except (NotMigrated, SchemaDrift) as error:
            say(f"semel: {error}", sys.stderr)
            return FAILED
        print("up to date")
        return OK
    applied = migrate_store(args.url)
    for name in applied:
        print(f"applied {name}")
    if not applied:
        print("up to date")
    return OK


MIGRATE = Command("migrate", "Make or update the tables of a store; safe to run twice, and at once.", configure, run)
