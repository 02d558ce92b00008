"""Live progress: a block of lines redrawn in place on a terminal, or a plain line now and then elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from typing import Final, Protocol, TextIO

__all__ = ["Screen", "Stopping", "View", "color_wanted"]

PLAIN_EVERY: Final = 1.0
"""Seconds between lines where nothing can be drawn again."""
BAR: Final = 30


class View(Protocol):
    """What is shown."""

    title: str
    phase: str
    seconds: float

    @property
    def elapsed(self) -> float: ...

    def numbers(self) -> list[tuple[str, int]]: ...


class Stopping(Protocol):
    """Whether the user asked the demo to stop."""

    def is_set(self) -> bool: ...

    def wait(self, seconds: float) -> bool: ...


def color_wanted(stream: TextIO) -> bool:
    """A terminal that can, and a user who did not say no (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Draws on one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._color = color_wanted(stream)
        self._drawn = 0
        self._plain_at = 0.0

    def show(self, view: View) -> None:
        if self._live:
            self._draw(self._block(view))
        elif time.monotonic() >= self._plain_at:
            self._plain_at = time.monotonic() + PLAIN_EVERY
            self.say(
                f"{view.phase:<9} {view.elapsed:5.1f} s  " + "  ".join(f"{name} {n}" for name, n in view.numbers())
            )

    def say(self, text: str) -> None:
        """A line, or several, that stay; the block is drawn below them."""
        self._erase()
        print(text, file=self._stream, flush=True)

    def _block(self, view: View) -> list[str]:
        done = min(1.0, view.elapsed / view.seconds) if view.seconds else 1.0
        bar = "█" * int(done * BAR) + "░" * (BAR - int(done * BAR))
        numbers = [f"{name} {n}" for name, n in view.numbers()]
        cells = [f"{cell:<18}" for cell in numbers]
        return [
            view.title,
            f"  {bar} {min(view.elapsed, view.seconds):5.1f} s of {view.seconds:.3g} s  {view.phase}",
            "  " + "".join(cells[:4]),
            "  " + "".join(cells[4:]),
        ]

    def _draw(self, lines: list[str]) -> None:
        width = shutil.get_terminal_size().columns - 1  # a line that wraps would spoil the count of lines to go up
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        cut = [line[:width] for line in lines]
        text = "".join(f"\x1b[2K{line}\n" for line in [self._bold(cut[0]), *cut[1:]])
        self._stream.write(up + text)
        self._stream.flush()
        self._drawn = len(lines)

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._color else text
