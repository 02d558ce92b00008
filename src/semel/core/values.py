"""The decorator for small immutable values.

``@value`` makes a dataclass with slots that is frozen for type checkers. It is not frozen at run time, because a frozen
dataclass sets each field through ``object.__setattr__``, which makes its creation three times as slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=True)
def value(cls: type[T]) -> type[T]:
    """Make ``cls`` a slotted dataclass, frozen to the type checker."""
    return dataclass(slots=True)(cls)
