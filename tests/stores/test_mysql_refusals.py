"""MySQL that cannot store, or cannot be reached: each case is a clear error of our tree, and nothing is run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pymysql
import pytest

from semel import (
    AsyncMySQLStore,
    AsyncSemel,
    MySQLStore,
    NotMigrated,
    Semel,
    SemelError,
    StoreError,
    StoreUnavailable,
    StoreUncertain,
    open_async_store,
    open_store,
)
from semel.core.ops import Claim, Claimed, Complete, Lookup, Resolve, Sweep
from semel.core.states import Takeover
from semel.errors import StoreURLError
from semel.sql.connections.errors import mysql_error
from semel.sql.dialects import mysql as dialect
from semel.stores.mysql import migrate
from semel.stores.mysql.connections import MySQLSettings
from tests.servers import MariaDBServer
from tests.servers.freezing import freeze


def claim(name: str, nonce: int = 1, ttl: float = 60.0) -> Claim:
    return Claim(name.ljust(16).encode(), nonce, b"", 30.0, ttl, Takeover.RETRY, "", "op", name)


@pytest.fixture
def database(mariadb_url: str) -> str:
    migrate(mariadb_url)
    return mariadb_url


@pytest.fixture
def store(database: str) -> Iterator[MySQLStore]:
    with contextlib.closing(MySQLStore(database, connections=1)) as made:
        yield made


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (1114, StoreUnavailable, "full"),
        (1290, StoreUnavailable, "read-only"),
        (1836, StoreUnavailable, "read-only"),
        (1146, NotMigrated, "semel migrate"),
        (2006, StoreUncertain, "lost"),
        (2013, StoreUncertain, "lost"),
        (1927, StoreUncertain, "lost"),
        (None, StoreUncertain, "lost"),
        (1180, StoreUncertain, "committed"),
        (1213, StoreUnavailable, "because of others"),
        (1205, StoreUnavailable, "because of others"),
        (1969, StoreUnavailable, "took too long"),
        (1406, StoreUnavailable, "refused"),
    ],
)
def test_what_the_server_says_in_our_words(number: int | None, kind: type[Exception], words: str) -> None:
    error = mysql_error(number, "whatever it said")
    assert isinstance(error, kind)
    assert words in str(error)


def test_a_read_only_server_is_said_to_be_one_and_the_handler_does_not_run(private_mariadb: MariaDBServer) -> None:
    url = private_mariadb.create_database()
    migrate(url)
    for statement in (
        "CREATE USER app IDENTIFIED BY 'p@ss/wörd'",
        "GRANT ALL ON `%`.* TO app",  # without the right to write to a read-only server
        "SET GLOBAL read_only = 1",
    ):
        private_mariadb.execute(statement)
    url = url.replace("root@", "app:p%40ss%2Fw%C3%B6rd@")
    ran: list[str] = []
    with contextlib.closing(MySQLStore(url)) as store:
        with pytest.raises(StoreUnavailable, match="read-only") as refused:
            Semel(store, sweep_every=None).run("ship", key="1", call=lambda: ran.append("x"))
        assert isinstance(refused.value.__cause__, pymysql.MySQLError), "the driver's own error is behind it"

    async def main() -> None:
        async def call() -> None:
            ran.append("x")

        store = AsyncMySQLStore(url)
        with pytest.raises(StoreUnavailable, match="read-only"):
            await AsyncSemel(store, sweep_every=None).run("ship", key="1", call=call)
        await store.close()

    asyncio.run(main())
    assert ran == []


def test_what_is_larger_than_a_packet_is_refused_before_it_is_sent(private_mariadb: MariaDBServer) -> None:
    url = private_mariadb.create_database()
    migrate(url)
    private_mariadb.execute("SET GLOBAL max_allowed_packet = 1048576")
    with contextlib.closing(MySQLStore(url, connections=1)) as store:
        small, large = store.execute_many([claim("a"), claim("b")])
        lane: Any = store._combiner._connections[0]
        answers = store.execute_many(
            [
                Complete(claim("a").id, small.token, b"x" * 300_000, 60.0),
                Complete(claim("b").id, large.token, b"x" * 700_000, 60.0),
            ]
        )
        assert answers[0] is True, "a neighbour is sent by itself"
        assert isinstance(answers[1], StoreUnavailable)
        assert "max_allowed_packet" in str(answers[1])
        assert lane._connection is not None, "the connection is still good"
        assert store.execute(Lookup(claim("b").id)) is not None


def test_nobody_is_told_not_stored_of_what_was_stored(database: str, store: MySQLStore) -> None:
    """A batch is several packets, each committed by itself, and a later one fails."""
    held = store.execute(claim("b"))
    assert isinstance(held, Claimed)
    with _raw(database) as raw, raw.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER trip BEFORE UPDATE ON semel_record FOR EACH ROW"
            " SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 1021"
        )
    answer, failed = store.execute_many([claim("a"), Complete(claim("b").id, held.token, b"x" * 20, 60.0)])
    assert isinstance(failed, StoreUnavailable)
    assert "full" in str(failed)
    assert isinstance(answer, Claimed)


def test_a_packet_that_fails_half_way_is_uncertain_where_its_first_half_is_committed(
    database: str, store: MySQLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of MySQL a claim is an insert and a look in one packet: the look fails, the insert stands."""
    program = dialect.program
    monkeypatch.setattr(dialect, "program", lambda ops, found, returning: program(ops, found, returning=False))
    look = dialect._SHARED["look"]
    monkeypatch.setitem(
        dialect._SHARED, "look", type(look)("look", look.sql.replace("FROM semel_record", "FROM nowhere"), False)
    )
    with pytest.raises(StoreUncertain):
        store.execute(claim("a"))
    with _raw(database) as raw, raw.cursor() as cursor:
        cursor.execute("SELECT COUNT(*) FROM semel_record")
        assert cursor.fetchone() == (1,)


class SoftTimeLimit(Exception):
    """As task queues raise it, from a signal handler."""


def test_a_connection_interrupted_in_mid_statement_is_not_used_again(database: str, store: MySQLStore) -> None:
    held = store.execute(claim("a"))
    assert isinstance(held, Claimed)

    def raise_it(*_: Any) -> None:
        raise SoftTimeLimit

    previous = signal.signal(signal.SIGALRM, raise_it)
    try:
        with _raw(database) as rival, rival.cursor() as cursor:
            cursor.execute("START TRANSACTION")
            cursor.execute("SELECT * FROM semel_record FOR UPDATE")
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(SoftTimeLimit):
                store.execute(Complete(claim("a").id, held.token, b"x" * 20, 60.0))
            cursor.execute("ROLLBACK")
    finally:
        signal.signal(signal.SIGALRM, previous)
    for _ in range(2):
        assert store.execute(Lookup(claim("a").id)) is not None


def test_a_connection_that_someone_ends_is_opened_again_and_the_op_is_done_once(
    database: str, store: MySQLStore
) -> None:
    first = store.execute(claim("a"))
    for _ in range(3):
        _end_connections(database, store)
        assert store.execute(claim("a")) == first, "the same claim, known by its nonce"
    _end_connections(database, store)
    assert store.execute(Sweep(10)).removed == 0


def _end_connections(database: str, store: MySQLStore) -> None:
    lane: Any = store._combiner._connections[0]
    own = lane._connection
    assert own is not None
    with _raw(database) as raw, raw.cursor() as cursor:
        cursor.execute(f"KILL {own.raw.thread_id()}")


def test_a_resolution_whose_connection_was_lost_is_not_sent_again(database: str, store: MySQLStore) -> None:
    """Resolve carries neither nonce nor token: sent again, it could remove whoever claimed meanwhile."""
    store.execute(claim("a"))
    _end_connections(database, store)
    with pytest.raises(StoreUncertain):
        store.execute(Resolve(claim("a").id, None, 60.0, force=True))
    assert store.execute(Resolve(claim("a").id, None, 60.0, force=True)).name == "RUNNING"


SECRET = "hunter2"


@pytest.mark.slow  # PyMySQL and asyncmy try to connect for a second
@pytest.mark.parametrize("opens", [open_store, open_async_store])
@pytest.mark.parametrize(
    "url",
    [
        f"mysql://app:{SECRET} x@127.0.0.1:1/db",
        f"mysql://app:{SECRET}/x@127.0.0.1:1/db",
        f"mysql://app:x:{SECRET}@127.0.0.1:port/db",
        f"mysql://app:x[{SECRET}@127.0.0.1:1/db",
        f"mysql://app:x#{SECRET}@127.0.0.1:1/db",
        f"mariadb://app:{SECRET}@127.0.0.1:1/db",
    ],
)
def test_no_error_shows_the_password(url: str, opens: Any) -> None:
    def ask() -> None:
        if opens is open_async_store:
            asyncio.run(ask_async())
        with contextlib.closing(opens(url)) as store:
            store.execute(Lookup(b"x" * 16))

    async def ask_async() -> None:
        store = opens(url)
        try:
            await store.execute(Lookup(b"x" * 16))
        finally:
            await store.close()

    with pytest.raises(SemelError) as refused:
        ask()
    assert SECRET not in str(refused.value)
    assert isinstance(refused.value, (StoreURLError, StoreUnavailable))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://app@host", "mysql://user:password@host:3306/database"),
        ("mysql://app@host/db?charset=latin1", "leave charset out"),
        ("mysql://app@host/db?chraset=latin1", "ssl_ca"),
        ("mysql://app@host/db?ssl=maybe", "true or false"),
        ("mysql://app@host/db?ssl_ca=/no/such/file", "cannot be read"),
    ],
)
def test_a_url_that_cannot_be_meant_says_what_can(url: str, words: str) -> None:
    with pytest.raises(StoreURLError, match=words):
        MySQLStore(url)


def test_what_a_url_says_is_what_the_driver_is_told() -> None:
    where = MySQLSettings("mysql://a%40b:p%2Fw%C3%B6@h:3307/shop%20x?unix_socket=/run/s&ssl=true", 1, 1, 1, 1).where
    assert where.pop("ssl").check_hostname is True
    assert where == {
        "host": "h", "port": 3307, "user": "a@b", "password": "p/wö".encode(), "database": "shop x",
        "unix_socket": "/run/s",
    }  # fmt: skip


@pytest.mark.parametrize("async_", [False, True])
def test_a_host_that_never_answers_is_given_up(async_: bool) -> None:
    """It takes the connection and says nothing: bounded by the connection's own time-out."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(64)
        url = f"mysql://x@127.0.0.1:{deaf.getsockname()[1]}/x"

        def ask() -> None:
            if async_:
                asyncio.run(ask_async())
            with contextlib.closing(MySQLStore(url, connect_timeout=0.3, retry_for=0.0)) as store:
                store.execute(Lookup(b"x" * 16))

        async def ask_async() -> None:
            store = AsyncMySQLStore(url, connect_timeout=0.3, retry_for=0.0)
            try:
                await store.execute(Lookup(b"x" * 16))
            finally:
                await store.close()

        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            ask()


@pytest.mark.parametrize("async_", [False, True])
def test_a_server_that_falls_silent_is_uncertain_within_the_time_out(
    private_mariadb: MariaDBServer, async_: bool
) -> None:
    url = private_mariadb.create_database()
    migrate(url)
    server = private_mariadb.pid
    assert server is not None

    def ask() -> None:
        with contextlib.closing(MySQLStore(url, timeout=0.5, retry_for=0.0, connections=1)) as store:
            store.execute(claim("a"))
            freeze(server)
            store.execute(claim("a"))

    async def ask_async() -> None:
        store = AsyncMySQLStore(url, timeout=0.5, retry_for=0.0, connections=1)
        try:
            await store.execute(claim("a"))
            freeze(server)
            await store.execute(claim("a"))
        finally:
            await store.close()

    try:
        with pytest.raises(StoreUncertain):
            asyncio.run(ask_async()) if async_ else ask()
    finally:
        os.kill(server, signal.SIGCONT)


def test_a_forked_child_opens_connections_of_its_own(database: str, store: MySQLStore) -> None:
    first = store.execute(claim("a"))
    assert isinstance(first, Claimed)
    lane: Any = store._combiner._connections[0]
    session = lane._connection.raw.thread_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "?"
        with contextlib.suppress(BaseException):
            answer = f"{store.execute(claim('a')) == first} {lane._connection.raw.thread_id() != session}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"True True"
    assert store.execute(Lookup(claim("a").id)) is not None
    assert lane._connection.raw.thread_id() == session, "the parent's session goes on"
    os.close(reader)
    os.close(writer)


def test_threads_share_few_connections(database: str) -> None:
    with contextlib.closing(MySQLStore(database, connections=2)) as store:
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda n=n: answers.append(store.execute(claim(f"k{n}")))) for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [type(answer) for answer in answers] == [Claimed] * 16
        with _raw(database) as raw, raw.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()")
            assert cursor.fetchone()[0] <= 3


def test_a_store_that_is_closed_says_so(store: MySQLStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.execute(Lookup(b"x" * 16))


def _raw(url: str) -> Any:
    return pymysql.connect(**MySQLSettings(url, 1, 1, 1, 1).where, autocommit=True)
