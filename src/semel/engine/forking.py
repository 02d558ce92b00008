"""What a forked child must replace: locks that a thread of the parent held, threads that stayed behind, connections
that belong to the parent.

A server that loads the application and then forks its workers (gunicorn's preload) copies guards and stores into them.
An object that holds such things registers a method, which is called in every child before anything else runs there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

_survivors: weakref.WeakKeyDictionary[Any, list[Callable[[Any], Any]]] = weakref.WeakKeyDictionary()


def survive_forks(renew: Callable[[], Any]) -> None:
    """Call the bound method in every child of this process, for as long as its object lives."""
    assert isinstance(renew, MethodType)
    _survivors.setdefault(renew.__self__, []).append(renew.__func__)


def renewed(event: threading.Event) -> threading.Event:
    """Return a new event in the same state. A thread of the parent may hold the lock of the old one forever."""
    new = threading.Event()
    if event.is_set():
        new.set()
    return new


def _renew_all() -> None:
    for survivor, renewals in list(_survivors.items()):
        for renew in renewals:
            renew(survivor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
