"""``semel recover``: finish what processes that died have left, with the functions of a service. Ctrl-C and SIGTERM
finish the operation in hand.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from semel.cli.exits import FAILED, OK
from semel.cli.signals import SIGNALS, stop_on_signals
from semel.errors import ConfigurationError

if TYPE_CHECKING:
    from semel.core.resume import ResumeReport
    from semel.observe.events import Event

NAME = "recover"
HELP = "Resume abandoned operations of a service's resumable functions, until it is stopped."

LOOK: Final = 0.2
"""Seconds within which a signal is noticed."""


def configure(parser: argparse.ArgumentParser) -> None:
    from semel.cli.sweep import _positive

    parser.add_argument("guard", metavar="MODULE:GUARD", help="the guard, as the service imports it: shop.orders:guard")
    parser.add_argument("--app-dir", default=".", metavar="DIR", help="where to import it from (default: here)")
    parser.add_argument("--once", action="store_true", help="one round over all that was abandoned, then end")
    parser.add_argument("--every", default="5s", metavar="T", help="rest between two rounds (default: 5s)")
    parser.add_argument("--pause", default="1s", metavar="T", help="rest of one that failed, growing (default: 1s)")
    parser.add_argument("--tries", type=_positive, default=10, metavar="N", help="attempts of one (default: 10)")
    parser.add_argument("--limit", type=_positive, default=50, metavar="N", help="records in one look (default: 50)")


def run(args: argparse.Namespace) -> int:
    from semel.cli.targets import load
    from semel.stores.aio_guard import AsyncSemel
    from semel.stores.guard import Semel

    if ":" not in args.guard:
        raise ConfigurationError(f"{args.guard!r} names no guard: write module:attribute, like shop.orders:guard")
    guard = load(args.guard, args.app_dir)
    if not isinstance(guard, (Semel, AsyncSemel)):
        raise ConfigurationError(f"{args.guard} is a {type(guard).__name__}: name a Semel or an AsyncSemel")
    if not guard.resumable:
        raise ConfigurationError(f"{args.guard} has no resumable function: decorate one with once(…, resumable=True)")
    settings = {"every": args.every, "limit": args.limit, "tries": args.tries, "pause": args.pause}
    guard.add_event_hook(_print_failure)
    rounds = _Rounds(args.once, ", ".join(sorted(guard.resumable)))
    if isinstance(guard, AsyncSemel):
        import asyncio

        asyncio.run(_in_loop(guard, settings, rounds))
    else:
        _in_thread(guard, settings, rounds)
    return rounds.finished()


class _Rounds:
    """Counts over all rounds, printed after each round that did something."""

    def __init__(self, once: bool, operations: str) -> None:
        self.once = once
        self.operations = operations
        self.resumed = self.failed = self.given_up = 0

    def begin(self) -> None:
        """Print what is about to run. From here on a signal stops it in order."""
        if not self.once:
            print(f"recovering {self.operations}; Ctrl-C stops it", flush=True)

    def add(self, report: ResumeReport) -> None:
        self.resumed += report.resumed
        self.failed += report.failed
        self.given_up = report.given_up
        if not self.once and (report.resumed or report.failed):
            resting = f", {report.resting} resting" if report.resting else ""
            print(f"resumed {report.resumed}, {report.failed} failed{resting}", flush=True)

    def finished(self) -> int:
        left = f", {self.given_up} given up" if self.given_up else ""
        print(f"in all: resumed {self.resumed}, {self.failed} failed{left}")
        return FAILED if self.once and (self.failed or self.given_up) else OK


def _print_failure(event: Event) -> None:
    """Show the failures that need attention on the screen."""
    from semel.observe.events import RecoveryFailed, RecoveryGivenUp

    if isinstance(event, RecoveryFailed):
        print(f"{event.operation}[{event.key}]: attempt {event.attempt} failed: {event.error}", file=sys.stderr)
    elif isinstance(event, RecoveryGivenUp):
        print(f"{event.operation}[{event.key}]: given up after {event.attempt} attempts", file=sys.stderr)


def _in_thread(guard: Any, settings: dict[str, Any], rounds: _Rounds) -> None:
    from semel.engine.resumer import Resumer

    class Telling(Resumer):
        def resume(self) -> ResumeReport:
            report = super().resume()
            rounds.add(report)
            return report

    failure: list[BaseException] = []

    def work() -> None:
        try:
            resumer.resume() if rounds.once else resumer.run()
        except BaseException as error:
            failure.append(error)

    with guard:
        resumer = Telling(guard, **settings)
        resumer.check()
        with stop_on_signals() as stopping:
            rounds.begin()
            thread = threading.Thread(target=work, name="semel-resumer", daemon=True)
            thread.start()
            while thread.is_alive():
                thread.join(LOOK)
                if stopping.is_set():
                    resumer.stop()
    if failure:
        raise failure[0]


async def _in_loop(guard: Any, settings: dict[str, Any], rounds: _Rounds) -> None:
    import asyncio

    from semel.engine.resumer import AsyncResumer

    class Telling(AsyncResumer):
        async def resume(self) -> ResumeReport:
            report = await super().resume()
            rounds.add(report)
            return report

    async with guard:
        resumer = Telling(guard, **settings)
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for number in SIGNALS:
            loop.add_signal_handler(number, signalled.set)
        try:
            rounds.begin()
            if not rounds.once:
                resumer.start()
                await signalled.wait()
                await resumer.stop()
                return
            work = asyncio.ensure_future(resumer.resume())
            waiting = asyncio.ensure_future(signalled.wait())
            await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await resumer.stop()
            await work
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
