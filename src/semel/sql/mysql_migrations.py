"""MySQL's way of migrating, and of comparing: it cannot roll tables back.

A migration is a row of statements that each commit by themselves and can be run again; one migrator at a time works,
under a named lock that ends with its connection. For the comparison the tables are made anew as temporary ones, which
hide the real ones from this connection alone and go with it.
"""

from __future__ import annotations

import re
from typing import Final

from semel.sql import migrations
from semel.sql.migrations import Schema, compare, do, require
from semel.sql.program import AsyncConnection, Connection, Program, Rows, run, run_async

__all__ = ["MYSQL", "check", "check_async", "migrate", "migrate_async"]

LOCK_WAIT: Final = 600
"""Seconds that a migrator waits for another."""

MYSQL: Final = Schema(
    folder="mysql",
    # The lock is the whole server's, so the database's name is part of its own: hashed, for a name has 64 characters at
    # most. Not by MD5, which MySQL 9.7 has no longer.
    begin=(f"SELECT GET_LOCK(CONCAT('semel.', SHA2(DATABASE(), 224)), {LOCK_WAIT})",),
    ledger=(
        "CREATE TABLE IF NOT EXISTS semel_migration (version int NOT NULL PRIMARY KEY, name varchar(255) NOT NULL)"
        " ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    ),
    has_ledger=(
        "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'semel_migration'"
    ),
    describe="SELECT table_name FROM information_schema.tables"
    " WHERE table_schema = DATABASE() AND table_name LIKE 'semel\\\\_%' ORDER BY table_name",
    aside=(),
)

_MADE: Final = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+)")
_LINES: Final = re.compile(r"(?:(?P<kind>CONSTRAINT|UNIQUE KEY|KEY|PRIMARY KEY) )?(?:`(?P<name>\w+)`)?\s*(?P<rest>.*)")

Description = dict[tuple[str, str], str]


def _check() -> Program[None]:
    yield from require(MYSQL)
    real: Description = {}
    for (table,) in (yield do(MYSQL.describe)):
        real |= _described(table, (yield do(f"SHOW CREATE TABLE `{table}`")))
    fresh: Description = {}
    statements = [MYSQL.ledger, *(sql for _, _, parts in MYSQL.migrations() for sql in parts)]
    for sql in statements:
        yield do(_MADE.sub(r"CREATE TEMPORARY TABLE \1", sql))
    made = [name for sql in statements for name in _MADE.findall(sql)]
    for table in made:
        fresh |= _described(table, (yield do(f"SHOW CREATE TABLE `{table}`")))
        yield do(f"DROP TEMPORARY TABLE `{table}`")
    compare(real, fresh)


def _described(table: str, rows: Rows) -> Description:
    """One entry for each line of SHOW CREATE TABLE: columns, keys, constraints, and the table's options."""
    _, *lines, options = rows[0][1].splitlines()
    found = {("options", table): re.sub(r" AUTO_INCREMENT=\d+", "", options.strip(") "))}
    for line in lines:
        text = line.strip().rstrip(",")
        match = _LINES.fullmatch(text)
        assert match is not None
        kind = {"KEY": "index", "UNIQUE KEY": "index", "PRIMARY KEY": "index", "CONSTRAINT": "constraint"}.get(
            match["kind"] or "", "column"
        )
        name = match["name"] or "PRIMARY"
        found[kind, name if kind == "constraint" else f"{table}.{name}"] = text
    return found


def migrate(connection: Connection) -> list[str]:
    """Bring the database up to date; answers what was applied. The lock is given back when the connection is closed."""
    return migrations.migrate(connection, MYSQL)


async def migrate_async(connection: AsyncConnection) -> list[str]:
    """The same on an async connection."""
    return await migrations.migrate_async(connection, MYSQL)


def check(connection: Connection) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly the ones the migrations make."""
    run(_check(), connection)


async def check_async(connection: AsyncConnection) -> None:
    """The same on an async connection."""
    await run_async(_check(), connection)
