# Twin: deadletters.py is generated from this file by make twins.
# Twin: awaited=True -> awaited=False
"""The dead letters: messages that a relay or a consumer has given up, and the way back for them.

::

    letters = AsyncDeadLetters(store)
    for letter in await letters.list(LetterFilter(origin="ledger")):
        print(letter.message.id, letter.reason)
    await letters.redrive(LetterFilter(origin="ledger"), rate=50)

A redrive moves messages back into the outbox, under their ids. The relay sends them again, and a consumer that has
applied one of them already does nothing. So a redrive of everything, done twice, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from semel.core.messaging.messages import CountLetters, Letter, LetterFilter, ListLetters, PurgeLetters, RedriveLetters
from semel.engine.ports import AsyncStore, check_sql_store
from semel.errors import PolicyError

_ALL: Final = LetterFilter()
_AT_ONCE: Final = 100
"""How many one transaction moves. A longer one would hold its locks for too long."""
_log = logging.getLogger("semel.deadletters")


class AsyncDeadLetters:
    """The dead letters in the database of a store."""

    def __init__(self, store: AsyncStore) -> None:
        """:param store: SQLite, PostgreSQL or MySQL, with Semel's tables."""
        check_sql_store(store, "DeadLetters", awaited=True)
        self._store = store

    async def list(self, filter: LetterFilter = _ALL, *, after: int = 0, limit: int = _AT_ONCE) -> tuple[Letter, ...]:
        """Return a page of dead letters, the oldest first.

        :param after: the position of the last letter of the page before.
        """
        return await self._store.execute(ListLetters(filter, after, limit))

    async def get(self, message_id: str, *, origin: str | None = None) -> Letter | None:
        """Return the dead letter with this message, or None.

        :param origin: the consumer that has given it up, or ``""`` for the relay. Needed if several have.
        """
        found = await self.list(LetterFilter(message=message_id, origin=origin), limit=1)
        return found[0] if found else None

    async def count(self, filter: LetterFilter = _ALL) -> int:
        """Return how many dead letters fit."""
        return (await self._store.execute(CountLetters(filter)))[0]

    async def redrive(
        self,
        filter: LetterFilter = _ALL,
        *,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Move dead letters back into the outbox, and return how many. Those that die meanwhile are not moved again.

        :param limit: the most messages to move. Defaults to all.
        :param rate: the most messages to move in a second, so that consumers are not flooded. Defaults to no limit.
        :param dry_run: move nothing, and return how many there are.
        :param progress: called after each step with the number moved so far, and the number to move.
        """
        return await self._move(RedriveLetters, "moved back into the outbox", filter, limit, rate, dry_run, progress)

    async def purge(
        self,
        filter: LetterFilter = _ALL,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> int:
        """Delete dead letters, and return how many. Same parameters as ``redrive``."""
        return await self._move(PurgeLetters, "deleted", filter, limit, None, dry_run, progress)

    async def _move(
        self,
        op: type[RedriveLetters] | type[PurgeLetters],
        what: str,
        filter: LetterFilter,
        limit: int | None,
        rate: float | None,
        dry_run: bool,
        progress: Callable[[int, int], object] | None,
    ) -> int:
        if rate is not None and not rate > 0:
            raise PolicyError(f"rate is a number of messages in a second, more than 0, and not {rate}")
        if limit is not None and limit < 0:
            raise PolicyError(f"limit is 0 or more, and not {limit}")
        count, last = await self._store.execute(CountLetters(filter))
        wanted = count if limit is None else min(count, limit)
        if dry_run:
            return wanted
        step = _AT_ONCE if rate is None else max(1, int(min(_AT_ONCE, rate)))
        moved = 0
        try:
            while moved < wanted:
                gone = await self._store.execute(op(filter, last, min(step, wanted - moved)))
                moved += gone
                if progress is not None:
                    progress(moved, wanted)
                if not gone:  # somebody else was faster
                    break
                if rate is not None and moved < wanted:
                    await asyncio.sleep(gone / rate)
        finally:
            if moved:
                _log.warning("dead letters were %s: %d (%s)", what, moved, describe_filter(filter))
        return moved


def describe_filter(filter: LetterFilter) -> str:
    """The filter in words, for logs."""
    parts = [f"{name} {getattr(filter, name)!r}" for name in ("origin", "type", "destination", "stream", "message")
             if getattr(filter, name) is not None]  # fmt: skip
    if filter.reason:
        parts.append(f"reason with {filter.reason!r}")
    if filter.older:
        parts.append(f"older than {filter.older:g} s")
    return ", ".join(parts) or "all"
