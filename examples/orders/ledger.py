"""The ledger consumer: it books each payment once. `python -m examples.orders.ledger DATABASE SOURCE`

The ledger's row and the message's id commit together. If the message is delivered again, the inbox finds its id.
"""

import json
import signal
import sys

import psycopg

from semel import PostgresStore
from semel.messaging import Inbox, Message, open_source


def main(database: str, source: str) -> None:
    store = PostgresStore(database)

    @Inbox(store).handler("ledger", connect=lambda: psycopg.connect(database, autocommit=True), ordered=True)
    def book(message: Message, connection: psycopg.Connection) -> None:
        payment = json.loads(message.data)
        root, cause = message.headers["idempotency-root"], message.headers["causation-id"]
        connection.execute(
            "INSERT INTO ledger VALUES (%s, %s, %s, %s, %s)",
            (payment["order"], payment["cents"], payment["charge"], message.id, root),
        )
        print(
            f"ledger    {payment['order']} booked for payment.captured {message.id[:6]}, caused by order.placed "
            f"{cause[:6]}, which began with the key {root}",
            flush=True,
        )

    signal.signal(signal.SIGTERM, lambda *_: book.stop())
    book.run(open_source(source))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
