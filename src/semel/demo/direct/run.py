"""Run storms straight on the store, one after another: processes call a protected function beside a ledger."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

from semel.demo.direct.effects import refuse_without_transactions
from semel.demo.direct.storm import Storm
from semel.demo.screen import Screen, Stopping, color_wanted
from semel.demo.verdict import StormVerdict, headed, table
from semel.stores.urls import migrate_store

__all__ = ["run"]

WORKERS = 4


def run(args: argparse.Namespace, stopping: Stopping) -> bool:
    """Run one storm, or storms until Ctrl-C. Returns whether all were clean."""
    mode = args.mode or "leased"
    if mode == "transactional" and args.store:
        refuse_without_transactions(args.store)
    stream = sys.stderr if args.json else sys.stdout
    screen = Screen(stream)
    total, storms = StormVerdict(), 0
    with tempfile.TemporaryDirectory(prefix="semel-demo-", ignore_cleanup_errors=True) as home:
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
                workers=args.workers or WORKERS,
                seed=seed,
                mode=mode,
                sabotage=os.environ.get("SEMEL_DEMO_SABOTAGE", ""),
                number=storms,
            )
            verdict = storm.run(stopping, screen.show)
            total += verdict
            if not args.json:
                screen.say(headed(storm.title, verdict, table(verdict, color=color_wanted(stream))))
            if not verdict.clean:
                screen.say("the end of the workers' log:\n" + storm.last_lines())
            if args.once:
                break
    if args.json:
        about = {"storms": storms, "store": store.partition(":")[0], "mode": mode, "seed": seed}
        print(json.dumps({**total.as_json(), **about}), flush=True)
    elif storms > 1:
        screen.say(headed(f"all {storms} storms", total, table(total, color=color_wanted(stream))))
    return total.clean
