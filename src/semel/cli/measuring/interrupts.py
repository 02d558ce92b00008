"""Ctrl-C and SIGTERM while samples are in a user's store: finish the current step, then remove all samples.

A signal handler that raises may do so between creating something and recording that it was created, or in the middle of
removing it. So while there is something to remove, the handler only sets a flag. The code that writes checks it between
two steps. When there is nothing to remove, a signal ends the command at once.
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
    """The signals of one command. None are handled outside of ``handled``."""

    def __init__(self) -> None:
        self._asked = False
        self._careful = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals that end a command. An ignored signal stays ignored (``nohup``, background jobs)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        taken = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = [(number, signal.signal(number, self._handle)) for number in taken]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, self._asked = not self._asked, True
        if not self._careful:
            raise KeyboardInterrupt
        if first:
            _say(b"semel: removing the samples, then ending\n")

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal came. Call it between two steps."""
        if self._asked:
            raise KeyboardInterrupt

    @contextmanager
    def place(self, remove: Callable[[], None], what: str) -> Iterator[None]:
        """A place for samples that is created inside the block, and removed at its end whatever happens.

        :param remove: removes all of it. Also called when nothing, or only a part, was created.
        :param what: names it in the error, for the user to remove by hand if ``remove`` fails.
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
    """Write from a signal handler. It may interrupt ``print`` itself, so it does not print, and it raises nothing.

    The terminal may be gone. In a process started without one (``2>&-``), descriptor 2 may be a socket or a file.
    """
    with suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), line)
