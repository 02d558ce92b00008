"""What the readers return: stories, lineages, the newest moments, and minutes of all writers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from semel import ConfigurationError, MemoryStore
from semel.cli.app import main
from semel.core.keys import identity
from semel.core.trail.minutes import MinuteCounter, bucket_end, bucket_of, minute_row, quantile, sum_rows
from semel.core.trail.moments import ForgetTrail, KeepTrail, Links, Moment
from semel.observe import events
from semel.trail import TrailReader
from tests.trail.histories import STORES, History, marked

LINKS = Links()
NOON = 1_700_000_040.0
"""It is the beginning of a minute."""


@pytest.fixture(params=marked(*STORES))
def history(request: pytest.FixtureRequest, open_history: Callable[[str], History]) -> History:
    return open_history(request.param)


def moment(at: float, event: events.Event, number: int) -> Moment:
    return LINKS.moment(at, event, "shop@host:1", number.to_bytes(16, "big"))


def started(key: str) -> events.Started:
    return events.Started("pay", "", key, 1, 7, id=identity("", "pay", key))


def completed(key: str) -> events.Completed:
    return events.Completed("pay", "", key, 1, 20, route="POST /pay", id=identity("", "pay", key))


def keep(*moments: Moment, writer: bytes = b"w" * 8, counter: MinuteCounter | None = None) -> KeepTrail:
    rows = () if counter is None else tuple(map(minute_row, counter.take_changed()))
    return KeepTrail(writer, moments, rows, 3600.0, 86400.0)


def test_a_story_is_told_in_order_and_without_the_key(history: History) -> None:
    id = identity("", "pay", "secret-key")
    failed = events.StoreFailed("pay", "", "secret-key", "claim", "no record for secret-key", id=id)
    history.execute(keep(moment(NOON + 2, completed("secret-key"), 3), moment(NOON, started("secret-key"), 1)))
    history.execute(keep(moment(NOON + 1, failed, 2), moment(NOON, started("other"), 4)))
    story = history.story(id)
    assert [each.kind for each in story] == ["started", "store_failed", "completed"]
    assert [each.route for each in story] == ["pay", "pay", "POST /pay"]
    assert "secret-key" not in repr(story)
    assert story[2].details["size"] == 20
    assert history.story(b"x" * 16) == ()


def test_a_batch_that_is_sent_twice_is_kept_once(history: History) -> None:
    counter = MinuteCounter()
    counter.add(NOON, "pay", "started", None)
    batch = keep(moment(NOON, started("a"), 1), counter=counter)
    history.execute(batch)
    history.execute(batch)
    assert len(history.recent()) == 1
    assert [minute.count for minute in history.minutes(NOON)] == [1]


def test_minutes_of_several_writers_are_added(history: History) -> None:
    counters = [MinuteCounter(), MinuteCounter()]
    for at in range(3):
        for writer, counter in enumerate(counters):
            counter.add(NOON + at, "pay", "completed", 0.010 * (writer + 1))
            counter.add(NOON + 60, "pay", "started", None)
            history.execute(keep(counter=counter, writer=bytes([writer]) * 8))
    first, second = history.minutes(NOON - 600, NOON + 600)
    assert (first.at, first.route, first.kind, first.count) == (int(NOON), "pay", "completed", 6)
    assert first.seconds == pytest.approx(0.09)
    assert sum(first.buckets.values()) == 6
    assert (second.at, second.kind, second.count, second.seconds) == (int(NOON) + 60, "started", 6, 0.0)
    assert history.minutes(NOON + 60, NOON + 600) == (second,)


def test_an_older_row_of_a_writer_does_not_replace_a_newer_one(history: History) -> None:
    counter = MinuteCounter()
    batches = []
    for _ in range(2):
        counter.add(NOON, "pay", "started", None)
        batches.append(keep(counter=counter))
    for batch in reversed(batches):
        history.execute(batch)
    assert [minute.count for minute in history.minutes(NOON)] == [2]


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 0.000_05, 0.001, 0.017, 1.0, 600.0])
def test_a_quantile_is_right_to_a_tenth(seconds: float) -> None:
    counter = MinuteCounter()
    for _ in range(100):
        counter.add(NOON, "pay", "completed", seconds)
    minutes = sum_rows([(row.at, row.route, row.kinds) for row in map(minute_row, counter.take_changed())])
    found = quantile(minutes, 0.99)
    assert found is not None
    assert abs(found - seconds) <= max(0.1 * seconds, 1e-6)
    assert seconds <= bucket_end(bucket_of(seconds)) * 1.000_001
    assert quantile([], 0.5) is None


def test_recent_moments_come_newest_first_and_can_be_chosen(history: History) -> None:
    history.execute(
        keep(
            *[moment(NOON + number, started(str(number)), number) for number in range(20)],
            *[moment(NOON + number, completed(str(number)), 100 + number) for number in range(20)],
        )
    )
    assert [each.at - NOON for each in history.recent(3, kinds=["started"])] == [19, 18, 17]
    assert {each.kind for each in history.recent(10, route="POST /pay")} == {"completed"}
    assert len(history.recent(50)) == 40


def test_old_moments_and_minutes_are_forgotten(history: History) -> None:
    if "redis" in history.kind:
        pytest.skip("Redis forgets by itself")
    now = time.time()
    counter = MinuteCounter()
    counter.add(now - 7200, "pay", "started", None)
    counter.add(now, "pay", "started", None)
    history.execute(keep(*[moment(now - 7200 * (2 - n), started("a"), n) for n in range(3)], counter=counter))
    assert history.execute(ForgetTrail(3600.0, 86400.0, 1)) == 1
    assert len(history.story(identity("", "pay", "a"))) == 2
    assert history.execute(ForgetTrail(3600.0, 86400.0, 100)) == 1
    assert [each.at for each in history.story(identity("", "pay", "a"))] == [pytest.approx(now)]
    assert history.execute(ForgetTrail(3600.0, 3600.0, 100)) == 1
    assert [each.at for each in history.minutes(0)] == [int(now) // 60 * 60]


@pytest.mark.parametrize("kind", marked("redis", "async-redis", "redis-cluster"))
def test_redis_forgets_what_is_old_among_the_newest(kind: str, open_history: Callable[[str], History]) -> None:
    """The story of a key expires by itself. The newest moments of all keys do not: they are added to all the time."""
    history = open_history(kind)
    now = time.time()
    counter = MinuteCounter()
    counter.add(now - 7200, "pay", "started", None)
    counter.add(now, "pay", "started", None)
    history.execute(keep(*[moment(now - 7200 * (2 - n), started("a"), n) for n in range(3)], counter=counter))
    assert history.execute(ForgetTrail(3600.0, 86400.0, 100)) == 2
    for kinds in ((), ["started"]):
        assert [each.at for each in history.recent(kinds=kinds)] == [pytest.approx(now)]
    assert len(history.minutes(0)) == 2
    assert history.execute(ForgetTrail(3600.0, 3600.0, 100)) == 1
    assert [each.at for each in history.minutes(0)] == [int(now) // 60 * 60]


@pytest.mark.parametrize("kind", marked("sqlite", "postgres", "mysql", "redis"))
def test_semel_sweep_forgets_the_history_that_nobody_writes_any_more(
    kind: str, open_history: Callable[[str], History], capsys: pytest.CaptureFixture[str]
) -> None:
    history = open_history(kind)
    url = f"sqlite:///{history.url}" if kind == "sqlite" else history.url
    now = time.time()
    counter = MinuteCounter()
    for day in (8, 1, 0):
        counter.add(now - day * 86400, "pay", "started", None)
    history.execute(keep(*[moment(now - 7200 * (2 - n), started("a"), n) for n in range(3)], counter=counter))
    assert main(["sweep", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 0, "unknown": 0}
    assert (len(history.recent()), len(history.minutes(0))) == (3, 3)
    assert main(["sweep", url, "--all", "--limit", "1", "--trail-keep", "1h", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": 0, "unknown": 0, "history": 3}
    assert [each.at for each in history.recent()] == [pytest.approx(now)]
    assert len(history.minutes(0)) == 2
    assert main(["sweep", url, "--trail-keep", "1h", "--trail-keep-minutes", "2h"]) == 0
    assert capsys.readouterr().out.endswith("forgot 1 events and minutes of the history\n")


def test_semel_sweep_refuses_a_store_without_a_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "dynamodb://eu-west-1/records", "--trail-keep", "6h"]) == 2
    assert "keeps no history of events" in capsys.readouterr().err


def test_a_store_without_a_trail_is_refused() -> None:
    class Small(MemoryStore):
        trails = False

    with pytest.raises(ConfigurationError, match="Small keeps no history of events: use a MemoryStore"):
        TrailReader(Small())


def test_the_hops_of_a_chain_are_found_by_its_root(history: History) -> None:
    """Client → service → a second service → a message → its consumer."""
    second = identity("", "ship", "derived")
    chain = [
        events.Started("pay", "", "k1", 1, 7, id=identity("", "pay", "k1")),
        events.Started("ship", "", "derived", 1, 7, "k1", "k1", id=second),
        events.StepSaved("ship", "", "derived", "label", id=second),
        events.Emitted("ship", "", "derived", "m1", "orders", "", "shipped", id=second),
        events.Completed("ship", "", "derived", 1, 9, id=second),
        events.PublishFailed("shipped", "", "m1", "", "refused", 1),
        events.AppliedEvent("shipped", "", "m2", "ledger", 0.1, "k1", "derived"),
        events.Skipped("shipped", "", "m2", "ledger", 0.1, "k1", "derived"),
    ]
    strange = [started("k2"), events.AppliedEvent("shipped", "", "m3", "ledger", 0.1, "k2", "")]
    history.execute(keep(*[moment(NOON + at, event, at) for at, event in enumerate(chain + strange)]))
    kinds = [event.name for event in chain]
    assert [each.kind for each in history.lineage(LINKS.link("k1"))] == kinds
    assert [each.kind for each in history.lineage_of(second)] == kinds
    assert [each.kind for each in history.lineage_of(LINKS.link("m2"))] == kinds
    assert [each.kind for each in history.lineage_of(LINKS.link("m1"))] == ["publish_failed"]
    assert history.lineage(b"?" * 16) == history.lineage_of(b"?" * 16) == ()
    ship = history.story(second)[0]
    assert ship.details["parent"] == LINKS.link("k1").hex()
    assert ship.details["key"] == LINKS.link("derived").hex()


def test_what_is_unusual_is_kept_as_it_is(history: History) -> None:
    unusual = [
        moment(NOON, events.Released("pay", "", "k", 3, "\0 \ud800 ' \" % \\ ☃" + "x" * 500, True, 0.25), 1),
        moment(NOON + 0.000_001, events.BrokerLost("", "", "", "refused"), 2),
        moment(NOON + 1, events.Mismatched("a\0b☃", "", "k"), 3),
    ]
    history.execute(keep(*unusual))
    assert list(history.recent()) == unusual[::-1]
    assert unusual[1].id == b""
    assert len(unusual[0].details["error"]) == 200


def test_a_writer_that_cannot_write_for_hours_holds_two_of_them() -> None:
    counter = MinuteCounter()
    for minute in range(500):
        for route in range(20):
            counter.add(NOON + 60 * minute, str(route), "started", None)
    first, second = counter.take_changed(), counter.take_changed()
    assert (len(first), len(second), counter.take_changed()) == (2000, 400, [])
    assert min(at for at, *_ in first + second) == NOON + 60 * 380
    counter.add(NOON + 60 * 500, "0", "started", None)
    counter.put_back(map(minute_row, first + second))
    assert len(counter.take_changed() + counter.take_changed()) == 2381
    counter.forget(NOON + 60 * 1000)
    assert counter._counts == {}
