"""The payments service for people: its address and its first call as lines to paste, and storms against it."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import Final

from semel.cli.demo.screen import Screen, color_wanted
from semel.cli.demo.service import Service, require_packages
from semel.cli.demo.stopping import stopping_on_signals
from semel.cli.demo.verdict import Verdict, headed, one_line, table
from semel.cli.exits import FAILED, OK
from semel.stores.urls import migrate_store

__all__ = ["run", "welcome"]

WORKERS: Final = 3
PACE: Final = 60.0
"""New payments each second of one storm that is all there is to do."""
GENTLE_PACE: Final = 15.0
GENTLE_KILLS: Final = 4.0
"""Seconds between kills while people use the service too."""
BETWEEN: Final = 1.0
"""Seconds between two storms."""
TICK: Final = 0.1


def run(args: argparse.Namespace) -> int:
    require_packages()
    from semel.cli.demo.http_storm import KILL_EVERY, HTTPStorm
    from semel.cli.demo.payments.data import Books, has_books, prepare, stats

    stream = sys.stderr if args.json else sys.stdout
    screen = Screen(stream)
    total, storms, seed = Verdict(), 0, args.seed
    with (
        stopping_on_signals() as stopping,
        tempfile.TemporaryDirectory(prefix="semel-demo-", ignore_cleanup_errors=True) as home,
    ):
        folder = Path(home).resolve()
        store = args.store or f"sqlite:///{folder}/semel.db"
        migrate_store(store)
        # Beside the records, so that a later mode can commit both as one; a store without SQL has no place for rows.
        where = store if has_books(store) else f"sqlite:///{folder}/books.db"
        prepare(where)
        service = Service(
            folder,
            store,
            where,
            workers=args.workers or WORKERS,
            port=args.port,
            mistake=os.environ.get("SEMEL_DEMO_SABOTAGE", ""),
        )
        books = Books(where)
        try:
            service.start()
            if not args.once:
                screen.say(welcome(service.url, storm=not args.no_storm))
            while not stopping.is_set() and not args.no_storm:
                storms += 1
                seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed + storms - 1
                storm = HTTPStorm(
                    service, store, books,
                    seconds=args.seconds, seed=seed, number=storms,
                    pace=PACE if args.once else GENTLE_PACE,
                    kill_every=KILL_EVERY if args.once else GENTLE_KILLS,
                )  # fmt: skip
                verdict = storm.run(stopping, screen.show)
                total += verdict
                if not args.json:
                    text = headed(storm.title, verdict, table(verdict, color=color_wanted(stream)))
                    screen.say(text if args.once or not verdict.clean else one_line(storm.title, verdict))
                if not verdict.clean:
                    screen.say("the service's last words:\n" + service.last_words())
                if args.once:
                    break
                _idle(service, stopping, BETWEEN)
            if args.no_storm:
                _idle(service, stopping)
            counted = books.run(stats())._asdict()
        finally:
            books.close()
            service.stop()
    if args.json:
        found = {"storms": storms, "store": store.partition(":")[0], "seed": seed, "over": "http", "stats": counted}
        print(json.dumps({**total.as_json(), **found}), flush=True)
    else:
        if storms > 1:
            screen.say(headed(f"all {storms} storms", total, table(total, color=color_wanted(stream))))
        screen.say("GET /stats, at the end: " + json.dumps(counted))
    return OK if total.clean or not total.operations else FAILED


def welcome(url: str, *, storm: bool) -> str:
    """What is where, and two calls that work as pasted."""
    key = uuid.uuid4()
    call = (
        f"curl -i {url}/payments -H 'Authorization: Bearer sk_alice' -H 'Idempotency-Key: {key}' "
        """-H 'Content-Type: application/json' -d '{"amount": 1250, "currency": "EUR", "customer": "ada"}'"""
    )
    lines = [
        f"Payments that happen once, on {url}   (Ctrl-C ends it)",
        "",
        "The first call:",
        f"  {call}",
        "Its replay, the same line again: the same answer, and Idempotent-Replayed: true",
        f"  {call}",
        "How often a handler ran, and what there is:",
        f"  curl {url}/stats",
        f"Pages: {url}/docs   OpenAPI: {url}/openapi.json",
    ]
    if storm:
        lines += ["", "Meanwhile a storm of retries goes over it, and its processes are killed (--no-storm: neither)."]
    return "\n".join([*lines, ""])


def _idle(service: Service, stopping: threading.Event, seconds: float | None = None) -> None:
    """Only serve, until it is time or over."""
    left = seconds
    while not stopping.is_set() and (left is None or left > 0):
        service.tend()
        stopping.wait(TICK)
        left = None if left is None else left - TICK
