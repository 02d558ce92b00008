# Twin: guard.py is generated from this file by make twins.
# Twin: Use one per event loop. -> Threads may share it.
# Twin: AsyncGuard -> SyncGuard
# Twin: open_async_store -> open_store
"""``AsyncSemel``, the class that programs import: a guard that takes a store, or the URL of one."""

from __future__ import annotations

from semel.engine.aio import AsyncGuard
from semel.engine.ports import AsyncStore


class AsyncSemel(AsyncGuard):
    """Makes functions happen once, however often they are called with the same key. Use one per event loop."""

    def _open_store(self, url: str) -> AsyncStore:
        from semel.stores.urls import open_async_store

        return open_async_store(url)
