"""Run the demo: storms one after another, straight on the store or over HTTP beside a service, and their verdicts."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from semel.demo.evidence import refuse_without_transactions
from semel.demo.http_storm import KILL_EVERY, HTTPStorm
from semel.demo.payments.service import Service, require_packages
from semel.demo.screen import Screen, Stopping, StormVerdict, View
from semel.demo.storm import Storm
from semel.stores.urls import migrate_store, open_store

DIRECT_WORKERS: Final = 4
WORKERS: Final = 3
PACE: Final = 60.0
"""New payments each second, when one storm is all there is to do."""
GENTLE_PACE: Final = 15.0
GENTLE_KILLS: Final = 4.0
"""Seconds between kills while people use the service too."""
BETWEEN: Final = 1.0
"""Seconds between two storms."""
TICK: Final = 0.1


def run_direct(args: argparse.Namespace, stopping: Stopping) -> bool:
    """Run one storm on the store, or storms until Ctrl-C. Returns whether all were clean."""
    mode = args.mode or "leased"
    if mode == "transactional" and args.store:
        refuse_without_transactions(args.store)
    with _home() as home:
        store = args.store or f"sqlite:///{home}/semel.db"
        migrate_store(store)
        open_store(store).close()  # raises here, and not in each worker, if the sync driver is missing

        def make(number: int, seed: int) -> Storm:
            folder = home / f"storm-{number}"
            folder.mkdir()
            return Storm(
                folder, store, seconds=args.seconds, workers=args.workers or DIRECT_WORKERS, seed=seed, mode=mode,
                sabotage=_sabotage(), number=number,
            )  # fmt: skip

        session = _Session(args, stopping)
        session.run(make, brief=False)
    session.finish({"store": store.partition(":")[0], "mode": mode})
    return session.total.clean


def run_http(args: argparse.Namespace, stopping: Stopping) -> bool:
    """Serve until Ctrl-C, under storms unless told otherwise. Returns whether all storms were clean."""
    require_packages()
    session = _Session(args, stopping)
    workers = args.workers or WORKERS
    with _home() as home, contextlib.ExitStack() as stack:
        stormy = None
        if not args.once and not args.no_storm:  # of its own: the user's calls are neither counted nor cut off
            apart = home / "storm"
            apart.mkdir()
            stormy = stack.enter_context(Service(apart, None, workers=workers, port=0, mistake=_sabotage()))
        service = stack.enter_context(
            Service(
                home, args.store, workers=workers, port=args.port, mistake=_sabotage(),
                beside="" if stormy is None else stormy.store,
            )
        )  # fmt: skip
        stormy = stormy or service
        if not args.once:
            session.screen.say(welcome(service.url, storm=not args.no_storm))

        def make(number: int, seed: int) -> HTTPStorm:
            return HTTPStorm(
                stormy, seconds=args.seconds, seed=seed, number=number, pace=PACE if args.once else GENTLE_PACE,
                kill_every=KILL_EVERY if args.once else GENTLE_KILLS,
            )  # fmt: skip

        def idle(seconds: float = float("inf")) -> None:
            while not stopping.is_set() and seconds > 0:
                service.tend()
                stormy.tend()
                stopping.wait(TICK)
                seconds -= TICK

        if args.no_storm:
            idle()
        else:
            session.run(make, brief=not args.once, tend=service.tend, between=lambda: idle(BETWEEN))
        counted = (stormy if args.json else service).counted()
    session.finish({"store": stormy.store.partition(":")[0], "over": "http", "stats": counted})
    if not args.json:
        session.screen.say("GET /stats, at the end: " + json.dumps(counted))
    return session.total.clean or not session.total.operations


class _Session:
    """Storms one after another, their verdicts, and the sum of these."""

    def __init__(self, args: argparse.Namespace, stopping: Stopping) -> None:
        self._args = args
        self._stopping = stopping
        self._stream = sys.stderr if args.json else sys.stdout
        self._announced_end = False
        self.screen = Screen(self._stream)
        self.total = StormVerdict()
        self.storms = 0
        self.seed: int | None = args.seed

    def run(
        self,
        make: Callable[[int, int], Any],
        *,
        brief: bool,
        tend: Callable[[], None] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        """Run one storm, or storms until Ctrl-C.

        :param make: makes the storm of this number, with this seed.
        :param brief: say a clean verdict in one line.
        :param tend: called all the time.
        :param between: called between two storms.
        """

        def show(view: View) -> None:
            if tend is not None:
                tend()
            if self._stopping.is_set() and not self._announced_end:
                self._announced_end = True
                self.screen.say(
                    "stopping: what was started is finished first, then the verdict; Ctrl-C ends it at once"
                )
            self.screen.show(view)

        first = self._args.seed
        while not self._stopping.is_set():
            self.storms += 1
            self.seed = random.SystemRandom().randrange(1_000_000) if first is None else first + self.storms - 1
            storm = make(self.storms, self.seed)
            verdict: StormVerdict = storm.run(self._stopping, show)
            self.total += verdict
            if not self._args.json:
                short = brief and verdict.clean
                self.screen.say(verdict.as_line(storm.title) if short else verdict.as_table(storm.title, self._stream))
            if not verdict.clean:
                self.screen.say("the end of the workers' log:\n" + storm.last_lines())
            if self._args.once:
                return
            if between is not None:
                between()

    def finish(self, about: dict[str, Any]) -> None:
        """Say the sum of all verdicts."""
        if self._args.json:
            about = {"storms": self.storms, "seed": self.seed, **about}
            print(json.dumps({**self.total.as_json(), **about}), flush=True)
        elif self.storms > 1:
            self.screen.say(self.total.as_table(f"all {self.storms} storms", self._stream))


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """A temporary folder."""
    with tempfile.TemporaryDirectory(prefix="semel-demo-", ignore_cleanup_errors=True) as home:
        yield Path(home).resolve()


def _sabotage() -> str:
    """A mistake to make on purpose, to show that the verdict finds it."""
    return os.environ.get("SEMEL_DEMO_SABOTAGE", "")


def welcome(url: str, *, storm: bool) -> str:
    """The addresses, and two calls to paste."""
    key = uuid.uuid4()
    call = (
        f"curl -i {url}/payments -H 'Authorization: Bearer sk_alice' -H 'Idempotency-Key: {key}' "
        """-H 'Content-Type: application/json' -d '{"amount": 1250, "currency": "EUR", "customer": "ada"}'"""
    )
    lines = [
        f"Payments that happen once, on {url}   (Ctrl-C ends it)",
        f"Open {url}/ in a browser: the console, with buttons that pay twice and kill a worker.",
        "",
        "The first call:",
        f"  {call}",
        "Its replay, the same line again: the same answer, and Idempotent-Replayed: true",
        f"  {call}",
        "How often a handler ran, and what there is:",
        f"  curl {url}/stats",
        f"Its routes: {url}/try   OpenAPI: {url}/openapi.json, and as pages: {url}/docs",
    ]
    if storm:
        lines += [
            "",
            "Meanwhile a second one, with tables of its own, is under a storm of retries, and its processes are killed",
            "(--no-storm: neither). The console shows it as the store called storm.",
        ]
    return "\n".join([*lines, ""])
