"""``semel lookup``: show one record, as text or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from semel.cli.exits import FAILED, OK
from semel.core.ops import Record
from semel.core.states import State
from semel.errors import SemelError

NAME = "lookup"
HELP = "Show the record of an operation; exit code 1 when there is none."


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.cli.targets import add_record

    add_record(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    from semel.cli.targets import open_guard

    with open_guard(args.url) as guard:
        record = guard.lookup(args.operation, args.key, tenant=args.tenant or None)
    shown = {"operation": args.operation, "key": args.key, "tenant": args.tenant, **describe(record)}
    if args.json:
        print(json.dumps(shown, ensure_ascii=False, default=repr))
    else:
        width = max(map(len, shown))
        for name, value in shown.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
            print(f"{name.replace('_', ' '):<{width}}  {text}")
    return OK if record is not None else FAILED


def describe(record: Record | None) -> dict[str, Any]:
    """A record as plain values. Times are seconds from now. Fields that mean nothing in its state are left out."""
    if record is None:
        return {"state": State.ABSENT.name.lower()}
    shown: dict[str, Any] = {
        "state": record.state.name.lower(),
        "id": record.id.hex(),
        "attempt": record.attempt,
        "token": record.token,
        "age": round(record.age, 3),
    }
    if record.state is State.RUNNING:
        shown["lease_left"] = round(record.lease_left, 3)
    if record.state is State.DONE:
        shown["expires_in"] = round(record.expires_in, 3)
        shown.update(_outcome(record))
    return shown


def _outcome(record: Record) -> dict[str, Any]:
    from semel.codec import Codec
    from semel.core.encoding.serializers import PLAIN, decode_result
    from semel.core.encoding.snapshot import Kind

    try:
        snapshot = Codec().open(record.snapshot or b"", record.id)
        if snapshot.kind is Kind.EMPTY:
            return {"not_kept": snapshot.reason}
        if snapshot.kind is Kind.VALUE:
            try:
                return {"result": decode_result(PLAIN, snapshot.serializer, snapshot.payload)}
            except SemelError:
                pass  # only the program knows this type: show the stored form
        name = "failure" if snapshot.kind is Kind.ERROR else "result"
        return {name: _as_stored(snapshot.payload)}
    except SemelError as error:
        return {"unreadable": str(error)}


def _as_stored(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        return repr(payload)
