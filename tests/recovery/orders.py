"""A service of two steps, whose processes stop in the middle of their work and wait to be killed.

``python -m tests.recovery.orders NAME`` works on four orders at once, each as far as another place; it says so, line by
line, and goes no further. ``semel recover tests.recovery.orders:guard`` finishes them.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from contextlib import closing
from dataclasses import dataclass

from semel import INJECTED, Operation, Policy, Semel, open_store
from semel.natural import insert_once

PLACES = ("asked", "charged", "marked", "booked")
guard = Semel(open_store(os.environ["ORDERS_STORE"]), policy=Policy(lease="1s"), sweep_every=None)
stops = threading.local()


@dataclass
class Order:
    id: str
    lines: tuple[str, ...]


@guard.once(key="order.id", operation="ship", resumable=True)
def ship(order: Order, op: Operation = INJECTED) -> str:
    reached("asked", order)
    op.step("charge", effect, "charged", order, op.derive("charge"))
    reached("marked", order)
    op.step("book", effect, "booked", order, op.derive("book"))
    return f"shipped {' and '.join(order.lines)}"


def effect(kind: str, order: Order, key: str) -> None:
    """What another company does, which knows keys."""
    with closing(sqlite3.connect(os.environ["ORDERS_EFFECTS"], timeout=30)) as conn, conn:
        insert_once(conn, "effect", {"key": key, "kind": kind, "order_id": order.id}, key="key")
        conn.execute("INSERT INTO asked VALUES (?, ?)", (kind, order.id))
    reached(kind, order)


def reached(place: str, order: Order) -> None:
    if getattr(stops, "at", None) == place:
        os.write(1, f"{order.id}\n".encode())  # in one piece: print writes the text and its end apart
        threading.Event().wait()


def work(order: Order, place: str) -> None:
    stops.at = place
    ship(order)


if __name__ == "__main__":
    for place in PLACES:
        order = Order(f"{sys.argv[1]}-{place}", ("pen", "ink"))
        threading.Thread(target=work, args=(order, place)).start()
