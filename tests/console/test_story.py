"""The pure half: words for every event, hops in their order, and the figures of the overview."""

from __future__ import annotations

from semel.console import words
from semel.console.charts import bars, sparkline
from semel.console.figures import HourCounts, summarize
from semel.console.story import LINES, hops, tell, with_lost_attempt
from semel.core.ops import Record
from semel.core.states import State
from semel.observe.events import EVENTS
from semel.trail import Minute, Moment

ABOUT_NO_KEY = {
    *("renewed", "swept", "cache_lost", "cache_back", "broker_lost", "broker_back", "relay_late", "unkeyed"),
    *("consumer_interrupted", "slot_lag", "key_missing", "key_invalid"),
}
NOW = 1_800_000_030.0


def test_every_event_of_a_key_has_words() -> None:
    names = {event.name for event in EVENTS}
    assert names - LINES.keys() <= ABOUT_NO_KEY
    for name in names:
        text, tone = tell(name, 2, {})
        assert text
        assert tone in ("good", "plain", "warn", "bad")


def test_details_are_filled_in() -> None:
    assert tell("completed", 1, {"size": 40, "seconds": 0.0042})[0] == (
        "It ran, and its answer is stored (40 bytes, 4.2ms)"
    )
    assert tell("resolved", 0, {"happened": True})[0].endswith("(it happened: yes)")
    assert tell("something_new", 0, {}) == ("Something new", "plain")
    assert tell("released", 1, {"error": "{evil} {0} {error.__class__}"})[0].endswith("{evil} {0} {error.__class__}")


def moment(at: float, id: int, kind: str, route: str, root: int = 0, **details: str) -> Moment:
    link = bytes([root]) * 16 if root else b""
    return Moment(at, bytes([id]) * 16, kind, route, "a@b:1", 1, link, details, bytes([int(at)]) * 16)


def test_hops_stand_below_the_one_that_called_them() -> None:
    def key(number: int) -> str:
        return (bytes([number]) * 16).hex()

    found = [
        ("shop", moment(1, 1, "started", "pay", 9)),
        ("shop", moment(2, 2, "started", "book", 9, key=key(8), parent=key(9))),
        ("mail", moment(3, 3, "started", "mail", 9, key=key(7), parent=key(8))),
        ("mail", moment(4, 4, "applied", "order.paid")),
    ]
    told = hops(found, bytes([2]) * 16)
    assert [(hop["operation"], hop["depth"], hop["current"], hop["record"]) for hop in told] == [
        ("pay", 0, False, True), ("book", 1, True, True), ("mail", 2, False, True), ("order.paid", 0, False, False),
    ]  # fmt: skip
    client = moment(0, 9, "call_ended", "POST http://shop", outcome="succeeded")
    assert len(hops([("shop", client), *found], b"")) == 4, "the record stands for both"
    (alone,) = hops([("shop", client)], b"")
    assert (alone["call"], alone["record"]) == (True, False)
    assert tell("call_ended", 0, {"outcome": "succeeded", "attempts": 1, "seconds": 0.1})[0].endswith(
        "(sent once, 100ms)"
    )
    circle = [("shop", moment(1, 1, "started", "pay", 9, key=key(9), parent=key(9)))]
    assert hops(circle, b"")[0]["depth"] == 6


def test_the_attempt_of_a_killed_process_is_told_by_its_record() -> None:
    def record(state: State, attempt: int) -> Record:
        return Record(bytes([1]) * 16, state, 7, attempt, b"", None, 0.0, 8.0, 60.0, "", "pay")

    later = [("shop", moment(5, 1, "taken_over", "pay")), ("shop", moment(6, 1, "completed", "pay"))]
    told = with_lost_attempt(later, "shop", record(State.DONE, 2), 10.0)
    assert [(each.kind, each.at, each.attempt) for _, each in told][:2] == [("lost", 2.0, 1), ("taken_over", 5, 1)]
    assert "left no trace" in tell("lost", 1, {})[0]
    known = [("shop", moment(1, 1, "started", "pay")), *later]
    assert with_lost_attempt(known, "shop", record(State.DONE, 2), 10.0) == known
    assert with_lost_attempt(later, "shop", record(State.DONE, 1), 10.0) == later
    assert with_lost_attempt([], "shop", record(State.DONE, 2), 10.0) == []
    for state in (State.UNKNOWN, State.ABANDONED):
        ((_, lost),) = with_lost_attempt([], "shop", record(state, 1), 10.0)
        assert (lost.kind, lost.at, lost.route) == ("lost", 2.0, "pay")
    assert with_lost_attempt([], "shop", record(State.RUNNING, 1), 10.0) == []


def minute(ago: int, kind: str, count: int, route: str = "pay", buckets: dict[int, int] | None = None) -> Minute:
    return Minute(int(NOW) // 60 * 60 - 60 * ago, route, kind, count, 0.0, buckets or {})


def test_what_was_asked_is_what_ran_was_absorbed_or_was_refused() -> None:
    counted = [
        *(minute(0, kind, count) for kind, count in (("started", 5), ("taken_over", 1), ("replayed", 3))),
        *(minute(59, kind, 2) for kind in ("turned_away", "mismatched", "waited", "completed")),
        minute(60, "started", 1000),
        minute(1, "started", 7, "refund"),
        minute(1, "dropped", 4, ""),
        *(minute(1, kind, 1, "order.paid") for kind in ("applied", "skipped")),
    ]
    view = summarize([("shop", HourCounts(counted))], NOW)
    assert view["totals"] == {"asked": 22, "ran": 14, "absorbed": 6, "refused": 2}
    assert [(row["operation"], row["message"]) for row in view["operations"]] == [
        ("pay", False), ("refund", False), ("order.paid", True),
    ]  # fmt: skip
    assert (view["series"]["ran"][-1], view["series"]["ran"][-2], view["series"]["absorbed"][0]) == (6, 8, 2)
    assert (view["dropped"], view["minutes"]) == (4, 60)
    assert summarize([("shop", HourCounts([minute(0, "started", 1)]))], NOW)["minutes"] == 15
    empty = summarize([], NOW)
    assert empty["totals"] == {"asked": 0, "ran": 0, "absorbed": 0, "refused": 0}
    assert empty["series"]["ran"] == [0] * 60


def test_a_minute_is_taken_away_as_it_was_added() -> None:
    old = [minute(2, "completed", 3, buckets={40: 2, 41: 1}), minute(2, "started", 3)]
    hour = HourCounts(old)
    more = HourCounts([minute(1, "completed", 2, buckets={41: 1, 60: 1}), minute(1, "started", 2, "refund")])
    hour.add(more)
    (row,) = [row for row in summarize([("shop", hour)], NOW)["operations"] if row["operation"] == "pay"]
    assert row["first"]["p50"] < 0.002 < row["first"]["p99"]
    hour.remove(more)
    assert hour.routes == HourCounts(old).routes
    hour.remove(HourCounts(old))
    assert hour.routes == {}


def test_charts_stay_inside_their_frame_and_escape_their_labels() -> None:
    drawn = bars([("ran", [0, 1, 1000]), ("refused", [0, 1, 0])], '"<b>', width=30, height=10)
    assert "<b>" not in drawn
    assert drawn.count("<rect") == 3
    assert "nan" not in sparkline([], [], "") + sparkline([0] * 60, [0] * 60, "")
    path = sparkline([0, 3, 3, 0], [0, 0, 3, 0], "").partition('class="ran" d="')[2].partition('"')[0]
    assert path == "M0 28h1V14h2V28h1V28z"


def test_a_duration_that_is_unknown_is_a_dash() -> None:
    assert [words.duration_or_dash(seconds) for seconds in (0.0042, 150, None)] == ["4.2ms", "2m30s", "–"]


def test_numbers_and_masks() -> None:
    assert [words.count(number) for number in (0, 9999, 123456, 2_500_000, None)] == [
        "0",
        "9,999",
        "123.5 k",
        "2.5 M",
        "–",
    ]
    assert [words.rate(number) for number in (0.01, 3.21, 1234.0)] == ["0.6/min", "3.21/s", "1,234/s"]
    assert [words.mask(key) for key in ("4111-1111", "abc", "", None)] == ["411…", "a…", "", None]
