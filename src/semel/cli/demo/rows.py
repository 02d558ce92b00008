"""The effects of the transactional mode: rows in the store's own database, written in the transaction of the record.

The table does not know which payments are the same: a second row of one is simply a second row.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from typing import Any, Final

from semel.cli.demo.ledger import Effect
from semel.errors import StoreURLError
from semel.sql.connections.adopt import adopt
from semel.sql.connections.sqlite import named_error
from semel.sql.program import load_queries
from semel.stores.urls import sqlite_path

__all__ = ["Rows", "refuse_without_transactions"]

BUSY_TIMEOUT: Final = 20.0
_Q: Final = load_queries("semel.cli.demo", "rows.sql")
_DIALECTS: Final = {
    "sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip


def refuse_without_transactions(store: str) -> None:
    """Raise where the payments cannot be written in the transaction of their records."""
    scheme = store.partition(":")[0]
    if scheme not in _DIALECTS:
        raise StoreURLError(
            "in the transactional mode a payment is a row in the store's own database: "
            f"give a store of SQLite, PostgreSQL or MySQL, not {scheme}, or another --mode"
        )


class Rows:
    """The rows of one run; every thread has a connection of its own."""

    def __init__(self, store: str, run: str) -> None:
        refuse_without_transactions(store)
        self._store = store
        self._run = run
        self._dialect = _DIALECTS[store.partition(":")[0]]
        self._mine = threading.local()
        self._all: list[Any] = []

    def prepare(self) -> None:
        """Make the table, once, before the workers start."""
        adopt(self.connection()).execute(_Q[f"table_on_{self._dialect}"]())

    def connection(self) -> Any:
        """This thread's connection, without an open transaction."""
        raw = getattr(self._mine, "raw", None)
        if raw is None:
            raw = self._mine.raw = self._connect()
            self._all.append(raw)
        return raw

    def insert(self, payment: int, amount: int, attempt: int, token: int) -> int:
        """Write a row in this thread's transaction; answers its receipt."""
        row = {"run": self._run, "payment": payment, "amount": amount, "attempt": attempt, "token": token}
        lent = adopt(self.connection())
        if self._dialect == "mysql":
            lent.execute(_Q["insert_on_mysql"](**row, pid=os.getpid()))
            return int(lent.execute(_Q["receipt_on_mysql"]())[0][0])
        return int(lent.execute(_Q["insert"](**row, pid=os.getpid()))[0][0])

    def tear(self) -> None:
        """Commit what there is and go on in a new transaction: how the demo's sabotage takes the two apart."""
        lent = adopt(self.connection())
        lent.execute(_Q["commit"]())
        lent.execute(_Q["begin_on_sqlite" if self._dialect == "sqlite" else "begin"]())

    def drop(self) -> None:
        """This thread's connection has failed; the next one is new."""
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

    def _connect(self) -> Any:
        if self._dialect == "sqlite":
            try:
                raw = sqlite3.connect(
                    sqlite_path(self._store), timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
                )
                raw.execute("PRAGMA journal_mode = WAL").fetchall()
                raw.execute("PRAGMA synchronous = NORMAL")  # processes are killed here, the machine is not
            except sqlite3.Error as error:
                raise named_error(error) from error
            return raw
        if self._dialect == "mysql":
            from semel.stores.mysql import settings as mysql
            from semel.stores.mysql.sync import connect as connect_mysql

            return connect_mysql(mysql.Settings(self._store, 1, mysql.TIMEOUT, mysql.CONNECT_TIMEOUT, 0.0)).raw
        from semel.stores.postgres import settings as postgres
        from semel.stores.postgres.sync import connect

        return connect(postgres.Settings(self._store, 1, postgres.TIMEOUT, postgres.CONNECT_TIMEOUT, 0.0)).raw
