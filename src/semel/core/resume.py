"""How a resumer finds abandoned operations and continues them, written once for sync and async.

One round looks at all stored arguments, page by page. It starts at a random place and wraps around, so that several
resumers start with different operations. The claim alone decides who resumes an operation: a resumer that comes second
goes on to the next one. An operation that fails is tried again after ever longer pauses, and is given up after a number
of tries.

The round is a generator that knows no store, clock or thread. It yields ``Resumable``, an Op for the store, and each
``Abandoned`` operation to continue. The answer to the latter is its Outcome, or Raised with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from semel.core.call import Outcome, Raised, describe_error
from semel.core.lineage import read_label
from semel.core.ops import Abandoned, Record, Resumable
from semel.errors import InProgress, LeaseLost
from semel.observe import events

LONGEST_PAUSE: Final = 3600.0
"""The longest time between two tries of an operation, in seconds."""
REPORTED: Final = 1000
"""How many given-up operations a resumer remembers, so that it reports each of them once."""

ResumeFlow: TypeAlias = Generator["Resumable | Abandoned", Any, "ResumeReport"]


@dataclass
class ResumeReport:
    """What one round of a resumer did."""

    resumed: int = 0
    """Operations that were finished."""
    failed: int = 0
    """Operations that failed again, or whose arguments cannot be read: see the events."""
    elsewhere: int = 0
    """Operations that someone else had already taken over."""
    resting: int = 0
    """Operations that failed, and will be tried later."""
    given_up: int = 0
    """Operations that have used up their tries, and are left for people."""


class ResumePlan:
    """Decides which abandoned operations are continued, and when."""

    def __init__(self, limit: int, tries: int, pause: float, hook: events.EventHook) -> None:
        """
        :param limit: how many operations are listed by one Op.
        :param tries: how many attempts an operation has, including the first one.
        :param pause: seconds after the second attempt before the third one; the pauses then double.
        """
        self.limit = limit
        self.tries = tries
        self.pause = pause
        self._hook = hook
        self._reported: set[tuple[bytes, int]] = set()

    def round(self, operations: tuple[str, ...], start: bytes, stopping: Callable[[], bool]) -> ResumeFlow:
        """Look at all abandoned operations of these names once, in the order of their ids, from ``start`` on."""
        report = ResumeReport()
        after, wrapped = start, False
        while not stopping():
            page = yield Resumable(operations, after, self.limit)
            for abandoned in page.found:
                if stopping() or (wrapped and abandoned.record.id > start):
                    return report
                if abandoned.record.attempt >= self.tries:
                    report.given_up += 1
                    self._report_given_up(abandoned.record)
                elif not self._is_due(abandoned.record):
                    report.resting += 1
                else:
                    self._count(report, abandoned.record, (yield abandoned))
            if page.last is not None and not (wrapped and page.last > start):
                after = page.last
            elif wrapped or not start:
                break
            else:
                after, wrapped = b"", True
        return report

    def _is_due(self, record: Record) -> bool:
        """Whether an operation has rested long enough: not at all after its first attempt, then ever longer."""
        doublings = min(record.attempt - 1, 32)
        return -record.lease_left >= min(self.pause * ((1 << doublings) - 1), LONGEST_PAUSE)

    def _count(self, report: ResumeReport, record: Record, answer: Outcome[Any] | Raised) -> None:
        if isinstance(answer, Outcome):
            if answer.replayed or answer.attempt == 0:
                report.elsewhere += 1
            else:
                report.resumed += 1
        elif isinstance(answer.error, (InProgress, LeaseLost)):
            report.elsewhere += 1
        else:
            report.failed += 1
            self._tell(events.RecoveryFailed, record, record.attempt + 1, describe_error(answer.error))

    def _report_given_up(self, record: Record) -> None:
        attempt = (record.id, record.attempt)
        if attempt not in self._reported:
            if len(self._reported) >= REPORTED:
                self._reported.clear()
            self._reported.add(attempt)
            self._tell(events.RecoveryGivenUp, record, record.attempt)

    def _tell(self, event: type[events.Event], record: Record, *details: Any) -> None:
        key, operation = read_label(record).key or "", record.operation
        self._hook(event(operation, record.tenant, key, *details, route=operation, id=record.id))
