"""``Semel`` as programs import it: it takes a store, or the URL of one."""

from __future__ import annotations

from semel.engine.opening import opens_urls
from semel.engine.ports import Store
from semel.engine.sync import Semel

__all__ = ["Semel"]


def _open(url: str) -> Store:
    from semel.stores.urls import open_store

    return open_store(url)


opens_urls(_open, awaited=False)
