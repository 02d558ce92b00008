"""Redis beside what its records are: how many commands a call costs, what is shared, what comes back after trouble."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Set
from typing import Any

import pytest

from semel import AsyncRedisStore, AsyncSemel, ConfigurationError, RedisStore, Semel, StoreUnavailable, StoreUncertain
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Op, Release, Renew, Resolve, SaveStep, Sweep
from semel.core.states import State, Takeover
from semel.stores.listening import AsyncListener, Listener
from semel.stores.redis.aio_connection import WRITE_EARLY, AsyncRedisConnection
from semel.stores.redis.commands import ServerClock, unpack
from tests.servers import RedisServer
from tests.servers.base import free_port
from tests.servers.freezing import freeze

PLAIN = {"get", "set", "evalsha", "eval", "publish", "setrange", "keys", "scan", "wait", "script|load", "time"}
LOOKS = {"getrange", "pttl"}
"""What a sweep asks of each key; pttl is also what scripts ask."""


def claim(
    id: bytes | None = None, nonce: int = 1, *, lease: float = 60.0, takeover: Takeover = Takeover.RETRY
) -> Claim:
    return Claim(id or os.urandom(16), nonce, b"", lease, 3600.0, takeover, "acme", "ship", "key")


def commands(server: RedisServer, also: Set[str] = frozenset()) -> dict[str, int]:
    """How often each command ran since the last call, those of the tests themselves left out."""
    found = re.findall(r"cmdstat_([\w|]+):calls=(\d+)", server.cli("INFO", "commandstats"))
    server.cli("CONFIG", "RESETSTAT")
    return {name: int(calls) for name, calls in found if name in PLAIN | also}


def number(server: RedisServer, section: str, name: str) -> int:
    found = re.search(rf"^{name}:(\d+)", server.cli("INFO", section), re.MULTILINE)
    assert found, name
    return int(found[1])


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[AsyncRedisStore]:
    store = AsyncRedisStore(url)
    try:
        yield store
    finally:
        await store.close()


async def told(store: AsyncRedisStore, op: Op[Any]) -> Any:
    return await store.execute(op)


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(main())


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    with contextlib.closing(RedisStore(redis_url)) as opened:
        yield opened


# What a call costs


def test_a_first_execution_is_two_commands_and_a_replay_is_one(private_redis: RedisServer) -> None:
    with Semel(RedisStore(private_redis.url), sweep_every=None) as guard:
        guard.run("ship", key=0, call=lambda: "warm")
        commands(private_redis)
        guard.run("ship", key=1, call=lambda: "sent")
        # SET NX GET, and EVALSHA, which reads and writes within the server.
        assert commands(private_redis) == {"set": 1 + 1, "evalsha": 1, "get": 1}
        guard.run("ship", key=1, call=lambda: "sent")
        assert commands(private_redis) == {"set": 1}


def test_the_async_store_costs_as_much(private_redis: RedisServer) -> None:
    async def main() -> None:
        async with AsyncSemel(AsyncRedisStore(private_redis.url), sweep_every=None) as guard:

            async def send() -> str:
                return "sent"

            await guard.run("ship", key=0, call=send)
            commands(private_redis)
            await guard.run("ship", key=1, call=send)
            assert commands(private_redis) == {"set": 1 + 1, "evalsha": 1, "get": 1}
            await guard.run("ship", key=1, call=send)
            assert commands(private_redis) == {"set": 1}

    run(main)


def test_the_time_is_asked_for_again_now_and_then(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        store.execute(claim())
        commands(private_redis)
        store.execute_many([claim() for _ in range(20)])
        assert commands(private_redis) == {"set": 20}
        lanes: Any = store._combiner._connections
        for lane in lanes:
            for connection in lane._connections.values():
                connection.clock.ask_at = 0
        op = claim()
        assert isinstance(store.execute(op), Claimed)
        assert commands(private_redis) == {"set": 1, "time": 1}
        record = store.execute(Lookup(op.id))
        assert record is not None
        assert 0 <= record.age < 60


def test_nothing_but_a_sweep_walks_the_keys(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        first = claim()
        won = store.execute(first)
        assert isinstance(won, Claimed)
        token = won.token
        store.execute_many(
            [
                claim(first.id, 2), Renew(first.id, token, 60.0), SaveStep(first.id, token, "charge", b"1", 0),
                Lookup(first.id), Complete(first.id, token, b"", 60.0), Release(first.id, token),
                Resolve(first.id, None, 60.0), claim(first.id, 3),
            ]
        )  # fmt: skip
        assert not {"keys", "scan"} & commands(private_redis).keys()
        store.execute(Sweep(10))
        assert commands(private_redis)["scan"] == 1


def test_a_sweep_asks_one_thing_of_a_record_that_is_not_in_doubt(private_redis: RedisServer) -> None:
    """It goes through the connection of the calls, and through their event loop."""

    async def main() -> None:
        async with opened(private_redis.url) as store:
            ops = [claim(takeover=takeover) for takeover in Takeover for _ in range(10)]
            for op in ops:
                assert isinstance(await store.execute(op), Claimed)
            commands(private_redis)
            assert (await store.execute(Sweep(100))).unknown == 0
            asked = commands(private_redis, LOOKS)
            assert asked["getrange"] == 30
            assert asked["pttl"] == 20, "those that may not be run again"

    run(main)


def test_an_async_sweep_sends_a_script_that_the_server_has_forgotten(private_redis: RedisServer) -> None:
    async def main() -> None:
        async with opened(private_redis.url) as store:
            for _ in range(5):
                op = claim(lease=0.001, takeover=Takeover.REJECT)
                object.__setattr__(op, "ttl", 0.001)
                await store.execute(op)
            private_redis.cli("SCRIPT", "FLUSH")
            async with asyncio.timeout(10):
                found = 0
                while found < 5:
                    found += (await store.execute(Sweep(100))).unknown
            assert found == 5

    run(main)


def test_names_that_are_no_valid_text_are_kept_as_they_are(store: RedisStore) -> None:
    op = claim()
    for name in ("tenant", "operation", "key"):
        object.__setattr__(op, name, f"{name} \ud800")
    won = store.execute(op)
    assert isinstance(won, Claimed)
    record = store.execute(Lookup(op.id))
    assert record is not None
    assert (record.tenant, record.operation, record.key) == (op.tenant, op.operation, op.key)
    assert store.execute(Complete(op.id, won.token, b"x", 60.0))
    met = store.execute(op)
    found = store.execute(Lookup(op.id))
    assert isinstance(met, Existing)
    assert found is not None
    for name in ("id", "state", "token", "attempt", "fingerprint", "snapshot", "tenant", "operation", "key"):
        assert getattr(met.record, name) == getattr(found, name)


def test_a_sweep_is_bounded_and_goes_on_where_it_stopped(
    private_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.stores.redis.programs.SCAN_COUNT", 10)
    monkeypatch.setattr("semel.stores.redis.programs.MAX_SCANS", 3)
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        abandoned = [claim(lease=0.001, takeover=Takeover.REJECT) for _ in range(200)]
        for op in abandoned:
            object.__setattr__(op, "ttl", 0.001)
        store.execute_many(abandoned)
        commands(private_redis)
        time.sleep(0.01)
        found, sweeps = 0, 0
        while found < 200:
            swept = store.execute(Sweep(1000))
            assert swept.removed == 0
            found += swept.unknown
            sweeps += 1
            assert sweeps < 30, "it begins again and again at the start"
            assert commands(private_redis)["scan"] <= 3
        assert found == 200
        assert sweeps > 1
        assert store.execute(Lookup(abandoned[0].id)).state is State.UNKNOWN  # type: ignore[union-attr]


class CountingTransport:
    """A transport that counts writes."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.writes += 1
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()


def test_tasks_of_one_turn_share_a_connection_and_its_writes(private_redis: RedisServer) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url)
        await store.execute(claim())
        (link,) = store._servers._connections.values()
        counting: Any = CountingTransport(link._transport)
        link._transport = counting
        answers = await asyncio.gather(*(store.execute(claim()) for _ in range(100)))
        assert {type(answer) for answer in answers} == {Claimed}
        assert counting.writes == -(-100 // WRITE_EARLY)
        assert number(private_redis, "clients", "connected_clients") == 2, "one connection, and redis-cli's"
        await store.close()

    run(main)


def test_threads_share_trips(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        store.execute(claim())
        before = number(private_redis, "stats", "total_reads_processed")
        store.execute_many([claim() for _ in range(100)])
        assert number(private_redis, "stats", "total_reads_processed") - before < 10


def test_only_those_who_are_waited_for_publish(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        first, second = claim(), claim()
        (one, two) = store.execute_many([first, second])
        store.wait(second.id, 0.05)
        commands(private_redis)
        store.execute(Complete(first.id, one.token, b"", 60.0))
        assert "publish" not in commands(private_redis)
        store.execute(Complete(second.id, two.token, b"", 60.0))
        assert commands(private_redis)["publish"] == 1


def test_who_waits_is_woken_and_does_not_only_look_again(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.stores.listening.LISTEN_AGAIN", 60.0)

    async def main() -> None:
        sync, aio = RedisStore(redis_url), AsyncRedisStore(redis_url)
        for ends in (Complete, Release):
            op = claim()
            won = await aio.execute(op)
            assert isinstance(won, Claimed)
            waiting = [
                asyncio.create_task(asyncio.to_thread(sync.wait, op.id, 50)),
                asyncio.create_task(aio.wait(op.id, 50)),
            ]
            await asyncio.sleep(0.1)
            ending = Complete(op.id, won.token, b"", 60.0) if ends is Complete else Release(op.id, won.token)
            assert await aio.execute(ending) is True
            async with asyncio.timeout(20):
                await asyncio.gather(*waiting)
        sync.close()
        await aio.close()

    run(main)


# Records


def test_a_record_is_one_key_that_ends_by_itself(redis: RedisServer, redis_url: str, store: RedisStore) -> None:
    database = redis_url.rpartition("/")[2]
    first = claim()
    won = store.execute(first)
    assert isinstance(won, Claimed)
    store.execute(SaveStep(first.id, won.token, "charge", b"1", 0))
    store.execute(Complete(first.id, won.token, b"answer", 50.0))
    key = f"semel:{first.id.hex()}"
    assert redis.cli("-n", database, "KEYS", "*").split() == [key]
    assert 0 < int(redis.cli("-n", database, "PTTL", key)) <= 50_000


def test_a_foreign_key_in_the_way_is_named_and_left_alone(redis: RedisServer, redis_url: str) -> None:
    database = redis_url.rpartition("/")[2]
    ran: list[int] = []
    with Semel(RedisStore(redis_url), sweep_every=None) as guard:
        id = guard._identity("ship", 1, None)
        redis.cli("-n", database, "SET", f"semel:{id.hex()}", "somebody else's")
        with pytest.raises(ConfigurationError, match="prefix"):
            guard.run("ship", key=1, call=lambda: ran.append(1))
        redis.cli("-n", database, "DEL", f"semel:{id.hex()}")
        redis.cli("-n", database, "LPUSH", f"semel:{id.hex()}", "a list")
        with pytest.raises(ConfigurationError, match="prefix"):
            guard.run("ship", key=1, call=lambda: ran.append(1))
        assert redis.cli("-n", database, "LLEN", f"semel:{id.hex()}") == "1\n"
    assert ran == []


def test_prefixes_keep_stores_apart(redis_url: str) -> None:
    op = claim()
    with (
        contextlib.closing(RedisStore(redis_url)) as one,
        contextlib.closing(RedisStore(redis_url, prefix="shop[*]:")) as two,
        contextlib.closing(RedisStore(redis_url + "?prefix=shop[*]:")) as two_again,
    ):
        assert isinstance(one.execute(op), Claimed)
        assert isinstance(two.execute(op), Claimed)
        assert isinstance(two_again.execute(claim(op.id, 2)), Existing)
        assert two.execute(Sweep(10)).unknown == 0


# Trouble


@pytest.mark.parametrize("forget", ["flush", "restart"])
def test_scripts_that_the_server_forgot_are_sent_again(private_redis: RedisServer, forget: str) -> None:
    def forgets() -> None:
        private_redis.cli("SCRIPT", "FLUSH") if forget == "flush" else private_redis.restart()

    with contextlib.closing(RedisStore(private_redis.url, retry_for="20s")) as store:
        store.execute(claim())
        forgets()
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        assert store.execute(Renew(op.id, won.token, 60.0)) is True
        assert store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True

    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, retry_for="20s")
        await store.execute(claim())
        forgets()
        op = claim()
        won = await store.execute(op)
        assert isinstance(won, Claimed)
        assert await store.execute(Renew(op.id, won.token, 60.0)) is True
        assert await store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
        await store.close()

    run(main)


def test_a_batch_whose_scripts_were_forgotten_is_still_answered_in_order(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        private_redis.cli("SCRIPT", "FLUSH")
        shown, done, replay = store.execute_many(
            [claim(op.id, 2), Complete(op.id, won.token, b"answer", 60.0), claim(op.id, 3)]
        )
        assert (shown.record.state, done, replay.record.snapshot) == (State.RUNNING, True, b"answer")


def test_a_server_that_is_not_there_is_not_available(private_redis: RedisServer) -> None:
    private_redis.crash()

    async def main() -> None:
        with contextlib.closing(RedisStore(private_redis.url, retry_for=0.1)) as store:
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="cannot be reached") as refused:
                    store.execute(claim())
                assert refused.value.__cause__ is not None, "the driver's own error is behind it"
        aio = AsyncRedisStore(private_redis.url, retry_for=0.1)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="cannot be reached") as refused:
                await aio.execute(claim())
            assert refused.value.__cause__ is not None
        await aio.close()

    run(main)


def test_a_server_that_comes_back_within_the_patience_is_found_again(private_redis: RedisServer) -> None:
    async def main() -> None:
        sync, aio = RedisStore(private_redis.url, retry_for="20s"), AsyncRedisStore(private_redis.url, retry_for="20s")
        sync.execute(claim())
        await aio.execute(claim())
        private_redis.crash()
        waiting = [
            asyncio.create_task(asyncio.to_thread(sync.execute, claim())),
            asyncio.create_task(aio.execute(claim())),
        ]
        await asyncio.sleep(0.1)
        private_redis.return_()
        assert {type(answer) for answer in await asyncio.gather(*waiting)} == {Claimed}
        sync.close()
        await aio.close()

    run(main)


def test_a_silent_server_leaves_it_uncertain(private_redis: RedisServer) -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"timeout": 1.0, "wait_timeout": 0.1, "retry_for": 0}
        sync, aio = RedisStore(private_redis.url, **settings), AsyncRedisStore(private_redis.url, **settings)
        sync.execute(claim())
        await aio.execute(claim())
        assert private_redis.pid is not None
        freeze(private_redis.pid)
        try:
            with pytest.raises(StoreUncertain, match="before the answer"):
                sync.execute(claim())
            with pytest.raises(StoreUncertain, match="no answer within"):
                await aio.execute(claim())
        finally:
            os.kill(private_redis.pid, signal.SIGCONT)
        assert isinstance(sync.execute(claim()), Claimed)
        assert isinstance(await told(aio, claim()), Claimed)
        sync.close()
        await aio.close()

    run(main)


class HalfDeaf:
    """Stands before a server, passes on what clients say, and keeps the answers to itself when told to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = free_port()
        self.deaf = False
        self.asked = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> HalfDeaf:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        self.cut()

    async def lose_the_answer(self) -> None:
        """Wait for the answer, keep it, break the line, and hear well again."""
        await self.asked.wait()
        self.asked.clear()
        self.deaf = False
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, away]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pass(reader, away, True), self._pass(there, writer, False))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, asks: bool) -> None:
        while data := await source.read(65536):
            if asks or not self.deaf:
                sink.write(data)
            elif self.deaf:
                self.asked.set()  # the server has done it, and the answer goes nowhere


def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_happens_twice(private_redis: RedisServer) -> None:
    async def main() -> None:
        async with HalfDeaf(private_redis.port) as between:
            store = AsyncRedisStore(f"redis://127.0.0.1:{between.port}", retry_for="20s")
            await store.execute(claim())
            op = claim()
            between.deaf = True
            claiming = asyncio.create_task(store.execute(op))
            await between.lose_the_answer()
            won = await claiming
            assert isinstance(won, Claimed)
            assert won.attempt == 1, "the claim was taken for another one"
            assert await store.execute(Complete(op.id, won.token, b"answer", 60.0)) is True
            # A resolution may not be sent twice: by then the record may be another owner's.
            other = claim()
            won = await store.execute(other)
            assert isinstance(won, Claimed)
            await store.execute(Release(other.id, won.token, State.UNKNOWN))
            between.deaf = True
            resolving = asyncio.create_task(store.execute(Resolve(other.id, b"x", 60.0)))
            await between.lose_the_answer()
            with pytest.raises(StoreUncertain):
                await resolving
            record = await store.execute(Lookup(other.id))
            assert record is not None
            assert record.state is State.DONE
            await store.close()

    run(main)


def test_a_caller_that_goes_away_takes_nobody_elses_answer(private_redis: RedisServer) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url)
        await store.execute(claim())
        done = []
        for _ in range(20):
            op = claim()
            won = await store.execute(op)
            assert isinstance(won, Claimed)
            done.append((op, won))
        tasks = [
            asyncio.create_task(store.execute(Complete(op.id, won.token, op.id, 60.0) if i % 2 else claim()))
            for i, (op, won) in enumerate(done)
        ]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for i, answer in enumerate(answers):
            if i % 3 == 0:
                assert isinstance(answer, asyncio.CancelledError)
            else:
                assert answer is True if i % 2 else isinstance(answer, Claimed)
        for op, _ in done[1::2]:
            record = await store.execute(Lookup(op.id))
            assert record is not None
            assert record.snapshot in (op.id, None)
        await store.close()

    run(main)


def test_what_never_left_is_told_from_what_may_have_arrived(private_redis: RedisServer) -> None:
    """The line breaks in the turn in which a command was queued: nothing was written, so nothing can be stored."""

    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, retry_for=0)
        await store.execute(claim())
        (link,) = store._servers._connections.values()
        assert isinstance(link, AsyncRedisConnection)
        task = asyncio.create_task(store.execute(claim()))
        await asyncio.sleep(0)
        link._end("cut")
        with pytest.raises(StoreUnavailable, match="was lost"):
            await task
        await store.close()

    run(main)


def test_what_the_line_does_not_take_yet_waits_for_it(private_redis: RedisServer) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url)
        claims = [claim() for _ in range(24)]
        won = await store.execute_many(claims)
        (link,) = store._servers._connections.values()
        assert private_redis.pid is not None
        freeze(private_redis.pid)
        try:
            tasks = []
            for op, claimed in zip(claims, won, strict=True):
                snapshot = op.id * 65536
                tasks.append(asyncio.create_task(store.execute(Complete(op.id, claimed.token, snapshot, 60.0))))
                await asyncio.sleep(0.001)
            assert link._paused, "24 MB went into a server that stands still"
            assert link._unsent
        finally:
            os.kill(private_redis.pid, signal.SIGCONT)
        assert await asyncio.gather(*tasks) == [True] * 24
        for op in claims:
            record = await store.execute(Lookup(op.id))
            assert record is not None
            assert record.snapshot == op.id * 65536
        await store.close()

    run(main)


def test_a_crowd_is_refused_before_it_fills_the_memory(
    private_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.stores.redis.aio_connection.MAX_IN_FLIGHT", 20)

    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, retry_for=0)
        await store.execute(claim())
        answers = await store.execute_many([claim() for _ in range(50)])
        assert [type(answer) for answer in answers] == [Claimed] * 20 + [StoreUnavailable] * 30
        assert isinstance(await told(store, claim()), Claimed)
        await store.close()

    run(main)


def test_the_two_stores_and_their_listeners_are_one_thing_twice() -> None:
    for sync, aio in ((RedisStore, AsyncRedisStore), (Listener, AsyncListener)):
        names = [
            [name for name, member in vars(kind).items() if inspect.isfunction(member) and not name.startswith("_")]
            for kind in (sync, aio)
        ]
        assert [name for name in names[0] if name != "resume"] == names[1]  # a task is simply started again
    settings = [list(inspect.signature(kind).parameters) for kind in (RedisStore, AsyncRedisStore)]
    assert [name for name in settings[0] if name != "connections"] == settings[1]


def test_a_closed_store_says_so(redis_url: str) -> None:
    store = RedisStore(redis_url)
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.execute(claim())

    async def main() -> None:
        aio = AsyncRedisStore(redis_url)
        await aio.execute(claim())
        await aio.close()
        await aio.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            await aio.execute(claim())

    run(main)


def test_an_async_store_belongs_to_one_loop_at_a_time(redis_url: str) -> None:
    store = AsyncRedisStore(redis_url)
    with asyncio.Runner() as one, asyncio.Runner() as two:
        assert isinstance(one.run(store.execute(claim())), Claimed)
        with pytest.raises(ConfigurationError, match="another event loop"):
            two.run(store.execute(claim()))
        (link,) = store._servers._connections.values()
        one.run(_closed(link))
    with asyncio.Runner() as three:
        assert isinstance(three.run(store.execute(claim())), Claimed)
        three.run(store.close())


async def _closed(link: AsyncRedisConnection) -> None:
    link.close()
    await asyncio.sleep(0)


def test_a_forked_child_opens_connections_of_its_own(private_redis: RedisServer) -> None:
    store = RedisStore(private_redis.url)
    store.execute(claim())
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.SimpleQueue()

    def connections() -> int:
        return private_redis.cli("CLIENT", "LIST").count("name=semel")

    def child() -> None:
        told = [type(store.execute(claim())).__name__ for _ in range(20)]
        answers.put((told, connections()))

    until = time.monotonic() + 30
    while connections() < 2:  # its lane, and its listener
        assert time.monotonic() < until
        store.wait(os.urandom(16), 1.0)
    before = connections()

    process = fork.Process(target=child)
    process.start()
    parents = [type(store.execute(claim())).__name__ for _ in range(20)]
    told, during = answers.get()
    assert told == parents == ["Claimed"] * 20
    assert during == before + 1
    process.join(30)
    assert process.exitcode == 0
    assert type(store.execute(claim())).__name__ == "Claimed"
    store.close()


def test_a_unix_socket_will_do(redis: RedisServer) -> None:
    path = f"/tmp/semel-{os.getpid()}.sock"
    server = RedisServer("--unixsocket", path)
    with server:
        until = time.monotonic() + 10
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.closing(RedisStore(f"unix://{path}")) as store:
            assert isinstance(store.execute(claim()), Claimed)

        async def main() -> None:
            aio = AsyncRedisStore(f"unix://{path}?db=1")
            assert isinstance(await told(aio, claim()), Claimed)
            await aio.close()

        run(main)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


@pytest.mark.parametrize("prefix", ["semel:", "50%:"])
def test_the_templates_of_the_frequent_commands_send_the_same_bytes(prefix: str) -> None:
    """Both are filled in instead of packed: any size of the words, and a prefix with a percent sign."""
    from hiredis import pack_command

    programs = AsyncRedisStore("redis://localhost", prefix=prefix)._programs
    op, clock = claim(), ServerClock()
    clock.ask_at = 2**63
    sent = next(programs.by_op[Claim](op, programs.key(op.id), clock)).parts
    assert isinstance(sent, bytes)
    words = unpack(sent)
    assert pack_command(tuple(words)) == sent
    assert words[:2] + words[3:6] == [b"SET", programs.key(op.id), b"NX", b"GET", b"PX"]
    for snapshot in (b"", b"\r\n%d" * 5000):
        done = next(programs.by_op[Complete](Complete(op.id, 7, snapshot, 60.0), programs.key(op.id), clock))
        assert isinstance(done.parts, bytes)
        words = unpack(done.parts)
        assert pack_command(tuple(words)) == done.parts
        assert (words[0], words[2:4], words[5:7]) == (b"EVALSHA", [b"1", programs.key(op.id)], [snapshot, b"60000"])
        assert words[9] == programs.channel
        assert done.in_full().parts == (b"EVAL", done.script.text, *words[2:])  # type: ignore[union-attr]
