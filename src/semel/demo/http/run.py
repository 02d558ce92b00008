"""Serve the payments service with commands to paste, and run storms against a second copy of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Final, Self

from semel.demo.http.service import Service, require_packages
from semel.demo.screen import Screen, Stopping, color_wanted
from semel.demo.verdict import StormVerdict, headed, one_line, table
from semel.stores.urls import migrate_store

__all__ = ["run", "welcome"]

WORKERS: Final = 3
PACE: Final = 60.0
"""New payments each second, when one storm is all there is to do."""
GENTLE_PACE: Final = 15.0
GENTLE_KILLS: Final = 4.0
"""Seconds between kills while people use the service too."""
BETWEEN: Final = 1.0
"""Seconds between two storms."""
TICK: Final = 0.1


def run(args: argparse.Namespace, stopping: Stopping) -> bool:
    """Serve until Ctrl-C, under storms unless told otherwise. Returns whether all storms were clean."""
    require_packages()
    stream = sys.stderr if args.json else sys.stdout
    screen = Screen(stream)
    with (
        tempfile.TemporaryDirectory(prefix="semel-demo-", ignore_cleanup_errors=True) as home,
        contextlib.ExitStack() as stack,
    ):
        served = stack.enter_context(_Served(Path(home).resolve(), args.store, args.port, args.workers or WORKERS))
        stormy = None if args.no_storm else served
        if not args.once:
            screen.say(welcome(served.service.url, storm=not args.no_storm))
            if not args.no_storm:  # a service of its own: the user's calls are neither counted nor cut off
                apart = Path(home).resolve() / "storm"
                apart.mkdir()
                stormy = stack.enter_context(_Served(apart, None, 0, args.workers or WORKERS))
        total, storms, seed = _storms(args, served, stormy, stopping, screen)
        if stormy is None:
            _idle((served,), stopping)
        counted = (stormy or served).counted()
    if args.json:
        found = {"storms": storms, "store": (stormy or served).store.partition(":")[0], "seed": seed}
        print(json.dumps({**total.as_json(), **found, "over": "http", "stats": counted}), flush=True)
    else:
        if storms > 1:
            screen.say(headed(f"all {storms} storms", total, table(total, color=color_wanted(stream))))
        screen.say("GET /stats, at the end: " + json.dumps(counted))
    return total.clean or not total.operations


class _Served:
    """A running service with its own store and rows."""

    def __init__(self, folder: Path, store: str | None, port: int, workers: int) -> None:
        from semel.demo.payments.data import Books, has_books, prepare

        self.store = store or f"sqlite:///{folder}/semel.db"
        migrate_store(self.store)
        # In the store's own database where it has SQL tables, otherwise in a file.
        where = self.store if has_books(self.store) else f"sqlite:///{folder}/books.db"
        prepare(where)
        mistake = os.environ.get("SEMEL_DEMO_SABOTAGE", "")
        self.service = Service(folder, self.store, where, workers=workers, port=port, mistake=mistake)
        self.books = Books(where)

    def __enter__(self) -> Self:
        try:
            self.service.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.books.close()
        self.service.stop()

    def counted(self) -> dict[str, int]:
        from semel.demo.payments.data import stats

        found: dict[str, int] = self.books.run(stats())._asdict()
        return found


def _storms(
    args: argparse.Namespace, served: _Served, stormy: _Served | None, stopping: Stopping, screen: Screen
) -> tuple[StormVerdict, int, int | None]:
    """Run storms, or one. Returns the sum of the verdicts, the number of storms, and the last seed."""
    from semel.demo.http.storm import KILL_EVERY, HTTPStorm

    stream = sys.stderr if args.json else sys.stdout
    total, storms, seed = StormVerdict(), 0, args.seed
    while stormy is not None and not stopping.is_set():
        storms += 1
        seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed + storms - 1
        storm = HTTPStorm(
            stormy.service, stormy.store, stormy.books,
            seconds=args.seconds, seed=seed, number=storms,
            pace=PACE if args.once else GENTLE_PACE,
            kill_every=KILL_EVERY if args.once else GENTLE_KILLS,
        )  # fmt: skip

        def show(storm: HTTPStorm) -> None:
            served.service.tend()
            screen.show(storm)

        verdict = storm.run(stopping, show)
        total += verdict
        if not args.json:
            text = headed(storm.title, verdict, table(verdict, color=color_wanted(stream)))
            screen.say(text if args.once or not verdict.clean else one_line(storm.title, verdict))
        if not verdict.clean:
            screen.say("the end of the service's log:\n" + stormy.service.last_lines())
        if args.once:
            break
        _idle((served, stormy), stopping, BETWEEN)
    return total, storms, seed


def welcome(url: str, *, storm: bool) -> str:
    """The addresses, and two calls to paste."""
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
        lines += [
            "",
            "Meanwhile a second one, with tables of its own, is under a storm of retries, and its processes are killed",
            "(--no-storm: neither).",
        ]
    return "\n".join([*lines, ""])


def _idle(served: tuple[_Served, ...], stopping: Stopping, seconds: float | None = None) -> None:
    """Serve without a storm, for this many seconds or until stopped."""
    left = seconds
    while not stopping.is_set() and (left is None or left > 0):
        for each in served:
            each.service.tend()
        stopping.wait(TICK)
        left = None if left is None else left - TICK
