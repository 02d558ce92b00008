"""``AsyncSemel`` as programs import it: it takes a store, or the URL of one."""

from __future__ import annotations

from semel.engine.aio import AsyncSemel
from semel.engine.opening import opens_urls
from semel.engine.ports import AsyncStore

__all__ = ["AsyncSemel"]


def _open(url: str) -> AsyncStore:
    from semel.stores.urls import open_async_store

    return open_async_store(url)


opens_urls(_open, awaited=True)
