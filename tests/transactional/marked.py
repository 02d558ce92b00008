"""The kinds of connections as parameters of tests, marked with the server they need. Apart from `kinds.py`, which
child processes import, where pytest would only cost time."""

from typing import Any

import pytest

from tests.transactional.kinds import ALL, ASYNC_MYSQL, ASYNC_SQLITE, MYSQL, SQLITE


def marked(kind: str, *more: Any, id: str | None = None) -> Any:
    """The kind, and what else the test takes, as one set of parameters."""
    if kind in SQLITE + ASYNC_SQLITE:
        return pytest.param(kind, *more, id=id)
    server = pytest.mark.mariadb if kind in MYSQL + ASYNC_MYSQL else pytest.mark.postgres
    return pytest.param(kind, *more, id=id, marks=[server, pytest.mark.server])


MARKED = [marked(kind) for kind in ALL]
SOME = [
    marked(kind)
    for kind in (
        *("sqlite3", "session-aiosqlite"),
        *("psycopg", "psycopg-autocommit", "session-psycopg", "django-postgres"),
        *("asyncpg", "async-psycopg", "session-asyncpg"),
        *("pymysql", "pymysql-autocommit", "asyncmy", "session-asyncmy"),
    )
]
"""Every driver, with autocommit where it has that, and a library of each sort above one. For what has been shown on all
kinds by a first test."""
on_some = pytest.mark.parametrize("kind", SOME)
