"""The results of the natural helpers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from semel.core.values import value

__all__ = ["Applied", "Change", "Inserted"]


class Applied(Enum):
    """How a conditional change ended."""

    NOW = "now"
    """This call made the change."""
    ALREADY = "already"
    """The change had been made before: this is a repeat."""
    LOST = "lost"
    """Someone else has changed the row: read it again and decide."""
    ABSENT = "absent"
    """There is no such row."""


@value
class Change:
    """The result of ``compare_and_set``, ``transition`` and ``append_event``."""

    applied: Applied
    current: Any = None
    """What the row has if the change is LOST: the version, the status, or the id of the other event."""

    def __bool__(self) -> bool:
        """Whether the row is as the caller wants it, changed now or before."""
        return self.applied in (Applied.NOW, Applied.ALREADY)


class Inserted(NamedTuple):
    """The result of ``insert_once``."""

    row: Mapping[str, Any]
    """The row in the table: the new one, or the one that existed."""
    new: bool
