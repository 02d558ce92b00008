# Twin: reader.py is generated from this file by make twins.
"""Read the history of events from a store, from any process.

::

    reader = AsyncTrailReader(store)
    for moment in await reader.lineage_of(record.id):
        print(moment.at, moment.who, moment.kind)

Each method is answered from an index, however long the history is.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final

from semel.core.trail.minutes import MINUTE, Minute
from semel.core.trail.moments import (
    Links,
    Moment,
    ReadMinutes,
    ReadRecent,
    ReadStories,
    TrailFlow,
    follow_id,
    follow_root,
)
from semel.engine.ports import AsyncStore, check_trails

_LONGEST_STORY: Final = 1000


class AsyncTrailReader:
    """Reads moments and minutes."""

    def __init__(self, store: AsyncStore, *, secret: bytes | None = None) -> None:
        """
        :param store: where a ``Trail`` writes: memory, SQLite, PostgreSQL, MySQL or Redis.
        :param secret: the secret of the trail, if it has one.
        """
        check_trails(store)
        self._store = store
        self._links = Links(secret)

    def link(self, key: str) -> bytes:
        """Return what ``lineage`` takes for the key at the start of a chain."""
        return self._links.link(key)

    async def story(self, id: bytes, *, limit: int = _LONGEST_STORY) -> tuple[Moment, ...]:
        """Return the moments of one record, the oldest first.

        :param id: the identity of the record, as ``Record.id``.
        """
        return await self._store.execute(ReadStories((id,), limit))

    async def lineage(self, root: bytes, *, limit: int = _LONGEST_STORY) -> tuple[Moment, ...]:
        """Return the moments of all hops of a chain, the oldest first: of clients, services, messages and consumers.

        :param root: ``link(key)`` of the key at the start of the chain, or ``Moment.root``.
        """
        return await self._follow(follow_root(root, limit, self._links))

    async def lineage_of(self, id: bytes, *, limit: int = _LONGEST_STORY) -> tuple[Moment, ...]:
        """Return the moments of all hops of the chain to which a record belongs, the oldest first."""
        return await self._follow(follow_id(id, limit, self._links))

    async def recent(
        self, limit: int = 50, *, kinds: Collection[str] = (), route: str | None = None
    ) -> tuple[Moment, ...]:
        """Return the newest moments, the newest first. It looks at the newest 5000, or at those of each kind.

        :param kinds: only events of these names.
        """
        return await self._store.execute(ReadRecent(limit, tuple(kinds), route))

    async def minutes(self, since: float, until: float | None = None) -> tuple[Minute, ...]:
        """Return the counts of all processes, by minute, route and kind, in this order.

        :param since: seconds since 1970. Minutes that begin from then on are returned ...
        :param until: ... and before this time; by default up to the present one.
        """
        end = time.time() + MINUTE if until is None else until
        return await self._store.execute(ReadMinutes(int(since), int(end)))

    async def _follow(self, flow: TrailFlow) -> tuple[Moment, ...]:
        try:
            op = next(flow)
            while True:
                op = flow.send(await self._store.execute(op))
        except StopIteration as stop:
            found: tuple[Moment, ...] = stop.value
            return found
