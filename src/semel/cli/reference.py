"""``semel stores`` and ``semel diagram``: facts about the library, printed from the tables that the code uses."""

from __future__ import annotations

import argparse
import json

from semel.cli.commands import OK, Command

__all__ = ["DIAGRAM", "STORES"]


def configure_stores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def stores(args: argparse.Namespace) -> int:
    """What each kind of store promises, side by side."""
    from semel.stores.urls import KINDS, TRAITS

    if args.json:
        print(json.dumps({kind.name: {"urls": kind.schemes, **kind.traits()} for kind in KINDS}))
        return OK
    rows = [("", *(kind.name for kind in KINDS))]
    rows.append(("URL", *(kind.example for kind in KINDS)))
    for trait, words in TRAITS.items():
        rows.append((words, *(_word(kind.traits()[trait]) for kind in KINDS)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return OK


def _word(promise: bool | str) -> str:
    return promise if isinstance(promise, str) else ("yes" if promise else "no")


def diagram(args: argparse.Namespace) -> int:
    """The life of a record, drawn from the transition table."""
    from semel.core.states import mermaid

    print(mermaid())
    return OK


STORES = Command("stores", "Show what each kind of store can do, side by side.", configure_stores, stores)
DIAGRAM = Command("diagram", "Print the life of a record as a Mermaid state diagram.", lambda parser: None, diagram)
