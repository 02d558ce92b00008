"""What the user sees: live progress, and the verdict of a storm.

Progress is a block of lines redrawn in place on a terminal, or a plain line now and then elsewhere.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Protocol, TextIO

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


def has_colour(stream: TextIO) -> bool:
    """Whether to print in colour: only on a terminal that can, and not with NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Screen:
    """Draws on one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._color = has_colour(stream)
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


def _count(meaning: str, name: str = "") -> int:
    """A number of the verdict, what it means, and what the table calls it."""
    found: int = field(default=0, metadata={"meaning": meaning, "name": name})
    return found


@dataclass(frozen=True)
class StormVerdict:
    """The result of a storm. Every number comes from the ledger or from what the workers wrote down."""

    operations: int = _count("payments that clients asked for")
    calls: int = _count("how often they asked")
    attempts: int = _count("handlers that began")
    effects: int = _count("what was done: lines in the ledger, rows of the service")
    declined: int = _count("refused as asked for, and remembered")
    replays: int = _count("answered again, nothing run")
    refused: int = _count("409: the first still ran")
    kills: int = _count("worker processes killed")
    takeovers: int = _count("abandoned attempts taken over", "take-overs")
    recovered: int = _count("of these, found done and not done again")
    fenced: int = _count("slow owners that were replaced")
    failures: int = _count("calls that failed and were tried again")
    store_errors: int = _count("calls that the store failed", "store errors")
    crashes: int = _count("workers that ended of an unexpected error")
    duplicates: int = _count("payments charged more than once")
    lost: int = _count("acknowledged but not charged, not finished, or answered in two ways")
    unsettled: int = _count("payments the store does not show as done")
    repeated: int = _count("steps that ran again although they were done")
    disordered: int = _count("payments shipped before they were charged")
    mismatched: int = 0
    """Lost payments that were answered in two ways, or with a receipt that the ledger does not have."""
    seconds: float = 0.0

    @classmethod
    def counted(cls, counts: Mapping[str, int], **numbers: Any) -> StormVerdict:
        """The verdict of these numbers and of the counts that have its names; other counts are left out."""
        return cls(**{f.name: counts[f.name] for f in fields(cls) if f.name in counts} | numbers)

    @property
    def clean(self) -> bool:
        wrong = (self.duplicates, self.lost, self.unsettled, self.crashes, self.repeated, self.disordered)
        return self.operations > 0 and not any(wrong)

    def __add__(self, other: StormVerdict) -> StormVerdict:
        return StormVerdict(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 2), "clean": self.clean}

    def as_table(self, title: str, stream: TextIO) -> str:
        lines = [
            f"  {each.metadata['name'] or each.name:<13}{getattr(self, each.name):>8}   {each.metadata['meaning']}"
            for each in fields(self)
            if each.metadata
        ]
        color = has_colour(stream)
        word = f"\x1b[1;{32 if self.clean else 31}m{self._word}\x1b[0m" if color else self._word
        return "\n".join([f"{title} · {self.seconds:.1f} s", *lines, f"  {word}", ""])

    def as_line(self, title: str) -> str:
        """The verdict in one line, when another storm follows."""
        return (
            f"{title} · {self.operations} payments, {self.calls} requests, {self.replays} replays, {self.kills} kills, "
            f"{self.duplicates} duplicates, {self.lost} lost · {self._word}"
        )

    @property
    def _word(self) -> str:
        return "CLEAN" if self.clean else "NOT CLEAN"
