"""The ledger run: events from producers through outbox, relays and a broker to consumers, while everything breaks.

    python -m examples.ledger --broker kafka --events 100000 --seconds 120

It starts PostgreSQL and the broker, two producers, two relays and two consumers, each in its own process. Then it
kills and pauses these processes at random, and restarts the broker and the database. At the end it compares the
posted entries with the applied ones: nothing may be lost, applied twice, or applied out of order within an account.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable

import psycopg

from examples.brokers import BROKERS, BrokerServer
from examples.worker import Worker
from semel.stores.postgres import migrate
from tests.servers import PostgresServer

PRODUCERS = RELAYS = CONSUMERS = 2
LEASE = 2.0
"""Seconds. A relay that is paused for longer is taken for dead."""
STALLED = 60.0
"""Seconds without progress after which the run ends: what is not applied by then is lost."""

TABLES = """
CREATE TABLE posted (producer integer, number integer, account text, PRIMARY KEY (producer, number));
CREATE TABLE applied (place bigserial PRIMARY KEY, account text, number integer);
"""
# "applied" has no unique key: a second application must show. Its places are taken while the row of the account's
# stream is locked, so they grow in the order in which the entries of an account are applied.
VERDICT = """
SELECT (SELECT count(*) FROM posted),
       (SELECT count(DISTINCT number) FROM applied),
       (SELECT count(*) FROM posted p WHERE NOT EXISTS (SELECT 1 FROM applied a WHERE a.number = p.number)),
       (SELECT count(*) - count(DISTINCT number) FROM applied),
       (SELECT count(*) FROM (
           SELECT number, max(number) OVER (PARTITION BY account ORDER BY place ROWS UNBOUNDED PRECEDING) AS highest
           FROM applied) AS entries WHERE number < highest)
"""


class Run:
    """One run: its servers, its workers and its faults."""

    def __init__(self, options: argparse.Namespace, database: PostgresServer, broker: BrokerServer) -> None:
        self.options = options
        self.database = database
        self.broker = broker
        self.url = database.create_database()
        self.random = random.Random(options.seed)
        self.kills = self.pauses = self.restarts = 0
        migrate(self.url)
        with psycopg.connect(self.url) as connection:
            connection.execute(TABLES)
        broker.prepare("ledger")
        rate = options.events / PRODUCERS / (0.8 * options.seconds)
        self.producers = [
            Worker(f"producer {at}", self._python("producer", at, PRODUCERS, options.events, options.streams, rate))
            for at in range(PRODUCERS)
        ]
        relay = [
            sys.executable, "-m", "semel", "relay", self.url, "--to", broker.publish_url, "--lease", f"{LEASE}s",
        ]  # fmt: skip
        self.relays = [Worker(f"relay {at}", relay, stdout=sys.stderr) for at in range(RELAYS)]
        consumer = self._python(
            "consumer", broker.consume_url("ledger", "ledger"), *(["batches"] if options.in_batches else [])
        )
        self.consumers = [Worker(f"consumer {at}", consumer) for at in range(CONSUMERS)]

    def _python(self, module: str, *words: object) -> list[str]:
        return [sys.executable, "-m", f"examples.ledger.{module}", self.url, *(str(word) for word in words)]

    @property
    def workers(self) -> list[Worker]:
        return [*self.producers, *self.relays, *self.consumers]

    def faults(self) -> list[Callable[[], None]]:
        """Return the faults of this run: each kind at least once, in random order."""
        kinds = [
            lambda: self.kill(self.producers),
            lambda: self.kill(self.relays),
            lambda: self.kill(self.consumers),
            lambda: self.pause(self.relays),
            lambda: self.pause(self.consumers),
            self.restart_broker,
            self.restart_database,
        ]
        faults = kinds + self.random.choices(kinds[:5], k=self.options.faults - len(kinds))
        self.random.shuffle(faults)
        return faults

    def kill(self, workers: list[Worker]) -> None:
        worker = self.random.choice(workers)
        if not worker.finished:
            self.tell(f"kill {worker.name}")
            worker.kill()
            self.kills += 1

    def pause(self, workers: list[Worker]) -> None:
        worker = self.random.choice(workers)
        self.tell(f"pause {worker.name}")
        worker.pause(LEASE * 1.5)
        self.pauses += 1

    def restart_broker(self) -> None:
        self.tell("restart the broker")
        self.broker.restart()
        self.restarts += 1

    def restart_database(self) -> None:
        self.tell("restart the database")
        self.database.restart("immediate")
        self.restarts += 1

    def tell(self, text: str) -> None:
        if not self.options.json:
            print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def tell_where(self, connection: psycopg.Connection) -> None:
        """Report where the entries are that were not applied."""
        for table in ("semel_outbox", "semel_hold", "semel_dead_letter"):
            count, example = connection.execute(f"SELECT count(*), min(t::text) FROM {table} t").fetchone()
            self.tell(f"{table}: {count} rows{f', such as {example[:300]}' if count else ''}")

    def count(self) -> tuple[int, int]:
        """Return how many events are posted and applied, or zeros while the database is down."""
        with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url) as connection:
            row = connection.execute("SELECT (SELECT count(*) FROM posted), (SELECT count(*) FROM applied)").fetchone()
            return row[0], row[1]
        return 0, 0

    def go(self) -> dict[str, int | float]:
        self.began = time.monotonic()
        waiting = self.faults()
        every = 0.8 * self.options.seconds / (len(waiting) + 1)
        moved, before = time.monotonic(), (0, 0)
        try:
            while True:
                time.sleep(min(every, 1.0))
                for worker in self.workers:
                    worker.revive()
                if waiting and time.monotonic() - self.began > every * (self.options.faults - len(waiting) + 1):
                    waiting.pop()()
                now = self.count()
                self.tell(f"posted {now[0]:,}, applied {now[1]:,}")
                if now != before:
                    moved, before = time.monotonic(), now
                done = all(producer.finished for producer in self.producers) and now[0] <= now[1] and now[0] > 0
                if (done and not waiting) or time.monotonic() - moved > STALLED:
                    break
            took = time.monotonic() - self.began
        finally:
            for worker in self.workers:
                worker.stop()
        with psycopg.connect(self.url) as connection:
            posted, applied, lost, duplicates, disordered = connection.execute(VERDICT).fetchone()
            if lost:
                self.tell_where(connection)
        return {
            "events": posted, "applied": applied, "lost": lost + self.options.events - posted,
            "duplicates": duplicates, "disordered": disordered, "kills": self.kills, "pauses": self.pauses,
            "restarts": self.restarts, "seconds": round(took, 1),
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("--broker", choices=sorted(BROKERS), default="redis")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long events are posted and faults injected")
    parser.add_argument("--faults", type=int, default=14, help="how many, at least 7: one of each kind")
    parser.add_argument("--in-batches", action="store_true", help="a consumer applies many entries in one transaction")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print only the verdict, as one JSON object")
    options = parser.parse_args()
    options.faults = max(7, options.faults)
    with PostgresServer() as database, BROKERS[options.broker]() as broker:
        verdict = Run(options, database, broker).go()
    clean = not (verdict["lost"] or verdict["duplicates"] or verdict["disordered"])
    if not options.json:
        print("CLEAN" if clean else "NOT CLEAN", flush=True)
    print(json.dumps(verdict), flush=True)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
