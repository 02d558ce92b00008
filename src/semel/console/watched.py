"""The stores that a console watches, by name. Each question is bounded in time and size.

It knows what its store declares (listing, history, messages) and asks nothing else of it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

from semel.console.figures import HourCounts
from semel.core.lineage import read_label
from semel.core.messaging.messages import (
    CountLetters,
    InspectOutbox,
    Letter,
    LetterFilter,
    ListLetters,
    OutboxState,
)
from semel.core.ops import Listing, ListRecords, Lookup, Measure, Op, Record, Size
from semel.core.states import State
from semel.core.trail.minutes import MINUTE
from semel.engine.aio import AsyncGuard
from semel.engine.sync import SyncGuard
from semel.errors import ConfigurationError, MissingDependency, SemelError, StoreUnavailable
from semel.messaging import AsyncDeadLetters, DeadLetters
from semel.stores.aio_guard import AsyncSemel
from semel.stores.guard import Semel
from semel.stores.urls import open_async_store, open_store, tiers
from semel.trail import AsyncTrailReader, Minute, Moment

Watched: TypeAlias = AsyncGuard | SyncGuard | str
"""A guard, or the URL of a store."""
R = TypeVar("R")
PATIENCE: Final = 5.0
"""Seconds that a store has for one answer."""
LOOK: Final = 5000
"""Records that a store looks at for one page."""
FRESH: Final = 1.0
"""Seconds for which an answer is used again: ten people who look at one page cost as much as one."""
SETTLED: Final = 60
"""Seconds after its end until a minute is kept, and not read for every page: its writers are seldom later."""
AT_ONCE: Final = 5
"""Minutes that a page waits for."""
LONGEST_KEEP: Final = 600
"""Seconds for which a minute is kept at most."""
COUNTED: Final = 10_000
"""Messages, and dead letters, that are counted for a page."""
MOST_MOMENTS: Final = 500
"""Moments of one chain on a page."""


class WatchedStore:
    """One store, behind a guard."""

    def __init__(self, name: str, watched: Watched, secret: bytes | None = None) -> None:
        """:param secret: that of the trails, if they have one."""
        self.name = name
        self._secret = secret
        self._watched = watched
        self._opened: SyncGuard | AsyncGuard | None = None
        self._minutes: dict[int, tuple[float, HourCounts]] = {}
        self._settled = HourCounts()
        self._reading: asyncio.Future[None] | None = None
        self._answers: dict[Any, tuple[float, asyncio.Task[Any]]] = {}

    @property
    def guard(self) -> AsyncGuard:
        """The guard for this event loop. A store that is named by its URL is opened now."""
        guard = self._base()
        return guard.in_this_loop() if isinstance(guard, SyncGuard) else guard

    def _base(self) -> SyncGuard | AsyncGuard:
        if not isinstance(self._watched, str):
            return self._watched
        if self._opened is None:
            self._opened = _open(self._watched)
        return self._opened

    @property
    def lists(self) -> bool:
        """Whether its records can be listed."""
        return self.guard.store.lists

    @property
    def trail(self) -> AsyncTrailReader | None:
        """The reader of its history, if the store can keep one."""
        store = self.guard.store
        return AsyncTrailReader(store, secret=self._secret) if store.trails else None

    @property
    def has_messages(self) -> bool:
        """Whether there is an outbox, an inbox and dead letters in the same database."""
        return self._base().store.adopt is not None

    async def ask(self, op: Op[R]) -> R:
        """Execute an Op. Raises StoreUnavailable if that takes too long."""
        answer: R = await self._in_time(self.guard.store.execute(op))
        return answer

    async def _in_time(self, answer: Any) -> Any:
        try:
            return await asyncio.wait_for(answer, PATIENCE)
        except TimeoutError:
            raise StoreUnavailable(f"{self.name}: no answer within {PATIENCE:g} s") from None

    async def _fresh(self, question: Any, ask: Callable[[], Any]) -> Any:
        """Ask once for all who want to know the same at about the same time."""
        now = time.monotonic()
        known = self._answers.get(question)
        if known is None or now - known[0] > FRESH:
            for old in [each for each, (at, _) in self._answers.items() if now - at > FRESH]:
                del self._answers[old]
            known = self._answers[question] = (now, asyncio.ensure_future(ask()))
        return await asyncio.shield(known[1])

    async def list(
        self, states: tuple[State, ...] = (), operation: str | None = None, tenant: str | None = None,
        older: float = 0.0, limit: int = 50, after: str | None = None,
    ) -> Listing:  # fmt: skip
        """Return a page of records, with keys and lineage apart."""
        op = ListRecords(
            states=states, operation=operation, tenant=tenant, older=older, limit=limit, look=LOOK, after=after
        )
        question = (states, operation, tenant, older, limit, after)
        found: Listing = await self._fresh(question, lambda: self.ask(op))
        return Listing(tuple(read_label(each) for each in found.records), found.after, found.looked_at)

    async def measure(self) -> Size:
        """Return how large the store is."""
        found: Size = await self._fresh("size", lambda: self.ask(Measure()))
        return found

    async def lookup(self, id: bytes) -> Record | None:
        """Return a record by its identity."""
        record = await self.ask(Lookup(id))
        return None if record is None else read_label(record)

    async def hour(self, since: int) -> tuple[HourCounts, HourCounts]:
        """Return what was counted since that minute: in the minutes that are over, and in the newest.

        Both are empty if there is no history. A minute that is over hardly changes. It is read again now and then, the
        more seldom the older it is.
        """
        reader = self.trail
        if reader is None:
            return HourCounts(), HourCounts()
        now = time.time()
        newest = self._newest(now)
        for old in [at for at in self._minutes if at < since]:
            self._keep(old, None)
        missing = [at for at in range(since, newest, MINUTE) if at not in self._minutes]
        expired = [at for at, (until, _) in self._minutes.items() if until < now]
        if missing:
            await self._read_some(reader, missing[-AT_ONCE:])
            if len(missing) > AT_ONCE and not self.reading:
                self._reading = asyncio.ensure_future(self._read_rest(reader, missing[:-AT_ONCE]))
        elif expired:
            await self._read_some(reader, [max(expired)])
        return self._settled, await self._recent_minutes(reader, newest)

    def _newest(self, now: float) -> int:
        """The first of the minutes that are read for every page."""
        return int(now - SETTLED) // MINUTE * MINUTE

    async def _recent_minutes(self, reader: AsyncTrailReader, newest: int) -> HourCounts:
        async def read() -> HourCounts:
            return HourCounts(await self._in_time(reader.minutes(newest)))

        found: HourCounts = await self._fresh(("minutes", newest), read)
        return found

    @property
    def reading(self) -> bool:
        """Whether older minutes are still being read."""
        return self._reading is not None and not self._reading.done()

    async def wait_for_hour(self) -> None:
        """Wait until they are read."""
        if self._reading is not None:
            await self._reading

    async def _read_rest(self, reader: AsyncTrailReader, missing: Sequence[int]) -> None:
        """Read the older minutes little by little: no page waits for them."""
        with suppress(SemelError):  # the next page tries again
            for end in range(len(missing), 0, -AT_ONCE):
                await self._read_some(reader, missing[max(0, end - AT_ONCE) : end])

    async def _read_some(self, reader: AsyncTrailReader, minutes: Sequence[int]) -> None:
        first, end = minutes[0], minutes[-1] + MINUTE
        await self._fresh(("hour", first, end), lambda: self._read_minutes(reader, first, end))

    async def _read_minutes(self, reader: AsyncTrailReader, first: int, end: int) -> None:
        found: dict[int, list[Minute]] = {at: [] for at in range(first, end, MINUTE)}
        for minute in await self._in_time(reader.minutes(first, end)):
            found[minute.at].append(minute)
        for at, minutes in found.items():
            self._keep(at, HourCounts(minutes))

    def _keep(self, at: int, tally: HourCounts | None) -> None:
        """Keep a minute instead of what was known of it, or drop it."""
        known = self._minutes.pop(at, None)
        if known is not None:
            self._settled.remove(known[1])
        if tally is not None:
            self._settled.add(tally)
            now = time.time()
            self._minutes[at] = (now + min(LONGEST_KEEP, (now - at) / 4), tally)

    async def recent_routes(self) -> set[str]:
        """Return the routes of the last minutes."""
        reader = self.trail
        if reader is None:
            return set()
        found = await self._recent_minutes(reader, self._newest(time.time()))
        return {route for route in found.routes if route}

    async def story(self, id: bytes) -> tuple[Moment, ...]:
        """Return the moments of the chain to which a record belongs."""
        return await self._moments(lambda reader: reader.lineage_of(id, limit=MOST_MOMENTS))

    async def lineage(self, root: bytes) -> tuple[Moment, ...]:
        """Return the moments of a chain."""
        return await self._moments(lambda reader: reader.lineage(root, limit=MOST_MOMENTS))

    async def recent(self, limit: int, kinds: tuple[str, ...] = ()) -> tuple[Moment, ...]:
        """Return the newest moments."""
        found: tuple[Moment, ...] = await self._fresh(
            ("recent", limit, kinds), lambda: self._moments(lambda reader: reader.recent(limit, kinds=kinds))
        )
        return found

    async def _moments(self, read: Callable[[AsyncTrailReader], Any]) -> tuple[Moment, ...]:
        """Ask the reader of the history; nothing if there is no history."""
        reader = self.trail
        return () if reader is None else await self._in_time(read(reader))

    async def outbox(self, streams: int) -> OutboxState:
        """Return what is in the outbox."""
        found: OutboxState = await self._fresh(("outbox", streams), lambda: self.ask(InspectOutbox(streams, COUNTED)))
        return found

    async def letters(self, filter: LetterFilter, after: int, limit: int) -> tuple[Letter, ...]:
        """Return a page of dead letters."""
        return await self.ask(ListLetters(filter, after, limit))

    async def count_letters(self, filter: LetterFilter) -> int:
        """Return how many dead letters fit; COUNTED if there are as many or more."""
        return (await self.ask(CountLetters(filter, COUNTED)))[0]

    async def move_letters(self, purge: bool, filter: LetterFilter, limit: int) -> int:
        """Redrive or purge dead letters. Returns how many."""
        guard = self._base()
        if isinstance(guard, SyncGuard):
            letters = DeadLetters(guard.store)
            return await asyncio.to_thread(letters.purge if purge else letters.redrive, filter, limit=limit)
        aio_letters = AsyncDeadLetters(guard.store)
        return await (aio_letters.purge if purge else aio_letters.redrive)(filter, limit=limit)

    async def close(self) -> None:
        """Close what was opened here. A guard of the application stays open."""
        if self._reading is not None:
            self._reading.cancel()
        opened, self._opened = self._opened, None
        if isinstance(opened, SyncGuard):
            await asyncio.to_thread(opened.close)
        elif opened is not None:
            await opened.close()


def _open(url: str) -> SyncGuard | AsyncGuard:
    try:
        return AsyncSemel(open_async_store(url), sweep_every=None)
    except MissingDependency as missing:
        try:
            return Semel(open_store(url), sweep_every=None)
        except MissingDependency:
            raise missing from None


def watch_stores(watched: Watched | Mapping[str, Watched], secret: bytes | None = None) -> dict[str, WatchedStore]:
    """Return the stores by their names, which stand in addresses."""
    named = watched if isinstance(watched, Mapping) else {default_name(watched): watched}
    if not named:
        raise ConfigurationError("a console needs a guard or the URL of a store")
    for name, each in named.items():
        if re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,39}", name) is None:
            raise ConfigurationError(f"{name!r} is no name for a store in an address: use a-z, 0-9, dots and dashes")
        if not isinstance(each, (AsyncGuard, SyncGuard, str)):
            raise ConfigurationError(f"{name}: pass a guard or the URL of a store, not a {type(each).__name__}")
    return {name: WatchedStore(name, each, secret) for name, each in named.items()}


def default_name(watched: Watched) -> str:
    """Return a name for a store, from its URL without the secrets in it."""
    if not isinstance(watched, str):
        return "store"
    try:
        parts = urlsplit(tiers(watched)[0] if watched.startswith("tiered:") else watched)
        words = [
            parts.scheme.partition("+")[0],
            parts.path.rpartition("/")[2] or parts.hostname or "",
        ]
    except ValueError:
        words = ["store"]
    name = re.sub(r"[^a-z0-9.-]+", "-", "-".join(filter(None, words)).lower()).strip("-.")[:40]
    return name or "store"


def names_for(urls: list[str]) -> dict[str, Watched]:
    """Return a name for each URL, no two alike."""
    named: dict[str, Watched] = {}
    for url in urls:
        base = name = default_name(url)
        number = 2
        while name in named:
            name = f"{base[:36]}-{number}"
            number += 1
        named[name] = url
    return named
