"""``semel size``: what a window takes, from records measured in the store itself; and how long it must be."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from semel.cli.exits import FAILED, OK
from semel.errors import PolicyError

NAME = "size"
HELP = "Size the window: keys, bytes and memory in a store, measured there; and how long it must be."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--qps", required=True, metavar="N", help="new keys each second: first requests, not retries")
    parser.add_argument(
        "--window", metavar="T", help="how long answers are kept: 24h, 7d (default: what is needed, or 24h)"
    )
    parser.add_argument("--store", default="memory:", metavar="URL", help="the store to measure in (default: memory:)")
    parser.add_argument(
        "--body", default="1kB", metavar="SIZE", help="bytes of a stored answer, as they are after compression (1kB)"
    )
    parser.add_argument("--sample", metavar="FILE", help="a real answer instead, compressed as Semel would")
    parser.add_argument(
        "--records", type=int, default=2000, metavar="N", help="how many records are written and measured (2000)"
    )
    parser.add_argument("--retry-budget", metavar="T", help="for how long clients retry")
    parser.add_argument("--broker-retention", metavar="T", help="for how long a broker may deliver a message again")
    parser.add_argument("--replay-horizon", metavar="T", help="how far back somebody may replay a log or a queue")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from semel.cli.measuring import Sample, measure
    from semel.cli.sizing import DEFAULT_WINDOW, Needs, recommended
    from semel.core.policy import seconds

    def given(name: str) -> float | None:
        text = getattr(args, name)
        return None if text is None else seconds(_number(text), f"--{name.replace('_', '-')}")

    qps = _qps(args.qps)
    needs = Needs(given("retry_budget"), given("broker_retention"), given("replay_horizon"))
    needed = recommended(needs)
    window = given("window") or needed or DEFAULT_WINDOW
    if not 10 <= args.records <= 1_000_000:
        raise PolicyError(f"--records is 10 to 1000000, not {args.records}")
    sample = Sample(_answer(args), args.records)
    if sys.stderr.isatty():
        print(f"writing {args.records} samples …", file=sys.stderr)
    with _stopping():
        measured = measure(args.store, sample)
    enough = needed is None or window >= (needs.longest() or ("", 0.0))[1]
    found = {
        "qps": qps,
        "window_seconds": window,
        "keys": round(qps * window),
        "store": [_resources(each, qps, window) for each in measured],
        "writes_per_second": 2 * qps,
        "removed_per_second": qps,
        "recommended_window_seconds": needed,
        "decided_by": None if needed is None else (needs.longest() or ("",))[0],
        "window_is_enough": enough,
    }
    print(json.dumps(found)) if args.json else _show(found)
    if not enough:
        print("semel: the window is too short: a request that comes again after it runs again", file=sys.stderr)
    return OK if enough else FAILED


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM ends as Ctrl-C does: the samples are removed first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _resources(each: Any, qps: float, window: float) -> dict[str, Any]:
    held = min(window, each.holds) if each.holds is not None else window
    keys = round(qps * held)
    return {
        "store": each.store,
        "kind": each.what,
        "keys": keys,
        "bytes_per_record": round(each.record, 1),
        "bytes_per_record_in_indexes": None if each.index is None else round(each.index, 1),
        "bytes": round(each.each * keys),
        "held_seconds": held,
        "measured_records": each.records,
        "measured_by": each.how,
    }


def _show(found: dict[str, Any]) -> None:
    from semel.cli.sizing import MARGIN, duration, size

    print(
        f"{found['qps']:g} new keys each second, kept for {duration(found['window_seconds'])}: {found['keys']:,} keys"
    )
    print(
        f"{found['writes_per_second']:g} writes each second (claim, complete), {found['removed_per_second']:g} removed"
    )
    print()
    rows = [("", "keys", "a record", "its indexes", "in all")]
    for each in found["store"]:
        index = each["bytes_per_record_in_indexes"]
        rows.append(
            (
                f"{each['store']}, {each['kind']}",
                f"{each['keys']:,}",
                size(each["bytes_per_record"]),
                "-" if index is None else size(index),
                size(each["bytes"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells))
    print()
    for each in found["store"]:
        print(f"{each['store']}: measured on {each['measured_records']} records, by {each['measured_by']}")
    needed = found["recommended_window_seconds"]
    if needed is None:
        print("window: nobody said how long requests may come again; see --retry-budget and its neighbours")
        return
    verdict = "is enough" if found["window_is_enough"] else "is TOO SHORT"
    print(
        f"window: {duration(found['window_seconds'])} {verdict}; {duration(needed)} is recommended "
        f"({found['decided_by']} and {MARGIN:.0%})"
    )


def _answer(args: argparse.Namespace) -> bytes:
    from semel.cli.sizing import bytes_in

    if args.sample is None:
        import secrets

        return secrets.token_bytes(bytes_in(args.body))  # does not compress: it is what it is
    try:
        with open(args.sample, "rb") as file:
            return file.read()
    except OSError as error:
        raise PolicyError(f"--sample: {error}") from error


def _qps(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise PolicyError(f"--qps is how many new keys come each second, such as 200 or 0.5, not {text[:40]!r}")
    return number


def _number(text: str) -> float | str:
    """Seconds without a unit, as in a policy."""
    try:
        return float(text)
    except ValueError:
        return text
