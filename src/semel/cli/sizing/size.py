"""``semel size``: the room that a ttl window takes, measured with records in the store, and how long it must be."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from semel.cli.commands import FAILED, OK, URLS, Command, add_store
from semel.core.policy import duration, seconds
from semel.errors import PolicyError
from semel.stores.sizing import MARGIN, Needs, bytes_in, recommended, size

if TYPE_CHECKING:
    from semel.cli.sizing.samples import Measured

DEFAULT_RECORDS: Final = 2000
LARGEST_ANSWER: Final = 64 * 1024 * 1024
"""Bytes: the default limit of the codec."""
MOST_BYTES: Final = 2**31
"""Bytes that all samples together may have."""
DEFAULT_BYTES: Final = 200_000_000
"""Bytes of all samples by default. If answers are large, fewer samples are written."""
DEFAULT_WINDOW: Final = 86400.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--qps", required=True, metavar="N", help="new keys each second: first requests, not retries")
    parser.add_argument(
        "--window", metavar="T", help="how long answers are kept: 24h, 7d (default: what is needed, or 24h)"
    )
    add_store(parser, "memory:", f"the store to measure in: {URLS} (default: memory:)")
    parser.add_argument(
        "--body",
        default="1kB",
        metavar="SIZE",
        help="bytes of a stored answer, as they are after compression; 64 MiB at most (default: 1kB)",
    )
    parser.add_argument("--sample", metavar="FILE", help="a real answer instead, compressed as Semel would")
    parser.add_argument(
        "--records",
        type=int,
        metavar="N",
        help="how many records are written and measured; databases may need more (default: 2000, fewer if large)",
    )
    add_needs(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def add_needs(parser: argparse.ArgumentParser) -> None:
    """Add the options that say for how long a request may come again."""
    parser.add_argument("--retry-budget", metavar="T", help="for how long clients retry")
    parser.add_argument("--broker-retention", metavar="T", help="for how long a broker may deliver a message again")
    parser.add_argument("--replay-horizon", metavar="T", help="how far back somebody may replay a log or a queue")


def needs_of(args: argparse.Namespace) -> Needs:
    """What these options say."""
    return Needs(*(seconds_of(args, name) for name in ("retry_budget", "broker_retention", "replay_horizon")))


def seconds_of(args: argparse.Namespace, name: str) -> float | None:
    """The time that an option has, as a number of seconds or with a unit; None if it was left out."""
    text, option = getattr(args, name), f"--{name.replace('_', '-')}"
    if text is None:
        return None
    try:
        number: float | str = float(text)
    except ValueError:
        number = text
    found = seconds(number, option)
    if found <= 0:
        raise PolicyError(f"{option}: {text[:40]} is no time; write 30s, 24h or 7d, or leave it out")
    return found


def run(args: argparse.Namespace) -> int:
    from semel.cli.sizing.measure import measure
    from semel.cli.sizing.samples import Interrupts, Sample

    qps = _qps(args.qps)
    needs = needs_of(args)
    needed = recommended(needs)
    window = seconds_of(args, "window") or needed or DEFAULT_WINDOW
    answer = _answer(args)
    records = _records(args.records, len(answer))
    interrupts = Interrupts()
    if sys.stderr is not None and sys.stderr.isatty():
        _tell(f"writing {records} samples …")
    with interrupts.handled():
        measured = measure(args.store, Sample(answer, records, interrupts))
    longest = needs.longest()
    enough = longest is None or window >= longest[1]
    found = {
        "qps": qps,
        "window_seconds": window,
        "keys": round(qps * window),
        "store": [_resources(each, qps, window) for each in measured],
        "writes_per_second": 2 * qps,
        "removed_per_second": qps,
        "recommended_window_seconds": needed,
        "decided_by": None if longest is None else longest[0],
        "window_is_enough": enough,
    }
    print(json.dumps(found)) if args.json else _show(found, measured)
    if not enough:
        _tell("semel: the window is too short: a retry that arrives after it runs the operation again")
    return OK if enough else FAILED


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
        "work": [
            {
                "unit": work.unit,
                "per_new_key": work.first,
                "per_retry": work.again,
                "per_sweep_at_most": work.sweep,
                "per_second": work.first * qps,
            }
            for work in each.work
        ],
    }


def _tell(line: str) -> None:
    """Print to standard error, if there is one and its terminal still exists."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(line, file=sys.stderr)


def _show(found: dict[str, Any], measured: list[Measured]) -> None:
    qps, writes, removed = (f"{found[name]:,.12g}" for name in ("qps", "writes_per_second", "removed_per_second"))
    print(f"{qps} new keys each second, kept for {duration(found['window_seconds'])}: {found['keys']:,} keys")
    print(f"{writes} writes each second (claim, complete), {removed} removed")
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
    for each, asked in zip(found["store"], measured, strict=True):
        for work, one in zip(each["work"], asked.work, strict=True):
            print(f"{each['store']}: {_describe_work(work, one.which)}")
        by = f"measured on {asked.records} records, by {asked.how}" if asked.records else asked.how
        print(f"{each['store']}: {by}")
    needed = found["recommended_window_seconds"]
    if needed is None:
        print("window: nobody said how long requests may come again; see --retry-budget and its neighbours")
        return
    verdict = "is enough" if found["window_is_enough"] else "is TOO SHORT"
    print(
        f"window: {duration(found['window_seconds'])} {verdict}; {duration(needed)} is recommended "
        f"({found['decided_by']} and {MARGIN:.0%})"
    )


def _describe_work(work: dict[str, Any], which: str) -> str:
    unit, new, retry, sweep = (work[name] for name in ("unit", "per_new_key", "per_retry", "per_sweep_at_most"))
    words = f"{work['per_second']:,.12g} {unit} each second ({new:g} for a new key), {retry or 'none'} for {which}"
    if not new and not retry:
        words = f"no {unit} for calls"
    return words if sweep is None else f"{words}, up to {sweep:,.12g} for a sweep"


def _answer(args: argparse.Namespace) -> bytes:
    if args.sample is None:
        import secrets

        length = bytes_in(args.body)
        if length > LARGEST_ANSWER:
            raise PolicyError(
                f"--body: {args.body[:40]} is too large for an answer; write at most {size(LARGEST_ANSWER)}"
            )
        return secrets.token_bytes(length)  # random bytes do not compress, so the size stays
    try:
        with open(args.sample, "rb") as file:
            answer = file.read(LARGEST_ANSWER + 1)
    except OSError as error:
        raise PolicyError(f"--sample: {error}") from error
    if len(answer) > LARGEST_ANSWER:
        raise PolicyError(f"--sample: the file is too large for an answer; give one of at most {size(LARGEST_ANSWER)}")
    return answer


def _records(asked: int | None, length: int) -> int:
    if asked is None:
        return max(1, min(DEFAULT_RECORDS, DEFAULT_BYTES // max(1, length)))
    if not 10 <= asked <= 1_000_000:
        raise PolicyError(f"--records is 10 to 1000000, not {asked}")
    if asked * length > MOST_BYTES:
        fit = MOST_BYTES // length
        raise PolicyError(f"--records: {asked} answers of {size(length)} are too much to write; {fit} are enough")
    return asked


def _qps(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e9:
        raise PolicyError(f"--qps is how many new keys come each second, such as 200 or 0.5, not {text[:40]!r}")
    return number


SIZE = Command(
    "size", "Size the window: keys, bytes and work of a store, measured there; and how long it must be.", configure, run
)
