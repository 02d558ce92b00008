"""The gauges of a store: what they say, how often the store is asked for them, and that nobody waits for it."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from semel import AsyncMemoryStore, MemoryStore, Semel, SQLiteStore, State
from semel.core.keys import identity
from semel.core.messaging.messages import DestinationDepth, OutboxState
from semel.core.ops import Claim, Release, Takeover
from semel.errors import ConfigurationError, StoreUnavailable
from semel.messaging import Outbox
from semel.observe.prometheus import StoreMetrics
from semel.observe.store_state import MAX_DESTINATIONS, StoreState, StoreWatch, gauges, limit_destinations
from semel.testing.faults import until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with closing(SQLiteStore(tmp_path / "a.db")) as made:
        yield made


def claim(store: Any, key: str, lease: float) -> Any:
    return store.execute(Claim(identity("", "op", key), 1, b"", lease, 3600.0, Takeover.RETRY, "", "op", key))


def test_what_the_gauges_say(store: SQLiteStore, tmp_path: Path) -> None:
    with Semel(store, sweep_every=None) as guard:
        guard.run("op", key="done", call=lambda: 1)
        claim(store, "runs", 60.0)
        claim(store, "died", 0.001)
        unknown = claim(store, "in doubt", 60.0)
        store.execute(Release(identity("", "op", "in doubt"), unknown.token, State.UNKNOWN))
        with closing(sqlite3.connect(tmp_path / "a.db")) as connection, connection:
            outbox = Outbox(store)
            for number in range(3):
                outbox.add(connection, "paid", {"n": number}, destination="payments")
        registry = CollectorRegistry()
        metrics = StoreMetrics(store, registry, every="1h")
        until(lambda: store_states(store)["died"] is State.ABANDONED, 10, "the lease has ended")
        metrics.look()

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, labels)

        assert value("semel_store_up") == 1
        assert value("semel_records") == 4
        assert value("semel_sweep_lag_seconds") == 0
        for state in ("running", "abandoned", "unknown"):
            assert value("semel_unfinished_records", state=state) == 1
            assert value("semel_unfinished_oldest_seconds", state=state) > 0  # type: ignore[operator]
        assert value("semel_outbox_messages", destination="payments") == 3
        assert value("semel_outbox_failing_messages", destination="payments") == 0
        assert value("semel_outbox_oldest_seconds", destination="payments") >= 0  # type: ignore[operator]
        assert value("semel_outbox_retained_bytes") == 0
        assert value("semel_relays") == 0
        assert value("semel_dead_letters") == 0


def store_states(store: Any) -> dict[str, State]:
    from semel.core.ops import ListRecords

    return {record.key or "": record.state for record in store.execute(ListRecords()).records}


def test_a_record_that_hangs_stays_in_sight_behind_newer_ones() -> None:
    store = MemoryStore()
    claim(store, "hangs", 3600.0)
    watch = StoreWatch(store, look=3)
    assert running(watch.look()) == 1
    with Semel(store, sweep_every=None) as guard:
        for number in range(20):
            guard.run("op", key=f"newer {number}", call=lambda: 1)
        assert running(watch.look()) == 1
        assert running(StoreWatch(store, look=3).look()) == 0, "the newest ones do not show it"
        guard.release("op", "hangs", force=True)
    assert running(watch.look()) == 0


def test_a_record_that_hung_before_the_first_look_is_found_by_the_looks_that_follow() -> None:
    store = MemoryStore()
    with Semel(store, sweep_every=None) as guard:
        for number in range(10):
            guard.run("op", key=f"older {number}", call=lambda: 1)
        claim(store, "hangs", 3600.0)
        for number in range(10):
            guard.run("op", key=f"newer {number}", call=lambda: 1)
        watch = StoreWatch(store, look=3)
        found = [running(watch.look()) for _ in range(20)]
    first = found.index(1)
    assert 0 < first < 7
    assert found[first:] == [1] * (20 - first), "it stays in sight, also when the looks begin again"


def running(state: StoreState) -> int:
    assert state.unfinished is not None
    return state.unfinished[State.RUNNING].records


class Counting(MemoryStore):
    """Counts what it is asked, and may fail or hang."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.fails = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def execute(self, op: Any) -> Any:
        self.asked.append(type(op).__name__)
        self.goes_on.wait(20)
        if self.fails:
            raise StoreUnavailable("away")
        return super().execute(op)


def test_many_scrapes_are_one_look_and_none_waits_for_it() -> None:
    store, registry = Counting(), CollectorRegistry()
    store.goes_on.clear()  # the store hangs
    StoreMetrics(store, registry, every="1h")
    assert store.asked == [], "nothing is asked before the first scrape"
    for _ in range(20):
        assert registry.get_sample_value("semel_store_up") is None
    store.goes_on.set()
    until(lambda: registry.get_sample_value("semel_store_up") == 1, 10, "the look has ended")
    assert store.asked == ["Measure", "ListRecords"]
    assert registry.get_sample_value("semel_dead_letters") is None, "a store in memory has no outbox"


def test_a_store_that_is_away_is_logged_once_and_its_gauges_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    store, registry = Counting(), CollectorRegistry()
    metrics = StoreMetrics(store, registry, every="1h")
    caplog.set_level(logging.WARNING, "semel.observe")
    store.fails = True
    metrics.look()
    metrics.look()
    # Gauges of another store, such as one of a page of the documentation, may be looked at in the meantime.
    messages = [record.getMessage() for record in caplog.records if "closed" not in record.getMessage()]
    assert messages == ["the store cannot be measured, so its gauges are missing: away"]
    assert registry.get_sample_value("semel_store_up") == 0
    assert registry.get_sample_value("semel_records") is None
    store.fails = False
    metrics.look()
    assert registry.get_sample_value("semel_records") == 0


def test_a_url_opens_a_store_of_its_own_and_an_async_store_is_refused(tmp_path: Path) -> None:
    SQLiteStore(tmp_path / "a.db").close()
    watch = StoreWatch(f"sqlite:///{tmp_path}/a.db")
    assert watch.look().up
    watch.close()
    with pytest.raises(ConfigurationError, match="AsyncMemoryStore is an async store: pass its URL"):
        StoreWatch(AsyncMemoryStore())  # type: ignore[arg-type]


def test_destinations_are_bounded() -> None:
    """A destination may be the URL of each customer's own webhook."""
    depths = tuple(DestinationDepth(f"https://{number}.example", number, 1, float(number)) for number in range(1, 61))
    found = limit_destinations(OutboxState(depths, (), 1, 64)).destinations
    assert len(found) == MAX_DESTINATIONS + 1
    assert found[0].messages == 60
    assert found[-1] == DestinationDepth("(other)", sum(range(1, 11)), 10, 10.0)


def test_no_look_no_gauges() -> None:
    assert list(gauges(None)) == []
    assert [name for name, *_ in gauges(StoreState(up=False))] == ["semel_store_up"]
