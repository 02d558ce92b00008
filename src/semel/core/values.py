"""The decorator for small immutable values of the core.

``@value`` is a dataclass with slots that type checkers hold to be frozen. It is not frozen at run time, because a
frozen dataclass writes each field through ``object.__setattr__`` and is three times as slow to make; two Ops are made
per call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=True)
def value(cls: type[T]) -> type[T]:
    """Make ``cls`` a slotted dataclass, frozen to the type checker."""
    return dataclass(slots=True)(cls)
