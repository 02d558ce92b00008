"""``semel lookup``, ``resolve`` and ``release``: show a record, settle it, or let it run again. ``semel diagram``: its
life.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semel.cli.commands import FAILED, OK, Command, add_record, as_json, load_guard, names_guard, open_guard, say
from semel.errors import PolicyError

if TYPE_CHECKING:
    from semel.codec import Codec


def configure_lookup(parser: argparse.ArgumentParser) -> None:
    add_record(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def lookup(args: argparse.Namespace) -> int:
    from semel.engine.outcomes import describe_record

    tenant = args.tenant or None
    record, codec = _ask(args, lambda guard: guard.lookup(args.operation, args.key, tenant=tenant), reads_only=True)
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


def resolve(args: argparse.Namespace) -> int:
    try:
        result = json.loads(args.result)
    except ValueError as error:
        raise PolicyError(f"--result is not JSON ({error}); a text needs its quotes: --result '\"paid\"'") from error
    _ask(args, lambda guard: guard.resolve(args.operation, args.key, result, tenant=args.tenant or None))
    say(f"resolved {args.operation}[{args.key}]: later calls get {json.dumps(result)}")
    return OK


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


def release(args: argparse.Namespace) -> int:
    how = {"tenant": args.tenant or None, "force": args.force, "stored": args.stored}
    _ask(args, lambda guard: guard.release(args.operation, args.key, **how))
    say(f"released {args.operation}[{args.key}]: the next call runs it")
    return OK


def diagram(args: argparse.Namespace) -> int:
    """The life of a record, drawn from the transition table."""
    from semel.core.states import mermaid

    print(mermaid())
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
DIAGRAM = Command("diagram", "Print the life of a record as a Mermaid state diagram.", lambda parser: None, diagram)
