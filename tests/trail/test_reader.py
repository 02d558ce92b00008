"""What the readers return: stories, lineages, the newest moments, and minutes of all writers."""

from __future__ import annotations

import asyncio

import pytest

from semel import AsyncMemoryStore, ConfigurationError, MemoryStore
from semel.core.keys import identity
from semel.core.trail.minutes import MinuteCounter, bucket_end, bucket_of, quantile
from semel.core.trail.moments import ForgetTrail, KeepTrail, Links, Moment
from semel.observe import events
from semel.trail import AsyncTrailReader, TrailReader

LINKS = Links()
NOON = 1_700_000_040.0
"""It is the beginning of a minute."""


def moment(at: float, event: events.Event, number: int) -> Moment:
    return LINKS.moment(at, event, "shop@host:1", number.to_bytes(16, "big"))


def started(key: str) -> events.Started:
    return events.Started("pay", "", key, 1, 7, id=identity("", "pay", key))


def completed(key: str) -> events.Completed:
    return events.Completed("pay", "", key, 1, 20, route="POST /pay", id=identity("", "pay", key))


def keep(*moments: Moment, writer: bytes = b"w" * 8, counter: MinuteCounter | None = None) -> KeepTrail:
    rows = () if counter is None else tuple(counter.take_changed())
    return KeepTrail(writer, moments, rows, 3600.0, 86400.0)


def test_a_story_is_told_in_order_and_without_the_key() -> None:
    store = MemoryStore()
    reader = TrailReader(store)
    id = identity("", "pay", "secret-key")
    failed = events.StoreFailed("pay", "", "secret-key", "claim", "no record for secret-key", id=id)
    store.execute(keep(moment(NOON + 2, completed("secret-key"), 3), moment(NOON, started("secret-key"), 1)))
    store.execute(keep(moment(NOON + 1, failed, 2), moment(NOON, started("other"), 4)))
    story = reader.story(id)
    assert [each.kind for each in story] == ["started", "store_failed", "completed"]
    assert [each.route for each in story] == ["pay", "pay", "POST /pay"]
    assert "secret-key" not in repr(story)
    assert story[2].details["size"] == 20
    assert reader.story(b"x" * 16) == ()


def test_a_batch_that_is_sent_twice_is_kept_once() -> None:
    store = MemoryStore()
    counter = MinuteCounter()
    counter.add(NOON, "pay", "started", None)
    batch = keep(moment(NOON, started("a"), 1), counter=counter)
    store.execute(batch)
    store.execute(batch)
    reader = TrailReader(store)
    assert len(reader.recent()) == 1
    assert [minute.count for minute in reader.minutes(NOON)] == [1]


def test_minutes_of_several_writers_are_added() -> None:
    store = MemoryStore()
    reader = TrailReader(store)
    counters = [MinuteCounter(), MinuteCounter()]
    for at in range(3):
        for writer, counter in enumerate(counters):
            counter.add(NOON + at, "pay", "completed", 0.010 * (writer + 1))
            counter.add(NOON + 60, "pay", "started", None)
            store.execute(keep(counter=counter, writer=bytes([writer]) * 8))
    first, second = reader.minutes(NOON - 600, NOON + 600)
    assert (first.at, first.route, first.kind, first.count) == (int(NOON), "pay", "completed", 6)
    assert first.seconds == pytest.approx(0.09)
    assert sum(first.buckets.values()) == 6
    assert (second.at, second.kind, second.count, second.seconds) == (int(NOON) + 60, "started", 6, 0.0)
    assert reader.minutes(NOON + 60, NOON + 600) == (second,)


def test_an_older_row_of_a_writer_does_not_replace_a_newer_one() -> None:
    store = MemoryStore()
    counter = MinuteCounter()
    batches = []
    for _ in range(2):
        counter.add(NOON, "pay", "started", None)
        batches.append(keep(counter=counter))
    for batch in reversed(batches):
        store.execute(batch)
    assert [minute.count for minute in TrailReader(store).minutes(NOON)] == [2]


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.000_05, 0.001, 0.017, 1.0, 600.0])
def test_a_quantile_is_right_to_a_tenth(seconds: float) -> None:
    store = MemoryStore()
    counter = MinuteCounter()
    for _ in range(100):
        counter.add(NOON, "pay", "completed", seconds)
    store.execute(keep(counter=counter))
    minutes = TrailReader(store).minutes(NOON)
    found = quantile(minutes, 0.99)
    assert found is not None
    assert abs(found - seconds) <= max(0.1 * seconds, 1e-6)
    assert seconds <= bucket_end(bucket_of(seconds)) * 1.000_001
    assert quantile([], 0.5) is None


def test_recent_moments_come_newest_first_and_can_be_chosen() -> None:
    store = MemoryStore()
    reader = TrailReader(store)
    store.execute(
        keep(
            *[moment(NOON + number, started(str(number)), number) for number in range(20)],
            *[moment(NOON + number, completed(str(number)), 100 + number) for number in range(20)],
        )
    )
    assert [each.at - NOON for each in reader.recent(3, kinds=["started"])] == [19, 18, 17]
    assert {each.kind for each in reader.recent(10, route="POST /pay")} == {"completed"}
    assert len(reader.recent(50)) == 40


def test_old_moments_and_minutes_are_forgotten() -> None:
    store = MemoryStore()
    reader = TrailReader(store)
    counter = MinuteCounter()
    counter.add(NOON, "pay", "started", None)
    store.execute(keep(moment(NOON, started("a"), 1), moment(NOON + 7200, started("a"), 2), counter=counter))
    assert store.execute(ForgetTrail(3600.0, 86400.0, 100)) == 1
    assert [each.at for each in reader.story(identity("", "pay", "a"))] == [NOON + 7200]
    assert store.execute(ForgetTrail(3600.0, 3600.0, 100)) == 1
    assert reader.minutes(NOON - 1) == ()


def test_an_async_reader_returns_the_same() -> None:
    async def main() -> None:
        store = AsyncMemoryStore()
        await store.execute(keep(moment(NOON, started("a"), 1)))
        reader = AsyncTrailReader(store)
        (found,) = await reader.lineage_of(identity("", "pay", "a"))
        assert found.kind == "started"
        assert await reader.story(found.id) == await reader.recent() == (found,)
        assert await reader.minutes(NOON) == ()

    asyncio.run(main())


def test_a_store_without_a_trail_is_refused() -> None:
    class Small(MemoryStore):
        trails = False

    with pytest.raises(ConfigurationError, match="Small keeps no history of events: use a MemoryStore"):
        TrailReader(Small())
