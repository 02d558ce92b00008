"""The hook: it never disturbs a call, drops what does not fit, and writes a batch again whose answer was lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from semel import (
    AsyncMemoryStore,
    AsyncSemel,
    ConfigurationError,
    MemoryStore,
    Semel,
    SQLiteStore,
    StoreUnavailable,
    StoreUncertain,
)
from semel.core.trail.moments import KeepTrail
from semel.observe import events
from semel.trail import Trail, TrailReader


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def counts_of(reader: TrailReader) -> dict[tuple[str, str], int]:
    """The counts by route and kind. A test may run while a minute ends."""
    counts: Counter[tuple[str, str]] = Counter()
    for minute in reader.minutes(time.time() - 300):
        counts[minute.route, minute.kind] += minute.count
    return dict(counts)


class Broken(MemoryStore):
    """Fails at each Op of a trail while ``error`` is set: before it is done, or after."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.tried = 0

    def execute(self, op: Any) -> Any:
        self.tried += 1
        if isinstance(self.error, StoreUncertain):
            super().execute(op)
        if self.error is not None:
            raise self.error
        return super().execute(op)


def test_the_story_of_a_key_and_the_counts_of_its_route() -> None:
    store = MemoryStore()
    with Semel(store, on_event=(trail := Trail(store, service="shop"))) as guard:
        for _ in range(3):
            guard.run("pay", key="k1", call=lambda: 7)
        record = guard.lookup("pay", key="k1")
        trail.close()
    assert record is not None
    reader = TrailReader(store)
    story = reader.story(record.id)
    assert [each.kind for each in story] == ["started", "completed", "replayed", "replayed"]
    assert {each.who for each in story} == {story[0].who}
    assert story[0].who.startswith("shop@")
    assert story[0].who.endswith(f":{os.getpid()}")
    assert reader.lineage(reader.link("k1")) == reader.lineage_of(record.id) == story
    assert counts_of(reader) == {("pay", "started"): 1, ("pay", "completed"): 1, ("pay", "replayed"): 2}


def test_an_async_guard_writes_to_a_sync_store_in_a_thread() -> None:
    class Slow(MemoryStore):
        thread: threading.Thread | None = None

        def execute(self, op: Any) -> Any:
            if isinstance(op, KeepTrail):
                self.thread = threading.current_thread()
            return super().execute(op)

    history = Slow()

    async def main() -> None:
        trail = Trail(history, service="shop")
        async with AsyncSemel(AsyncMemoryStore(), on_event=trail) as guard:

            async def pay() -> int:
                return 7

            await guard.run("pay", key="k1", call=pay)
        await asyncio.to_thread(trail.close)

    asyncio.run(main())
    assert [each.kind for each in TrailReader(history).recent()] == ["completed", "started"]
    assert history.thread not in (None, threading.main_thread())


@pytest.mark.parametrize("error", [StoreUnavailable("down"), StoreUncertain("the answer is lost"), ValueError("bug")])
def test_a_failing_store_disturbs_no_call_and_nothing_is_counted_twice(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    history = Broken()
    history.error = error
    with (
        caplog.at_level(logging.WARNING, "semel.trail"),
        Trail(history, service="shop", interval=0.01) as trail,
        Semel(MemoryStore(), on_event=trail) as guard,
    ):
        assert guard.run("pay", key="k1", call=lambda: 7) == 7
        wait_until(lambda: history.tried >= 3)
        guard.run("ship", key="k1", call=lambda: 7)
        history.error = None
    reader = TrailReader(history)
    assert [each.kind for each in reader.recent()] == ["completed", "started"] * 2
    assert counts_of(reader) == {(route, kind): 1 for route in ("pay", "ship") for kind in ("completed", "started")}
    assert trail.dropped == 0
    assert len(caplog.records) == 1, "once, not at every try"
    assert "cannot be written" in caplog.text


def test_what_does_not_fit_is_dropped_and_counted_and_the_counts_stay_right() -> None:
    history = Broken()
    history.error = StoreUnavailable("down")
    with Trail(history, service="shop", interval=0.01, queue=10) as trail:
        for number in range(2000):
            trail(events.Mismatched("pay", "", str(number)))
        history.error = None
    assert trail.dropped > 0
    reader = TrailReader(history)
    assert counts_of(reader) == {("pay", "mismatched"): 2000, ("pay", "dropped"): trail.dropped}
    assert len(reader.recent(5000)) == 2000 - trail.dropped


def test_a_batch_that_the_store_always_refuses_does_not_hold_up_the_others() -> None:
    class Picky(MemoryStore):
        def execute(self, op: Any) -> Any:
            if isinstance(op, KeepTrail) and any(each.details.get("error") == "bad" for each in op.moments):
                raise StoreUnavailable("refused")
            return super().execute(op)

    history = Picky()
    with Trail(history, service="shop", interval=0.001) as trail:
        trail(events.Released("pay", "", "k1", 1, "bad", False))
        wait_until(lambda: trail.dropped)
        trail(events.Mismatched("pay", "", "k2"))
    assert [each.kind for each in TrailReader(history).recent()] == ["mismatched"]
    assert {each.kind for each in TrailReader(history).minutes(time.time() - 120)} == {
        "released", "mismatched", "dropped",
    }  # fmt: skip


def test_closing_does_not_wait_for_a_store_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    end = threading.Event()

    class Hanging(MemoryStore):
        def execute(self, op: Any) -> Any:
            end.wait(30)
            return super().execute(op)

    trail = Trail(Hanging(), service="shop", interval=0.01)
    trail(events.Mismatched("pay", "", "k1"))
    trail.close(timeout=0.05)
    assert "1 events could not be written" in caplog.text
    trail(events.Mismatched("pay", "", "k2"))  # ignored
    end.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_its_own_events_only(tmp_path: Path) -> None:
    """The parent's thread is not in the child, its queue and its counts are."""
    path = tmp_path / "history.db"
    with closing(SQLiteStore(path)) as store:
        reader = TrailReader(store)
        trail = Trail(f"sqlite:///{path}", service="shop", interval=30)
        trail(events.Mismatched("pay", "", "written"))
        wait_until(reader.recent)
        # The thread still removes what is old, and SQLite must not be forked in the middle of a transaction: the child
        # would find its file locked for ever, by a connection that is not there.
        wait_until(lambda: trail._wake._cond._waiters)  # type: ignore[attr-defined]
        trail(events.Mismatched("pay", "", "waiting"))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                threading.Timer(60, os._exit, (9,)).start()
                trail(events.Mismatched("pay", "", "child"))
                trail.close(60)
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        written = {each.id: each.who for each in reader.recent()}
        assert set(written) == {reader.link("written"), reader.link("child")}
        assert written[reader.link("child")].endswith(f":{pid}")
        trail.close()
        assert len(reader.recent()) == 3
        assert sum(each.count for each in reader.minutes(time.time() - 120)) == 3


def test_old_moments_are_removed_by_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.trail.hook.FORGET_EVERY", 0.0)
    history = MemoryStore()
    with Trail(history, service="shop", interval=0.01, keep=0.05) as trail:
        trail(events.Mismatched("pay", "", "k1"))
        wait_until(lambda: TrailReader(history).recent())
        time.sleep(0.06)  # it is old then
        trail(events.Mismatched("pay", "", "k2"))
        wait_until(lambda: [each.id for each in TrailReader(history).recent()] == [trail._links.link("k2")])


def test_routes_that_a_program_makes_up_are_counted_together() -> None:
    history = MemoryStore()
    with Trail(history, service="shop") as trail:
        for number in range(1200):
            trail(events.Mismatched(f"op{number}", "", "k"))
        trail(events.Mismatched("with\0zero\ud800", "", "k"))
    minutes = TrailReader(history).minutes(time.time() - 120)
    assert sum(each.count for each in minutes if each.kind == "mismatched") == 1201
    assert len({(each.at, each.route) for each in minutes}) <= 1001 * len({each.at for each in minutes})


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (AsyncMemoryStore(), "give it the URL, or a sync store"),
        (
            "dynamodb://eu-west-1/table",
            "DynamoDBStore keeps no history of events: use a MemoryStore, SQLiteStore, Post",
        ),
        ("nonsense://x", "no store is called 'nonsense'"),
    ],
)
def test_a_store_that_cannot_keep_it_is_refused_at_once(store: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Trail(store, service="shop")


def test_the_hook_costs_few_calls() -> None:
    """Counted, not timed: they take 2 µs together."""
    calls: Counter[str] = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1

    with Trail(MemoryStore(), service="shop", interval=1000) as trail:
        told = [events.Completed("pay", "", str(n), 1, 20, 0.01, 0.001, id=b"i" * 16) for n in range(100)]
        trail(told[0])
        gc.disable()  # what other tests have left may call functions when it is collected
        sys.setprofile(profile)
        for event in told:
            trail(event)
        sys.setprofile(None)
        gc.enable()
    assert sum(calls.values()) <= 5 * len(told), calls
