"""Connections to the database of the demo's own rows: SQLite, PostgreSQL or MySQL, by the store's URL."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from semel.sql.connections.errors import sqlite_error
from semel.sql.connections.sqlite import SQLiteConnection, connect_file
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
        from semel.stores.mysql.connections import MySQLSettings
        from semel.stores.mysql.connections import connect as connect_mysql

        return connect_mysql(MySQLSettings(url))
    from semel.stores.postgres.connections import PostgresSettings, Psycopg

    return Psycopg().connect(PostgresSettings(url))


def _connect_sqlite(url: str) -> SQLiteConnection:
    try:
        raw = connect_file(sqlite_path(url), BUSY_TIMEOUT)
        raw.execute("PRAGMA journal_mode = WAL").fetchall()
        raw.execute("PRAGMA synchronous = NORMAL")  # processes are killed here, the machine is not
    except sqlite3.Error as error:
        raise sqlite_error(error) from error
    return SQLiteConnection(raw)
