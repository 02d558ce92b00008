"""Ctrl-C and SIGTERM while samples stand in somebody's store: the step in hand is finished, and all of it is removed.

An exception that a signal raises just anywhere may come between making a thing and remembering that it was made, or in
the middle of removing it. So while there is something to remove, a signal is only remembered; whoever writes looks
between two steps whether one came. When nothing is there, it ends the command at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from semel.errors import SemelError, StoreUnavailable

__all__ = ["Interrupts"]


class Interrupts:
    """The signals of one command. Without ``heard`` there are none."""

    def __init__(self) -> None:
        self._asked = False
        self._careful = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Take signals that end the command; what is ignored stays ignored (``nohup``, a job in the background)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        taken = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = [(number, signal.signal(number, self._hear)) for number in taken]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if not self._careful:
            raise KeyboardInterrupt
        if first:
            _say(b"semel: ending; the samples are removed first\n")

    def check(self) -> None:
        """Between two steps: end, if a signal came."""
        if self._asked:
            raise KeyboardInterrupt

    @contextmanager
    def place(self, remove: Callable[[], None], what: str) -> Iterator[None]:
        """A place for samples, made inside and removed in the end, whatever happens.

        :param remove: removes all of it; also called when nothing was made, or only a part.
        :param what: what is left for people to remove, should that fail.
        """
        failed: BaseException | None = None
        self._careful = True
        try:
            yield
        except BaseException as error:
            failed = error
            raise
        finally:
            try:
                remove()
            except Exception as error:
                why = f"{failed}; " if isinstance(failed, SemelError) else ""
                said = " ".join(str(error).split())[:300]
                raise StoreUnavailable(f"{why}{what} could not be removed, do so by hand: {said}") from error
            finally:
                self._careful = False
        self.check()


def _say(line: bytes) -> None:
    """Written in the middle of anything, ``print`` and a removal too: so without print, and nothing is raised.

    The terminal may be gone. And whoever was started without one (``2>&-``) has a socket or a file as number 2.
    """
    with suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), line)
