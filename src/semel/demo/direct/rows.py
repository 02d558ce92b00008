"""The effects of the transactional mode: rows in the store's own database, in the same transaction as the record.

The table does not deduplicate: a second row for a payment is a second row.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final

from semel.demo.databases import DIALECTS, connect
from semel.demo.direct.ledger import Effect
from semel.errors import StoreURLError
from semel.sql.connections.adopt import adopt
from semel.sql.program import load_queries

__all__ = ["Rows", "refuse_without_transactions"]

_Q: Final = load_queries("semel.demo.direct", "rows.sql")


def refuse_without_transactions(store: str) -> None:
    """Raise if the store has no transaction in which payments could be written."""
    scheme = store.partition(":")[0]
    if scheme not in DIALECTS:
        raise StoreURLError(
            "in the transactional mode a payment is a row in the store's own database: "
            f"give a store of SQLite, PostgreSQL or MySQL, not {scheme}, or another --mode"
        )


class Rows:
    """The rows of one run. Each thread has its own connection."""

    def __init__(self, store: str, run: str) -> None:
        refuse_without_transactions(store)
        self._store = store
        self._run = run
        self._dialect = DIALECTS[store.partition(":")[0]]
        self._mine = threading.local()
        self._all: list[Any] = []

    def prepare(self) -> None:
        """Make the table, once, before the workers start."""
        adopt(self.connection()).execute(_Q[f"table_on_{self._dialect}"]())

    def connection(self) -> Any:
        """This thread's connection, without an open transaction."""
        raw = getattr(self._mine, "raw", None)
        if raw is None:
            raw = self._mine.raw = connect(self._store).raw
            self._all.append(raw)
        return raw

    def insert(self, payment: int, amount: int, attempt: int, token: int) -> int:
        """Write a row in this thread's transaction and return its receipt."""
        row = {"run": self._run, "payment": payment, "amount": amount, "attempt": attempt, "token": token}
        lent = adopt(self.connection())
        if self._dialect == "mysql":
            lent.execute(_Q["insert_on_mysql"](**row, pid=os.getpid()))
            return int(lent.execute(_Q["receipt_on_mysql"]())[0][0])
        return int(lent.execute(_Q["insert"](**row, pid=os.getpid()))[0][0])

    def tear(self) -> None:
        """Sabotage: commit the row without the record, and go on in a new transaction."""
        lent = adopt(self.connection())
        lent.execute(_Q["commit"]())
        lent.execute(_Q["begin_on_sqlite" if self._dialect == "sqlite" else "begin"]())

    def drop(self) -> None:
        """Close this thread's failed connection; the next call opens a new one."""
        raw = self.connection()
        self._mine.raw = None
        self._all.remove(raw)
        raw.close()

    def effects(self) -> list[Effect]:
        """All rows, in order."""
        return [Effect(*row) for row in adopt(self.connection()).execute(_Q["effects"](run=self._run))]

    def count(self) -> int:
        return int(adopt(self.connection()).execute(_Q["count"](run=self._run))[0][0])

    def close(self) -> None:
        for raw in self._all:
            raw.close()
