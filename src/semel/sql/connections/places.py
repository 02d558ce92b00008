"""Which database a connection of the caller's is connected to: for the words of an error, and to know it again.

As a URL without the password, as far as the driver tells without a question to the server: a transaction that has
failed answers none. SQLite, which is a library, is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote

from semel.errors import NotMigrated
from semel.sql.program import Program, Query

__all__ = ["not_migrated", "place_of"]

_FILES: Final = Query("files", "PRAGMA database_list", False)

Parts = tuple[Any, Any, Any, Any]
"""User, host (or the folder of a socket), port, database."""


def not_migrated(connection: Any, error: NotMigrated) -> Program[NotMigrated]:
    """The error, with the database that was looked at, which need not be the one that was migrated."""
    what = str(error).partition(": run ")[0]
    place = place_of(connection)
    if connection.dialect == "sqlite":
        rows = yield _FILES()
        file = next((row[2] for row in rows if row[1] == "main"), "")
        if not file:
            return NotMigrated(
                f"{what}. This connection is to a database in memory: use one to the database of the guard's store"
            )
        place = f"sqlite:///{file}"
    if not place:
        return error
    return NotMigrated(
        f"{what}. This connection is to {place}: run `semel migrate {place}`, or use a connection to the database of "
        "the guard's store"
    )


def place_of(connection: Any) -> str:
    """``postgresql://app@localhost:5432/shop``; empty where the driver does not tell, and for SQLite."""
    read = _READ.get(type(connection).__name__)
    if read is None or connection.dialect == "sqlite":
        return ""
    try:
        user, host, port, database = (_text(part) for part in read(connection))
    except Exception:  # what is told here only adds words to an error, or saves a question
        return ""
    if not database:
        return ""
    at = f"{quote(user)}@" if user else ""
    if host.startswith("/"):
        return f"{connection.dialect}://{at}/{quote(database)}?host={host}"
    return f"{connection.dialect}://{at}{host}{f':{port}' if port and host else ''}/{quote(database)}"


def _text(part: Any) -> str:
    return part.decode() if isinstance(part, bytes) else str(part or "")


def _psycopg(connection: Any) -> Parts:
    info = connection.raw.info
    return info.user, info.host, info.port, info.dbname


def _asyncpg(connection: Any) -> Parts:
    params, address = getattr(connection.raw, "_params", None), getattr(connection.raw, "_addr", "")
    host, port = address if isinstance(address, tuple) else (str(address).rpartition("/")[0], "")
    return getattr(params, "user", ""), host, port, getattr(params, "database", "")


def _pymysql(connection: Any) -> Parts:
    raw = connection.raw
    return raw.user, raw.host, raw.port, raw.db


def _asyncmy(connection: Any) -> Parts:
    raw = connection.raw
    return tuple(getattr(raw, name, "") for name in ("_user", "_host", "_port", "_db"))  # type: ignore[return-value]


def _sqlalchemy(connection: Any) -> Parts:
    bind = getattr(connection, "bind", connection.raw)
    url = bind.engine.url
    return url.username, url.host or url.query.get("host", ""), url.port, url.database


def _django(connection: Any) -> Parts:
    settings = connection.raw.settings_dict
    return settings.get("USER"), settings.get("HOST"), settings.get("PORT"), settings.get("NAME")


_READ: Final[dict[str, Callable[[Any], Parts]]] = {
    "LentPsycopg": _psycopg,
    "AsyncLentPsycopg": _psycopg,
    "LentAsyncpg": _asyncpg,
    "LentPyMySQL": _pymysql,
    "LentAsyncmy": _asyncmy,
    "LentConnection": _sqlalchemy,
    "LentSession": _sqlalchemy,
    "AsyncLentConnection": _sqlalchemy,
    "AsyncLentSession": _sqlalchemy,
    "LentDjango": _django,
}
"""By the name of the class that has adopted the connection, so that no driver is imported here."""
