"""What the commands share: what a command is, its exit codes, Ctrl-C as a flag, and safe output."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NamedTuple, TextIO

from semel.errors import ConfigurationError, NotResolvable, RequestError, SemelError, StoreError

__all__ = [
    "FAILED", "INTERRUPTED", "OK", "SIGNALS", "STORE", "USAGE", "Command", "StopFlag", "as_json", "exit_code",
    "positive", "printable", "say", "stop_on_signals",
]  # fmt: skip

OK: Final = 0
FAILED: Final = 1
"""The command ran, and the answer is no: a check failed, a storm was not clean, a record was not found."""
USAGE: Final = 2
"""The command line, the URL or the set-up is wrong; argparse uses the same number."""
STORE: Final = 3
"""The store could not be reached, or refused."""
INTERRUPTED: Final = 130
"""Ctrl-C, numbered as shells do."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
NOTICED_WITHIN: Final = 0.05
"""Seconds."""


class Command(NamedTuple):
    """A command. It raises ``SemelError`` and never prints an error itself.

    Its module imports what it needs inside ``run``, so that ``--version`` and the help stay fast.
    """

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Returns the exit code."""


def exit_code(error: SemelError) -> int:
    """The exit code for an error."""
    if isinstance(error, StoreError):
        return STORE
    if isinstance(error, NotResolvable):
        return FAILED
    return USAGE if isinstance(error, (ConfigurationError, RequestError)) else FAILED


def positive(text: str) -> int:
    """The type of an argument that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def printable(text: str) -> str:
    """Escape what is not printable, except line ends: what a store holds must not control the user's terminal.

    That includes marks that change the direction of text. Inside a JSON text the escapes mean the same characters.
    """
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def as_json(value: Any) -> str:
    """The value as JSON in one line, readable and safe to print."""
    return printable(json.dumps(value, ensure_ascii=False, default=repr))


def say(text: str, file: TextIO | None = None) -> None:
    """Print text that comes from a store."""
    print(printable(text), file=file, flush=True)


class StopFlag:
    """Set by a signal handler.

    Not a ``threading.Event``: a handler that interrupts the main thread inside ``Event.wait`` would wait for a lock
    that this thread holds.
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, seconds: float) -> bool:
        """Sleep until the flag is set, but no longer than this. Returns whether it is set."""
        end = time.monotonic() + seconds
        while not self._set and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, NOTICED_WITHIN))
        return self._set


@contextmanager
def stop_on_signals(on_stop: Callable[[], None] | None = None) -> Iterator[StopFlag]:
    """Let the first signal set the flag, and the second raise KeyboardInterrupt.

    :param on_stop: called by the signal handler, once. It must not wait for anything.
    """
    flag = StopFlag()

    def stop(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()
        if on_stop is not None:
            on_stop()

    before = [(number, signal.signal(number, stop)) for number in SIGNALS]
    try:
        yield flag
    finally:
        for number, handler in before:
            signal.signal(number, handler)
