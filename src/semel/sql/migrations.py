"""The schema: numbered .sql files, applied in order under a lock, and compared with what a database really has.

``migrate`` may run in many processes at once: one does the work, the others find it done. ``drift`` makes the schema
anew beside the real one, inside a transaction that is rolled back, and lists where the two differ.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
from dataclasses import dataclass
from importlib import resources
from typing import Final

from semel.errors import NotMigrated, SchemaDrift, StoreUnavailable
from semel.sql.connections.refusals import Contended
from semel.sql.connections.sqlite import SQLiteConnection
from semel.sql.program import AsyncConnection, Connection, Program, Query, Statement, run, run_async

__all__ = [
    "POSTGRES",
    "SQLITE",
    "Schema",
    "check",
    "check_async",
    "compare",
    "do",
    "migrate",
    "migrate_async",
    "migrate_sqlite",
    "require",
]

_STATEMENT_END: Final = re.compile(r";(?=(?:[^$]*\$\$[^$]*\$\$)*[^$]*\Z)")
"""A semicolon outside of a function's body, which stands between two ``$$``."""
_LOCK_KEY: Final = 0x53454D454C  # "SEMEL": the advisory lock that migrations take
LOCK_TIMEOUT: Final = "5s"
"""How long a migration waits for a table that others use. Whoever comes after it waits behind it, so not for long."""


@dataclass(frozen=True)
class Schema:
    """One dialect's way of migrating."""

    folder: str
    begin: tuple[str, ...]
    """How to open the transaction in which one migrator at a time works."""
    ledger: str
    has_ledger: str
    describe: str
    """One row (kind, name, definition) for each of our objects in the current schema."""
    aside: tuple[str, ...]
    """How to begin making the schema anew beside the real one."""

    @functools.cache  # noqa: B019 - there are as many schemas as dialects
    def migrations(self) -> list[tuple[int, str, list[str]]]:
        """(number, name, statements) of every file, in order."""
        found = []
        for file in resources.files("semel.sql.schema").joinpath(self.folder).iterdir():
            match = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name)
            if match:
                lines = [line for line in file.read_text("utf-8").splitlines() if not line.lstrip().startswith("--")]
                statements = [part.strip() for part in _STATEMENT_END.split("\n".join(lines))]
                found.append((int(match[1]), match[2], [part for part in statements if part]))
        return sorted(found)


SQLITE: Final = Schema(
    folder="sqlite",
    begin=("BEGIN IMMEDIATE",),
    ledger=(
        "CREATE TABLE IF NOT EXISTS semel_migration (version INTEGER NOT NULL PRIMARY KEY, name TEXT NOT NULL) STRICT"
    ),
    has_ledger="SELECT 1 FROM sqlite_master WHERE name = 'semel_migration'",
    describe=(
        "SELECT type, name, sql FROM sqlite_master WHERE tbl_name LIKE 'semel\\_%' ESCAPE '\\' AND sql IS NOT NULL"
    ),
    aside=(),
)

POSTGRES: Final = Schema(
    folder="postgres",
    # The limit comes after the lock of the migrators: they may wait for each other for as long as it takes.
    begin=("BEGIN", f"SELECT pg_advisory_xact_lock({_LOCK_KEY})", f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"),
    ledger="CREATE TABLE IF NOT EXISTS semel_migration (version integer NOT NULL PRIMARY KEY, name text NOT NULL)",
    has_ledger="SELECT 1 WHERE to_regclass('semel_migration') IS NOT NULL",
    describe="""
        SELECT 'column', c.relname || '.' || a.attname,
               format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
                   || coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '') || ' storage ' || a.attstorage::text
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND c.relname LIKE 'semel\\_%'
          AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT 'index', i.relname, regexp_replace(pg_get_indexdef(i.oid), ' ON [^ ]+\\.', ' ON ')
        FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class c ON c.oid = x.indrelid
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relname LIKE 'semel\\_%' AND x.indisvalid
        UNION ALL
        SELECT 'constraint', k.conname, pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relname LIKE 'semel\\_%'
          AND k.contype IN ('p', 'u', 'c', 'f')
        UNION ALL
        SELECT 'options', c.relname, coalesce(array_to_string(c.reloptions, ','), '')
        FROM pg_class c
        WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r' AND c.relname LIKE 'semel\\_%'
        UNION ALL
        SELECT 'function', p.proname, pg_get_function_arguments(p.oid)
               || coalesce(' returns ' || pg_get_function_result(p.oid), '') || ' ' || p.provolatile::text || ' '
               || coalesce(array_to_string(p.proconfig, ','), '') || p.prosrc
        FROM pg_proc p
        WHERE p.pronamespace = current_schema()::regnamespace AND p.proname LIKE 'semel\\_%'
    """,
    aside=("BEGIN", "CREATE SCHEMA semel_drift", "SET LOCAL search_path TO semel_drift"),
)


def do(sql: str) -> Statement:
    """A statement without parameters."""
    return Statement(Query("schema", sql, True), {})


def _apply(schema: Schema) -> Program[list[str]]:
    """Inside a transaction: make what is missing. Answers the names of what was applied."""
    yield do(schema.ledger)
    known = {row[0] for row in (yield do("SELECT version FROM semel_migration"))}
    applied = []
    for number, name, statements in schema.migrations():
        if number not in known:
            for statement in statements:
                yield do(statement)
            yield do(f"INSERT INTO semel_migration (version, name) VALUES ({number}, '{name}')")
            applied.append(f"{number:04d}_{name}")
    return applied


def _migrate(schema: Schema) -> Program[list[str]]:
    missing = yield from _missing(schema)
    if not missing:
        return []  # the common case asks for no lock
    for sql in schema.begin:
        yield do(sql)
    try:
        applied = yield from _apply(schema)
    except Contended as error:
        raise StoreUnavailable(
            "another transaction holds a table that is to be changed; writers would wait behind this migration, "
            f"so it was given up, and nothing was changed. Run it again when that one has ended ({error})"
        ) from error.__cause__
    yield do("COMMIT")
    return applied


def _missing(schema: Schema) -> Program[list[str]]:
    wanted = {number: f"{number:04d}_{name}" for number, name, _ in schema.migrations()}
    if not (yield do(schema.has_ledger)):
        return list(wanted.values())
    known = {row[0] for row in (yield do("SELECT version FROM semel_migration"))}
    return [name for number, name in wanted.items() if number not in known]


def require(schema: Schema) -> Program[None]:
    """Raise NotMigrated unless every migration has been applied."""
    missing = yield from _missing(schema)
    if missing:
        raise NotMigrated(f"the database lacks {', '.join(missing)}: run `semel migrate URL`")


def _check(schema: Schema, fresh: dict[tuple[str, str], str] | None) -> Program[None]:
    yield from require(schema)
    real = _described((yield do(schema.describe)))
    if fresh is None:
        for sql in schema.aside:
            yield do(sql)
        yield from _apply(schema)
        fresh = _described((yield do(schema.describe)))
        yield do("ROLLBACK")
    compare(real, fresh)


def compare(real: dict[tuple[str, str], str], fresh: dict[tuple[str, str], str]) -> None:
    """Raise SchemaDrift where the two descriptions differ."""
    differences = [
        f"{kind} {name}: is {real.get((kind, name), 'missing')!r}, should be {fresh.get((kind, name), 'none')!r}"
        for kind, name in sorted(real.keys() | fresh.keys())
        if real.get((kind, name)) != fresh.get((kind, name))
    ]
    if differences:
        raise SchemaDrift("the database's tables are not the ones the migrations make:\n  " + "\n  ".join(differences))


def _described(rows: object) -> dict[tuple[str, str], str]:
    return {(kind, name): " ".join(str(definition).split()) for kind, name, definition in rows}  # type: ignore[attr-defined]


def _sqlite_fresh() -> dict[tuple[str, str], str]:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    try:
        connection = SQLiteConnection(raw)
        run(_apply(SQLITE), connection)
        return _described(connection.execute(do(SQLITE.describe)))
    finally:
        raw.close()


def migrate(connection: Connection, schema: Schema) -> list[str]:
    """Bring the database up to date; answers what was applied, nothing when it was."""
    try:
        return run(_migrate(schema), connection)
    except BaseException:
        _quietly_roll_back(connection)
        raise


async def migrate_async(connection: AsyncConnection, schema: Schema) -> list[str]:
    """The same on an async connection."""
    try:
        return await run_async(_migrate(schema), connection)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to see
            await connection.execute(do("ROLLBACK"))
        raise


def check(connection: Connection, schema: Schema) -> None:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly the ones the migrations make."""
    try:
        run(_check(schema, _sqlite_fresh() if schema is SQLITE else None), connection)
    except BaseException:
        _quietly_roll_back(connection)
        raise


async def check_async(connection: AsyncConnection, schema: Schema) -> None:
    """The same on an async connection."""
    try:
        await run_async(_check(schema, None), connection)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to see
            await connection.execute(do("ROLLBACK"))
        raise


def migrate_sqlite(raw: sqlite3.Connection, file: str = "") -> list[str]:
    """Bring a SQLite file up to date."""
    return migrate(SQLiteConnection(raw, file), SQLITE)


def _quietly_roll_back(connection: Connection) -> None:
    with contextlib.suppress(Exception):  # the first error is the one to see
        connection.execute(do("ROLLBACK"))
