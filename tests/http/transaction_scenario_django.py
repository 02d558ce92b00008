"""The payment of ``transaction_scenario.py`` by a view of Django's."""

from __future__ import annotations

import importlib
from typing import Any

from semel import InProgress, Operation, Semel, SQLiteStore
from tests.http.apps_django_shop import DjangoService

# What the first request of a process imports, so that not each of many forks does.
for _each in ("django.contrib.staticfiles.storage", "django.db.backends.sqlite3.base", "semel.sql.connections.django"):
    importlib.import_module(_each)


def pay(folder: str) -> None:
    """One request; a 409 or 503 is raised as what a client would take it for: try again."""

    def work(conn: Any, op: Operation) -> Any:
        with conn.cursor() as cursor:
            cursor.execute("INSERT INTO payment VALUES (%s)", [op.key])
        return 201, "paid"

    with Semel(SQLiteStore(f"{folder}/shop.db", migrate=False), sweep_every=None) as guard:
        service = DjangoService("rest", f"{folder}/shop.db", guard, work, in_loop=False)
        answer = service.ask("k1")
        service.close()
    if answer.status_code in (409, 503):
        raise InProgress(answer.content.decode())
    assert answer.status_code == 201, answer.content
