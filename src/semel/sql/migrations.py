"""The schema: numbered .sql files, applied in order under a lock, and compared with what a database really has.

``migrate_program`` may run in many processes at once: one does the work, the others find it done. ``check_program``
makes the schema anew beside the real one, reads both, and lists the differences.

PostgreSQL and SQLite migrate in a transaction. MySQL cannot roll tables back: there each statement of a migration
commits by itself and can be repeated. One migrator at a time works, under a named lock that ends with its connection.
"""

from __future__ import annotations

import functools
import re
import sqlite3
from dataclasses import dataclass
from importlib import resources
from typing import Final, TypeAlias

from semel.errors import NotMigrated, SchemaDrift, StoreUnavailable
from semel.sql.connections.errors import Contention
from semel.sql.program import Program, Query, Rows, Statement, load_queries

LOCK_TIMEOUT: Final = "5s"
"""How long a migration of PostgreSQL waits for a table that others use. Whoever comes next waits behind the migration,
so this is short."""
MYSQL_LOCK_TIMEOUT: Final = 600
"""Seconds that a migrator of MySQL waits for another one."""

_STATEMENT_END: Final = re.compile(r";(?=(?:[^$]*\$\$[^$]*\$\$)*[^$]*\Z)")
"""A semicolon outside of a function's body, which stands between two ``$$``."""
_LOCK_KEY: Final = 0x53454D454C  # "SEMEL": the advisory lock that migrations take

Description: TypeAlias = dict[tuple[str, str], str]
"""The definition of each of our objects, by (kind, name)."""


@dataclass(frozen=True)
class Schema:
    """How to migrate one dialect."""

    folder: str
    begin: tuple[str, ...]
    """Open the transaction, or take the lock, under which one migrator at a time works."""
    ledger: str
    """Make the table of applied migrations."""
    has_ledger: str

    @functools.cache  # noqa: B019 - there are as many schemas as dialects
    def migrations(self) -> list[tuple[int, str, list[str]]]:
        """(number, name, statements) of every file, in order."""
        found = []
        for file in (resources.files("semel.sql") / "schema" / self.folder).iterdir():
            match = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name)
            if match:
                lines = [line for line in file.read_text("utf-8").splitlines() if not line.lstrip().startswith("--")]
                statements = [part.strip() for part in _STATEMENT_END.split("\n".join(lines))]
                found.append((int(match[1]), match[2], [part for part in statements if part]))
        return sorted(found)

    def all_statements(self) -> list[str]:
        """What makes the whole schema in an empty database."""
        return [self.ledger, *(sql for _, _, statements in self.migrations() for sql in statements)]


SQLITE: Final = Schema(
    folder="sqlite",
    begin=("BEGIN IMMEDIATE",),
    ledger=(
        "CREATE TABLE IF NOT EXISTS semel_migration (version INTEGER NOT NULL PRIMARY KEY, name TEXT NOT NULL) STRICT"
    ),
    has_ledger="SELECT 1 FROM sqlite_master WHERE name = 'semel_migration'",
)

POSTGRES: Final = Schema(
    folder="postgres",
    # The limit is set after the migrators' lock is taken: they may wait for each other as long as it takes.
    begin=("BEGIN", f"SELECT pg_advisory_xact_lock({_LOCK_KEY})", f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"),
    ledger="CREATE TABLE IF NOT EXISTS semel_migration (version integer NOT NULL PRIMARY KEY, name text NOT NULL)",
    has_ledger="SELECT 1 WHERE to_regclass('semel_migration') IS NOT NULL",
)

MYSQL: Final = Schema(
    folder="mysql",
    # The lock belongs to the whole server, so its name contains the database's name: hashed, because a name has at most
    # 64 characters, and not by MD5, which MySQL 9.7 no longer has. It is released when the connection is closed.
    begin=(f"SELECT GET_LOCK(CONCAT('semel.', SHA2(DATABASE(), 224)), {MYSQL_LOCK_TIMEOUT})",),
    ledger=(
        "CREATE TABLE IF NOT EXISTS semel_migration (version int NOT NULL PRIMARY KEY, name varchar(255) NOT NULL)"
        " ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    ),
    has_ledger=(
        "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'semel_migration'"
    ),
)


def statement(sql: str) -> Statement:
    """A statement without parameters."""
    return Statement(Query("schema", sql, True), {})


def migrate_program(schema: Schema) -> Program[list[str]]:
    """Bring the database up to date; return the names of the migrations that were applied."""
    missing = yield from _missing(schema)
    if not missing:
        return []  # the usual case takes no lock
    for sql in schema.begin:
        yield statement(sql)
    try:
        applied = yield from _apply(schema)
    except Contention as error:
        raise StoreUnavailable(
            "another transaction holds a table that is to be changed; writers would wait behind this migration, "
            f"so it was given up, and nothing was changed. Run it again when that one has ended ({error})"
        ) from error.__cause__
    yield statement("COMMIT")
    return applied


def check_program(schema: Schema) -> Program[None]:
    """Raise NotMigrated or SchemaDrift unless the tables are exactly what the migrations make."""
    yield from check_ledger(schema)
    if schema is MYSQL:
        real, fresh = yield from _mysql_descriptions()
    else:
        real = _described((yield _DESCRIBE[schema.folder]()))
        fresh = _fresh_sqlite() if schema is SQLITE else (yield from _fresh_postgres())
    differences = [
        f"{kind} {name}: is {real.get((kind, name), 'missing')!r}, should be {fresh.get((kind, name), 'none')!r}"
        for kind, name in sorted(real.keys() | fresh.keys())
        if real.get((kind, name)) != fresh.get((kind, name))
    ]
    if differences:
        raise SchemaDrift("the database's tables are not the ones the migrations make:\n  " + "\n  ".join(differences))


def check_ledger(schema: Schema) -> Program[None]:
    """Raise NotMigrated unless every migration was applied."""
    missing = yield from _missing(schema)
    if missing:
        raise NotMigrated(f"the database lacks {', '.join(missing)}: run `semel migrate URL`")


def _missing(schema: Schema) -> Program[list[str]]:
    wanted = {number: f"{number:04d}_{name}" for number, name, _ in schema.migrations()}
    if not (yield statement(schema.has_ledger)):
        return list(wanted.values())
    known = {row[0] for row in (yield statement("SELECT version FROM semel_migration"))}
    return [name for number, name in wanted.items() if number not in known]


def _apply(schema: Schema) -> Program[list[str]]:
    """Inside a transaction: apply what is missing."""
    yield statement(schema.ledger)
    known = {row[0] for row in (yield statement("SELECT version FROM semel_migration"))}
    applied = []
    for number, name, statements in schema.migrations():
        if number not in known:
            for sql in statements:
                yield statement(sql)
            yield statement(f"INSERT INTO semel_migration (version, name) VALUES ({number}, '{name}')")
            applied.append(f"{number:04d}_{name}")
    return applied


# Descriptions of a schema: the real one, and the one that the migrations make


_DESCRIBE: Final = load_queries("semel.sql", "schema/describe.sql")


def _described(rows: Rows) -> Description:
    return {(kind, name): " ".join(str(definition).split()) for kind, name, definition in rows}


def _fresh_sqlite() -> Description:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for sql in SQLITE.all_statements():
            raw.execute(sql)
        return _described(raw.execute(_DESCRIBE["sqlite"].sql).fetchall())
    finally:
        raw.close()


def _fresh_postgres() -> Program[Description]:
    """In a schema beside the real one, in a transaction that is rolled back."""
    for sql in ("BEGIN", "CREATE SCHEMA semel_drift", "SET LOCAL search_path TO semel_drift"):
        yield statement(sql)
    yield from _apply(POSTGRES)
    fresh = _described((yield _DESCRIBE["postgres"]()))
    yield statement("ROLLBACK")
    return fresh


_CREATED: Final = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+)")
_LINE: Final = re.compile(r"(?:(?P<kind>CONSTRAINT|UNIQUE KEY|KEY|PRIMARY KEY) )?(?:`(?P<name>\w+)`)?\s*(?P<rest>.*)")


def _mysql_descriptions() -> Program[tuple[Description, Description]]:
    """The real tables and the fresh ones.

    The fresh ones are temporary. They hide the real ones from this connection alone, and end with it.
    """
    real: Description = {}
    for (table,) in (yield _DESCRIBE["mysql"]()):
        real |= _mysql_described(table, (yield statement(f"SHOW CREATE TABLE `{table}`")))
    fresh: Description = {}
    statements = MYSQL.all_statements()
    for sql in statements:
        yield statement(_CREATED.sub(r"CREATE TEMPORARY TABLE \1", sql))
    for table in [name for sql in statements for name in _CREATED.findall(sql)]:
        fresh |= _mysql_described(table, (yield statement(f"SHOW CREATE TABLE `{table}`")))
        yield statement(f"DROP TEMPORARY TABLE `{table}`")
    return real, fresh


def _mysql_described(table: str, rows: Rows) -> Description:
    """One entry for each line of SHOW CREATE TABLE: columns, keys, constraints, and the table's options."""
    _, *lines, options = rows[0][1].splitlines()
    found = {("options", table): re.sub(r" AUTO_INCREMENT=\d+", "", options.strip(") "))}
    for line in lines:
        text = line.strip().rstrip(",")
        match = _LINE.fullmatch(text)
        assert match is not None
        kind = {"KEY": "index", "UNIQUE KEY": "index", "PRIMARY KEY": "index", "CONSTRAINT": "constraint"}.get(
            match["kind"] or "", "column"
        )
        name = match["name"] or "PRIMARY"
        found[kind, name if kind == "constraint" else f"{table}.{name}"] = text
    return found
