"""What the natural helpers answer."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from semel.core.values import value

__all__ = ["Applied", "Change", "Inserted"]


class Applied(Enum):
    """What a conditional change met."""

    NOW = "now"
    """It was made, by this call."""
    ALREADY = "already"
    """It had been made before: a repeat, and nothing to do."""
    LOST = "lost"
    """Someone else has changed the row: look again, and decide anew."""
    ABSENT = "absent"
    """There is no such row."""


@value
class Change:
    """The answer of ``compare_and_set``, ``transition`` and ``append_event``."""

    applied: Applied
    current: Any = None
    """What stands there where it is LOST: the version, the status, or the other event's id."""

    def __bool__(self) -> bool:
        """Whether all is as the caller wants it, made now or before."""
        return self.applied in (Applied.NOW, Applied.ALREADY)


class Inserted(NamedTuple):
    """The answer of ``insert_once``."""

    row: Mapping[str, Any]
    """As it stands in the table: the new one, or the one that was there."""
    new: bool
