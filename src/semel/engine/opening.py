"""The store of a guard: one that was made, or its URL, which is opened here.

The engine knows no store. The modules that programs get their guards from (``semel.stores.guard``, ``aio_guard``) know
them all, and say here how a URL is opened.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from semel.core.quota import Quota
from semel.engine.ports import Store
from semel.errors import ConfigurationError

__all__ = ["opened", "opens_urls"]

MEMBERS: Final = ("wakes", "counts", "resumes", "adopt", "accept", "execute", "execute_many", "wait", "close")
_openers: Final[dict[bool, Callable[[str], Any]]] = {}
"""How a sync guard opens a URL (False), and an async one (True)."""


def opens_urls(opener: Callable[[str], Any], *, awaited: bool) -> None:
    """Let guards of this kind take a URL in place of a store."""
    _openers[awaited] = opener


def opened(store: Any, quota: Quota | None, *, awaited: bool) -> Any:
    """The store, checked: one of the wrong kind would fail at the first call only, in words that explain nothing."""
    if isinstance(store, str) and awaited in _openers:
        store = _openers[awaited](store)
    if not isinstance(store, Store):  # both protocols have the same members
        raise ConfigurationError(_no_store(store))
    if inspect.iscoroutinefunction(store.execute) is not awaited:
        needs, other = ("AsyncSemel", "Semel") if awaited else ("Semel", "AsyncSemel")
        kind = type(store).__name__
        raise ConfigurationError(
            f"{kind} is {'a sync' if awaited else 'an async'} store: {needs} cannot use it; use {other}"
        )
    if quota is not None and not store.counts:
        raise ConfigurationError(
            f"quota= needs a store that counts keys, and {type(store).__name__} does not: use another"
        )
    return store


def _no_store(store: object) -> str:
    if isinstance(store, str):
        shown = "another string"  # never quote it: it may be a URL with a password
    else:
        shown = repr(store)
        missing = [name for name in MEMBERS if not hasattr(store, name)]
        if len(missing) < len(MEMBERS):
            shown = f"{type(store).__name__}, which does not declare {', '.join(missing)}"
    return f"a guard takes a store, such as SQLiteStore('app.db'), or its URL, 'sqlite:///app.db', not {shown}"
