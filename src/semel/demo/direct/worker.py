"""One worker process of the demo: ``python -m semel.demo.direct.worker '{…}'``. It runs a few clients in threads."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import Final

from semel.demo.direct.effects import Ledger
from semel.demo.direct.sightings import Sightings
from semel.demo.direct.till import TILLS, Config, Till
from semel.stores.guard import Semel
from semel.stores.urls import open_store

__all__ = ["main"]

HOT: Final = 24
"""Payments requested at the same time: few, so that clients of all processes compete."""
OLD: Final = 250
COMING_BACK: Final = 0.2
"""Share of clients that come back to a recent payment: they find answers, and what killed workers left."""
LOST_ANSWERS: Final = 0.5
"""Share of answers that a client discards, to retry with the same key."""


def storm(config: Config, till: Till, stopping: threading.Event, dice: random.Random) -> None:
    """One client of the storm: request recent payments, discard half of the answers, and retry."""
    while not stopping.is_set():
        newest = int((time.time() - config.began) * config.rate)
        payment = max(0, newest - dice.randrange(OLD if dice.random() < COMING_BACK else HOT))
        while till.ask(payment, dice) and dice.random() < LOST_ANSWERS and not stopping.is_set():
            time.sleep(0.01 * dice.random())


def finish(payments: list[int], till: Till, stopping: threading.Event, dice: random.Random) -> None:
    """One client after the storm: request each of these payments once."""
    while not stopping.is_set():
        try:
            payment = payments.pop()
        except IndexError:
            return
        till.ask(payment, dice)


def crash(args: threading.ExceptHookArgs) -> None:
    """Exit on an unexpected error of a client. The verdict counts the exit code."""
    traceback.print_exception(args.exc_value)
    os._exit(70)


def listen(stopping: threading.Event) -> None:
    """Stop on a line from standard input. End of file means that the parent died: exit at once."""
    for _ in sys.stdin:
        stopping.set()
    os._exit(1)


def main(argv: list[str]) -> int:
    config = Config(**json.loads(argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    stopping = threading.Event()
    threading.excepthook = crash
    threading.Thread(target=listen, args=(stopping,), daemon=True).start()
    ledger = Ledger(str(config.folder / "ledger.db"))
    sightings = Sightings(config.folder / f"worker-{config.number}.jsonl")
    with Semel(open_store(config.store), sweep_every=None) as guard:
        till = TILLS[config.mode](config, guard, ledger, sightings)
        begun = json.loads((config.folder / "finish.json").read_text()) if config.finishing else []
        clients = []
        for i in range(config.threads):
            dice = random.Random(f"{config.seed}/{config.number}/{i}")
            if config.finishing:
                client = threading.Thread(target=finish, args=(begun, till, stopping, dice))
            else:
                client = threading.Thread(target=storm, args=(config, till, stopping, dice))
            client.start()
            clients.append(client)
        for client in clients:
            client.join()
    ledger.close()
    sightings.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
