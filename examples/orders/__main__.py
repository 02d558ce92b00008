"""Orders, payments and a ledger: three services, each with its own database, and a broker between them.

    python -m examples.orders --broker kafka

It starts PostgreSQL, the broker and the services, and sends each order twice, as an impatient user would. The payments
consumer is killed right after it has charged a card. At the end each order must be charged
once and booked once.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import psycopg

from examples.brokers import BROKERS
from examples.worker import Worker
from semel.client import Retry
from semel.client.httpx import IdempotencyTransport
from semel.stores.postgres import migrate
from tests.servers import PostgresServer
from tests.servers.base import free_port

TABLES = {
    "orders": "CREATE TABLE orders (id text PRIMARY KEY, customer text, cents integer)",
    "payments": "CREATE TABLE payments (order_id text, charge text)",
    "ledger": "CREATE TABLE ledger (order_id text, cents integer, charge text, message text, root text)",
}  # only the orders have unique keys, so that a second charge or booking would show
CUSTOMERS = ["ada", "grace", "edsger", "barbara", "donald"]
LONGEST = 90.0


def run(stack: ExitStack, broker_name: str, count: int) -> bool:
    postgres = stack.enter_context(PostgresServer())
    broker = stack.enter_context(BROKERS[broker_name]())
    databases = {name: postgres.create_database() for name in TABLES}
    for name, database in databases.items():
        migrate(database)
        with psycopg.connect(database) as connection:
            connection.execute(TABLES[name])
    for destination in ("orders", "payments"):
        broker.prepare(destination)

    def start(name: str, *command: str) -> None:
        workers.append(Worker(name, [sys.executable, "-m", *command]))
        stack.callback(workers[-1].stop)

    workers: list[Worker] = []
    provider = stack.enter_context(provider_of_cards())
    port = str(free_port())
    os.environ |= {"DATABASE": databases["orders"], "CRASH": CUSTOMERS[0]}
    start("orders", "uvicorn", "--log-level=warning", f"--port={port}", "examples.orders.service:app")
    for name in ("orders", "payments"):
        start(f"relay of {name}", "semel", "relay", databases[name], "--to", broker.publish_url)
    orders, payments = broker.consume_url("orders", "payments"), broker.consume_url("payments", "ledger")
    start("payments", "examples.orders.payments", databases["payments"], orders, provider)
    start("ledger", "examples.orders.ledger", databases["ledger"], payments)

    keys = send_each_order_twice(f"http://127.0.0.1:{port}/orders", count)
    wait_for_the_ledger(databases, len(keys), workers)
    return each_once(keys, databases, provider)


def send_each_order_twice(url: str, count: int) -> dict[str, str]:
    """Return the order of each key."""
    found = {}
    retry = Retry(attempts=1000, time=LONGEST, cap="1s")  # until the service is up
    with httpx.Client(transport=IdempotencyTransport(retry=retry), timeout=30) as client:
        for number in range(count):
            order = {"customer": CUSTOMERS[number % len(CUSTOMERS)], "cents": 1000 + number}
            key = f"checkout-{number + 1}"
            for _ in range(2):
                answer = client.post(url, json=order, headers={"Idempotency-Key": key}).raise_for_status()
                again = " (replayed)" if "Idempotent-Replayed" in answer.headers else ""
                print(f"browser   sends {key}: {answer.status_code} {answer.text}{again}", flush=True)
            found[key] = answer.json()["order"]
    return found


def wait_for_the_ledger(databases: dict[str, str], count: int, workers: list[Worker]) -> None:
    """Wait until all orders are booked and no event is left. Restarts processes that die meanwhile."""

    def count_rows(database: str, table: str) -> int:
        with psycopg.connect(databases[database]) as connection:
            return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]

    end = time.monotonic() + LONGEST
    while time.monotonic() < end:
        for worker in workers:
            if worker.process.poll() not in (None, 0):
                print(f"{worker.name:<9} is dead; it is started again", flush=True)
                worker.revive()
        left = count_rows("orders", "semel_outbox") + count_rows("payments", "semel_outbox")
        if not left and count_rows("ledger", "ledger") >= count:
            return
        time.sleep(0.1)


def each_once(keys: dict[str, str], databases: dict[str, str], provider: str) -> bool:
    """Compare the orders that were sent with the provider's charges and the ledger's rows."""
    charges = httpx.get(f"{provider}/charges").json()
    with psycopg.connect(databases["ledger"]) as connection:
        booked = connection.execute("SELECT root, order_id, charge FROM ledger ORDER BY root").fetchall()
    print("\nkey          order     charges  bookings")
    for key, order in keys.items():
        charged = [charge["id"] for charge in charges if charge["order"] == order]
        print(f"{key:<12} {order}  {len(charged):>7}  {booked.count((key, order, *charged)):>8}")
    by_order = {charge["order"]: charge["id"] for charge in charges}
    wanted = [(key, order, by_order.get(order)) for key, order in keys.items()]
    return len(charges) == len(keys) and sorted(booked) == sorted(wanted)


@contextmanager
def provider_of_cards() -> Iterator[str]:
    """Run a fake provider, which charges once for each Idempotency-Key. Yields its URL."""
    command = [sys.executable, "-m", "examples.payment_provider.provider"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.orders", description=__doc__.splitlines()[0])
    parser.add_argument("--broker", choices=sorted(BROKERS), default="rabbitmq")
    parser.add_argument("--orders", type=int, default=5)
    options = parser.parse_args()
    with ExitStack() as stack:
        fine = run(stack, options.broker, options.orders)
    print("each order was charged once and booked once" if fine else "NOT each order was charged once and booked once")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
