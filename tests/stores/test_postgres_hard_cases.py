# ruff: noqa: PT017
"""Hard cases of the PostgreSQL store."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from semel import AsyncPostgresStore, AsyncSemel, PostgresStore
from semel.core.ops import Claim, Claimed, Complete, Lookup, Resolve, SaveStep, Sweep, WatchRecord
from semel.core.states import Takeover
from semel.errors import SemelError, StoreError, StoreUnavailable, StoreUncertain
from semel.stores.postgres import migrate


@pytest.fixture
def database(postgres_url: str) -> str:
    migrate(postgres_url)
    return postgres_url


@pytest.fixture
def store(database: str) -> Iterator[PostgresStore]:
    made = PostgresStore(database, connections=1)
    yield made
    made.close()


def claim(
    name: str, nonce: int = 1, takeover: Takeover = Takeover.RETRY, ttl: float = 60.0, lease: float = 30.0
) -> Claim:
    return Claim(name.ljust(16).encode(), nonce, b"", lease, ttl, takeover, "", "op", name)


def sql(database: str, *statements: str) -> list[Any]:
    with psycopg.connect(database, autocommit=True) as raw:
        rows: list[Any] = []
        for statement in statements:
            cursor = raw.execute(statement)  # type: ignore[call-overload]
            rows = cursor.fetchall() if cursor.description else []
        return rows


TRIGGER = """
CREATE FUNCTION trip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NEW; END $$;
CREATE TRIGGER trip BEFORE UPDATE ON semel_record FOR EACH ROW EXECUTE FUNCTION trip()
"""


def test_not_stored_is_never_said_of_what_was_stored(database: str, store: PostgresStore) -> None:
    """A batch is several statements, each committed by itself: a later one fails, and all are told 'not stored'."""
    held = store.execute(claim("b"))
    sql(database, TRIGGER.format(body="RAISE EXCEPTION 'disk full' USING ERRCODE = '53100';"))
    answer, failed = store.execute_many([claim("a"), Complete(claim("b").id, held.token, b"x" * 20, 60.0)])
    assert isinstance(failed, StoreUnavailable)
    record = store.execute(Lookup(claim("a").id))
    assert not (isinstance(answer, StoreUnavailable) and record is not None), (answer, record)


def test_a_statement_that_takes_too_long_is_not_tried_once_for_every_op(database: str) -> None:
    """A slow database: a batch that timed out is sent apart, each with the whole time-out again."""
    store = PostgresStore(database, connections=1, timeout=1.0)
    try:
        held = [store.execute(claim(f"k{i}")) for i in range(8)]
        sql(database, TRIGGER.format(body="PERFORM pg_sleep(3);"))
        before = time.monotonic()
        store.execute_many([Complete(claim(f"k{i}").id, held[i].token, b"x" * 20, 60.0) for i in range(8)])
        assert time.monotonic() - before < 7 * 1.0
    finally:
        store.close()


class SoftTimeLimit(Exception):
    """As task queues raise it, from a signal handler."""


def test_a_connection_interrupted_in_mid_statement_is_not_used_again(database: str, store: PostgresStore) -> None:
    held = store.execute(claim("a"))

    def raise_it(*_: Any) -> None:
        raise SoftTimeLimit

    previous = signal.signal(signal.SIGALRM, raise_it)
    try:
        with psycopg.connect(database) as rival:
            rival.execute("SELECT * FROM semel_record FOR UPDATE")
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(SoftTimeLimit):
                store.execute(Complete(claim("a").id, held.token, b"x" * 20, 60.0))
            rival.rollback()
    finally:
        signal.signal(signal.SIGALRM, previous)
    for _ in range(2):
        time.sleep(0.05)
        record = store.execute(Lookup(claim("a").id))
    assert record is not None


def test_a_wait_is_over_in_time_though_nobody_can_listen(database: str) -> None:
    """The port's promise: after `seconds` at the latest."""
    store = PostgresStore(database)

    def unreachable(*_: Any) -> Any:
        raise OSError("no more connections")

    store._listener._receive = unreachable
    try:
        before = time.monotonic()
        store.wait(b"x" * 16, 0.1)
        assert time.monotonic() - before < 20
    finally:
        store.close()


SECRET = "hunter2"


@pytest.mark.parametrize("driver", ["sync", "asyncpg", "psycopg"])
@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://app:{SECRET} x@127.0.0.1:1/db",
        f"postgresql://app:{SECRET}/x@127.0.0.1:1/db",
        f"postgresql://app:x:{SECRET}@127.0.0.1:port/db",
        f"postgresql://app:%zz{SECRET}@127.0.0.1:1/db",
        f"postgresql://app:x#{SECRET}@127.0.0.1:1/db",
        f"postgresql://app:x[{SECRET}@127.0.0.1:1/db",
        f"postgresql://app:{SECRET}@127.0.0.1:1/db",
    ],
)
def test_no_error_shows_the_password(url: str, driver: str) -> None:
    try:
        if driver == "sync":
            store = PostgresStore(url, retry_for=0)
            try:
                store.execute(Lookup(b"x" * 16))
            finally:
                store.close()
        else:
            asyncio.run(_lookup(url, driver))
    except SemelError as error:
        assert SECRET not in str(error), error
    else:
        pytest.fail("reached?")


async def _lookup(url: str, driver: Any) -> None:
    store = AsyncPostgresStore(url, driver=driver, retry_for=0)
    try:
        await store.execute(Lookup(b"x" * 16))
    finally:
        await store.close()


def test_a_resolution_whose_answer_was_lost_touches_no_newer_claim(database: str, store: PostgresStore) -> None:
    """Resolve carries neither nonce nor token: sent again, a forced release removes whoever claimed meanwhile."""
    store.execute(claim("a", nonce=1))
    lane: Any = store._combiner._connections[0]
    once = lane._driver.send
    lost: list[int] = []

    def lossy(connection: Any, settings: Any, ops: Any, found: Any) -> Any:
        answers = once(connection, settings, ops, found)
        if type(ops[0]) is Resolve and not lost:
            lost.append(1)
            lane.close()
            other = PostgresStore(database, connections=1)
            assert isinstance(other.execute(claim("a", nonce=2)), Claimed)  # a new owner begins
            other.close()
            raise StoreUncertain("the answer was lost")
        return answers

    lane._driver.send = lossy
    with contextlib.suppress(StoreError):
        store.execute(Resolve(claim("a").id, None, 60.0, force=True))
    record = store.execute(Lookup(claim("a").id))
    assert record is not None, "the new owner's record is gone while it runs"


def test_steps_of_an_expired_record_are_forgotten_with_it(database: str, store: PostgresStore) -> None:
    first = store.execute(claim("a", nonce=1, ttl=0.05))
    store.execute(SaveStep(claim("a").id, first.token, "secret", b"v" * 20, 0))
    store.execute(Complete(claim("a").id, first.token, b"x" * 20, 0.05))
    time.sleep(0.1)
    second = store.execute(claim("a", nonce=2, ttl=0.05))
    assert second.attempt == 1
    store.execute(Complete(claim("a").id, second.token, b"x" * 20, 0.05))
    time.sleep(0.1)
    assert store.execute(Sweep(10)).removed == 1
    assert sql(database, "SELECT count(*) FROM semel_step") == [(0,)]


@pytest.mark.slow
def test_a_host_that_swallows_packets_is_given_up_within_patience_and_one_time_out() -> None:
    """`retry_for` counts only the pauses between tries, not the tries."""
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        store = PostgresStore(f"postgresql://x@127.0.0.1:{deaf.getsockname()[1]}/x", connect_timeout=2, retry_for=0.1)
        before = time.monotonic()
        with pytest.raises(StoreError):
            store.execute(Lookup(b"x" * 16))
        store.close()
        assert time.monotonic() - before < 20


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_claim_that_was_cancelled_and_given_back_stays_given_back(database: str, driver: Any) -> None:
    """The first send is held up on its lane; the second overtakes it on the other, is released, and the first lands."""

    async def scenario() -> Any:
        store = AsyncPostgresStore(database, driver=driver, connections=2, listen=False)
        guard = AsyncSemel(store, sweep_every=None)
        await asyncio.gather(*(store.execute(Lookup(bytes([i]) * 16)) for i in range(2)))
        held = asyncio.Event()
        go = asyncio.Event()
        used: Any = store._combiner._connections[0]
        real = used._driver.send  # all connections share the driver
        first: list[Any] = []

        async def slow(connection: Any, settings: Any, ops: Any, found: Any) -> Any:
            if type(ops[0]) is Claim and not first:
                first.append(ops[0])
                held.set()
                await go.wait()  # in the network's hands
            return await real(connection, settings, ops, found)

        used._driver.send = slow

        async def handler() -> int:
            return 1

        task = asyncio.create_task(guard.run("op", key="k", call=handler, guarantee="at_most_once"))
        await held.wait()
        task.cancel()
        await asyncio.wait([task], timeout=0.3)
        go.set()
        await asyncio.wait([task])
        await asyncio.sleep(0.2)
        record = await guard.lookup("op", "k")
        await guard.close()
        return record

    assert asyncio.run(scenario()) is None


def test_completing_and_watching_the_same_records_do_not_deadlock(database: str) -> None:
    names = [f"k{i:02}" for i in range(40)]
    one, two = PostgresStore(database, connections=1), PostgresStore(database, connections=1)
    try:
        tokens = {
            a.id: b.token for a, b in zip(map(claim, names), one.execute_many([claim(n) for n in names]), strict=True)
        }
        stop = time.monotonic() + 4

        def renew(store: Any, order: list[str]) -> None:
            from semel.core.ops import Renew

            while time.monotonic() < stop:
                store.execute_many([Renew(claim(n).id, tokens[claim(n).id], 30.0) for n in order])

        def watch(store: Any, order: list[str]) -> None:
            while time.monotonic() < stop:
                store.execute_many([WatchRecord(claim(n).id) for n in order])

        threads = [
            threading.Thread(target=renew, args=(one, names[::-1])),
            threading.Thread(target=watch, args=(two, names)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(1.2)
        assert sql(database, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == [(0,)]
    finally:
        one.close()
        two.close()
