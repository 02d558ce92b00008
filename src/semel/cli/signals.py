"""Ctrl-C and SIGTERM as a flag: the command finishes the step in hand. A second signal ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["SIGNALS", "StopFlag", "stop_on_signals"]

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
NOTICED_WITHIN: Final = 0.05
"""Seconds."""


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
def stop_on_signals() -> Iterator[StopFlag]:
    """Let the first signal set the flag, and the second raise KeyboardInterrupt."""
    flag = StopFlag()

    def stop(number: int, frame: FrameType | None) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = [(number, signal.signal(number, stop)) for number in SIGNALS]
    try:
        yield flag
    finally:
        for number, handler in before:
            signal.signal(number, handler)
