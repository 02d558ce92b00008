"""Ctrl-C and SIGTERM as an event: what is in hand is still finished, and judged; a second one ends at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stopping_on_signals"]


@contextmanager
def stopping_on_signals() -> Iterator[threading.Event]:
    """The event that is set by the first signal."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield stopping
    finally:
        for number, handler in before:
            signal.signal(number, handler)
