"""How a resumer goes about it, written once for sync and async: look through what was abandoned, and resume it.

One round looks at every input that is kept, page by page, from a place of its own on and around to it again, so that
several resumers begin with different ones. Who resumes what is decided by the claim alone: a resumer that comes
second goes on to the next. An operation that fails is tried again later and later, and left alone after so many tries.

A generator that yields Ops and the attempts to be resumed; it knows no store, clock or thread.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from semel.core.ops import Abandoned, Page, Record, Resumable
from semel.core.values import value

__all__ = ["ResumeReport", "Rules", "Word", "look_through"]

LONGEST_PAUSE: Final = 3600.0
"""Seconds between two tries of an operation, at most."""

Word: TypeAlias = Literal["resumed", "failed", "elsewhere"]
"""What came of one: it is finished; it failed, or cannot be run; someone else has it, or it is over already."""


@value
class Rules:
    """How patient a resumer is."""

    limit: int
    tries: int
    pause: float

    def due(self, record: Record) -> bool:
        """Whether it has rested long enough: not at all after its first attempt, then longer and longer."""
        doublings = min(record.attempt - 1, 32)
        return -record.lease_left >= min(self.pause * ((1 << doublings) - 1), LONGEST_PAUSE)

    def given_up(self, record: Record) -> bool:
        return record.attempt >= self.tries


@dataclass
class ResumeReport:
    """What one round of a resumer came to."""

    resumed: int = 0
    """Operations that were finished."""
    failed: int = 0
    """Operations that failed again, or whose input cannot be read: see the events."""
    elsewhere: int = 0
    """Operations that someone else had taken up by then."""
    resting: int = 0
    """Operations that failed, and will be tried later."""
    given_up: int = 0
    """Operations that have used up their tries, and are left for people."""


@value
class GivenUp:
    """Tell that this one is left alone."""

    record: Record


def look_through(
    operations: tuple[str, ...], start: bytes, rules: Rules
) -> Generator[Resumable | Abandoned | GivenUp, Page | Word | None, ResumeReport]:
    """One round. Answer a Resumable with its page, an Abandoned with a word, a GivenUp with nothing."""
    recovery = ResumeReport()
    after, around = start, False
    while True:
        page = yield Resumable(operations, after, rules.limit)
        assert isinstance(page, Page)
        for each in page.found:
            if around and each.record.id > start:
                return recovery
            if rules.given_up(each.record):
                recovery.given_up += 1
                yield GivenUp(each.record)
            elif not rules.due(each.record):
                recovery.resting += 1
            else:
                word = yield each
                assert isinstance(word, str)
                setattr(recovery, word, getattr(recovery, word) + 1)
        if page.last is not None and not (around and page.last > start):
            after = page.last
        elif around or not start:
            return recovery
        else:
            after, around = b"", True
