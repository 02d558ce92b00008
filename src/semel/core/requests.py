"""What a flow asks of an engine beside the store's Ops, and what it is told of the handler."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from semel.core.ops import Claimed, Op
from semel.core.outcomes import Failed, Outcome
from semel.core.values import value

__all__ = [
    "Await",
    "Declined",
    "Flow",
    "Lost",
    "NotRun",
    "Pause",
    "Raised",
    "Recover",
    "Request",
    "Returned",
    "Run",
]


@value
class Run:
    """Run the handler, keeping the lease alive meanwhile; None as claim: the store is down and the policy is open."""

    claimed: Claimed | None


@value
class Recover:
    """Call the recover hook under the new lease."""

    claimed: Claimed


@value
class Await:
    """Wait until the record may have changed, ``seconds`` at most, polling every ``interval`` where nothing wakes us.

    Answered with the seconds that passed.
    """

    id: bytes
    seconds: float
    interval: float


@value
class Pause:
    """Let so many seconds pass."""

    seconds: float


@value
class Returned:
    """The handler returned this."""

    value: Any


@value
class Raised:
    """The handler raised this."""

    error: BaseException


@value
class Declined:
    """The handler returned this, and says that nothing happened: the answer is given, and the key is free again."""

    value: Any


@value
class Lost:
    """The lease was lost and the handler was stopped."""


@value
class NotRun:
    """The caller went away before the handler began."""

    error: BaseException


Request: TypeAlias = "Op[Any] | Run | Recover | Await | Pause"
Flow: TypeAlias = Generator[Request, Any, "Outcome[Any] | Failed"]
