"""``semel relay``: send what is in the outbox. ``semel outbox``: what is in it, and why it waits. Ctrl-C and SIGTERM
finish the batch in hand.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from semel.cli.commands import (
    FAILED,
    OK,
    Command,
    add_caution,
    add_url,
    as_json,
    confirmed,
    open_guard,
    positive,
    print_table,
    say,
    stop_on_signals,
    write_audit,
)
from semel.core.policy import duration
from semel.errors import ConfigurationError, MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semel.core.messaging.messages import OutboxState
    from semel.core.messaging.relaying import RelayReport
    from semel.messaging import AsyncRelay, Relay
    from semel.messaging.ports import Broker

BROKER_VARIABLE: Final = "SEMEL_BROKER"
"""The URL of the broker, for ``semel relay`` without ``--to``."""
BROKERS: Final = "kafka://host:9092/topic, amqp://…, nats://…, redis://…, sqs://…, sns://…, https://… (webhooks)"


def configure_relay(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument(
        "--to", default=os.environ.get(BROKER_VARIABLE), metavar="BROKER",
        help=f"the broker: {BROKERS}; may be left out if {BROKER_VARIABLE} is set",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true", help="send what is due, then exit; exit code 1 if something was not sent"
    )
    for name, type, default, about in (
        ("--batch", positive, 500, "messages that are sent at a time; in a backlog, up to four times as many"),
        ("--lease", str, "30s", "how long a relay that has died keeps its streams from the others"),
        ("--tries", positive, 10, "attempts to send a message before --on-poison decides"),
        ("--pause", str, "1s", "pause after a failure, growing with each attempt"),
        ("--longest-pause", str, "5m", "the longest pause"),
    ):
        metavar = "N" if type is positive else "T"
        parser.add_argument(name, type=type, default=default, metavar=metavar, help=f"{about} (default: {default})")
    parser.add_argument(
        "--on-poison", choices=("block", "park", "skip"), default="block",
        help="what happens to a stream whose next message cannot be sent: it waits (block), goes to the dead letters "
        "from there on (park), or goes on without that message (skip) (default: block)",
    )  # fmt: skip
    parser.add_argument(
        "--allow-unordered", action="store_true", help="publish to a broker that does not keep the order of streams"
    )
    parser.add_argument("--json", action="store_true", help="JSON objects, one line each")
    parser.set_defaults(shows_risks=True)  # it runs for long, so it says once what the broker's settings can lose


def relay(args: argparse.Namespace) -> int:
    from semel.messaging import open_broker
    from semel.stores.urls import check_store, open_async_store, open_store

    if not args.to:
        raise ConfigurationError(f"name the broker: --to URL, or set {BROKER_VARIABLE}")
    names = ("batch", "lease", "tries", "pause", "longest_pause", "on_poison", "allow_unordered")
    settings = {name: getattr(args, name) for name in names}
    _check_outbox(args.url)
    broker = open_broker(args.to)
    check_store(args.url)
    lines = _Lines(args.json, args.once)
    with _problems_on_screen():
        try:
            store = open_store(args.url)
        except MissingDependency as missing:
            with suppress(MissingDependency):
                asyncio.run(_relay_async(open_async_store, args.url, broker, settings, lines))
                return lines.finished()
            raise missing from None
        with closing(store):
            _relay(store, broker, settings, lines)
    return lines.finished()


def _relay(store: Any, broker: Broker, settings: dict[str, Any], lines: _Lines) -> None:
    from semel.core.messaging.messages import InspectOutbox
    from semel.messaging import Relay

    running = Relay(store, broker, **settings)
    # Nothing waits in this handler: while messages are drained there is no thread to join.
    with stop_on_signals(running.stop if lines.once else None) as stopping:
        lines.begin(running)
        if lines.once:
            lines.report = running.drain()
            if not stopping.is_set():
                lines.left = store.execute(InspectOutbox(1))
            return
        with running:
            while not stopping.wait(1.0):
                lines.tell()


async def _relay_async(open_store: Any, url: str, broker: Broker, settings: dict[str, Any], lines: _Lines) -> None:
    from semel.core.messaging.messages import InspectOutbox
    from semel.messaging import AsyncRelay

    store = open_store(url)
    running = AsyncRelay(store, broker, **settings)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    tasks = set()  # the loop itself does not hold them

    def stop() -> None:
        stopping.set()
        if lines.once:  # otherwise it is stopped below, which waits for the batch in hand
            tasks.add(loop.create_task(running.stop()))

    try:
        with stop_on_signals(lambda: loop.call_soon_threadsafe(stop)):
            lines.begin(running)
            if lines.once:
                lines.report = await running.drain()
                if not stopping.is_set():
                    lines.left = await store.execute(InspectOutbox(1))
                return
            async with running:
                while not stopping.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), 1.0)
                    lines.tell()
    finally:
        await store.close()


class _Lines:
    """One line for each second in which something happened, if somebody watches."""

    def __init__(self, as_objects: bool, once: bool) -> None:
        self.once = once
        self._as_objects = as_objects
        self._watched = sys.stdout.isatty() or as_objects
        self._last: dict[str, Any] = {}
        self.left: OutboxState | None = None
        """What is in the outbox when all that was due is sent."""

    def begin(self, running: Relay | AsyncRelay) -> None:
        self.report = running.report
        self._last = asdict(self.report)
        if not self.once and not self._as_objects:
            print("relaying; Ctrl-C stops it", flush=True)

    def tell(self) -> None:
        now = asdict(self.report)
        if self._watched and now != self._last:
            if self._as_objects:
                say(as_json(now))
            else:
                sent = now["sent"] - self._last["sent"]
                say(f"{time.strftime('%H:%M:%S')}  {sent:,} sent, {_summary(self.report)}")
        self._last = now

    def finished(self) -> int:
        report = self.report
        bad = report.failed or report.dead or report.blocked or report.broker_down or report.destinations_down
        if self._as_objects:
            say(as_json(asdict(report)))
        else:
            left = sum(each.messages for each in self.left.destinations) if self.left and not bad else 0
            waiting = f"; {left:,} not due, or with another relay: see `semel outbox`" if left else ""
            say(f"in all: {_summary(report)}{waiting}")
        return FAILED if self.once and bad else OK


def _summary(report: RelayReport) -> str:
    parts = [f"{report.sent:,} in all" if report.lanes else f"{report.sent:,} sent"]
    parts += [
        f"{number:,} {word}"
        for number, word in ((report.failed, "failed"), (report.dead, "dead"), (report.blocked, "blocked"))
        if number
    ]
    if report.lanes:
        parts.append(f"{report.lanes} of 64 lanes")
    if report.broker_down:
        parts.append(f"the broker is down: {report.broker_down}")
    if report.destinations_down:
        several = report.destinations_down > 1
        parts.append(f"{report.destinations_down} {'destinations are' if several else 'destination is'} down")
    return ", ".join(parts)


class _Screen(logging.Handler):
    """Prints the problems of a relay on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage(), sys.stderr)


@contextmanager
def _problems_on_screen() -> Iterator[None]:
    log, screen = logging.getLogger("semel.relay"), _Screen()
    driver, silence = logging.getLogger("aiormq"), logging.NullHandler()  # the relay says the same in its own words
    level = log.level
    log.addHandler(screen)
    driver.addHandler(silence)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(screen)
        driver.removeHandler(silence)
        log.setLevel(level)


# What is in the outbox


def configure_outbox(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--limit", type=positive, default=20, metavar="N", help="streams that are listed (default: 20)")
    parser.add_argument(
        "--mode", choices=("queue", "log", "wal"), help="first change how messages are stored (log, wal: PostgreSQL)"
    )
    add_caution(parser)


def _check_outbox(url: str) -> None:
    from semel.stores.urls import has_outbox

    if not has_outbox(url):
        raise ConfigurationError("this store has no outbox: that is in SQLite, PostgreSQL, MySQL or MariaDB")


def outbox(args: argparse.Namespace) -> int:
    from semel.core.messaging.messages import InspectOutbox
    from semel.messaging import Outbox

    _check_outbox(args.url)
    with open_guard(args.url) as guard:
        state = guard.store.execute(InspectOutbox(args.limit))
        change = f"change the mode of the outbox from {state.mode} to {args.mode}"
        if args.mode and not args.dry_run:
            if not confirmed(f"{change}?", args):
                return FAILED
            Outbox(guard.store).switch(args.mode)
            write_audit("outbox mode", was=state.mode, mode=args.mode)
            state = guard.store.execute(InspectOutbox(args.limit))
    if args.json:
        say(as_json(asdict(state)))
    else:
        _print_state(state)
        if args.mode and args.dry_run:
            print(f"would {change}")
    return OK


def _print_state(state: OutboxState) -> None:
    waiting = sum(each.messages for each in state.destinations)
    if waiting:
        rows = [("destination", "messages", "failing", "oldest")]
        for each in state.destinations:
            rows.append(
                (each.destination or "(the relay's)", f"{each.messages:,}", f"{each.failing:,}", duration(each.oldest))
            )
        print_table(rows)
        if state.more:
            print("there are more messages than these, which are the oldest ones")
    else:
        print("the outbox is empty")
    for held in state.held:
        until = "parked" if held.seconds is None else f"next try in {duration(held.seconds)}"
        until = "next try due" if held.seconds == 0 else until
        say(f"stream {held.stream}: {held.messages:,} wait, {until}: {held.reason}")
    if state.mode != "queue":
        print(f"the mode of the outbox is {state.mode}")
    if state.retained is not None:
        print(f"the database keeps {state.retained:,} bytes of its log for the outbox")
    relays = "1 relay owns" if state.relays == 1 else f"{state.relays} relays own"
    print(f"{relays} {state.lanes} of 64 lanes" if state.relays else "no relay is running")


RELAY = Command("relay", "Send the messages of the outbox to a broker, until it is stopped.", configure_relay, relay)
OUTBOX = Command("outbox", "Show what is in the outbox, what waits and why.", configure_outbox, outbox)
