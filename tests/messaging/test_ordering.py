"""The order of a stream and the safety of a settlement, where usual techniques lose them.

Each test shows both: the naive relay fails, and ours does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event, orm

from semel import SQLiteStore, TransactionConflict
from semel.core.messaging.messages import DeadLetter, JoinRelays, LeaveRelays, SettleMessages, StartMessages
from semel.messaging import Outbox
from tests.messaging.desks import DIALECTS, Desk, marked

A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))
LEASE = 1000.0
WAITING = {
    "postgres": "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


@pytest.fixture(params=marked("postgres", "mysql"))
def desk(request: pytest.FixtureRequest, open_desk: Callable[[str], Desk]) -> Desk:
    """Databases in which transactions write at the same time."""
    return open_desk(request.param)


@pytest.fixture
def others(desk: Desk) -> Iterator[Callable[[], Any]]:
    """Opens further connections."""
    opened: list[Any] = []

    def open() -> Any:
        opened.append(desk.connect())
        return opened[-1]

    yield open
    for conn in opened:
        conn.close()


def start(desk: Desk, relay: bytes = A) -> list[Any]:
    found = desk.execute(StartMessages(relay, 100, LEASE))
    assert found is not None
    return list(found)


def send(desk: Desk, relay: bytes = A) -> list[str]:
    """Send all that there is; return the ids."""
    found = start(desk, relay)
    assert desk.execute(SettleMessages(relay, tuple(one.position for one in found)))
    return [one.id for one in found]


class LastSeen:
    """A relay that remembers the highest id that it has sent."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.last = desk, 0

    def send(self) -> list[str]:
        rows = self.desk.sql("SELECT position, id FROM semel_outbox WHERE position > %s ORDER BY position", self.last)
        self.last = max([self.last, *(position for position, _ in rows)])
        return [id for _, id in rows]


def take_unlocked(desk: Desk, conn: Any) -> list[str]:
    """A relay that locks the next message, skips what others have locked, and sends while it holds the lock."""
    desk.sql("BEGIN", conn=conn)
    rows = desk.sql("SELECT id FROM semel_outbox ORDER BY position LIMIT 1 FOR UPDATE SKIP LOCKED", conn=conn)
    return [id for (id,) in rows]


def test_a_lower_position_that_commits_late_is_sent(desk: Desk, others: Callable[[], Any]) -> None:
    outbox, naive = Outbox(desk.store), LastSeen(desk)
    desk.execute(JoinRelays(A, LEASE))
    slow, quick = others(), others()
    with desk.transaction(slow):
        outbox.add(slow, "made", "", id="early", stream="s1")
        with desk.transaction(quick):
            outbox.add(quick, "made", "", id="late", stream="s2")
        assert naive.send() == ["late"]
        assert send(desk) == ["late"]
    assert naive.send() == []  # lost for good
    assert send(desk) == ["early"]


def test_positions_of_a_stream_grow_in_the_order_of_the_commits(desk: Desk, others: Callable[[], Any]) -> None:
    """A transaction that began to add first commits last. What it adds later must not come before the other's."""
    outbox = Outbox(desk.store)
    desk.execute(JoinRelays(A, LEASE))
    first, second = others(), others()

    # Without a lock of the stream: "early" has the lower position, and is not there yet when "late" is sent. No other
    # test has used these ids: MySQL would lock what it has not yet removed of them, and with it the other's place.
    with desk.transaction(first):
        desk.add("early", "s", conn=first)
        with desk.transaction(second):
            desk.add("late", "s", conn=second)
        assert LastSeen(desk).send() == ["late"]
        assert send(desk) == ["late"]
    assert send(desk) == ["early"]

    def add_second() -> None:
        with desk.transaction(second):
            outbox.add(second, "made", "", id="two", stream="s")

    rival = threading.Thread(target=add_second)
    with desk.transaction(first):
        outbox.add(first, "made", "", id="one", stream="s")
        rival.start()
        while not desk.sql(WAITING[desk.kind]):  # for the stream: it must not have a position yet
            assert rival.is_alive()
            time.sleep(0.15)  # MariaDB does not look again before a tenth of a second has passed without a question
        outbox.add(first, "made", "", id="one more", stream="s")
    rival.join()
    assert [(one.id, one.sequence) for one in start(desk)] == [("one", 1), ("one more", 2), ("two", 3)]


def test_two_relays_do_not_share_a_stream(desk: Desk, others: Callable[[], Any]) -> None:
    for id in ("one", "two"):
        desk.add(id, "s")
    quick, slow = others(), others()
    assert take_unlocked(desk, slow) == ["one"]
    assert take_unlocked(desk, quick) == ["two"]  # sent before "one" is
    for conn in (quick, slow):
        desk.sql("ROLLBACK", conn=conn)

    for relay in (A, B, A, B):  # until each has its share
        desk.execute(JoinRelays(relay, LEASE))
    taken = {relay: [one.id for one in start(desk, relay)] for relay in (A, B)}
    assert sorted(taken.values()) == [[], ["one", "two"]]


def test_what_a_paused_relay_settles_late_changes_nothing(desk: Desk) -> None:
    """It had given the message up, and was paused. Another relay has taken over and is sending it."""
    desk.execute(JoinRelays(A, LEASE))
    desk.add("one", "s")
    (found,) = start(desk)
    desk.end_lease(A)
    desk.execute(JoinRelays(B, LEASE))
    assert [one.id for one in start(desk, B)] == ["one"]

    assert desk.execute(SettleMessages(A, (), (), (DeadLetter(found.position, "too large", True),))) is False
    assert desk.execute(SettleMessages(A, (found.position,))) is False
    assert [row[0] for row in desk.state()["outbox"]] == ["one"]
    assert desk.state()["dead"] == []
    assert desk.execute(SettleMessages(B, (found.position,)))

    # The naive relay asks only for the row.
    desk.add("one", "s")
    (found,) = start(desk, B)
    desk.sql("DELETE FROM semel_outbox WHERE position = %s", found.position)
    assert desk.state()["outbox"] == []  # gone, while the other relay has not sent it yet


def test_a_savepoint_takes_its_events_along(tmp_path: Any) -> None:
    path = tmp_path / "shop.db"
    store = SQLiteStore(path)
    outbox = Outbox(store)
    engine = sa.create_engine(f"sqlite:///{path}")
    flushed: list[str] = []
    with orm.Session(engine) as session:
        buffered: list[str] = []
        event.listen(session, "before_commit", lambda session: flushed.extend(buffered))
        for data, fails in (("kept", False), ("undone", True), ("kept too", False)):
            nested = session.begin_nested()
            buffered.append(data)
            outbox.add(session, "made", data)
            nested.rollback() if fails else nested.commit()
        session.commit()
        added = session.execute(sa.text("SELECT data FROM semel_outbox ORDER BY position")).scalars().all()
        session.rollback()
    engine.dispose()
    store.close()
    assert "undone" in flushed  # the event of something that never happened
    assert added == [b"kept", b"kept too"]


@pytest.mark.parametrize("kind", marked(*DIALECTS))
def test_three_relays_keep_every_stream_in_order_while_messages_are_added(
    kind: str, open_desk: Callable[[str], Desk]
) -> None:
    """Relays come, go and lose their leases; transactions of several messages commit and roll back."""
    desk = open_desk(kind)
    streams, transactions, most = 5, 25, 60.0
    published: list[tuple[str, int]] = []
    errors: list[BaseException] = []
    added = threading.Event()

    def produce(worker: int) -> None:
        mine = Desk(kind, desk.url)
        outbox = Outbox(mine.store)
        try:
            for number in range(transactions):
                names = sorted({f"s{(worker + number * step) % streams}" for step in (1, 2)})
                # If the transaction that was to add the first message of a stream is rolled back, MySQL gives up one of
                # two that have waited for it.
                with suppress(KeyError, TransactionConflict), mine.transaction(mine.conn):
                    for name in names:  # in one order everywhere, against deadlocks
                        outbox.add(mine.conn, "made", "", stream=name)
                    if number % 4 == 0:
                        raise KeyError
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    def relay(name: bytes) -> None:
        mine = Desk(kind, desk.url)
        until = time.monotonic() + most
        try:
            for turn in range(1_000_000):
                if turn % 7 == 0:
                    mine.execute(JoinRelays(name, LEASE))
                found = mine.execute(StartMessages(name, 5, LEASE))
                if found is None:
                    mine.execute(JoinRelays(name, LEASE))
                    continue
                if turn % 23 == 22:
                    mine.end_lease(name)  # it hangs before it sends anything
                    continue
                published.extend((one.stream, one.sequence) for one in found)
                assert mine.execute(SettleMessages(name, tuple(one.position for one in found)))
                if turn % 31 == 30:
                    mine.execute(LeaveRelays(name))
                if not found:
                    if added.is_set() and not mine.sql("SELECT 1 FROM semel_outbox LIMIT 1"):
                        break
                    assert time.monotonic() < until, "messages are left"
                    time.sleep(0.005)
        except BaseException as error:
            errors.append(error)
        finally:
            mine.close()

    producers = [threading.Thread(target=produce, args=(worker,)) for worker in range(3)]
    relays = [threading.Thread(target=relay, args=(name,)) for name in (A, B, C)]
    for thread in (*producers, *relays):
        thread.start()
    for thread in producers:
        thread.join()
    added.set()
    for thread in relays:
        thread.join()
    assert not errors
    assert published
    for name in range(streams):
        sent = [sequence for stream, sequence in published if stream == f"s{name}"]
        assert sent == list(range(1, len(sent) + 1))
