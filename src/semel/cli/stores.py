"""``semel stores``: what each kind of store promises, side by side."""

from __future__ import annotations

import argparse
import json

from semel.cli.exits import OK

NAME = "stores"
HELP = "Show what each kind of store can do, side by side."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from semel.stores.capabilities import STORES, TRAITS

    if args.json:
        print(json.dumps({store.name: {"urls": store.schemes, **store.traits()} for store in STORES}))
        return OK
    rows = [("", *(store.name for store in STORES))]
    rows.append(("URL", *(store.example for store in STORES)))
    for trait, words in TRAITS.items():
        rows.append((words, *(_word(store.traits()[trait]) for store in STORES)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return OK


def _word(promise: bool | str) -> str:
    return promise if isinstance(promise, str) else ("yes" if promise else "no")
