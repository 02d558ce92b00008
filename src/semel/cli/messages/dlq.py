"""``semel dlq list``, ``show``, ``redrive`` and ``purge``: what was given up, and the way back for it."""

from __future__ import annotations

import argparse
import base64
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from semel.cli.commands import (
    FAILED,
    INTERRUPTED,
    OK,
    Command,
    Progress,
    add_caution,
    add_url,
    as_json,
    confirmed,
    open_guard,
    positive,
    say,
    stop_on_signals,
    write_audit,
)
from semel.core.policy import duration, seconds
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.core.messaging.messages import Letter, LetterFilter
    from semel.messaging import DeadLetters

_PAGE: Final = 500


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list dead letters, the oldest first", allow_abbrev=False)
    listing.set_defaults(act=list_letters)
    showing = actions.add_parser(
        "show", help="show one dead letter; exit code 1 when there is none", allow_abbrev=False
    )
    showing.set_defaults(act=show)
    redriving = actions.add_parser(
        "redrive", help="move dead letters back into the outbox, for a relay to send them again", allow_abbrev=False
    )
    redriving.set_defaults(act=redrive)
    redriving.add_argument("--rate", type=float, metavar="N", help="at most N messages in a second (default: no limit)")
    purging = actions.add_parser("purge", help="delete dead letters", allow_abbrev=False)
    purging.set_defaults(act=purge)
    for action in (listing, showing, redriving, purging):
        add_url(action)
        action.add_argument("--origin", metavar="NAME", help="given up by this consumer; '' means the relay")
        if action is showing:
            action.add_argument("message", metavar="ID", help="the id of the message")
            continue
        action.add_argument("--id", dest="message", metavar="ID", help="the message with this id")
        action.add_argument("--type", metavar="TYPE", help="messages of this type")
        action.add_argument("--destination", metavar="NAME", help="messages for this destination")
        action.add_argument("--stream", metavar="NAME", help="messages of this stream")
        action.add_argument("--reason", default="", metavar="TEXT", help="given up for a reason with this text in it")
        action.add_argument("--older-than", default="0s", metavar="TIME", help="dead for longer, such as 30s, 2h or 7d")
        action.add_argument("--limit", type=positive, metavar="N", help="at most N messages (default: all)")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="one JSON object")
        action.add_argument("--show-data", action="store_true", help="print the data of messages, which may be secret")
    for action in (redriving, purging):
        add_caution(action)


def run(args: argparse.Namespace) -> int:
    code: int = args.act(args)
    return code


@contextmanager
def _open(url: str) -> Iterator[DeadLetters]:
    from semel.messaging import DeadLetters
    from semel.stores.urls import has_outbox

    if not has_outbox(url):
        raise ConfigurationError("this store has no table for dead letters: that is in SQLite, PostgreSQL or MySQL")
    with open_guard(url) as guard:
        yield DeadLetters(guard.store)


def _filter(args: argparse.Namespace) -> LetterFilter:
    from semel.core.messaging.messages import LetterFilter

    return LetterFilter(
        origin=args.origin,
        type=args.type,
        destination=args.destination,
        stream=args.stream,
        message=args.message,
        reason=args.reason,
        older=seconds(args.older_than, "--older-than"),
    )


def list_letters(args: argparse.Namespace) -> int:
    found: list[Letter] = []
    with _open(args.url) as letters, stop_on_signals() as stopping:
        filter, after, left = _filter(args), 0, args.limit or sys.maxsize
        shown, more = 0, False
        while not stopping.is_set():
            if not left:
                more = bool(letters.list(filter, after=after, limit=1))
                break
            page = letters.list(filter, after=after, limit=min(left, _PAGE))
            for letter in page:
                if args.json:
                    found.append(letter)
                else:
                    _print_line(letter, args.show_data)
            shown += len(page)
            if len(page) < min(left, _PAGE):
                break
            left -= len(page)
            after = page[-1].position
    if args.json:
        print(as_json({"letters": [describe(letter, args.show_data) for letter in found], "more": more}))
    else:
        print(_letters(shown) + (", and there are more" if more else ""))
    return INTERRUPTED if stopping.is_set() else OK


def _print_line(letter: Letter, data: bool) -> None:
    message = letter.message
    age = time.time() - letter.died
    stream = f" {message.stream}#{message.sequence}" if message.stream else ""
    attempts = f"{letter.starts} attempt{'s' * (letter.starts != 1)}"
    say(
        f"{message.id}  {_one_line(message.type)}{stream}  {message.destination or '-'}  given up by "
        f"{letter.origin or 'the relay'} {duration(age)} ago after {attempts}: {_one_line(letter.reason)}"
    )
    if data:
        say(f"  {_one_line(_data(message.data))}")


def show(args: argparse.Namespace) -> int:
    with _open(args.url) as letters:
        letter = letters.get(args.message, origin=args.origin)
    if letter is None:
        say(f"there is no dead letter with the message {args.message}", sys.stderr)
        return FAILED
    shown = describe(letter, args.show_data)
    if args.json:
        print(as_json(shown))
        return OK
    width = max(map(len, shown))
    for name in ("died", "time"):
        if shown[name]:
            shown[name] = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(shown[name]))
    shown["origin"] = letter.origin or "the relay"
    for name, value in shown.items():
        text = _one_line(value) if isinstance(value, str) else as_json(value)
        say(f"{name.replace('_', ' '):<{width}}  {text}")
    return OK


def describe(letter: Letter, data: bool) -> dict[str, Any]:
    """A dead letter as plain values."""
    message = letter.message
    shown: dict[str, Any] = {
        "id": message.id,
        "origin": letter.origin,
        "reason": letter.reason,
        "died": round(letter.died, 3),
        "starts": letter.starts,
        "redrives": message.redrives,
        "type": message.type,
        "source": message.source,
        "destination": message.destination,
        "stream": message.stream,
        "sequence": message.sequence,
        "subject": message.subject,
        "content_type": message.content_type,
        "time": round(message.time, 3),
        "headers": dict(message.headers),
        "bytes": len(message.data),
    }
    if data:
        shown["data"] = _data(message.data)
    return shown


def _data(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")


def redrive(args: argparse.Namespace) -> int:
    return _move(args, "moved back into the outbox", lambda letters, **how: letters.redrive(rate=args.rate, **how))


def purge(args: argparse.Namespace) -> int:
    return _move(args, "deleted", lambda letters, **how: letters.purge(**how), needs_yes=True)


def _move(args: argparse.Namespace, done: str, move: Callable[..., int], *, needs_yes: bool = False) -> int:
    from semel.messaging.deadletters import describe_filter

    filter = _filter(args)
    moved, progress = 0, Progress()

    def follow(so_far: int, wanted: int) -> None:
        nonlocal moved
        moved = so_far
        progress.show(f"{so_far:,} of {wanted:,}")
        if stopping.is_set():
            raise KeyboardInterrupt

    with _open(args.url) as letters, stop_on_signals() as stopping:
        count = move(letters, filter=filter, limit=args.limit, dry_run=True)
        if not args.dry_run:
            question = f"{_letters(count)} will be {done}. Go on?"
            if count and not confirmed(question, args, needs_yes=needs_yes):
                return FAILED
            try:
                moved = move(letters, filter=filter, limit=args.limit, progress=follow)
            except KeyboardInterrupt:
                pass
            finally:
                progress.clear()
                if moved:
                    write_audit(f"dlq {args.act.__name__}", count=moved, filter=describe_filter(filter))
    found = count if args.dry_run else moved
    if args.json:
        print(as_json({"count": found, "dry_run": args.dry_run}))
    else:
        print(f"{_letters(found)} {'would be ' if args.dry_run else ''}{done}")
    return INTERRUPTED if stopping.is_set() else OK


def _letters(count: int) -> str:
    return f"{count:,} dead {'letter' if count == 1 else 'letters'}"


DLQ = Command(
    "dlq", "List, show, redrive or delete the messages that a relay or a consumer has given up.", configure, run
)
