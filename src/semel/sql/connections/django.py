"""Django's connections: ``django.db.connection``, or ``connections["other"]``; the transaction is ``atomic()``.

Statements go through Django's own cursor, so they stand in ``connection.queries`` and a broken connection is noticed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, Final, Literal

from semel.errors import ConfigurationError
from semel.sql.connections.adopt import Dialect
from semel.sql.connections.driver_errors import driver_error
from semel.sql.connections.mysql_text import inlined, kept
from semel.sql.program import Rows, Statement

__all__ = ["LentDjango"]

_db: Final[Any] = import_module("django.db")  # untyped
_atomic: Final[Any] = import_module("django.db.transaction").atomic
_DIALECTS: Final[dict[str, Dialect]] = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql"}
_ERRORS: Final = (_db.Error, UnicodeError, OverflowError, ValueError)


class LentDjango:
    """A DatabaseWrapper, or the proxy that stands for this thread's one."""

    awaited: Literal[False] = False
    opening: ClassVar[str] = "`with transaction.atomic():`"
    __slots__ = ("_atomic", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        vendor = raw.vendor
        if vendor not in _DIALECTS:
            raise ConfigurationError(f"transactions are kept on {', '.join(_DIALECTS)}, not on Django's {vendor}")
        self.raw = raw
        self.dialect = _DIALECTS[vendor]
        self._atomic: Any = None

    def execute(self, statement: Statement) -> Rows:
        # Django writes parameters as %s for every database.
        text, values = inlined(statement) if self.dialect == "mysql" else statement.values("format")
        try:
            with self.raw.cursor() as cursor:
                cursor.execute(text, values)
                if cursor.description is not None:
                    return [tuple(row) for row in cursor.fetchall()]
                return ((cursor.rowcount,),) if self.dialect == "mysql" else ()
        except _ERRORS as error:
            raise driver_error(error, self.dialect) from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def in_transaction(self) -> bool:
        return bool(self.raw.in_atomic_block or not self.raw.get_autocommit())

    def begun(self) -> bool:
        blocks = self.raw.atomic_blocks
        of_a_test = bool(blocks and blocks[-1]._from_testcase)  # around each test of a TestCase; ours is within, then
        return self.in_transaction() and not of_a_test

    def holds(self) -> bool:
        return self.in_transaction()

    def begin_with(self, statement: Statement) -> Rows:
        self._atomic = _atomic(using=self.raw.alias)
        try:
            self._atomic.__enter__()
        except _ERRORS as error:
            self._atomic = None
            raise driver_error(error, self.dialect) from error
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        rows = self.execute(statement)
        if self.dialect == "mysql":
            kept(rows)
        atomic, self._atomic = self._atomic, None
        try:
            atomic.__exit__(None, None, None)
        except _ERRORS as error:
            raise driver_error(error, self.dialect) from error

    def rollback(self) -> None:
        if self._atomic is None:
            return
        atomic, self._atomic = self._atomic, None
        try:
            undone = Undone()
            atomic.__exit__(Undone, undone, None)
        except _ERRORS as error:
            raise driver_error(error, self.dialect) from error


class Undone(Exception):
    """What ``atomic()`` is left with when it is to roll back."""
