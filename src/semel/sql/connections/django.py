"""Django's connections: ``django.db.connection``, or ``connections["other"]``. The transaction is ``atomic()``.

Statements are sent through Django's own cursor, so they appear in ``connection.queries`` and Django notices a broken
connection.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, Final, Literal

from semel.errors import ConfigurationError
from semel.sql.connections.adopt import DatabaseAddress, Dialect
from semel.sql.connections.errors import StatementRejected, wrapped_error
from semel.sql.connections.literals import mysql_text, require_change
from semel.sql.effects import EffectStyle, QueryResult
from semel.sql.program import Rows, Statement

_db: Final[Any] = import_module("django.db")  # it has no types
_atomic: Final[Any] = import_module("django.db.transaction").atomic
_DIALECTS: Final[dict[str, Dialect]] = {"sqlite": "sqlite", "postgresql": "postgresql", "mysql": "mysql"}
_ERRORS: Final = (_db.Error, UnicodeError, OverflowError, ValueError)


class LentDjango:
    """A DatabaseWrapper of the caller's, or the proxy for the one of this thread."""

    awaited: Literal[False] = False
    opening: ClassVar[str] = "`with transaction.atomic():`"
    style: ClassVar[EffectStyle] = "format"
    prepares: ClassVar[bool] = False
    nests: ClassVar[bool] = True
    __slots__ = ("_atomic", "dialect", "raw")

    def __init__(self, raw: Any) -> None:
        vendor = raw.vendor
        if vendor not in _DIALECTS:
            raise ConfigurationError(f"transactions are supported on {', '.join(_DIALECTS)}, not on Django's {vendor}")
        self.raw = raw
        self.dialect = _DIALECTS[vendor]
        self._atomic: Any = None
        """The ``atomic()`` that ``begin_with`` entered."""

    def address(self) -> DatabaseAddress:
        settings = self.raw.settings_dict
        return DatabaseAddress(*(settings.get(name) for name in ("USER", "HOST", "PORT", "NAME")))

    def execute(self, statement: Statement) -> Rows:
        # Django writes parameters as %s for every database.
        text, values = mysql_text(statement) if self.dialect == "mysql" else statement.values("format")
        try:
            with self.raw.cursor() as cursor:
                cursor.execute(text, values)
                if cursor.description is not None:
                    return [tuple(row) for row in cursor.fetchall()]
                return ((cursor.rowcount,),) if self.dialect == "mysql" else ()
        except _ERRORS as error:
            raise wrapped_error(error, self.dialect) from error

    def query(self, text: str, parameters: Any) -> QueryResult:
        try:
            with self.raw.cursor() as cursor:
                cursor.execute(text, parameters or None)
                if cursor.description is None:
                    return QueryResult(None, (), cursor.rowcount)
                return QueryResult([column[0] for column in cursor.description], cursor.fetchall(), 0)
        except _ERRORS as error:
            raise wrapped_error(error, self.dialect) from error

    def finish(self) -> None:
        """Nothing is held back here."""

    def nest(self) -> Any:
        """Enter an ``atomic()`` of our own. If Django did not know of the savepoint, an error of the ORM would have all
        of the caller's transaction rolled back, without a word, and callbacks of ``on_commit()`` would outlive what is
        undone.
        """
        atomic = _atomic(using=self.raw.alias)
        try:
            atomic.__enter__()
        except _ERRORS as error:
            raise wrapped_error(error, self.dialect) from error
        return _Nested(self.raw, atomic)

    def release(self, savepoint: _Nested) -> None:
        try:
            savepoint.commit()
        except _ERRORS as error:
            raise wrapped_error(error, self.dialect) from error

    def in_transaction(self) -> bool:
        return bool(self.raw.in_atomic_block or not self.raw.get_autocommit())

    def begun(self) -> bool:
        blocks = self.raw.atomic_blocks
        # Django wraps each test of a TestCase in a transaction; ours is opened within it.
        within_test = bool(blocks and blocks[-1]._from_testcase)
        return self.in_transaction() and not within_test

    def committers(self) -> tuple[Any, ...]:
        return ()  # Django refuses commit() within atomic() by itself

    def holds(self) -> bool:
        return self.in_transaction()

    def begin_with(self, statement: Statement) -> Rows:
        self._atomic = _atomic(using=self.raw.alias)
        try:
            self._atomic.__enter__()
        except _ERRORS as error:
            self._atomic = None
            raise wrapped_error(error, self.dialect) from error
        return self.execute(statement)

    def commit_with(self, statement: Statement) -> None:
        rows = self.execute(statement)
        if self.dialect == "mysql":
            require_change(rows)
        atomic, self._atomic = self._atomic, None
        try:
            atomic.__exit__(None, None, None)
        except _ERRORS as error:
            raise wrapped_error(error, self.dialect) from error

    def rollback(self) -> None:
        if self._atomic is None:
            return
        atomic, self._atomic = self._atomic, None
        try:
            atomic.__exit__(RollbackRequested, RollbackRequested(), None)
        except _ERRORS as error:
            raise wrapped_error(error, self.dialect) from error


class _Nested:
    """An ``atomic()`` inside of the caller's."""

    def __init__(self, raw: Any, atomic: Any) -> None:
        self._raw = raw
        self._atomic = atomic

    def commit(self) -> None:
        if self._raw.needs_rollback:  # atomic() would roll back without an error
            raise StatementRejected("an error inside of atomic() was caught, so Django accepts only a rollback")
        atomic, self._atomic = self._atomic, None
        atomic.__exit__(None, None, None)

    def rollback(self) -> None:
        if self._atomic is not None:
            self._atomic.__exit__(RollbackRequested, RollbackRequested(), None)


class RollbackRequested(Exception):
    """Passed to ``atomic()`` to make it roll back."""
