"""Two processes that are delivered the same messages at the same time: see ``test_killed_consumers.py``.

Every third run of a handler fails after it has written. A conflict or a failure means that the message is delivered
again, at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys

from semel.errors import TransactionConflict
from semel.messaging.inbox import Inbox
from tests.messaging.desks import Desk

MESSAGES = 40


def consume(dialect: str, url: str) -> None:
    desk = Desk(dialect, url)
    inbox = Inbox(desk.store)
    runs = itertools.count(1)

    def apply() -> None:
        desk.sql(f"INSERT INTO applied (id) VALUES ('{id}')")
        if next(runs) % 3 == 0:
            raise ValueError("it fails")

    for id in (f"m-{number:02}" for number in range(MESSAGES)):
        while True:
            with contextlib.suppress(TransactionConflict, ValueError):
                inbox.process(desk.conn, "ledger", id, apply, own_transaction=True)
                break
    desk.close()


if __name__ == "__main__":
    children = []
    for _ in range(2):
        child = os.fork()
        if not child:
            consume(*sys.argv[1:])
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    sys.exit(any(codes))
