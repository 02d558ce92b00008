"""What must be made anew in a forked child: locks that a thread of the parent held, threads that stayed behind,
connections that belong to the parent.

A server that loads the application and then forks its workers (gunicorn's preload) copies guards and stores along.
Whoever holds such things says so once, and is told in every child before anything else runs there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["survive_forks"]

_survivors: list[weakref.WeakMethod[Callable[[], Any]]] = []


def survive_forks(renew: Callable[[], Any]) -> None:
    """Have the bound method called in every child of this process, for as long as its object lives."""
    _survivors.append(weakref.WeakMethod(renew, _survivors.remove))


def _tell() -> None:
    for survivor in list(_survivors):
        renew = survivor()
        if renew is not None:
            renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tell)
