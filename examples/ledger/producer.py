"""A producer: each event is a row in its own table and a message in the outbox, committed together.

It posts a range of numbers. After it was killed, or the database was down, it reads from the table how far it came, and
continues there.
"""

import sys
import time

import psycopg

from semel import PostgresStore
from semel.errors import StoreError
from semel.messaging import Outbox


def post(connection: psycopg.Connection, outbox: Outbox, producer: int, number: int, streams: int) -> None:
    """Write one event. The account is the stream: its events must be applied in order."""
    account = f"account-{number % streams}"
    with connection.transaction():
        connection.execute(
            "INSERT INTO posted (producer, number, account) VALUES (%s, %s, %s)", (producer, number, account)
        )
        outbox.add(
            connection, "entry.posted", {"account": account, "number": number}, stream=account, destination="ledger"
        )


def main(url: str, producer: int, producers: int, events: int, streams: int, rate: float) -> None:
    store = PostgresStore(url, listen=False)
    outbox = Outbox(store, source="/ledger")
    started, done = time.monotonic(), 0
    while True:
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                last = connection.execute(
                    "SELECT coalesce(max(number), %s) FROM posted WHERE producer = %s", (producer - producers, producer)
                ).fetchone()[0]
                for number in range(last + producers, events, producers):
                    post(connection, outbox, producer, number, streams)
                    done += 1
                    ahead = started + done / rate - time.monotonic()
                    if ahead > 0:
                        time.sleep(ahead)
                return
        except (
            psycopg.OperationalError,
            StoreError,
        ):  # the database is down, or was: what is committed is read when it is back
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:6]), float(sys.argv[6]))
