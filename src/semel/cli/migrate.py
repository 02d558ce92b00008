"""``semel migrate``: make or update a store's tables, or check that they are what the migrations make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Final

from semel.cli.exits import FAILED, OK
from semel.errors import NotMigrated, SchemaDrift, StoreURLError

NAME = "migrate"
HELP = "Make or update the tables of a store; safe to run twice, and at once."


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.cli.targets import add_url

    add_url(parser)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 unless the tables are as they should be"
    )


def run(args: argparse.Namespace) -> int:
    from semel.stores.urls import migrate_store

    if args.check:
        return _check(args.url)
    applied = migrate_store(args.url)
    for name in applied:
        print(f"applied {name}")
    if not applied:
        print("up to date")
    return OK


def _check(url: str) -> int:
    scheme = url.partition(":")[0]
    if scheme not in _CHECKS:
        raise StoreURLError(f"no store is called {scheme[:40]!r}; there are: {', '.join(_CHECKS)}")
    try:
        _CHECKS[scheme](url)
    except (NotMigrated, SchemaDrift) as error:
        print(f"semel: {error}", file=sys.stderr)
        return FAILED
    print("up to date")
    return OK


def _check_sqlite(url: str) -> None:
    from semel.cli.targets import sqlite_file
    from semel.sql.connections.sqlite import SQLiteConnection
    from semel.sql.migrations import SQLITE, check

    with sqlite_file(url) as raw:
        check(SQLiteConnection(raw), SQLITE)


def _check_postgres(url: str) -> None:
    from semel.stores.postgres.sync import check

    check(url)


def _check_mysql(url: str) -> None:
    from semel.stores.mysql.sync import check

    check(url)


def _check_tiered(url: str) -> None:
    from semel.stores.urls import tiers

    truth = tiers(url)[0]
    scheme = truth.partition(":")[0]
    if scheme not in _CHECKS:
        raise StoreURLError(f"no store is called {scheme[:40]!r}; there are: {', '.join(_CHECKS)}")
    _CHECKS[scheme](truth)


def _check_dynamodb(url: str) -> None:
    from semel.stores.dynamodb import check

    check(url)


_CHECKS: Final[dict[str, Callable[[str], None]]] = {
    "sqlite": _check_sqlite,
    "postgresql": _check_postgres,
    "postgres": _check_postgres,
    "mysql": _check_mysql,
    "mariadb": _check_mysql,
    "dynamodb": _check_dynamodb,
    "memory": lambda url: None,
    "tiered": _check_tiered,
}
