"""``semel recover``: finish what processes that died have left, with the functions of a service. Ctrl-C and SIGTERM
finish the operation in hand.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING, Any

from semel.cli.commands import FAILED, OK, SIGNALS, Command, as_json, load_guard, positive, say, stop_on_signals
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.core.resume import ResumeReport
    from semel.observe.events import Event
    from semel.stores.aio_guard import AsyncSemel
    from semel.stores.guard import Semel


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("guard", metavar="MODULE:GUARD", help="the guard, as the service imports it: shop.orders:guard")
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import it from (default: here)")
    parser.add_argument(
        "--once",
        action="store_true",
        help="one round, then exit; exit code 1 if something failed or was given up",
    )
    parser.add_argument("--every", default="5s", metavar="T", help="pause between two rounds (default: 5s)")
    parser.add_argument(
        "--pause",
        default="1s",
        metavar="T",
        help="pause after a failure, growing with each attempt (default: 1s)",
    )
    parser.add_argument(
        "--tries",
        type=positive,
        default=10,
        metavar="N",
        help="attempts of one operation, including the first, after which it is given up (default: 10)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=50,
        metavar="N",
        help="records that are read in one round trip to the store (default: 50)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="JSON objects, one line for each round that did something, and one at the end",
    )


def run(args: argparse.Namespace) -> int:
    from semel.stores.aio_guard import AsyncSemel

    guard = load_guard(args.guard, args.app_dir)
    if not guard.resumable:
        raise ConfigurationError(f"{args.guard} has no resumable function: decorate one with once(…, resumable=True)")
    settings = {"every": args.every, "limit": args.limit, "tries": args.tries, "pause": args.pause}
    guard.add_event_hook(_print_failure)
    rounds = _Rounds(guard, args.once, args.json)
    if isinstance(guard, AsyncSemel):
        import asyncio

        asyncio.run(_resume_async(guard, settings, rounds))
    else:
        _resume(guard, settings, rounds)
    return rounds.finished()


class _Rounds:
    """Counts over all rounds, printed after each round that did something."""

    def __init__(self, guard: Semel | AsyncSemel, once: bool, json: bool) -> None:
        self._guard = guard
        self.once = once
        self._json = json
        self.resumed = self.failed = self.given_up = 0

    def begin(self) -> None:
        """Print what is about to run. From here on a signal stops it in order."""
        if not self.once and not self._json:
            print(f"recovering {', '.join(sorted(self._guard.resumable))}; Ctrl-C stops it", flush=True)

    def add(self, report: ResumeReport) -> None:
        self.resumed += report.resumed
        self.failed += report.failed
        self.given_up = report.given_up
        if not self.once and (report.resumed or report.failed):
            resting = f", {report.resting} resting" if report.resting else ""
            if self._json:
                found = {"resumed": report.resumed, "failed": report.failed, "resting": report.resting}
                print(as_json(found), flush=True)
            else:
                print(f"resumed {report.resumed}, {report.failed} failed{resting}", flush=True)

    def finished(self) -> int:
        left = f", {self.given_up} given up" if self.given_up else ""
        if self._json:
            print(as_json({"resumed": self.resumed, "failed": self.failed, "given_up": self.given_up, "ended": True}))
        else:
            print(f"in all: resumed {self.resumed}, {self.failed} failed{left}")
        return FAILED if self.once and (self.failed or self.given_up) else OK


def _print_failure(event: Event) -> None:
    """Show the failures that need attention on the screen."""
    from semel.observe.events import RecoveryFailed, RecoveryGivenUp, StoreFailed

    if isinstance(event, RecoveryFailed):
        say(f"{event.operation}[{event.key}]: attempt {event.attempt} failed: {event.error}", sys.stderr)
    elif isinstance(event, RecoveryGivenUp):
        say(f"{event.operation}[{event.key}]: given up after {event.attempt} attempts", sys.stderr)
    elif isinstance(event, StoreFailed) and event.op == "recover":
        say(f"a round failed, the next one may succeed: {event.error}", sys.stderr)


def _resume(guard: Semel, settings: dict[str, Any], rounds: _Rounds) -> None:
    from semel.engine.resumer import Resumer

    with guard:
        resumer = Resumer(guard, **settings)
        resumer.check()
        if rounds.once:
            with stop_on_signals(resumer.stop):
                rounds.add(resumer.resume())
            return
        # Not in this thread: a signal handler cannot wake a thread that waits for an Event, which it interrupts.
        working = threading.Thread(target=resumer.run, args=(rounds.add,), name="semel-recover", daemon=True)
        with stop_on_signals() as stopping:
            rounds.begin()
            working.start()
            try:
                while not stopping.wait(1.0):
                    pass
            finally:
                resumer.stop()
                working.join()


async def _resume_async(guard: AsyncSemel, settings: dict[str, Any], rounds: _Rounds) -> None:
    import asyncio

    from semel.engine.aio_resumer import AsyncResumer

    async with guard:
        resumer = AsyncResumer(guard, **settings)
        loop = asyncio.get_running_loop()
        tasks = set()  # the loop itself does not hold them
        for number in SIGNALS:
            loop.add_signal_handler(number, lambda: tasks.add(loop.create_task(resumer.stop())))
        try:
            rounds.begin()
            if rounds.once:
                rounds.add(await resumer.resume())
            else:
                await resumer.run(rounds.add)
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


RECOVER = Command(
    "recover", "Resume abandoned operations of a service's resumable functions, until it is stopped.", configure, run
)
