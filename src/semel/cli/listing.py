"""``semel list``, ``stats`` and ``purge``: which records there are, how many, and how finished ones are deleted."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from semel.cli.commands import (
    FAILED,
    INTERRUPTED,
    OK,
    Command,
    Progress,
    StopFlag,
    add_caution,
    add_url,
    as_json,
    confirmed,
    open_guard,
    positive,
    printable,
    say,
    stop_on_signals,
    who_is_here,
    write_audit,
)
from semel.core.ops import Record
from semel.core.policy import duration, seconds
from semel.core.states import State
from semel.demo.screen import has_colour
from semel.engine.audit_log import log_act
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.stores.guard import Semel

_STATES: Final = {state.name.lower(): state for state in (State.RUNNING, State.ABANDONED, State.UNKNOWN, State.DONE)}
_COLOURS: Final = {State.RUNNING: "36", State.ABANDONED: "33", State.UNKNOWN: "31", State.DONE: "32"}
_PAGE: Final = 500
_STEP: Final = 100
"""How many records a purge deletes in one step."""
_HEAD: Final = ("STATE", "OPERATION", "KEY", "TENANT", "AGE", "ATTEMPT", "EXPIRES IN")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operation", metavar="O", help="only records of this operation")
    parser.add_argument("--tenant", metavar="T", help="only records of this tenant; '' means those without one")
    parser.add_argument(
        "--older", default="0s", metavar="D", help="only records whose first attempt is older: 30s, 2h, 7d"
    )


def _filters(args: argparse.Namespace) -> dict[str, Any]:
    return {"operation": args.operation, "tenant": args.tenant, "older": seconds(args.older, "--older")}


class _Walk:
    """Follows the pages of a list, and shows how far it has looked."""

    def __init__(self, guard: Semel, stopping: StopFlag, filters: dict[str, Any]) -> None:
        self._guard = guard
        self._stopping = stopping
        self._filters = filters
        self.looked_at = 0
        self.ended = False
        self.progress = Progress()

    def pages(self, most: int | None = None) -> Iterator[Sequence[Record]]:
        """:param most: maximum number of records on all pages."""
        after: str | None = None
        left = sys.maxsize if most is None else most
        while left > 0 and not self._stopping.is_set():
            page = self._guard.list_page(limit=min(left, _PAGE), after=after, **self._filters)
            self.looked_at += page.looked_at
            left -= len(page.records)
            if page.records:
                self.progress.clear()
                yield page.records
            if page.after is None:
                self.ended = True
                break
            after = page.after
            self.progress.show(f"looked at {self.looked_at:,} records …")
        self.progress.clear()


def configure_list(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--state", action="append", choices=list(_STATES), metavar="S",
        help=f"only records in this state: {', '.join(_STATES)}; may be repeated",
    )  # fmt: skip
    _add_filters(parser)
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N records (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def list_records(args: argparse.Namespace) -> int:
    filters = {**_filters(args), "states": [_STATES[name] for name in args.state or ()]}
    shown = 0
    widths: list[int] | None = None
    with open_guard(args.url, reads_only=True) as guard, stop_on_signals() as stopping:
        walk = _Walk(guard, stopping, filters)
        for records in walk.pages(args.limit):
            shown += len(records)
            if args.json:
                for record in records:
                    print(as_json(describe_listed(record)))
            else:
                widths = _print_table(records, widths)
            sys.stdout.flush()
    if not args.json and not shown:
        print("no records")
    return INTERRUPTED if stopping.is_set() else OK


def describe_listed(record: Record) -> dict[str, Any]:
    """A record of a list as plain values. Times are seconds from now. What means nothing in its state is left out."""
    shown: dict[str, Any] = {
        "operation": record.operation,
        "key": record.key,
        "tenant": record.tenant,
        "state": record.state.name.lower(),
        "id": record.id.hex(),
        "attempt": record.attempt,
        "token": record.token,
        "age": round(record.age, 3),
        "expires_in": round(record.expires_in, 3),
    }
    if record.root is not None:
        shown |= {"root": record.root, "parent": record.parent}
    if record.state in (State.RUNNING, State.ABANDONED):
        shown["lease_left"] = round(record.lease_left, 3)
    return shown


def _print_table(records: Sequence[Record], widths: list[int] | None) -> list[int]:
    """Print a page in columns, with the head if it is the first. Returns the widths, which later pages keep."""
    rows = [_cells(record) for record in records]
    if widths is None:
        widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
        print("  ".join(name.ljust(width) for name, width in zip(_HEAD, widths, strict=True)).rstrip())
    coloured = has_colour(sys.stdout)
    for record, row in zip(records, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if coloured:
            cells[0] = f"\x1b[{_COLOURS[record.state]}m{cells[0]}\x1b[0m"
        print("  ".join(cells).rstrip())
    return widths


def _cells(record: Record) -> tuple[str, ...]:
    key = f"id {record.id.hex()}" if record.key is None else record.key
    return (
        record.state.name.lower(),
        *(printable(text).replace("\n", "\\n") for text in (record.operation, key, record.tenant or "-")),
        duration(record.age),
        str(record.attempt),
        duration(record.expires_in) if record.expires_in > 0 else "-",
    )


# -- how many there are


def configure_stats(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--look", type=positive, default=20_000, metavar="N",
        help="how many records to look at, the newest first, for states and operations (default: 20000)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")


def stats(args: argparse.Namespace) -> int:
    states: Counter[str] = Counter()
    operations: dict[str, Counter[str]] = {}
    oldest: dict[str, float] = {}
    with open_guard(args.url, reads_only=True) as guard, stop_on_signals() as stopping:
        size = guard.measure()
        walk = _Walk(guard, stopping, {})
        for records in walk.pages(args.look):
            for record in records:
                state = record.state.name.lower()
                states[state] += 1
                operations.setdefault(record.operation, Counter())[state] += 1
                oldest[state] = max(oldest.get(state, 0.0), record.age)
    found = {
        "records": size.records,
        "exact": size.exact,
        "bytes": size.bytes,
        "sweep_lag": round(size.sweep_lag, 3),
        "looked_at": walk.looked_at,
        "complete": walk.ended,
        "states": dict(states.most_common()),
        "oldest": {state: round(age, 3) for state, age in oldest.items()},
        "operations": {
            name: dict(counted) for name, counted in sorted(operations.items(), key=lambda each: -each[1].total())
        },
    }
    if args.json:
        print(as_json(found))
    else:
        _print_stats(found)
    return INTERRUPTED if stopping.is_set() else OK


def _print_stats(found: dict[str, Any]) -> None:
    about = "" if found["exact"] else "about "
    room = "" if found["bytes"] is None else f", {found['bytes'] / 1e6:,.1f} MB"
    print(f"{about}{found['records']:,} records{room}")
    lag = found["sweep_lag"]
    print(f"expired records wait for a sweep since {duration(lag)}" if lag else "no expired record waits for a sweep")
    part = "all of them" if found["complete"] else "the newest, where the store has an order"
    print(f"\nof {found['looked_at']:,} records that were looked at ({part}):")
    for state, count in found["states"].items():
        print(f"  {state:<10} {count:>9,}   oldest {duration(found['oldest'][state])}")
    print()
    width = max([9, *(len(printable(name)) for name in list(found["operations"])[:20])])
    for name, counted in list(found["operations"].items())[:20]:
        detail = ", ".join(f"{count:,} {state}" for state, count in counted.items())
        say(f"  {name:<{width}}  {detail}")
    more = len(found["operations"]) - 20
    if more > 0:
        print(f"  and {more} more operations")


# -- delete finished records


def configure_purge(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    _add_filters(parser)
    parser.add_argument("--all", action="store_true", help="all finished records: instead of a filter")
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N records (default: all)")
    add_caution(parser)


def purge(args: argparse.Namespace) -> int:
    filters = {**_filters(args), "states": [State.DONE]}
    chosen = {name: value for name, value in _filters(args).items() if value not in (None, 0.0)}
    if not chosen and not args.all:
        raise ConfigurationError("say which records: --operation, --tenant or --older, or --all for all finished ones")
    with open_guard(args.url, reads_only=args.dry_run) as guard, stop_on_signals() as stopping:
        count = sum(len(_deletable(records)) for records in _Walk(guard, stopping, filters).pages(args.limit))
        if stopping.is_set():
            raise KeyboardInterrupt
        question = f"delete {count:,} finished records? The next call with such a key runs its operation again."
        if count and not args.dry_run and not confirmed(question, args, needs_yes=True):
            return FAILED
        deleted = 0
        if not args.dry_run:
            walk = _Walk(guard, stopping, filters)
            who = who_is_here()
            try:
                for records in walk.pages(args.limit):
                    for record in _free(guard, _deletable(records), stopping):
                        deleted += 1
                        operation, identity = record.operation, record.id.hex()
                        log_act("purge", who, "cli", level=logging.INFO, operation=operation, id=identity)
                    walk.progress.show(f"{deleted:,} of {count:,} deleted …")
                _sweep(guard, deleted)
            finally:
                if deleted:
                    write_audit("purge", deleted=deleted, **chosen)
    done = count if args.dry_run else deleted
    if args.json:
        print(as_json({"count": done, "dry_run": args.dry_run}))
    else:
        print(f"{done:,} finished records {'would be ' if args.dry_run else ''}deleted")
    return INTERRUPTED if stopping.is_set() else OK


def _deletable(records: Sequence[Record]) -> Sequence[Record]:
    """The records that users may delete: not those that Semel keeps for itself."""
    from semel.stores.tiered.rules import NAME_OPERATION

    return [record for record in records if record.operation != NAME_OPERATION]


def _free(guard: Semel, records: Sequence[Record], stopping: StopFlag) -> Iterator[Record]:
    """Free records by their tokens: one that was claimed or released meanwhile is another record, and stays."""
    from semel.core.ops import Resolve
    from semel.stores.batching.batches import result_of

    for at in range(0, len(records), _STEP):
        if stopping.is_set():
            return
        part = records[at : at + _STEP]
        answers = guard.store.execute_many([Resolve(record.id, None, 1.0, token=record.token) for record in part])
        for record, answer in zip(part, answers, strict=True):
            if result_of(answer) is State.DONE:
                yield record


def _sweep(guard: Semel, freed: int) -> None:
    """Remove what was freed: a freed record counts as absent, but its fields are there until a sweep."""
    while freed > 0:
        swept = guard.sweep(1000)
        freed -= swept.removed
        if not swept.removed:
            return


LIST = Command("list", "List the records of a store by state, operation, tenant and age.", configure_list, list_records)
STATS = Command(
    "stats", "Show how many records a store has, in which states, and whether sweeps keep up.", configure_stats, stats
)
PURGE = Command(
    "purge", "Delete finished records, so that their keys can run again; asks first.", configure_purge, purge
)
