"""Charge a card and commit the payment's row: one charge and one row, wherever the process dies.

`python service.py DATABASE PROVIDER_URL ORDER CENTS`. With `CRASH=charged`, `CRASH=committed` or `CRASH=asked` in the
environment it kills itself at that point. Run it again without CRASH, like a client that got no response.
"""

import json
import os
import signal
import sqlite3
import sys
import urllib.request
from contextlib import closing
from typing import Any

from semel import INJECTED, Operation, Policy, Semel, SQLiteStore, Wait, outgoing_headers
from semel.natural import insert_once


class Service:
    def __init__(self, database: str, provider: str, lease: str = "500ms") -> None:
        self.database = database
        self.provider = provider
        # The lease is short, so that the operation of a dead process is soon free again.
        self.guard = Semel(SQLiteStore(database), policy=Policy(lease=lease, on_duplicate=Wait("10s")))
        with closing(sqlite3.connect(database)) as conn, conn:
            conn.execute("CREATE TABLE IF NOT EXISTS payment (order_id TEXT PRIMARY KEY, charge TEXT, cents INTEGER)")
        self.pay = self.guard.once(key="order", operation="pay")(self._pay)

    def _pay(self, order: str, cents: int, op: Operation = INJECTED) -> dict[str, Any]:
        mark("asked")
        with op.propagate("charge"):  # the key is derived from this operation: every attempt sends the same one
            charge = post(f"{self.provider}/charges", {"order": order, "cents": cents})
        mark("charged")
        with closing(sqlite3.connect(self.database, timeout=10)) as conn, conn:
            insert_once(conn, "payment", {"order_id": order, "charge": charge["id"], "cents": cents}, key="order_id")
        mark("committed")
        return {"order": order, "charge": charge["id"]}


def post(url: str, document: dict[str, Any]) -> dict[str, Any]:
    """Send a request as the program's own client would, with the headers of the current operation."""
    headers = {"Content-Type": "application/json", **outgoing_headers(f"POST {url}")}
    request = urllib.request.Request(url, json.dumps(document).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.load(answer))


def mark(place: str) -> None:
    """Kill the process if CRASH names this point."""
    if os.environ.get("CRASH") == place:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    database, provider, order, cents = sys.argv[1:]
    service = Service(database, provider)
    with service.guard:
        print(json.dumps(service.pay(order, int(cents))))
