"""The numbered .sql files as Django migrations, one for each number.

They use the same ledger (``semel_migration``) as ``semel migrate`` and the stores, so each sees what the others have
migrated. A new number needs a file of two lines in ``migrations``.
"""

from __future__ import annotations

import re
from typing import Any, Final

from django.db import migrations, models, router
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.operations.base import Operation
from django.db.utils import NotSupportedError

from semel.sql.migrations import MYSQL, POSTGRES, SQLITE, Schema

_ADMIN: Final = migrations.CreateModel(
    "IdempotencyRecord",
    [("id", models.CharField(primary_key=True, max_length=32, serialize=False))],
    {"managed": False, "default_permissions": ("view", "change"), "verbose_name": "idempotency record"},
)
"""The model of the admin. It makes no table."""
_CREATED: Final = re.compile(
    r"CREATE (?:UNIQUE )?(TABLE|INDEX|SEQUENCE|FUNCTION|PROCEDURE) (?:IF NOT EXISTS )?(\w+)(?:\s+ON (\w+))?",
    re.IGNORECASE,
)
_REPLACED: Final = re.compile(r"(?:CREATE OR REPLACE FUNCTION|DROP (?:INDEX|FUNCTION)) (\w+)", re.IGNORECASE)
_FILLED: Final = re.compile(r"INSERT INTO (\w+)", re.IGNORECASE)
_ALTERED: Final = re.compile(r"ALTER TABLE (\w+)(?: ADD COLUMN (\w+))?", re.IGNORECASE)
_LIFTED: Final = re.compile(r"ALTER TABLE (\w+) DROP CONSTRAINT (\w+)", re.IGNORECASE)


def migration(number: int, *, after: str | None = None) -> type[migrations.Migration]:
    """Return the migration class for file ``number``; ``after`` is the name of the previous migration."""
    dependencies = [("semel", after)] if after else []
    operations = [Apply(number)] if after else [Apply(number), _ADMIN]
    return type("Migration", (migrations.Migration,), {"dependencies": dependencies, "operations": operations})


class Apply(Operation):  # type: ignore[misc]  # Django is not typed
    """Run the statements of one file and of those before it, unless the ledger has their numbers already."""

    reversible = True
    elidable = False

    def __init__(self, number: int) -> None:
        self.number = number

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing to do: there are no models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        schema = _schema_of(schema_editor.connection)
        schema_editor.execute(schema.ledger, params=None)
        applied = self._applied(schema_editor)
        for number, name, statements in schema.migrations():
            if number > self.number or number in applied:
                continue
            for statement in statements:
                schema_editor.execute(statement, params=None)
            schema_editor.execute(
                f"INSERT INTO semel_migration (version, name) VALUES ({number}, '{name}')", params=None
            )

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        if not router.allow_migrate(schema_editor.connection.alias, app_label):
            return
        schema = _schema_of(schema_editor.connection)
        for statement in _undo_statements(schema, self.number):
            schema_editor.execute(statement, params=None)
        schema_editor.execute(f"DELETE FROM semel_migration WHERE version = {self.number}", params=None)
        if self.number == 1:
            schema_editor.execute("DROP TABLE semel_migration", params=None)

    def describe(self) -> str:
        return f"Semel's schema, file {self.number:04d}"

    def _applied(self, schema_editor: Any) -> set[int]:
        if schema_editor.collect_sql:  # manage.py sqlmigrate shows this file alone, and runs nothing
            return set(range(self.number))
        with schema_editor.connection.cursor() as cursor:
            cursor.execute("SELECT version FROM semel_migration")
            return {version for (version,) in cursor.fetchall()}


def _schema_of(connection: Any) -> Schema:
    if connection.vendor == "sqlite":
        return SQLITE
    if connection.vendor == "postgresql":
        return POSTGRES
    if connection.vendor == "mysql":
        return MYSQL
    raise NotSupportedError(
        f"there is no store for {connection.vendor}: keep the app semel off this database with a router (allow_migrate)"
    )


def _undo_statements(schema: Schema, number: int) -> list[str]:
    """Return statements that undo a file."""
    tables: set[str] = set()
    undo = []
    for statement in [
        each for version, _, statements in schema.migrations() if version == number for each in statements
    ]:
        created, altered, lifted = _CREATED.match(statement), _ALTERED.match(statement), _LIFTED.match(statement)
        replaced, filled = _REPLACED.match(statement), _FILLED.match(statement)
        if replaced:
            undo.append(_earlier(schema, replaced[1], number))
        elif filled and filled[1] in tables:
            pass  # its rows go with the table
        elif lifted:
            undo.append(f"ALTER TABLE {lifted[1]} ADD {_constraint_definition(schema, lifted[2])}")
        elif created:
            kind, name, table = created.groups()
            if kind.upper() == "TABLE":
                tables.add(name)
            if table not in tables:  # an index goes with its table
                where = f" ON {table}" if table and schema.folder == "mysql" else ""
                undo.append(f"DROP {kind} {name}{where}")
        elif altered and altered[1] not in tables and altered[2]:
            undo.append(f"ALTER TABLE {altered[1]} DROP COLUMN {altered[2]}")
        elif not (altered and altered[1] in tables):
            raise IrreversibleError(f"this statement cannot be undone: {statement[:80]}")
    return undo[::-1]


def _earlier(schema: Schema, name: str, number: int) -> str:
    """Return the statement that makes the function or index as it was before a file."""
    texts = [text for version, _, statements in schema.migrations() if version < number for text in statements]
    last = [text for text in texts if re.match(rf"CREATE [A-Z ]*(?:FUNCTION|INDEX) {name}\b", text)][-1]
    return re.sub("^CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", last)


def _constraint_definition(schema: Schema, name: str) -> str:
    """Return the definition of a constraint, which has a line of its own in the file that creates it."""
    texts = [statement for _, _, statements in schema.migrations() for statement in statements]
    return next(match[1] for text in texts if (match := re.search(rf"^ *(CONSTRAINT {name} .*[^,]),?$", text, re.M)))
