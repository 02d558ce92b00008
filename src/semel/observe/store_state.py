"""``StoreWatch``: looks into a store now and then, for the gauges of the sinks.

A look never scans a table of records, and there is at most one in each interval, however often the gauges are read. It
happens in a thread of its own, so whoever reads the gauges never waits for the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from semel.core.messaging.messages import (
    CountLetters,
    DestinationDepth,
    InspectOutbox,
    LetterFilter,
    OutboxState,
)
from semel.core.ops import ListRecords, Lookup, Measure, Record, Size
from semel.core.policy import Duration, seconds
from semel.core.states import State
from semel.core.values import value
from semel.engine.forking import survive_forks
from semel.engine.ports import Store, is_async_store
from semel.errors import ConfigurationError, MissingDependency, NotMigrated, StoreError
from semel.observe.metrics import OTHER
from semel.stores.urls import has_tables, open_any_store

EVERY: Final = "30s"
LOOK: Final = 5000
MOST_BEFORE: Final = 100
"""How many unfinished records of earlier looks are looked up again, the oldest ones first."""
MAX_DESTINATIONS: Final = 50
UNFINISHED: Final = (State.RUNNING, State.ABANDONED, State.UNKNOWN)
_log = logging.getLogger("semel.observe")


@value
class Unfinished:
    """The records in one state, as far as looks have found them."""

    records: int
    oldest: float
    """Seconds since the first attempt of the oldest one was claimed."""


@value
class StoreState:
    """What one look has found."""

    up: bool
    """False if the store has failed. Nothing else is known then."""
    size: Size | None = None
    """None if the store cannot list its records."""
    unfinished: Mapping[State, Unfinished] | None = None
    outbox: OutboxState | None = None
    """None if there is no outbox in this store."""
    dead_letters: int | None = None


class StoreWatch:
    """Looks into one store, at most once in each interval."""

    def __init__(self, store: Store | str, *, every: Duration = EVERY, look: int = LOOK) -> None:
        """
        :param store: a sync store, or the URL of a store. In an event loop, pass the URL.
        :param every: how often it looks, at most.
        :param look: how many of the newest records, and how many of the older ones, it reads to find unfinished ones.
            For the older ones, each look continues where the last one ended.
        """
        self._url = store if isinstance(store, str) else None
        if self._url is not None:
            has_tables(self._url)  # raises StoreURLError if it is no URL of a store
        self._store: Store | None = None if isinstance(store, str) else store
        if self._store is not None and is_async_store(self._store):
            raise ConfigurationError(f"{type(store).__name__} is an async store: pass its URL, or a sync store")
        self._every = seconds(every, "every")
        self._look = look
        self._state: StoreState | None = None
        self._due = float("-inf")
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._failed = ""
        self._unfinished: dict[bytes, Record] = {}
        """What the last look has found."""
        self._after: str | None = None
        """Where the next look continues; None: after the newest records."""
        survive_forks(self._renew)

    def latest(self) -> StoreState | None:
        """Return what the last look has found; None before the first one.

        If it is time for the next look, that begins, and the next call has its result.
        """
        with self._lock:
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + self._every
                threading.Thread(target=self.look, name="semel-store-watch", daemon=True).start()
            return self._state

    def look(self) -> StoreState:
        """Look now. A failure of the store is logged."""
        try:
            with self._looking:
                if self._store is None:
                    # Here, and not when it is made: where only an async driver is installed, the store has an event
                    # loop of its own, which cannot start inside another one.
                    assert self._url is not None
                    self._store = open_any_store(self._url)
                self._state, self._failed = self._read(self._store), ""
        except (StoreError, MissingDependency) as error:
            self._state = StoreState(up=False)
            if self._failed != str(error):
                self._failed = str(error)
                _log.warning("the store cannot be measured, so its gauges are missing: %s", error)
        return self._state

    def close(self) -> None:
        """Close the store, if it was opened here from a URL."""
        with self._looking:
            if self._url is not None and self._store is not None:
                self._store.close()

    def _read(self, store: Store) -> StoreState:
        size, unfinished = None, None
        if store.lists:
            size = store.execute(Measure())
            found = self._find_unfinished(store)
            ages = {state: [each.age for each in found if each.state is state] for state in UNFINISHED}
            unfinished = {state: Unfinished(len(of), max(of, default=0.0)) for state, of in ages.items()}
        outbox, dead_letters = None, None
        if store.adopt is not None:
            try:
                outbox = limit_destinations(store.execute(InspectOutbox(0)))
                dead_letters = store.execute(CountLetters(LetterFilter()))[0]
            except NotMigrated:  # the service sends no messages
                pass
        return StoreState(True, size, unfinished, outbox, dead_letters)

    def _find_unfinished(self, store: Store) -> Collection[Record]:
        """Return the unfinished records among the newest ones and among a further part of the store, a new one at each
        look, and those of the looks before that are still unfinished.
        """
        newest = store.execute(ListRecords(states=UNFINISHED, limit=self._look, look=self._look))
        found = {record.id: record for record in newest.records}
        after, self._after = self._after or newest.after, None  # if the store fails, it begins again
        if after is not None:
            older = store.execute(ListRecords(states=UNFINISHED, limit=self._look, look=self._look, after=after))
            found = {record.id: record for record in older.records} | found
            self._after = older.after
        before = sorted(self._unfinished.keys() - found.keys(), key=lambda id: -self._unfinished[id].age)
        if before:
            for record in store.execute_many([Lookup(id) for id in before[:MOST_BEFORE]]):
                if isinstance(record, Record) and record.state in UNFINISHED:
                    found[record.id] = record
        self._unfinished = found
        return found.values()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._due = float("-inf")


def limit_destinations(state: OutboxState) -> OutboxState:
    """Return the state with the largest destinations, and the others as one."""
    ranked = sorted(state.destinations, key=lambda each: -each.messages)
    largest, rest = ranked[:MAX_DESTINATIONS], ranked[MAX_DESTINATIONS:]
    if rest:
        messages, failing = sum(each.messages for each in rest), sum(each.failing for each in rest)
        largest.append(DestinationDepth(OTHER, messages, failing, max(each.oldest for each in rest)))
    return replace(state, destinations=tuple(largest))


GAUGES: Final = {
    "semel_store_up": "1 if the store could be measured, 0 if not.",
    "semel_records": "Records in the store; mostly an estimate.",
    "semel_records_bytes": "Room that the records take.",
    "semel_sweep_lag_seconds": "Seconds that the oldest expired record waits for a sweep.",
    "semel_unfinished_records": "Records that are not finished, as far as looks have found them.",
    "semel_unfinished_oldest_seconds": "Seconds since the oldest of them was first claimed.",
    "semel_outbox_messages": "Messages in the outbox, of the oldest 100,000.",
    "semel_outbox_failing_messages": "Messages in the outbox that could not be sent yet.",
    "semel_outbox_oldest_seconds": "Seconds since the oldest message was added.",
    "semel_outbox_retained_bytes": "Bytes of its own log that the database keeps for the outbox in mode wal.",
    "semel_relays": "Relays that live.",
    "semel_dead_letters": "Messages that were given up.",
}
"""All gauges, and what they say."""
Gauge: TypeAlias = tuple[str, tuple[str, ...], dict[tuple[str, ...], float]]
"""Its name, the names of its labels, and its values by their labels."""


def gauges(state: StoreState | None) -> Iterator[Gauge]:
    """Return the gauges of a look, as far as they are known."""
    if state is None:
        return
    yield "semel_store_up", (), {(): float(state.up)}
    if state.size is not None:
        yield "semel_records", (), {(): float(state.size.records)}
        if state.size.bytes is not None:
            yield "semel_records_bytes", (), {(): float(state.size.bytes)}
        yield "semel_sweep_lag_seconds", (), {(): state.size.sweep_lag}
    if state.unfinished is not None:
        found = {(state.name.lower(),): each for state, each in state.unfinished.items()}
        yield "semel_unfinished_records", ("state",), {label: each.records for label, each in found.items()}
        yield "semel_unfinished_oldest_seconds", ("state",), {label: each.oldest for label, each in found.items()}
    if state.outbox is not None:
        depths = {(each.destination,): each for each in state.outbox.destinations}
        labels = ("destination",)
        yield "semel_outbox_messages", labels, {label: each.messages for label, each in depths.items()}
        yield "semel_outbox_failing_messages", labels, {label: each.failing for label, each in depths.items()}
        yield "semel_outbox_oldest_seconds", labels, {label: each.oldest for label, each in depths.items()}
        yield "semel_outbox_retained_bytes", (), {(): float(state.outbox.retained or 0)}
        yield "semel_relays", (), {(): float(state.outbox.relays)}
    if state.dead_letters is not None:
        yield "semel_dead_letters", (), {(): float(state.dead_letters)}
