"""The payments consumer: it charges a card for each order, and emits an event for the payment.

`python -m examples.orders.payments DATABASE SOURCE PROVIDER`. A charge cannot be rolled back, so it is a step of an
operation whose key is the message's id. The provider gets a key that is derived from it. With CRASH=customer in the
environment, the process is killed after that customer's card was charged, before the charge is recorded.
"""

import json
import os
import signal
import sys

import httpx
import psycopg

from semel import Operation, Policy, PostgresStore, Semel
from semel.messaging import Inbox, Message, open_source


def main(database: str, source: str, provider: str) -> None:
    store = PostgresStore(database)
    # The lease is short, so that an operation of a dead consumer is soon free again.
    guard = Semel(store, policy=Policy(lease="2s"))

    @Inbox(store).handler("payments", guard=guard)
    def pay(message: Message, op: Operation) -> None:
        order = json.loads(message.data)
        key = op.derive("charge")  # the same in every attempt, so the provider charges once

        def charge(order: str, cents: int) -> str:
            body = {"order": order, "cents": cents}
            answer = httpx.post(f"{provider}/charges", json=body, headers={"Idempotency-Key": key})
            crash_after_the_charge()
            return str(answer.raise_for_status().json()["id"])

        def crash_after_the_charge() -> None:
            if order["customer"] == os.environ.get("CRASH") and op.attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        paid = op.step("charge", charge, order["order"], order["cents"])
        print(f"payments  {order['order']} charged as {paid} with the key {key[:6]}, attempt {op.attempt}", flush=True)

        def book() -> str:
            connection.execute("INSERT INTO payments VALUES (%s, %s)", (order["order"], paid))
            captured = {"order": order["order"], "cents": order["cents"], "charge": paid}
            return op.emit("payment.captured", captured, stream=order["order"], destination="payments")

        with psycopg.connect(database) as connection:  # the row, the event and the mark of the step commit together
            op.step("book", book, connection=connection)

    signal.signal(signal.SIGTERM, lambda *_: pay.stop())
    pay.run(open_source(source))
    guard.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
