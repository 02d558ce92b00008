"""What must be made anew in a forked child: locks that a thread of the parent held, threads that stayed behind,
connections that belong to the parent.

A server that loads the application and then forks its workers (gunicorn's preload) copies guards and stores along.
Whoever holds such things says so once, and its ``forked`` is called in every child before anything else runs there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forkable", "survive_forks"]


class Forkable(Protocol):
    def forked(self) -> None:
        """Make anew what does not survive a fork. Runs in the child, alone."""
        ...


_survivors: weakref.WeakSet[Forkable] = weakref.WeakSet()


def survive_forks(thing: Forkable) -> None:
    """Have ``thing.forked()`` called in every child of this process, for as long as the thing lives."""
    _survivors.add(thing)


def _tell() -> None:
    for thing in list(_survivors):
        thing.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
