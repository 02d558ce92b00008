"""Connections to the database of the demo's own rows: SQLite, PostgreSQL or MySQL, by the store's URL."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from semel.sql.connections.sqlite import SQLiteConnection, named_error
from semel.stores.urls import sqlite_path

__all__ = ["DIALECTS", "connect"]

BUSY_TIMEOUT: Final = 20.0
DIALECTS: Final = {
    "sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql", "mysql": "mysql", "mariadb": "mysql",
}  # fmt: skip
"""The SQL dialect of each URL scheme that has one."""


def connect(url: str) -> Any:
    """Open a connection that runs statements; its ``raw`` is the driver's own connection."""
    dialect = DIALECTS[url.partition(":")[0]]
    if dialect == "sqlite":
        return _connect_sqlite(url)
    if dialect == "mysql":
        from semel.stores.mysql import settings as mysql
        from semel.stores.mysql.sync import connect as connect_mysql

        return connect_mysql(mysql.Settings(url, 1, mysql.TIMEOUT, mysql.CONNECT_TIMEOUT, 0.0))
    from semel.stores.postgres import settings as postgres
    from semel.stores.postgres.sync import connect as connect_postgres

    return connect_postgres(postgres.Settings(url, 1, postgres.TIMEOUT, postgres.CONNECT_TIMEOUT, 0.0))


def _connect_sqlite(url: str) -> SQLiteConnection:
    try:
        raw = sqlite3.connect(sqlite_path(url), timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
        raw.execute("PRAGMA journal_mode = WAL").fetchall()
        raw.execute("PRAGMA synchronous = NORMAL")  # processes are killed here, the machine is not
    except sqlite3.Error as error:
        raise named_error(error) from error
    return SQLiteConnection(raw)
