"""``Relay`` and ``AsyncRelay`` on real databases, with a broker that records."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from semel import AsyncSQLiteStore, MemoryStore, PostgresStore, SQLiteStore
from semel.core.messaging import relaying
from semel.core.messaging.messages import (
    BrokerDown,
    DestinationDown,
    HeldStream,
    InspectOutbox,
    Refused,
    Sent,
    StartMessages,
    TakeLog,
    TryAgain,
)
from semel.core.messaging.relaying import RelayReport
from semel.core.ops import Op
from semel.errors import BrokerUnavailable, ConfigurationError, PolicyError, StoreUnavailable
from semel.messaging import AsyncRelay, DeadLetters, Outbox, Relay
from semel.observe import events
from tests.messaging.desks import DIALECTS, KINDS, Desk, marked
from tests.messaging.recording_broker import RecordingBroker
from tests.messaging.sources import ListSource

pytestmark = pytest.mark.timeout(60)
OpenDesk = Callable[[str], Desk]
OPEN_TRANSACTIONS = {
    "postgres": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND application_name = 'semel' AND xact_start IS NOT NULL",
    "mysql": "SELECT count(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist p "
    "ON p.id = t.trx_mysql_thread_id WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()",
}


@pytest.fixture(params=marked(*DIALECTS))
def desk(request: pytest.FixtureRequest, open_desk: OpenDesk) -> Desk:
    return open_desk(request.param)


@pytest.fixture
def sqlite(open_desk: OpenDesk) -> Desk:
    return open_desk("sqlite")


def drain(desk: Desk, broker: RecordingBroker, **settings: Any) -> RelayReport:
    if desk._runner is None:
        return Relay(desk.store, broker, **settings).drain()

    async def drain() -> RelayReport:
        return await AsyncRelay(desk.store, broker, **settings).drain()

    return desk._runner.run(drain())


def fill(desk: Desk, count: int, streams: int = 3) -> list[str]:
    with desk.transaction(desk.conn):
        for number in range(count):
            desk.add(f"m{number}", f"s{number % streams}", sequence=number // streams + 1)
    return [f"m{number}" for number in range(count)]


@pytest.mark.parametrize("kind", marked(*KINDS))
def test_it_sends_what_is_there_and_deletes_it(kind: str, open_desk: OpenDesk) -> None:
    desk = open_desk(kind)
    ids = fill(desk, 120)
    broker = RecordingBroker()
    report = drain(desk, broker, batch=50)
    assert broker.ids() == ids
    assert (report.sent, broker.calls, broker.closed) == (120, 3, 1)
    assert desk.state() == {"outbox": [], "hold": {}, "relay": {}, "lane": {}, "dead": []}
    message = broker.taken[4]
    assert (message.stream, message.sequence, message.destination, message.headers) == ("s1", 2, "orders", {"a": "1"})
    assert abs(message.time - time.time()) < 60


@pytest.mark.parametrize("kind", marked("postgres", "mysql"))
def test_no_transaction_is_open_while_messages_are_sent(kind: str, open_desk: OpenDesk) -> None:
    """It would occupy a connection for as long as a slow broker takes, and keep PostgreSQL from vacuuming."""
    desk = open_desk(kind)
    fill(desk, 3)
    broker = RecordingBroker()
    seen: list[int] = []
    broker.before = lambda: seen.append(desk.sql(OPEN_TRANSACTIONS[kind])[0][0])
    assert drain(desk, broker).sent == 3
    assert seen == [0]


def test_failures_are_settled_in_the_database(desk: Desk) -> None:
    fill(desk, 9)
    desk.add("alone")
    broker = RecordingBroker()
    results: dict[str, Any] = {
        "m0": TryAgain("busy"),
        "m1": Refused("bad"),
        "m2": Refused("worse"),
        "alone": TryAgain("no"),
    }
    broker.answer = lambda message: results.get(message.id, Sent())
    report = drain(desk, broker, on_poison={"s1": "skip", "s2": "park"})
    assert (report.sent, report.failed, report.dead) == (2, 2, 2)
    state = desk.state()
    assert state["outbox"] == [("m0", 1, True), ("m3", 0, True), ("m6", 0, True), ("alone", 1, False)]
    assert state["hold"]["s0"] == ("waits", "busy")
    assert state["hold"]["s2"] == ("parked", "worse")
    assert {id for id, _, _ in state["dead"]} == {"m1", "m2", "m5", "m8"}
    assert broker.ids() == ["m4", "m7"]


def test_a_reason_that_no_column_holds_does_not_block_the_relay(desk: Desk) -> None:
    for id in ("m0", "m1", "m2"):
        desk.add(id)
    reason = "odd \ud800\x00 text " + "ü" * 70_000
    results: dict[str, Any] = {"m0": TryAgain(reason), "m1": Refused(reason)}
    broker = RecordingBroker()
    broker.answer = lambda message: results.get(message.id, Sent())
    report = drain(desk, broker, on_poison="skip")
    assert (report.sent, report.failed, report.dead) == (1, 1, 1)
    assert desk.state()["dead"][0][1][:11] == "odd ? text "


def test_messages_for_a_destination_that_is_down_wait_and_count_no_start(desk: Desk) -> None:
    outbox = Outbox(desk.store)
    with desk.transaction(desk.conn):
        for number in range(6):
            outbox.add(desk.conn, "made", {}, id=f"s{number}", stream="s" * (number % 2), destination="down")
        outbox.add(desk.conn, "made", {}, id="u", stream="u", destination="up")
    broker = RecordingBroker()
    broker.answer = lambda message: DestinationDown("away") if message.destination == "down" else Sent()
    report = drain(desk, broker)
    assert broker.ids() == ["u"]
    assert (report.sent, report.failed, report.destinations_down) == (1, 0, 1)
    state = desk.state()
    assert [starts for _, starts, _ in state["outbox"]] == [0] * 6
    assert state["hold"] == {"s": ("waits", "away")}
    assert [due for id, _, due in state["outbox"] if id in ("s0", "s2", "s4")] == [False] * 3


@pytest.mark.slow
def test_a_broker_that_is_down_burns_no_start_even_if_the_relay_dies_then(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "BALANCE_EVERY", 0.1)
    monkeypatch.setattr(relaying, "BROKER_PAUSE_FIRST", 2.0)
    fill(desk, 5)
    broker = RecordingBroker()
    broker.answer = lambda message: BrokerDown("away")
    seen: list[int] = []
    with Relay(desk.store, broker) as relay:
        wait_until(lambda: bool(relay.report.broker_down))
        wait_until(lambda: [started for _, started in desk.state()["relay"].values()] == [[]])
        (name,) = desk.state()["relay"]
        desk.end_lease(name)  # as if it had died: whoever joins next finds nothing under way
        wait_until(lambda: [alive for alive, _ in desk.state()["relay"].values()] == [True])
        seen += [starts for _, starts, _ in desk.state()["outbox"] if starts]
        broker.answer = lambda message: Sent()
        broker.wait_for(5)
        wait_until(lambda: not desk.state()["outbox"])
    assert seen == []


def wait_until(condition: Callable[[], bool], patience: float = 30.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_parked_stream_goes_on_in_order_after_a_redrive(desk: Desk) -> None:
    outbox = Outbox(desk.store)

    def add(*ids: str) -> None:
        with desk.transaction(desk.conn):
            for id in ids:
                outbox.add(desk.conn, "made", {}, id=id, stream="s")

    broker = RecordingBroker()
    broker.answer = lambda message: Refused("bad") if message.id == "m2" else Sent()
    add("m1", "m2", "m3")
    drain(desk, broker, on_poison="park")
    add("m4")  # it waits in the outbox
    assert drain(desk, broker, on_poison="park").sent == 0
    broker.answer = lambda message: Sent()
    DeadLetters(desk.store).redrive()
    add("m5")
    assert drain(desk, broker, on_poison="park", batch=1).sent == 4
    assert broker.ids() == ["m1", "m2", "m3", "m4", "m5"]
    assert [message.sequence for message in broker.taken] == [1, 2, 3, 4, 5]


# In the background


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay that has found nothing does not look again by itself."""
    monkeypatch.setattr(relaying, "POLL_FIRST", 100.0)
    monkeypatch.setattr(relaying, "POLL_LONGEST", 100.0)
    monkeypatch.setattr(relaying, "BALANCE_EVERY", 100.0)


@pytest.mark.usefixtures("no_polls")
def test_wake_and_stop_do_not_wait_for_the_poll(sqlite: Desk) -> None:
    broker = RecordingBroker()
    relay = Relay(sqlite.store, broker, lease="300s")
    relay.start()
    wait_until(lambda: relay.report.lanes == 64)
    sqlite.add("m1")
    relay.wake()
    broker.wait_for(1)
    relay.stop()
    assert sqlite.state()["relay"] == {}
    assert broker.closed == 1
    relay.start()  # again
    sqlite.add("m2")
    relay.wake()
    broker.wait_for(2)
    relay.stop(timeout=10)


@pytest.mark.usefixtures("no_polls")
def test_async_wake_and_stop(open_desk: OpenDesk) -> None:
    desk = open_desk("async-sqlite")
    broker = RecordingBroker()

    async def main() -> None:
        async with AsyncRelay(desk.store, broker, lease="300s") as relay:
            await asyncio.to_thread(wait_until, lambda: relay.report.lanes == 64)
            desk.add("m1")
            relay.wake()
            await broker.wait_for_async(1)
        assert broker.closed == 1

    assert desk._runner is not None
    desk._runner.run(main())
    assert desk.state()["relay"] == {}


@pytest.mark.timeout(30)
def test_a_relay_that_drains_while_it_runs_in_the_background_still_stops(sqlite: Desk) -> None:
    broker = RecordingBroker()
    with Relay(sqlite.store, broker) as relay:
        wait_until(lambda: relay.report.lanes == 64)
        relay.drain()
        sqlite.add("m1")
        relay.wake()
        broker.wait_for(1)
    assert sqlite.state()["relay"] == {}


def test_a_relay_that_was_stopped_can_drain(sqlite: Desk) -> None:
    relay = Relay(sqlite.store, RecordingBroker())
    with relay:
        wait_until(lambda: relay.report.lanes == 64)
        relay.stop()  # the end of the block stops it again
    sqlite.add("m1")
    assert relay.drain().sent == 1
    sqlite.add("m2")
    relay.stop()  # a signal that comes before the beginning is not lost
    assert relay.drain().sent == 0
    assert relay.drain().sent == 1


def test_an_async_relay_that_was_stopped_can_drain(open_desk: OpenDesk) -> None:
    desk = open_desk("async-sqlite")
    relay = AsyncRelay(desk.store, RecordingBroker())

    async def main() -> None:
        async with relay:
            await asyncio.to_thread(wait_until, lambda: relay.report.lanes == 64)
            await relay.stop()
        desk.add("m1")
        assert (await relay.drain()).sent == 1
        desk.add("m2")
        await relay.stop()
        assert (await relay.drain()).sent == 0
        assert (await relay.drain()).sent == 1

    assert desk._runner is not None
    desk._runner.run(main())


def test_an_async_relay_starts_again_in_another_event_loop(open_desk: OpenDesk) -> None:
    """As in the tests of an application that starts it in its lifespan."""
    desk = open_desk("async-sqlite")
    broker = RecordingBroker()
    relay = AsyncRelay(desk.store, broker)

    async def main(number: int) -> None:
        async with relay:
            await asyncio.to_thread(wait_until, lambda: relay._driver._awake._waiters)  # it rests
            desk.add(f"m{number}")
            relay.wake()
            await broker.wait_for_async(number)

    for number in (1, 2):
        asyncio.run(main(number))


@pytest.mark.postgres
@pytest.mark.server
@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("kind", ["sync", "asyncpg", "psycopg"])
def test_a_commit_on_postgres_wakes_it(open_desk: OpenDesk, kind: str) -> None:
    from semel import AsyncPostgresStore

    desk = open_desk("postgres")
    broker = RecordingBroker()

    outbox = Outbox(desk.store)

    def seen() -> bool:
        with desk.transaction(desk.conn):
            outbox.add(desk.conn, "made", {})
        return bool(broker.taken)

    def add() -> None:
        wait_until(lambda: len(desk.state()["lane"]) == 64)
        wait_until(seen)  # more than once, because the relay may not listen yet

    async def main() -> None:
        store = AsyncPostgresStore(desk.url, driver=kind)  # type: ignore[arg-type]
        async with AsyncRelay(store, broker, lease="300s"):
            await asyncio.to_thread(add)
        await store.close()

    if kind == "sync":
        store = PostgresStore(desk.url)
        with Relay(store, broker, lease="300s"):
            add()
        store.close()
    else:
        asyncio.run(main())


def test_stop_finishes_the_batch_in_hand(sqlite: Desk) -> None:
    fill(sqlite, 20)
    broker = RecordingBroker()
    inside, go_on = threading.Event(), threading.Event()

    def before() -> Any:
        inside.set()
        return asyncio.to_thread(go_on.wait)

    broker.before = before
    relay = Relay(sqlite.store, broker, batch=10)
    relay.start()
    assert inside.wait(30)
    stopper = threading.Thread(target=relay.stop)
    stopper.start()
    go_on.set()
    stopper.join(30)
    assert len(broker.taken) == 10
    assert [id for id, _, _ in sqlite.state()["outbox"]] == [f"m{number}" for number in range(10, 20)]
    assert sqlite.state()["relay"] == {}


def test_a_cancelled_relay_does_not_leave_while_a_batch_is_under_way(open_desk: OpenDesk) -> None:
    """Another relay must not take its lanes before its lease has ended: the broker may still send the batch."""
    desk = open_desk("async-sqlite")
    fill(desk, 3)
    broker = RecordingBroker()

    async def main() -> None:
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.sleep(100)

        broker.before = hang
        relay = AsyncRelay(desk.store, broker)
        relay.start()
        await reached.wait()
        await relay.stop(timeout=0.01)

    assert desk._runner is not None
    desk._runner.run(main())
    assert len(desk.state()["relay"]) == 1
    assert len(desk.state()["outbox"]) == 3


def test_errors_of_the_store_only_pause_it(sqlite: Desk) -> None:
    fill(sqlite, 30)
    broker = RecordingBroker()
    store = Unreliable(sqlite.url)
    with Relay(store, broker, batch=5) as relay:
        broker.wait_for(30)
        wait_until(lambda: not sqlite.state()["outbox"])
    assert store.failures > 5
    assert broker.ids() == [f"m{number}" for number in range(30)]
    assert relay.report.sent == 30
    store.close()


class Unreliable(SQLiteStore):
    """Fails at every other Op."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.failures = 0
        self._turn = False

    def execute(self, op: Op[Any]) -> Any:
        self._turn = not self._turn
        if self._turn:
            self.failures += 1
            raise StoreUnavailable("away")
        return super().execute(op)


def test_an_error_that_an_operator_has_to_mend_costs_no_lease(sqlite: Desk) -> None:
    """Such as a replication slot that is gone. A relay that began anew each time would leave its lanes to the dead."""
    fill(sqlite, 3)
    broker = RecordingBroker()
    left = 3

    class Broken(SQLiteStore):
        def execute(self, op: Op[Any]) -> Any:
            nonlocal left
            if isinstance(op, TakeLog) and left:
                left -= 1
                raise ConfigurationError("the slot is gone")
            return super().execute(op)

    store = Broken(sqlite.url)
    with Relay(store, broker, lease="10m"):
        broker.wait_for(3)
        assert len(sqlite.state()["relay"]) == 1
    store.close()


@pytest.mark.parametrize("error", [None, ConfigurationError("the tables are being changed")])
def test_what_was_published_is_settled_although_the_store_does_not_read_ahead(
    open_desk: OpenDesk, error: Exception | None
) -> None:
    """The store answers to a read too late, or with an error that is not its own. The batch that was published
    meanwhile must be settled before the lease ends, otherwise it is sent again."""
    desk = open_desk("async-sqlite")
    fill(desk, 6)
    broker = RecordingBroker()

    class Mute(AsyncSQLiteStore):
        async def execute(self, op: Op[Any]) -> Any:
            if isinstance(op, StartMessages) and op.ahead:
                if error is not None:
                    raise error
                await asyncio.sleep(3)
            return await super().execute(op)

    async def main() -> None:
        store = Mute(desk.url)
        async with AsyncRelay(store, broker, batch=3, lease=1.0):
            await broker.wait_for_async(6)
            await asyncio.to_thread(wait_until, lambda: not desk.state()["outbox"])
        await store.close()

    assert desk._runner is not None
    desk._runner.run(main())
    assert broker.ids() == [f"m{number}" for number in range(6)]


@pytest.mark.postgres
@pytest.mark.server
def test_rows_that_cannot_be_removed_yet_are_not_read_again_and_again(
    open_desk: OpenDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an old transaction is open anywhere, PostgreSQL keeps every row that the relay deletes."""
    desk = open_desk("postgres")
    old = desk.connect()
    desk.sql("BEGIN ISOLATION LEVEL REPEATABLE READ", conn=old)
    desk.sql("SELECT 1", conn=old)

    def entries_read(rescan: float) -> int:
        """How many entries of the index one drain of 2,000 messages reads."""
        monkeypatch.setattr(relaying, "RESCAN_EVERY", rescan)
        desk.sql("TRUNCATE semel_outbox")
        fill(desk, 2000, streams=20)
        desk.sql("ANALYZE semel_outbox")
        before = index_reads()
        store = PostgresStore(desk.url, listen=False)
        assert Relay(store, RecordingBroker(), batch=50).drain().sent == 2000
        store.close()  # the server counts what a session has read when that ends, at the latest
        wait_until(lambda: not desk.sql("SELECT 1 FROM pg_stat_activity WHERE application_name = 'semel'"))
        wait_until(lambda: index_reads() - before >= 2000)
        return index_reads() - before

    def index_reads() -> int:
        desk.sql("SELECT pg_stat_clear_snapshot()")
        rows = desk.sql("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'semel_outbox_pkey'")
        return int(rows[0][0])

    naive, ours = entries_read(0.0), entries_read(100.0)
    old.close()
    assert naive > 20_000
    assert ours < naive / 3


# Adapters that misbehave


async def hang() -> None:
    await asyncio.sleep(100)


async def drop() -> None:
    raise BrokerUnavailable("no route")


async def break_down() -> None:
    raise ZeroDivisionError("a mistake in the adapter")


@pytest.mark.parametrize(
    ("before", "down", "reason"),
    [(hang, "", "did not return"), (drop, "no route", ""), (break_down, "", "ZeroDivisionError")],
)
def test_an_adapter_that_misbehaves_does_not_stop_the_relay(sqlite: Desk, before: Any, down: str, reason: str) -> None:
    fill(sqlite, 1)
    broker = RecordingBroker()
    broker.before = before
    report = drain(sqlite, broker, lease="1.2s")
    assert report.broker_down == down
    assert sqlite.state()["outbox"] == [("m0", int(not down), True)]
    assert reason in sqlite.state()["hold"].get("s0", ("", ""))[1]


def test_results_that_are_too_few_count_for_no_message(sqlite: Desk) -> None:
    fill(sqlite, 2, streams=2)
    broker = RecordingBroker()
    publish = broker.publish

    async def short(messages: Any, deadline: float) -> Any:
        return (await publish(messages, deadline))[1:]

    broker.publish = short  # type: ignore[method-assign]
    assert drain(sqlite, broker).failed == 2


# Settings, and what is refused


def test_a_broker_without_order_is_refused(sqlite: Desk, async_store: AsyncSQLiteStore) -> None:
    broker = RecordingBroker(ordered=False)
    for relay in (Relay, AsyncRelay):
        with pytest.raises(ConfigurationError, match="does not keep the order of a stream: pass allow_unordered=True"):
            relay(sqlite.store if relay is Relay else async_store, broker)
    fill(sqlite, 1)
    assert drain(sqlite, broker, allow_unordered=True).sent == 1


def test_a_store_without_an_outbox_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="MemoryStore is in none"):
        Relay(MemoryStore(), RecordingBroker())


def test_what_is_no_broker_is_refused(sqlite: Desk) -> None:
    nowhere: Any = "redis://localhost:6379/0"
    with pytest.raises(ConfigurationError, match=r"a relay takes a broker, not a string: open_broker\(URL\) opens one"):
        Relay(sqlite.store, nowhere)
    with pytest.raises(ConfigurationError, match="a relay takes a broker, not ListSource"):
        Relay(sqlite.store, cast(Any, ListSource([])))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": 0}, {"tries": 0}, {"tries": 1.5}, {"lease": "500ms"}, {"pause": 0}, {"pause": "10m"},
        {"on_poison": "explode"}, {"on_poison": {"*": "explode"}},
    ],
)  # fmt: skip
def test_settings_are_checked(sqlite: Desk, settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        Relay(sqlite.store, RecordingBroker(), **settings)


# What an operator sees


def test_problems_are_logged_once_a_minute_and_events_reach_the_hook(
    sqlite: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(4):
        sqlite.add(f"m{number}")
    broker = RecordingBroker()
    broker.answer = lambda message: TryAgain("busy") if message.id != "m3" else Refused("bad")
    seen: list[str] = []

    def hook(event: events.Event) -> None:
        seen.append(event.name)
        raise ZeroDivisionError

    with caplog.at_level(logging.INFO, "semel.relay"):
        drain(sqlite, broker, on_poison="skip", on_event=hook)
    texts = [record.getMessage() for record in caplog.records if "hook" not in record.getMessage()]
    assert len(texts) == 2
    assert "m0" in texts[0]
    assert "attempt 1 failed" in texts[0]
    assert "m3" in texts[1]
    assert "dead letters: bad" in texts[1]
    assert seen == ["publish_failed"] * 3 + ["publish_given_up"]


def test_the_log_names_a_stream_only_if_there_is_one(sqlite: Desk, caplog: pytest.LogCaptureFixture) -> None:
    sqlite.add("m0", "s0")
    sqlite.add("m1")
    broker = RecordingBroker()
    broker.answer = lambda message: Refused("bad")
    drain(sqlite, broker, on_poison="block")
    texts = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(" ")[2] for text in texts] == [
        "m0 cannot be sent, and its stream 's0' waits: bad",
        "m1 cannot be sent, and is tried again later: bad",
    ]


def test_an_operator_sees_a_stream_that_fails_also_when_its_next_try_is_due(desk: Desk) -> None:
    for number in range(2):
        desk.add(f"m{number}", "s0", sequence=number + 1)
    broker = RecordingBroker()
    sent, broker.answer = broker.answer, lambda message: TryAgain("busy")
    Relay(desk.store, broker, pause="200ms", longest_pause="200ms").drain()
    time.sleep(0.4)
    assert desk.execute(InspectOutbox(10)).held == (HeldStream("s0", 2, 0.0, "busy"),)
    broker.answer = sent
    Relay(desk.store, broker).drain()
    assert desk.execute(InspectOutbox(10)).held == ()


def test_an_operator_sees_what_waits_and_why(desk: Desk) -> None:
    for number in range(6):
        desk.add(f"m{number}", f"s{number % 3}", sequence=number // 3 + 1)
    broker = RecordingBroker()
    results: dict[str, Any] = {"m0": TryAgain("busy", 100.0), "m1": Refused("bad")}
    sent = broker.answer
    broker.answer = lambda message: results.get(message.id) or sent(message)
    Relay(desk.store, broker, on_poison="park").drain()
    desk.add("later", "s1")
    state = desk.execute(InspectOutbox(10))
    (depth,) = state.destinations
    assert (depth.destination, depth.messages, depth.failing) == ("orders", 3, 1)
    assert 0 <= depth.oldest < 60
    parked, waiting = state.held
    assert parked == HeldStream("s1", 1, None, "bad")
    assert (waiting.stream, waiting.messages, waiting.reason) == ("s0", 2, "busy")
    assert 40 < waiting.seconds <= 100
    assert desk.execute(InspectOutbox(1)).held == (parked,)
    assert (state.relays, state.lanes, state.more) == (0, 0, False)
    few = desk.execute(InspectOutbox(10, look=1))  # a page of a console does not count a million messages
    assert (few.more, few.destinations[0].messages, len(few.held)) == (True, 2, 2)
    broker.answer = sent
    with Relay(desk.store, broker):
        wait_until(lambda: desk.execute(InspectOutbox(1)).lanes == 64)
        assert desk.execute(InspectOutbox(1)).relays == 1
