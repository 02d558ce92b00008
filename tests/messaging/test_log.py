"""The outbox as a log: nothing is lost, streams stay in order, and old messages go. The naive ways to read it fail."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest

from semel.core.messaging import relaying
from semel.core.messaging.messages import (
    InspectOutbox,
    JoinRelays,
    LeaveRelays,
    LetterFilter,
    LogOwned,
    OutboxMode,
    PassLog,
    ReadLog,
    RedriveLetters,
    Refused,
    Sent,
    StartMessages,
    SwitchMode,
    TakeLog,
    TryAgain,
)
from semel.errors import ConfigurationError, SemelError
from semel.messaging import AsyncOutbox, Outbox, Relay
from semel.observe import events
from semel.observe.store_state import StoreWatch, gauges
from semel.sql import outbox_log
from semel.sql.outbox_log import LOG_PROGRAMS, QUERIES
from tests.messaging.desks import Desk, marked
from tests.messaging.recording_broker import RecordingBroker

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
LEASE = 1000.0
LOCKED = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


class Death(BaseException):
    """Ends a relay in the middle of a batch, without a word to the database."""


class LogDesk:
    """A PostgreSQL database whose outbox is no queue."""

    def __init__(self, desk: Desk, mode: OutboxMode) -> None:
        self.desk, self.mode = desk, mode
        self.outbox: Any = (AsyncOutbox if desk.kind in ("asyncpg", "async-psycopg") else Outbox)(desk.store)
        self._connections: list[Any] = []
        self.last = 0

    def open(self) -> Any:
        self._connections.append(self.desk.connect())
        return self._connections[-1]

    def close(self) -> None:
        for each in self._connections:
            each.close()

    def add(self, id: str, stream: str = "", conn: Any = None) -> None:
        conn = conn or self.desk.conn
        if conn.info.transaction_status:
            self.outbox.add(conn, "made", "", id=id, stream=stream)
        else:
            with self.desk.transaction(conn):
                self.outbox.add(conn, "made", "", id=id, stream=stream)

    def join(self, relay: bytes = A) -> str:
        self.desk.execute(JoinRelays(relay, LEASE))
        owned: LogOwned = self.desk.execute(TakeLog(relay))
        return owned.mode

    def read(self, relay: bytes = A, limit: int = 100) -> list[Any]:
        found = self.desk.execute(ReadLog(relay, limit, LEASE, self.mode))
        assert found is not None
        self.last = found[-1].position if found else 0
        return list(found)

    def settle(self, relay: bytes = A, **settings: Any) -> bool:
        done: bool = self.desk.execute(PassLog(relay, LEASE, self.mode, self.last, **settings))
        return done

    def send(self, relay: bytes = A) -> list[str]:
        """Send all that there is; return the ids."""
        found = self.read(relay)
        assert self.settle(relay)
        return [one.id for one in found]

    def waiting(self) -> int:
        return sum(each.messages for each in self.desk.execute(InspectOutbox(10)).destinations)


@pytest.fixture(params=marked("postgres"))
def desk(request: pytest.FixtureRequest, open_desk: Callable[[str], Desk]) -> Desk:
    return open_desk(request.param)


@pytest.fixture(params=["log", "wal"])
def log(request: pytest.FixtureRequest, desk: Desk) -> Iterator[LogDesk]:
    desk.execute(SwitchMode(request.param))
    log = LogDesk(desk, request.param)
    yield log
    log.close()


# Order, where naive ways to read a log lose it or lose messages


class LastSeen:
    """Remembers the highest position that it has sent."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.last = desk, 0

    def send(self) -> list[str]:
        rows = self.desk.sql("SELECT position, id FROM semel_log WHERE position > %s ORDER BY position", self.last)
        self.last = max([self.last, *(position for position, _ in rows)])
        return [id for _, id in rows]


class BelowTheOldest:
    """Sends transactions that are older than all that still run, in the order in which they began."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.last = desk, "0"

    def send(self) -> list[str]:
        rows = self.desk.sql(
            "SELECT xid::text, id FROM semel_log WHERE xid > %s::xid8 AND "
            "xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY xid, position", self.last,
        )  # fmt: skip
        self.last = rows[-1][0] if rows else self.last
        return [id for _, id in rows]


def test_a_lower_position_that_commits_late_is_sent(log: LogDesk) -> None:
    naive = LastSeen(log.desk)
    log.join()
    slow, quick = log.open(), log.open()
    with log.desk.transaction(slow):
        log.add("early", "s1", slow)
        log.add("late", "s2", quick)
        assert naive.send() == ["late"] or log.mode == "wal"
        assert log.send() == ["late"]
    assert naive.send() == []  # lost for good
    assert log.send() == ["early"]
    assert log.send() == []


def test_a_transaction_that_began_first_and_adds_last_is_sent_last(log: LogDesk) -> None:
    """Nor does a transaction that is open elsewhere on the server keep messages back."""
    naive = BelowTheOldest(log.desk)
    log.join()
    old, elsewhere = log.open(), log.open()
    with log.desk.transaction(old):
        log.desk.sql("SELECT pg_current_xact_id()", conn=old)  # its number is lower than that of the next one
        log.add("one", "s")
        log.add("two", "s", old)
    with log.desk.transaction(elsewhere):
        log.desk.sql("SELECT pg_current_xact_id()", conn=elsewhere)
        log.add("three", "s")
        if log.mode == "log":
            assert naive.send() == ["two", "one"]
        assert log.send() == ["one", "two", "three"]


def test_positions_of_a_stream_grow_in_the_order_of_the_commits(log: LogDesk) -> None:
    log.join()
    first, second = log.open(), log.open()
    rival = threading.Thread(target=log.add, args=("two", "s", second))
    with log.desk.transaction(first):
        log.add("one", "s", first)
        rival.start()
        while not log.desk.sql(LOCKED):  # for the stream: it must not have a position yet
            assert rival.is_alive()
        log.add("one more", "s", first)
    rival.join()
    assert [(one.id, one.sequence) for one in log.read()] == [("one", 1), ("one more", 2), ("two", 3)]


def test_savepoints(log: LogDesk) -> None:
    """A row's own transaction number is that of the savepoint, which no snapshot knows."""
    log.join()
    conn = log.open()
    with log.desk.transaction(conn):
        log.desk.sql("SAVEPOINT a", conn=conn)
        log.add("undone", "s", conn)
        log.desk.sql("ROLLBACK TO a", conn=conn)
        log.desk.sql("SAVEPOINT b", conn=conn)
        log.add("kept", "s", conn)
        log.desk.sql("RELEASE b", conn=conn)
        log.add("other")
        assert log.send() == ["other"]
    assert log.send() == ["kept"]
    assert log.send() == []


def test_a_large_window_is_read_in_batches(log: LogDesk) -> None:
    log.join()
    late = log.open()
    with log.desk.transaction(late):
        log.add("l1", "late", late)
        log.add("a", "s")
        assert log.send() == ["a"]
        log.add("b", "s")
        log.add("l2", "s2", late)
    log.add("c", "s")
    sent: list[str] = []
    for number in range(3):
        found = log.read(limit=2)
        log.add(f"new {number}", "s")
        sent += [one.id for one in found]
        assert log.settle()
    assert sorted(sent[:4]) == ["b", "c", "l1", "l2"], "what is added meanwhile comes afterwards"
    assert sent.index("b") < sent.index("c")
    assert sent[4:] == ["new 0", "new 1"]
    assert log.send() == ["new 2"]


def test_what_running_transactions_have_added_is_not_passed_while_no_later_one_has_ended(log: LogDesk) -> None:
    """A snapshot names no transaction that is younger than the last one that has ended. Such a one may have added
    messages long before the snapshot was taken."""
    log.join()
    assert log.send() == []
    first, second = log.open(), log.open()
    with log.desk.transaction(first):
        log.add("a1", "a", first)
        with log.desk.transaction(second):
            log.add("b1", "b", second)
            log.add("a2", "a", first)
            log.add("b2", "b", second)
            assert log.read() == []
    assert sorted(log.send()) == ["a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("log", ["log"], indirect=True)
def test_the_next_batch_is_read_while_one_is_sent(log: LogDesk) -> None:
    def ahead() -> list[Any]:
        return list(log.desk.execute(ReadLog(A, 2, LEASE, "log", ahead=True)))

    log.join()
    with log.desk.transaction(log.desk.conn):
        for number in range(1, 8):
            log.add(f"m{number}", "s")
    assert [one.id for one in log.read(limit=2)] == ["m1", "m2"]
    second = ahead()
    assert [one.id for one in second] == ["m3", "m4"]
    assert [one.id for one in ahead()] == ["m3", "m4"]
    assert log.settle(then=second[-1].position)
    assert log.settle(then=second[-1].position), "its answer was lost"
    assert log.settle(moved=tuple(second)), "nor does this move what is under way now"
    assert [one.id for one in ahead()] == ["m5", "m6"]
    assert log.desk.state()["outbox"] == []
    log.desk.end_lease(A)
    assert log.join(B) == "log"
    assert [(one.id, one.starts) for one in log.read(B)] == [
        ("m3", 1), ("m4", 1), ("m5", 0), ("m6", 0), ("m7", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("log", ["log"], indirect=True)
def test_the_lease_is_renewed_when_the_next_batch_begins(log: LogDesk) -> None:
    """And not when it is read: a relay may publish it for most of a lease from then on."""

    def lease() -> float:
        with log.desk.transaction(log.desk.conn):
            row = log.desk.conn.execute("SELECT extract(epoch FROM lease_end)::float8 FROM semel_relay").fetchone()
        return float(row[0])

    log.join()
    for number in range(4):
        log.add(f"m{number}", "s")
    log.read(limit=2)
    before = lease()
    ahead = log.desk.execute(ReadLog(A, 2, LEASE, "log", ahead=True))
    assert lease() == before
    assert log.settle(then=ahead[-1].position)
    assert lease() > before


@pytest.mark.parametrize("log", ["log"], indirect=True)
def test_what_was_read_ahead_does_not_overtake_a_failure(log: LogDesk) -> None:
    broker = RecordingBroker()
    broker.answer = lambda message: TryAgain("busy") if message.id == "bad6" else Sent()
    with log.desk.transaction(log.desk.conn):
        for number in range(20):
            log.add(f"bad{number}", "bad")
            log.add(f"good{number}", "good")
    relay = Relay(log.desk.store, broker, batch=1, pause="1h", longest_pause="1h")
    relay.drain()
    assert [id for id in broker.ids() if id.startswith("bad")] == [f"bad{number}" for number in range(6)]
    assert [id for id in broker.ids() if id.startswith("good")] == [f"good{number}" for number in range(20)]
    broker.answer = lambda message: Sent()
    log.desk.end_waiting()
    relay.drain()
    assert [id for id in broker.ids() if id.startswith("bad")] == [f"bad{number}" for number in range(20)]
    assert broker.calls > 10, "it went on in small batches"


# Two relays


def test_one_relay_owns_the_cursor_and_another_takes_over(log: LogDesk) -> None:
    assert log.join(A) == log.mode
    assert log.join(B) == "queue"
    log.add("one", "s")
    assert [one.starts for one in log.read(A)] == [0]
    assert log.desk.execute(ReadLog(B, 10, LEASE, log.mode)) is None
    log.desk.end_lease(A)
    assert log.join(B) == log.mode
    # What the dead relay was sending may have killed it: it has one start.
    found = log.read(B)
    assert [(one.id, one.starts) for one in found] == [("one", 1)]
    # The other one was only paused, and wakes.
    assert log.settle(A) is False
    assert log.settle(A, moved=tuple(found)) is False
    assert log.desk.execute(ReadLog(A, 10, LEASE, log.mode)) is None
    assert log.desk.state()["outbox"] == []
    assert log.settle(B, moved=tuple(found))
    assert log.settle(B, moved=tuple(found)), "its answer was lost"
    assert [row[:2] for row in log.desk.state()["outbox"]] == [("one", 1)]
    # All that follow in the stream have to go the same way.
    log.add("two", "s")
    log.add("three", "s3")
    assert [(one.id, one.starts, one.queued) for one in log.read(B)] == [("two", 0, True), ("three", 0, False)]


def test_what_a_relay_leaves_behind_counts_no_start(log: LogDesk) -> None:
    """It says that nothing is under way. It could not settle before, because answers of the database were lost."""
    log.join(A)
    log.add("one", "s")
    assert [one.id for one in log.read(A)] == ["one"]
    log.desk.execute(LeaveRelays(A))
    assert log.join(B) == log.mode
    assert [(one.id, one.starts) for one in log.read(B)] == [("one", 0)]


def test_a_settlement_that_arrives_late_does_not_pass_what_is_under_way_by_then(log: LogDesk) -> None:
    """Its answer was lost, it was repeated, and the first one still travels."""
    log.join()
    log.add("one", "s")
    assert log.send() == ["one"]
    late = PassLog(A, LEASE, log.mode, log.last)
    log.add("two", "s")
    assert [one.id for one in log.read()] == ["two"]
    log.desk.execute(late)
    log.desk.end_lease(A)
    log.join(B)
    assert [one.id for one in log.read(B)] == ["two"]


def test_what_was_not_sent_is_read_again(log: LogDesk) -> None:
    log.join()
    log.add("one", "s")
    assert [one.id for one in log.read()] == ["one"]
    assert log.settle(stays=True)
    log.add("two", "s")
    found = log.read() + (log.read() if log.settle() else [])
    assert [(one.id, one.starts) for one in found] == [("one", 0), ("two", 0)]


def test_relays_that_die_keep_every_stream_in_order(log: LogDesk) -> None:
    """Three relays lose their leases and send from the log and the queue, while messages are added and rolled back."""
    streams, transactions = 5, 25
    total = "SELECT sum(sequence) FROM semel_stream"
    published: list[tuple[str, int]] = []
    errors: list[BaseException] = []
    added = threading.Event()

    def produce(worker: int) -> None:
        mine = Desk("postgres", log.desk.url)
        outbox = Outbox(mine.store)
        try:
            for number in range(transactions):
                names = sorted({f"s{(worker + number * step) % streams}" for step in (1, 2)})
                try:
                    with mine.transaction(mine.conn):
                        for name in names:
                            outbox.add(mine.conn, "made", "", stream=name)
                        if number % 4 == 0:
                            raise KeyError
                except KeyError:
                    continue
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    def relay(number: int) -> None:
        mine = Desk("postgres", log.desk.url)
        broker = RecordingBroker()
        calls = 0

        def answer(message: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (10 + number, 25 + number):
                raise Death
            if calls % 17 == 16:
                return TryAgain("busy", 0.1)
            published.append((message.stream, message.sequence))
            return Sent()

        broker.answer = answer
        until = time.monotonic() + 60
        try:
            while not added.is_set() or len(set(published)) < log.desk.sql(total, conn=mine.conn)[0][0]:
                assert time.monotonic() < until, "messages are left"
                with suppress(Death):
                    Relay(mine.store, broker, batch=2, lease="1s", tries=1000, pause="100ms").drain()
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    producers = [threading.Thread(target=produce, args=(worker,)) for worker in range(3)]
    relays = [threading.Thread(target=relay, args=(number,)) for number in range(3)]
    for thread in (*producers, *relays):
        thread.start()
    for thread in producers:
        thread.join()
    added.set()
    for thread in relays:
        thread.join()
    assert not errors
    for name in range(streams):
        sent = [sequence for stream, sequence in published if stream == f"s{name}"]
        first = list(dict.fromkeys(sent))
        assert first == list(range(1, len(first) + 1))


# Failures


def test_a_stream_that_fails_goes_on_in_the_queue_and_comes_back(log: LogDesk) -> None:
    broker = RecordingBroker()
    happened: list[events.Event] = []
    relay = Relay(log.desk.store, broker, pause="1h", longest_pause="1h", on_event=happened.append)
    broker.answer = lambda message: TryAgain("busy") if message.id == "bad" else Sent()
    for id, stream in (("a", "good"), ("bad", "s"), ("b", "s"), ("c", ""), ("d", "good")):
        log.add(id, stream)
    assert relay.drain().sent == 3
    assert sorted(broker.ids()) == ["a", "c", "d"]
    assert [row[:2] for row in log.desk.state()["outbox"]] == [("bad", 1), ("b", 0)]
    assert log.desk.state()["hold"]["s"] == ("waits", "busy")
    assert [type(event) for event in happened if isinstance(event, events.PublishFailed)] == [events.PublishFailed]
    log.add("e", "s")
    log.add("f", "good")
    relay.drain()
    assert broker.ids()[3:] == ["f"]
    broker.answer = lambda message: Sent()
    log.desk.end_waiting()
    relay.drain()
    assert broker.ids()[4:] == ["bad", "b", "e"]
    log.add("g", "s")
    assert log.join() == log.mode
    assert [one.queued for one in log.read()] == [False]


def test_poison_goes_to_the_dead_letters_and_comes_back_in_order(log: LogDesk) -> None:
    broker = RecordingBroker()
    broker.answer = lambda message: Refused("too strange") if message.id == "bad" else Sent()
    relay = Relay(log.desk.store, broker, on_poison={"parks": "park", "*": "skip"})
    for id, stream in (("a", "parks"), ("bad", "parks"), ("b", "parks"), ("c", "other")):
        log.add(id, stream)
    assert relay.drain().dead == 1
    log.add("d", "parks")
    relay.drain()
    assert broker.ids() == ["a", "c"]
    assert [row[0] for row in log.desk.state()["dead"]] == ["bad", "b"]
    assert [row[0] for row in log.desk.state()["outbox"]] == ["d"]
    broker.answer = lambda message: Sent()
    log.desk.execute(RedriveLetters(LetterFilter(), 1 << 60, 100))
    log.add("e", "parks")
    relay.drain()
    assert broker.ids()[2:] == ["bad", "b", "d", "e"]


def test_a_delayed_message_waits_in_the_queue(log: LogDesk) -> None:
    with log.desk.transaction(log.desk.conn):
        log.outbox.add(log.desk.conn, "made", "", id="later", delay="1h")
    assert [row[0] for row in log.desk.state()["outbox"]] == ["later"]


# Old messages


@pytest.mark.parametrize("log", ["log"], indirect=True)
def test_a_slot_is_emptied_when_all_of_it_was_read(log: LogDesk) -> None:
    desk = log.desk
    desk.sql("SELECT setval('semel_log_position', 262141)")
    log.join()
    late = log.open()
    sizes = "SELECT pg_relation_size('semel_log_0') > 0, pg_relation_size('semel_log_1') > 0"
    with desk.transaction(late):
        log.add("late", "s", late)  # 262142
        for number in range(4):
            log.add(f"m{number}")
        assert len(log.send()) == 4
        log.join()
        assert desk.sql(sizes) == [(True, True)], "a transaction still writes there"
    log.join()
    assert desk.sql(sizes) == [(True, True)], "one message was not read"
    assert log.send() == ["late"]
    log.join()
    assert desk.sql(sizes) == [(False, True)]
    log.add("next")
    assert log.send() == ["next"]


@pytest.mark.parametrize("log", ["log"], indirect=True)
def test_a_long_transaction_elsewhere_does_not_make_reading_slower(log: LogDesk) -> None:
    log.join()
    elsewhere = log.open()
    with log.desk.transaction(elsewhere):
        log.desk.sql("SELECT pg_current_xact_id()", conn=elsewhere)
        log.desk.sql(
            "SELECT count(semel_add(i::text, 'made', '', '', '', '', '', 'text/plain', '{}', 0, 0)) "
            "FROM generate_series(1, 5000) AS i"
        )
        assert len(log.read(limit=6000)) == 5000
        assert log.settle()
        log.add("one")
        for setting in ("seqscan", "hashjoin", "mergejoin"):  # as the store does
            log.desk.sql(f"SET enable_{setting} = off")
        log.desk.sql("ANALYZE semel_log")
        text, values = QUERIES["read"](relay=A, most=2000, lease=LEASE, ahead=False, low=0).values("format")
        log.desk.sql("BEGIN")
        (plan,) = log.desk.sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {text}", *values)[0]
        log.desk.sql("ROLLBACK")
        assert rows_read(plan[0]["Plan"]) <= 10
        assert log.send() == ["one"]
    assert log.send() == []


def rows_read(plan: dict[str, Any]) -> int:
    """How many rows of the log a plan has read."""
    here = 0
    if plan.get("Relation Name", "").startswith("semel_log_") and plan["Relation Name"] != "semel_log_position":
        here = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return int(here + sum(map(rows_read, plan.get("Plans", ()))))


# The mode


def test_switching_keeps_messages_and_their_order(log: LogDesk) -> None:
    broker = RecordingBroker()
    modes: list[OutboxMode] = ["queue", log.mode, "queue", log.mode, log.mode, "queue"]
    for number, mode in enumerate(modes):
        log.add(f"a{number}", "s")
        log.add(f"b{number}", "t")
        log.outbox.switch(mode)
        assert log.desk.execute(InspectOutbox(1)).mode == mode
    log.add("a6", "s")
    Relay(log.desk.store, broker).drain()
    assert [one.id for one in broker.taken if one.stream == "s"] == [f"a{number}" for number in range(7)]
    assert [one.id for one in broker.taken if one.stream == "t"] == [f"b{number}" for number in range(6)]


@pytest.mark.parametrize("late", [False, True], ids=["before", "late"])
def test_switching_keeps_more_than_one_batch_of_bytes(
    log: LogDesk, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are added in the last moment before those who add messages have to wait."""
    empty, calls = outbox_log._empty_slot, itertools.count()

    def nothing() -> Any:
        yield from ()
        return False

    monkeypatch.setattr(outbox_log, "_empty_slot", lambda: nothing() if late and next(calls) == 0 else empty())
    with log.desk.transaction(log.desk.conn):  # larger than a batch by itself
        for number in range(3):
            log.outbox.add(log.desk.conn, "made", b"x" * (5 << 20), id=f"m{number}", stream="s")
    for number in range(3, 8):
        with log.desk.transaction(log.desk.conn):
            log.outbox.add(log.desk.conn, "made", b"x" * (3 << 20), id=f"m{number}", stream="s")
    log.outbox.switch("queue")
    rows = log.desk.sql("SELECT id, sequence FROM semel_outbox ORDER BY position")
    assert rows == [(f"m{number}", number + 1) for number in range(8)]


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_the_mode_changes_when_a_long_log_has_moved_batch_by_batch(
    log: LogDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a batch moves, others add messages. Only the last one has to wait for the change."""
    monkeypatch.setattr(outbox_log, "_BATCH_CHANGES", 30)
    for number in range(25):
        log.add(f"m{number}", "s")
    assert log.desk.execute(SwitchMode("queue")) is False
    assert len(log.desk.state()["outbox"]) == 10
    assert log.desk.execute(InspectOutbox(1)).mode == "wal"
    log.outbox.switch("queue")
    assert log.desk.execute(InspectOutbox(1)).mode == "queue"
    assert [row[0] for row in log.desk.state()["outbox"]] == [f"m{number}" for number in range(25)]


def test_switching_again_and_again_under_load_keeps_all_messages_and_their_order(log: LogDesk) -> None:
    broker = RecordingBroker()
    conn, count, stopping = log.open(), itertools.count(1), threading.Event()
    added: list[str] = []

    def add() -> None:
        while not stopping.is_set():
            log.add(f"m{next(count)}", "s", conn)
            added.append(f"m{len(added) + 1}")

    adding = threading.Thread(target=add)
    with Relay(log.desk.store, broker):
        adding.start()
        try:
            for mode in ("queue", log.mode) * 4:
                reached = len(added) + 100
                while len(added) < reached:
                    assert adding.is_alive()
                    time.sleep(0.01)
                log.outbox.switch(mode)  # type: ignore[arg-type]
        finally:
            stopping.set()
            adding.join()
        broker.wait_for(len(added))
        end = time.monotonic() + 30
        while len(set(broker.ids())) < len(added) and time.monotonic() < end:
            time.sleep(0.01)
    assert list(dict.fromkeys(broker.ids())) == added


def test_switching_keeps_what_a_transaction_has_added_that_did_not_wait_for_the_disk(log: LogDesk) -> None:
    """Logical decoding shows a commit only when it is on the disk. By then the slot would be gone."""
    conn = log.open()
    log.desk.sql("SET synchronous_commit = off", conn=conn)
    log.add("one", "s", conn)
    log.outbox.switch("queue")
    assert [row[0] for row in log.desk.state()["outbox"]] == ["one"]
    assert log.desk.sql("SHOW synchronous_commit", conn=conn) == [("off",)]


def test_who_adds_while_the_mode_changes_waits_and_uses_the_new_one(log: LogDesk) -> None:
    open_one, waiting_one = log.open(), log.open()
    log.desk.sql("BEGIN", conn=waiting_one)
    log.desk.sql("SELECT pg_current_xact_id()", conn=waiting_one)
    with log.desk.transaction(open_one):
        log.add("one", "s", open_one)
        switching = threading.Thread(target=log.desk.execute, args=(SwitchMode("queue"),))
        switching.start()
        while len(log.desk.sql(LOCKED)) < 1:
            assert switching.is_alive()
        adding = threading.Thread(target=log.add, args=("two", "s", waiting_one))
        adding.start()
        while len(log.desk.sql(LOCKED)) < 2:
            assert adding.is_alive()
    switching.join()
    adding.join()
    log.desk.sql("COMMIT", conn=waiting_one)
    assert [row[0] for row in log.desk.state()["outbox"]] == ["one", "two"]


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_relay_keeps_its_streams_when_the_mode_changes(log: LogDesk, busy: bool) -> None:
    """It loses the cursor, but not its lease. Under another name it would wait for the end of that lease."""
    broker = RecordingBroker()
    happened: list[events.Event] = []
    sent = itertools.count(3 if busy else 2)
    log.add("one", "s")
    if busy:
        broker.before = lambda: log.outbox.switch("queue")
    with Relay(log.desk.store, broker, lease="1h", on_event=happened.append):
        broker.wait_for(1)
        broker.before = lambda: None
        if not busy:
            while log.desk.sql("SELECT 1 FROM semel_cursor WHERE started IS NOT NULL"):
                time.sleep(0.01)
            log.outbox.switch("queue")
        else:  # what was under way is in the queue, and is sent again
            broker.wait_for(2)
        for id in ("two", "three", "four"):
            log.add(id, "s")
            broker.wait_for(next(sent))
        log.outbox.switch(log.mode)
        log.add("five", "s")
        broker.wait_for(next(sent))
    assert broker.ids() == [*(["one"] if busy else []), "one", "two", "three", "four", "five"]
    assert not [event for event in happened if isinstance(event, events.RelayLate)]


def test_an_old_snapshot_cannot_use_the_old_mode(log: LogDesk) -> None:
    conn = log.open()
    log.desk.sql("BEGIN ISOLATION LEVEL REPEATABLE READ", conn=conn)
    log.desk.sql("SELECT 1 FROM semel_outbox_mode", conn=log.desk.conn)
    log.desk.sql("SELECT count(*) FROM pg_class", conn=conn)  # takes the snapshot
    log.desk.execute(SwitchMode("queue"))
    with pytest.raises(SemelError, match="roll back and run the unit of work again"):
        log.outbox.add(conn, "made", "")
    log.desk.sql("ROLLBACK", conn=conn)


def test_a_restored_database_sends_what_it_may_not_have_sent(log: LogDesk) -> None:
    """Its transactions have other numbers than those in the cursor."""
    log.join()
    log.add("sent")
    assert log.send() == ["sent"]
    log.add("before the dump")
    log.desk.execute(LeaveRelays(A))
    log.desk.sql("UPDATE semel_cursor SET cluster = 1, seen = '900000000:900000000:'")
    log.add("after the restore", "s")
    broker = RecordingBroker()
    Relay(log.desk.store, broker).drain()
    log.add("later", "s")
    Relay(log.desk.store, broker).drain()
    assert broker.ids()[-3:] == ["before the dump", "after the restore", "later"]


# The database's own log


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_a_transaction_comes_whole_and_as_it_was_written(log: LogDesk) -> None:
    log.join()
    with log.desk.transaction(log.desk.conn):
        for number in range(20):
            log.outbox.add(
                log.desk.conn, "größer", b"\x00\n\xff", id=f"é{number}", subject="s\\\"", headers={"a": "ü", "b": "1"},
                destination="d", source="/here", stream="s",
            )  # fmt: skip
    found = log.read(limit=1)
    assert [one.sequence for one in found] == list(range(1, 21))
    message = found[0]
    assert message.data == b"\x00\n\xff"
    assert (message.id, message.type, message.subject, message.headers) == (
        "é0",
        "größer",
        's\\"',
        {"a": "ü", "b": "1"},
    )
    assert (message.destination, message.source, message.content_type) == ("d", "/here", "application/octet-stream")
    assert abs(message.time - time.time()) < 60


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_a_slot_that_falls_back_shows_nothing_twice(log: LogDesk) -> None:
    """After a crash of the server it may be at an earlier place."""
    log.join()
    log.add("one")
    assert len(log.read()) == 1
    log.desk.sql("UPDATE semel_cursor SET passed = started, started = NULL")  # and the slot stays
    log.add("two")
    assert [one.id for one in log.read()] == ["two"]


@pytest.mark.parametrize("changes", [3, 1500])
@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_messages_behind_many_of_other_programs_are_found(
    log: LogDesk, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They all come from the same slot. While the broker is down, a relay asks for one message."""
    monkeypatch.setattr(outbox_log, "_FEWEST_CHANGES", changes)
    log.join()
    for _ in range(150):
        log.desk.sql("SELECT pg_logical_emit_message(true, 'other', 'x')")
    for number in range(20):
        log.add(f"m{number}")
    found: list[str] = []
    for _ in range(50):
        batch = log.read(limit=1)
        assert len(batch) <= 3
        found += [one.id for one in batch]
        assert not batch or log.settle()
    assert found == [f"m{number}" for number in range(20)]


@contextmanager
def slot_in_use(log: LogDesk) -> Iterator[None]:
    """For 0.2 seconds another session uses the slot. Here it replicates."""
    import psycopg

    ((slot,),) = log.desk.sql("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    with closing(psycopg.connect(log.desk.url, replication="database", autocommit=True)) as other:
        settings = "proto_version '1', publication_names 'semel_outbox'"
        other.pgconn.send_query(f'START_REPLICATION SLOT "{slot}" LOGICAL 0/0 ({settings})'.encode())
        while not log.desk.sql("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", slot):
            time.sleep(0.01)
        timer = threading.Timer(0.2, other.close)
        timer.start()
        yield
        timer.join()


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_a_relay_waits_while_another_one_still_uses_the_slot(log: LogDesk) -> None:
    """The other one has lost the cursor, and its last statement still runs."""
    log.join()
    log.add("one")
    with slot_in_use(log):
        assert log.send() == ["one"]


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_a_slot_in_use_is_dropped_when_it_is_free(log: LogDesk) -> None:
    """It was left when the mode was switched. Nobody reads it, so the server would keep its own log for ever."""
    log.desk.sql("UPDATE semel_outbox_mode SET mode = 'log'")
    with slot_in_use(log):
        log.outbox.switch("log")
    assert not log.desk.sql("SELECT 1 FROM pg_replication_slots")


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_the_mode_can_be_left_while_a_relay_reads_the_slot(log: LogDesk) -> None:
    log.add("one", "s")
    with slot_in_use(log):
        log.outbox.switch("queue")
    assert [row[0] for row in log.desk.state()["outbox"]] == ["one"]
    assert not log.desk.sql("SELECT 1 FROM pg_replication_slots")


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_a_slot_that_is_gone_is_an_error_that_says_what_to_do(log: LogDesk) -> None:
    log.desk.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    with pytest.raises(ConfigurationError, match="its replication slot is gone"):
        log.join()
    log.outbox.switch("wal")
    log.add("one")
    assert log.join() == "wal"
    assert log.send() == ["one"]


@pytest.mark.parametrize("log", ["wal"], indirect=True)
def test_what_the_database_keeps_is_watched(log: LogDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[events.Event] = []
    log.add("one")
    assert log.desk.execute(InspectOutbox(1)).retained > 0
    retained = {name: values for name, _, values in gauges(StoreWatch(log.desk.store).look())}
    assert retained["semel_outbox_retained_bytes"][()] > 0  # also while no relay runs that could warn
    monkeypatch.setattr(relaying, "MOST_RETAINED", 1)
    Relay(log.desk.store, RecordingBroker(), on_event=happened.append).drain()
    assert [event.retained > 1 for event in happened if isinstance(event, events.SlotLag)] == [True]
    # Writes of others are not kept either, although they are no messages.
    log.join()
    log.desk.sql("SELECT pg_logical_emit_message(true, 'other', repeat('x', 3000000))")
    place = "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots"
    before = log.desk.sql(place)[0][0]
    assert log.read() == []
    assert log.desk.sql(place)[0][0] > before + 3_000_000
    log.outbox.switch("queue")
    assert log.desk.execute(InspectOutbox(1)).retained is None


def test_the_log_of_the_database_needs_a_setting() -> None:
    program = LOG_PROGRAMS[SwitchMode](SwitchMode("wal"))
    next(program)
    with pytest.raises(ConfigurationError, match="needs wal_level = logical, and this server has replica"):
        program.send([("replica", None, False, 0)])


# Other databases and drivers


@pytest.mark.parametrize("kind", marked("sqlite", "mysql"))
def test_other_databases_have_a_queue(kind: str, open_desk: Callable[[str], Desk]) -> None:
    outbox = Outbox(open_desk(kind).store)
    outbox.switch("queue")
    with pytest.raises(ConfigurationError, match="needs PostgreSQL"):
        outbox.switch("log")
    with pytest.raises(ConfigurationError, match="the mode of an outbox is 'queue', 'log', 'wal'"):
        outbox.switch("lgo")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["log", "wal"])
@pytest.mark.parametrize("kind", marked("asyncpg", "async-psycopg"))
def test_async_drivers(kind: str, mode: OutboxMode, open_desk: Callable[[str], Desk]) -> None:
    desk = open_desk(kind)
    desk.execute(SwitchMode(mode))
    log = LogDesk(desk, mode)
    with closing(Desk("postgres", desk.url)) as plain:
        log.outbox = Outbox(plain.store)
        log.add("one", "s")
        log.add("two", "t")
    log.join()
    found = log.read(limit=1)
    assert log.settle(moved=tuple(found))
    assert [row[0] for row in desk.state()["outbox"]] == [one.id for one in found]
    assert len(desk.execute(StartMessages(A, 10, LEASE))) == len(found)
    desk.execute(SwitchMode("queue"))
    assert [row[0] for row in desk.state()["outbox"]] == ["one", "two"]
