"""``semel lookup``, ``resolve`` and ``release``: show a record, settle it, or let it run again. ``semel diagram``: its
life.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semel.cli.commands import (
    FAILED,
    OK,
    Command,
    add_caution,
    add_record,
    as_json,
    confirmed,
    load_guard,
    names_guard,
    open_guard,
    say,
    write_audit,
)
from semel.core.states import State
from semel.errors import NotResolvable, PolicyError

if TYPE_CHECKING:
    from semel.codec import Codec
    from semel.core.ops import Record


def configure_lookup(parser: argparse.ArgumentParser) -> None:
    add_record(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def lookup(args: argparse.Namespace) -> int:
    from semel.engine.outcomes import describe_record

    record, codec = _find(args)
    shown = {"operation": args.operation, "key": args.key, "tenant": args.tenant, **describe_record(record, codec)}
    if args.json:
        print(as_json(shown))
    else:
        width = max(map(len, shown))
        for name, value in shown.items():
            if name == "response":
                text = "\n".join(_response_lines(value)).replace("\n", "\n" + " " * (width + 2))
            else:  # in one line: what is stored must not look like another field
                text = value.replace("\n", "\\n") if isinstance(value, str) else as_json(value)
            say(f"{name.replace('_', ' '):<{width}}  {text}")
    return OK if record is not None else FAILED


def _find(args: argparse.Namespace) -> tuple[Record | None, Codec]:
    """Look the record up. Returns it and the guard's codec."""
    tenant = args.tenant or None
    return _ask(args, lambda guard: guard.lookup(args.operation, args.key, tenant=tenant), reads_only=True)


def _ask(args: argparse.Namespace, ask: Callable[[Any], Any], *, reads_only: bool = False) -> tuple[Any, Codec]:
    """Ask the guard that is named, or one on the store that is named. Returns the answer and the guard's codec."""
    from semel.stores.guard import Semel

    if not names_guard(args.url):
        with open_guard(args.url, reads_only=reads_only) as plain:
            return ask(plain), plain.codec
    guard = load_guard(args.url, args.app_dir)
    if isinstance(guard, Semel):
        with guard:
            return ask(guard), guard.codec
    import asyncio

    async def ask_async() -> Any:
        async with guard:
            return await ask(guard)

    return asyncio.run(ask_async()), guard.codec


def _response_lines(response: dict[str, Any]) -> list[str]:
    """A response as it looks on the wire: status, headers, an empty line, the body."""
    headers = [f"{name}: {value}" for name, value in response["headers"]]
    body = "(the body was not kept)" if response["body"] is None else response["body"]
    return [str(response["status"]), *headers, "", *body.split("\n")]


def configure_resolve(parser: argparse.ArgumentParser) -> None:
    add_record(parser)
    parser.add_argument(
        "--result", default="null", metavar="JSON", help="what later calls are answered (default: null)"
    )
    add_caution(parser)


def resolve(args: argparse.Namespace) -> int:
    try:
        result = json.loads(args.result)
    except ValueError as error:
        raise PolicyError(f"--result is not JSON ({error}); a text needs its quotes: --result '\"paid\"'") from error
    then = f"later calls get {json.dumps(result)}"
    tenant = args.tenant or None
    return _settle(
        args,
        "resolve",
        then,
        lambda guard, seen: guard.resolve(args.operation, args.key, result, tenant=tenant, expected=seen),
    )


def configure_release(parser: argparse.ArgumentParser) -> None:
    add_record(parser)
    parser.add_argument(
        "--force", action="store_true", help="also while its owner runs; that owner's outcome will be refused"
    )
    parser.add_argument(
        "--stored",
        choices=["failure", "any"],
        help="also if it is done, so that it runs again: failure if an error or a response from 400 is stored, any "
        "whatever is stored",
    )
    add_caution(parser)


def release(args: argparse.Namespace) -> int:
    how = {"tenant": args.tenant or None, "force": args.force, "stored": args.stored}
    return _settle(
        args,
        "release",
        "the next call runs it",
        lambda guard, seen: guard.release(args.operation, args.key, **how, expected=seen),
    )


def _settle(args: argparse.Namespace, action: str, then: str, change: Callable[[Any, Record], Any]) -> int:
    """Resolve or release a record: look at it first, ask, and write an audit line.

    :param then: what follows from it, for the question and for the answer.
    :param change: called with the guard and the record that was found. It raises if that must stay as it is.
    """
    what = f"{args.operation}[{args.key}]"
    record, codec = _find(args)
    was = (State.ABSENT if record is None else record.state).name.lower()
    settles = record is not None and _settles(record, codec, args)
    if args.dry_run:
        if not settles:
            raise NotResolvable(f"{what} is {was}, and would stay as it is")
    elif settles and not confirmed(f"{action} {what}, which is {was}? Then {then}.", args):
        return FAILED
    elif record is None:
        raise NotResolvable(f"{what}: there is no such record")
    else:
        seen = record
        _ask(args, lambda guard: change(guard, seen))
        write_audit(action, operation=args.operation, tenant=args.tenant, id=record.id.hex(), was=was)
    if args.json:
        shown = {"operation": args.operation, "key": args.key, "tenant": args.tenant, "was": was}
        print(as_json({**shown, "action": action, "dry_run": args.dry_run}))
    elif args.dry_run:
        say(f"would {action} {what}, which is {was}: {then}")
    else:
        say(f"{action}d {what}: {then}")
    return OK


def _settles(record: Record, codec: Codec, args: argparse.Namespace) -> bool:
    """Whether the record would change. The guard judges it again when it changes it, and says why if it does not."""
    from semel.core.encoding.snapshot import outcome_kind

    stored, force = getattr(args, "stored", None), getattr(args, "force", False)
    if record.state is State.RUNNING:
        return bool(force)
    if record.state is State.DONE and stored == "failure":
        return outcome_kind(codec, record.snapshot or b"", record.id) == "failure"
    return record.state is not State.DONE or stored is not None


def configure_diagram(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")


def diagram(args: argparse.Namespace) -> int:
    """The life of a record, drawn from the transition table."""
    from semel.core.states import mermaid

    print(as_json({"mermaid": mermaid()}) if args.json else mermaid())
    return OK


LOOKUP = Command("lookup", "Show the record of an operation; exit code 1 when there is none.", configure_lookup, lookup)
RESOLVE = Command(
    "resolve",
    "Say that an unknown or abandoned operation did happen: later calls are answered with the result given here.",
    configure_resolve,
    resolve,
)
RELEASE = Command(
    "release",
    "Say that an unknown or abandoned operation did not happen, or drop a stored outcome: the next call runs it.",
    configure_release,
    release,
)
DIAGRAM = Command("diagram", "Print the life of a record as a Mermaid state diagram.", configure_diagram, diagram)
