"""The dead letters on every store: list, redrive, purge, and the streams that were parked because of them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from typing import Any

import pytest

from semel.core.messaging.messages import (
    BuryMessage,
    CountStart,
    DeadLetter,
    JoinRelays,
    LetterFilter,
    Message,
    SettleMessages,
    StartMessages,
)
from semel.errors import ConfigurationError, NotMigrated, PolicyError
from semel.messaging import AsyncDeadLetters, DeadLetters, Outbox
from semel.stores.memory import MemoryStore
from tests.messaging.desks import DIALECTS, KINDS, Desk, marked

RELAY = bytes(range(16))


@pytest.fixture(params=marked(*KINDS))
def desk(request: pytest.FixtureRequest, open_desk: Callable[[str], Desk]) -> Desk:
    desk = open_desk(request.param)
    for table in ("inbox", "inbox_stream", "inbox_start"):
        desk.sql(f"DELETE FROM semel_{table}")
    return desk


class Letters:
    """The dead letters of a desk, sync or async."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._letters: Any = (DeadLetters if desk.kind in DIALECTS else AsyncDeadLetters)(desk.store)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._letters, name)

        def call(*args: Any, **how: Any) -> Any:
            async def run() -> Any:
                return await method(*args, **how)

            return self._desk._runner.run(run()) if inspect.iscoroutinefunction(method) else method(*args, **how)  # type: ignore[union-attr]

        return call


def letter(id: str, stream: str = "", sequence: int = 0, **fields: Any) -> Message:
    return Message(
        id, "paid", b"\x00\xffdata", "/shop", "orders", stream, sequence, "s", "text/plain", 1700000000.25,
        {"a": "ü"}, **fields,
    )  # fmt: skip


def bury(desk: Desk, message: Message, consumer: str = "ledger", reason: str = "it failed", park: bool = False) -> None:
    desk.execute(BuryMessage(consumer, message, reason, 3, park))


def outbox(desk: Desk) -> list[str]:
    return [row[0] for row in desk.state()["outbox"]]


def test_a_letter_is_listed_as_it_died(desk: Desk) -> None:
    letters = Letters(desk)
    bury(desk, letter("m-1", "o-7", 4))
    bury(desk, letter("m-2"), reason="no such account")
    bury(desk, letter("m-2"), "mail")
    bury(desk, letter("m-1", "o-7", 4), reason="again")  # a repeat
    found = letters.list()
    assert [(each.origin, each.message.id, each.reason, each.starts) for each in found] == [
        ("ledger", "m-1", "again", 3), ("ledger", "m-2", "no such account", 3), ("mail", "m-2", "it failed", 3),
    ]  # fmt: skip
    assert found[0].message == letter("m-1", "o-7", 4)
    chosen = [
        LetterFilter(origin="mail"), LetterFilter(stream="o-7"), LetterFilter(message="m-2"),
        LetterFilter(reason="account"), LetterFilter(type="other"), LetterFilter(destination="orders"),
        LetterFilter(older=60.0), LetterFilter(origin=""),
    ]  # fmt: skip
    assert [letters.count(each) for each in chosen] == [1, 1, 2, 1, 0, 3, 0, 0]
    assert [each.message.id for each in letters.list(after=found[0].position, limit=1)] == ["m-2"]
    assert letters.get("m-2", origin="mail").origin == "mail"
    assert letters.get("m-9") is None


def test_a_redrive_keeps_ids_and_order_and_a_second_one_changes_nothing(desk: Desk) -> None:
    letters = Letters(desk)
    desk.add("m-9", "o-7", sequence=9)  # a later message of the stream waits in the outbox
    for sequence in (5, 4, 6):  # not in their order
        bury(desk, letter(f"m-{sequence}", "o-7", sequence))
    bury(desk, letter("alone"))
    bury(desk, letter("alone"), "mail")  # two consumers have given it up
    assert letters.redrive(dry_run=True) == 5
    assert outbox(desk) == ["m-9"]
    assert letters.redrive() == 5
    assert sorted(outbox(desk)) == ["alone", "m-4", "m-5", "m-6", "m-9"]
    assert [id for id in outbox(desk) if id != "alone"] == ["m-4", "m-5", "m-6", "m-9"]
    before = desk.sql("SELECT * FROM semel_outbox ORDER BY position")
    assert letters.redrive() == 0
    assert desk.sql("SELECT * FROM semel_outbox ORDER BY position") == before
    rows = desk.sql("SELECT id, redrives, starts, sequence, stream, data FROM semel_outbox ORDER BY id")
    assert [(row[0], *row[1:5], bytes(row[5])) for row in rows] == [
        ("alone", 1, 0, 0, "", b"\x00\xffdata"), ("m-4", 1, 0, 4, "o-7", b"\x00\xffdata"),
        ("m-5", 1, 0, 5, "o-7", b"\x00\xffdata"), ("m-6", 1, 0, 6, "o-7", b"\x00\xffdata"),
        ("m-9", 0, 0, 9, "o-7", b"m-9"),
    ]  # fmt: skip
    desk.execute(JoinRelays(RELAY, 60.0))
    sent = desk.execute(StartMessages(RELAY, 10, 60.0))
    assert [one.id for one in sent if one.stream] == ["m-4", "m-5", "m-6", "m-9"]
    redriven = next(one for one in sent if one.id == "m-4")
    expected = asdict(letter("m-4", "o-7", 4, redrives=1))
    assert {name: getattr(redriven, name) for name in expected} == expected
    assert redriven.broker_id == "m-4:1"


def test_a_redrive_of_the_last_letter_frees_a_stream_that_the_relay_has_parked(desk: Desk) -> None:
    letters = Letters(desk)
    for sequence in (1, 2):
        desk.add(f"m-{sequence}", "o-7", sequence=sequence)
    desk.execute(JoinRelays(RELAY, 60.0))
    first = desk.execute(StartMessages(RELAY, 10, 60.0))[0]
    assert desk.execute(SettleMessages(RELAY, (), (), (DeadLetter(first.position, "too large", park=True),)))
    desk.add("m-3", "o-7", sequence=3)
    assert desk.execute(StartMessages(RELAY, 10, 60.0)) == ()
    assert letters.count(LetterFilter(origin="")) == 2
    assert letters.redrive(limit=1) == 1
    assert desk.execute(StartMessages(RELAY, 10, 60.0)) == ()  # it would go out of order: m-2 is still dead
    assert letters.redrive() == 1
    assert [one.id for one in desk.execute(StartMessages(RELAY, 10, 60.0))] == ["m-1", "m-2", "m-3"]
    assert desk.state()["hold"] == {}


@pytest.mark.parametrize("stream", ["", "o-7"])
def test_a_message_that_is_redriven_before_the_relay_has_settled_it_is_sent_again(desk: Desk, stream: str) -> None:
    """A consumer may give up a message at once, while the relay still waits for others of its batch. The relay deletes
    what it has sent, and must not take along what came back."""
    letters = Letters(desk)
    desk.add("m-1", stream, sequence=len(stream))
    desk.execute(JoinRelays(RELAY, 60.0))
    (sent,) = desk.execute(StartMessages(RELAY, 10, 60.0))
    bury(desk, letter("m-1", stream, len(stream)))
    assert letters.redrive() == 1
    assert desk.execute(SettleMessages(RELAY, (sent.position,), (), ()))
    (again,) = desk.execute(StartMessages(RELAY, 10, 60.0))
    assert (again.id, again.broker_id, again.starts) == ("m-1", "m-1:1", 0)
    assert letters.count() == 0


def test_no_redrive_has_the_id_of_an_earlier_one(desk: Desk) -> None:
    """The broker would take it for a repeat, and swallow it."""
    letters = Letters(desk)
    for consumer, redrives in (("ledger", 0), ("mail", 2), ("mail", 1)):  # the last is a delivery that comes late
        bury(desk, letter("m-1", redrives=redrives), consumer)
    assert letters.redrive() == 2
    desk.execute(JoinRelays(RELAY, 60.0))
    assert [one.broker_id for one in desk.execute(StartMessages(RELAY, 10, 60.0))] == ["m-1:3"]
    bury(desk, letter("m-1"), "ledger")
    assert letters.redrive() == 1
    assert [one.broker_id for one in desk.execute(StartMessages(RELAY, 10, 60.0))] == ["m-1:4"]


@pytest.mark.parametrize("desk", marked(*DIALECTS), indirect=True)
@pytest.mark.parametrize("stream", ["", "o-7"])
def test_a_message_that_is_in_the_outbox_twice_dies_once(desk: Desk, stream: str) -> None:
    """On PostgreSQL that is possible if its id was random at first: the caller adds it again, or a consumer has given
    it up and it is redriven, before the relay has deleted it."""
    letters = Letters(desk)
    with desk.transaction(desk.conn):
        id = Outbox(desk.store).add(desk.conn, "paid", {}, stream=stream)
        Outbox(desk.store).add(desk.conn, "paid", {}, stream=stream, id=id)
    bury(desk, letter(id, stream, 1))
    assert letters.redrive() == 1
    desk.execute(JoinRelays(RELAY, 60.0))
    sent = desk.execute(StartMessages(RELAY, 10, 60.0))
    assert {one.id for one in sent} == {id}
    assert desk.execute(SettleMessages(RELAY, (), (), tuple(DeadLetter(one.position, "too large") for one in sent)))
    assert outbox(desk) == []
    assert [each.message.id for each in letters.list()] == [id]


def test_a_redrive_that_fails_leaves_no_transaction_open(desk: Desk) -> None:
    letters = Letters(desk)
    bury(desk, letter("m-1", "o-7", 1))
    desk.sql("ALTER TABLE semel_outbox RENAME TO away")  # as if the tables were of an older version
    with pytest.raises(NotMigrated):
        letters.redrive()
    desk.sql("ALTER TABLE away RENAME TO semel_outbox")
    assert letters.count() == 1
    assert letters.redrive() == 1
    assert outbox(desk) == ["m-1"]


def test_a_purge_deletes_and_frees_what_was_parked(desk: Desk) -> None:
    letters = Letters(desk)
    now = desk.now
    bury(desk, letter("m-4", "o-7", 4), park=True)
    bury(desk, letter("m-5", "o-7", 5), park=True)
    assert desk.sql("SELECT sequence FROM semel_inbox_stream") == [(-4,)]
    forever = {"sqlite": "9223372036854775807", "postgres": "'infinity'", "mysql": "'9999-12-31'"}[desk.dialect]
    desk.sql(f"INSERT INTO semel_hold (stream, until, reason) VALUES ('o-7', {forever}, 'parked'), ('o-8', {now}, 'x')")
    assert letters.purge(LetterFilter(message="m-4"), dry_run=True) == 1
    assert letters.purge(LetterFilter(message="m-4")) == 1
    assert desk.sql("SELECT sequence FROM semel_inbox_stream") == [(-5,)]  # the consumer waits for 5 now
    assert list(desk.state()["hold"]) == ["o-8"]
    assert [each.message.id for each in letters.list()] == ["m-5"]
    assert outbox(desk) == []
    assert letters.purge() == 1
    assert letters.purge() == 0
    assert desk.sql("SELECT sequence FROM semel_inbox_stream") == [(5,)]  # the consumer goes on with 6


def test_a_purge_of_what_the_relay_gave_up_frees_the_consumers_that_wait_for_it(desk: Desk) -> None:
    """Otherwise nothing would: the letter of the consumer itself is gone since the redrive."""
    letters = Letters(desk)
    for sequence in (4, 5):
        bury(desk, letter(f"m-{sequence}", "o-7", sequence), park=True)
    bury(desk, letter("m-4", "o-7", 4), "mail", park=True)
    assert letters.redrive(LetterFilter(origin="ledger", message="m-4")) == 1
    desk.execute(JoinRelays(RELAY, 60.0))
    (sent,) = desk.execute(StartMessages(RELAY, 10, 60.0))
    assert desk.execute(SettleMessages(RELAY, (), (), (DeadLetter(sent.position, "too large"),)))
    places = "SELECT consumer, sequence FROM semel_inbox_stream ORDER BY consumer"
    assert desk.sql(places) == [("ledger", -4), ("mail", -4)]
    assert letters.purge(LetterFilter(origin="")) == 1
    assert desk.sql(places) == [("ledger", -5), ("mail", -4)], "mail has a letter of its own"


def test_a_message_that_comes_back_has_all_of_its_tries(desk: Desk) -> None:
    """A consumer that is killed after it has given up a message cannot forget its starts. The message must not be given
    up again for them, without a try."""
    for id in ("m-1", "m-2"):
        desk.execute(CountStart("ledger", id))
    desk.execute(CountStart("mail", "m-1"))
    bury(desk, letter("m-1"))
    assert Letters(desk).redrive() == 1
    rows = desk.sql("SELECT consumer, id FROM semel_inbox_start ORDER BY consumer, id")
    assert rows == [("ledger", "m-2"), ("mail", "m-1")]


@pytest.mark.parametrize("desk", marked("postgres"), indirect=True)
def test_a_purge_sees_what_a_consumer_gives_up_at_the_same_moment(desk: Desk) -> None:
    """Otherwise the stream would go on, without the message that has followed the first one to the dead letters."""
    bury(desk, letter("m-4", "o-7", 4), park=True)
    other = desk.connect()
    with closing(other), ThreadPoolExecutor(1) as pool:
        with desk.transaction(other):
            bury_by_hand = (
                "INSERT INTO semel_dead_letter (origin, died, reason, sequence, created, starts, redrives, id, type, "
                "source, destination, stream, subject, content_type, headers, data) "
                "VALUES ('ledger', now(), 'x', 5, now(), 1, 0, 'm-5', 'paid', '', '', 'o-7', '', '', '{}', '')"
            )
            desk.sql(bury_by_hand, conn=other)
            desk.sql("SELECT sequence FROM semel_inbox_stream FOR UPDATE", conn=other)
            purge = pool.submit(DeadLetters(desk.store).purge, LetterFilter(message="m-4"))
            end = time.monotonic() + 30
            waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            while not desk.sql(waits):
                assert time.monotonic() < end
                time.sleep(0.01)
        assert purge.result(30) == 1
    assert desk.sql("SELECT sequence FROM semel_inbox_stream") == [(-5,)]


def test_a_redrive_is_capped_and_reports(
    open_desk: Callable[[str], Desk], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = open_desk("sqlite")
    for at in range(25):
        bury(desk, letter(f"m-{at}"))
    steps: list[tuple[int, int]] = []
    pauses: list[float] = []
    monkeypatch.setattr("semel.messaging.deadletters.time.sleep", pauses.append)
    letters = DeadLetters(desk.store)
    assert letters.redrive(LetterFilter(origin="ledger"), limit=20, rate=8, progress=lambda *s: steps.append(s)) == 20
    assert steps == [(8, 20), (16, 20), (20, 20)]
    assert pauses == [1.0, 1.0]
    assert "dead letters were moved back into the outbox: 20 (origin 'ledger')" in caplog.text
    assert letters.redrive(limit=2, rate=float("inf")) == 2
    with pytest.raises(PolicyError):
        letters.redrive(rate=0)
    with pytest.raises(ConfigurationError, match="MemoryStore is in none"):
        DeadLetters(MemoryStore())
