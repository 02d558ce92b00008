"""The command: options, storms one after another, Ctrl-C, and how the verdict is shown."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from semel.cli.exits import FAILED, OK
from semel.errors import StoreURLError

if TYPE_CHECKING:
    from semel.cli.demo.verdict import Verdict

NAME = "demo"
HELP = "Watch a retry storm: lost answers, killed workers, take-overs; then the verdict from an independent ledger."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", metavar="URL", help="where Semel keeps its records (default: SQLite in a temporary folder)"
    )
    parser.add_argument(
        "--seconds", type=_positive, default=8.0, metavar="N", help="how long a storm lasts (default: 8)"
    )
    parser.add_argument("--workers", type=_count, default=4, metavar="N", help="worker processes (default: 4)")
    parser.add_argument("--seed", type=int, metavar="N", help="repeat the chances of an earlier run")
    parser.add_argument("--once", action="store_true", help="one storm; without it, storm after storm until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="the verdict as one JSON object; progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    from semel.cli.demo.screen import Screen, color_wanted
    from semel.cli.demo.storm import Storm
    from semel.cli.demo.verdict import Verdict, table
    from semel.stores.urls import migrate_store

    if args.store and args.store.partition(":")[0] == "memory":
        raise StoreURLError("the demo's workers are processes, and cannot share a store in memory")
    stream = sys.stderr if args.json else sys.stdout
    screen = Screen(stream)
    total, storms = Verdict(), 0
    with (
        _stopping_on_signals() as stopping,
        tempfile.TemporaryDirectory(prefix="semel-demo-", ignore_cleanup_errors=True) as home,
    ):
        store = args.store or "sqlite:///" + str(Path(home).resolve() / "semel.db")
        migrate_store(store)
        while not stopping.is_set():
            storms += 1
            folder = Path(home, f"storm-{storms}")
            folder.mkdir()
            seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed + storms - 1
            storm = Storm(
                folder,
                store,
                seconds=args.seconds,
                workers=args.workers,
                seed=seed,
                sabotage=os.environ.get("SEMEL_DEMO_SABOTAGE", ""),
                number=storms,
            )
            verdict = storm.run(stopping, screen.show)
            total += verdict
            if not args.json:
                screen.say(_headed(storm.title, verdict, table(verdict, color=color_wanted(stream))))
            if not verdict.clean:
                screen.say(_last_words(folder))
            if args.once:
                break
    if args.json:
        print(
            json.dumps({**total.as_json(), "storms": storms, "store": store.partition(":")[0], "seed": seed}),
            flush=True,
        )
    elif storms > 1:
        screen.say(_headed(f"all {storms} storms", total, table(total, color=color_wanted(stream))))
    return OK if total.clean else FAILED


def _headed(title: str, verdict: Verdict, text: str) -> str:
    return f"{title} · {verdict.seconds:.1f} s\n{text}\n"


def _last_words(folder: Path) -> str:
    """What the workers complained of, for whoever looks for the reason."""
    log = folder / "workers.log"
    lines = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
    return "\n".join(["the workers' last words:", *lines]) if lines else "the workers said nothing"


@contextmanager
def _stopping_on_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the storm in hand, which is still finished and judged; a second one ends at once."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stopping
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return number


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 64")
    return number
