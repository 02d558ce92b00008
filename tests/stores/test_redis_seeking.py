"""Seeking the node of a Redis Cluster, or the master that sentinels name: what is said when nobody tells, and how long
it may take."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from semel import AsyncRedisStore, RedisStore, StoreUnavailable
from semel.core.ops import Claimed
from semel.stores.redis import failures, topology
from semel.stores.redis.aio_connection import AsyncServers
from semel.stores.redis.connection import Servers
from semel.stores.redis.settings import Address
from tests.servers import RedisClusterServers, RedisServer
from tests.servers.base import LOOPBACK, free_port
from tests.stores.test_redis_refusals import refused
from tests.stores.test_redis_server import claim, run, told


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """Servers that take a connection, and never say a word."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(4):
            listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
            found.append(f"{LOOPBACK}:{listener.getsockname()[1]}")
        yield found


@pytest.mark.parametrize("scheme", ["redis+cluster://", "redis+sentinel://"])
def test_a_password_that_is_missing_or_wrong_is_told(private_redis: RedisServer, scheme: str) -> None:
    private_redis.cli("CONFIG", "SET", "requirepass", "s3cret")
    where = f"{LOOPBACK}:{private_redis.port}"
    cluster = scheme == "redis+cluster://"
    path = "" if cluster else "/shop"
    for wrong, words in (("", "Redis asks for a password"), ("s3cret-not", "does not know this user and password")):
        who = f":{wrong}@" if cluster and wrong else ""
        asked = f"?sentinel_password={wrong}" if wrong and not cluster else ""
        refused(f"{scheme}{who}{where}{path}{asked}", StoreUnavailable, f"none of 1 .* answers: .*{words}")
    private_redis.cli("-a", "s3cret", "--no-auth-warning", "CONFIG", "SET", "requirepass", "")


def test_a_server_that_is_no_node_and_no_sentinel_is_told_so(private_redis: RedisServer) -> None:
    where = f"{LOOPBACK}:{private_redis.port}"
    refused(f"redis+cluster://{where}", StoreUnavailable, "this server is no node of a Redis Cluster: write redis://")
    refused(f"redis+sentinel://{where}/shop", StoreUnavailable, "this server is no sentinel: write redis://")


def test_nobody_there_is_told_with_the_reason() -> None:
    where = f"{LOOPBACK}:{free_port()},{LOOPBACK}:{free_port()}"
    refused(f"redis+cluster://{where}", StoreUnavailable, "none of 2 nodes .* answers: .* cannot be reached")
    refused(f"redis+sentinel://{where}/shop", StoreUnavailable, "none of 2 sentinels answers: .* cannot be reached")


def test_a_refusal_is_quoted_before_a_server_that_is_away() -> None:
    away, no = (
        failures.server_unreachable("a:1", OSError("gone")),
        failures.error_of_reply("NOAUTH Authentication required."),
    )
    mixed = topology._failure("none answers", [no, away])
    assert isinstance(mixed, failures.ServerUnreachable), "the one that is away may come back, and know us"
    assert "asks for a password" in str(mixed)
    assert isinstance(topology._failure("none answers", [no, no]), failures.CommandRefused)
    assert "gone" in str(topology._failure("none answers", [away]))


def test_all_nodes_share_the_time_that_one_connection_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(topology, "monotonic", lambda: now[0])
    time = topology.SearchTime(6.0)
    for left in (6, 5, 4):  # these use up their share
        share = time.share(left)
        assert share == pytest.approx(1.0)
        now[0] += share
    assert time.share(3) == pytest.approx(1.0)
    assert time.share(2) == pytest.approx(1.5), "that one answered at once, and left its share to the others"
    now[0] = 7.0
    assert time.share(1) == topology.SHORTEST


def test_silent_nodes_of_a_redis_cluster_leave_time_for_the_one_that_answers(
    redis_cluster: RedisClusterServers, silent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def counted(kind: type[Any]) -> None:
        real = kind._ask

        def ask(self: Any, address: Address, command: Any, share: float) -> Any:
            given.append(share)
            return real(self, address, command, share)

        monkeypatch.setattr(kind, "_ask", ask)

    counted(Servers)
    counted(AsyncServers)
    good = redis_cluster.url.removeprefix("redis+cluster://")
    url = f"redis+cluster://{','.join(silent)},{good}"
    with contextlib.closing(RedisStore(url, connect_timeout=2.0, retry_for=0)) as store:
        assert isinstance(store.execute(claim()), Claimed)
    assert len(given) == 5
    assert sum(given[:4]) < 2.0

    async def main() -> None:
        given.clear()
        store = AsyncRedisStore(url, connect_timeout=2.0, retry_for=0)
        assert isinstance(await told(store, claim()), Claimed)
        await store.close()
        assert len(given) == 5
        assert sum(given[:4]) < 2.0

    run(main)


class Announced:
    """A lock that says when somebody comes to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.comers = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.comers.release()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_who_waited_for_a_search_in_vain_does_not_search_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Address] = []
    go_on = threading.Event()

    def ask(self: Servers, address: Address, command: Any, share: float) -> Any:
        asked.append(address)
        assert go_on.wait(20)
        return failures.server_unreachable(str(address), OSError("gone"))

    monkeypatch.setattr(Servers, "_ask", ask)
    store = RedisStore("redis+cluster://a:1,b:1")
    servers = store._servers
    servers._lock = lock = Announced()  # type: ignore[assignment]
    errors: list[BaseException] = []

    def search() -> None:
        try:
            servers.search()
        except StoreUnavailable as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
        assert lock.comers.acquire(timeout=20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    said = "none of 2 nodes of the Redis Cluster answers: Redis at b:1 cannot be reached: gone"
    assert [str(error) for error in errors] == [said] * 3
    assert len(asked) == 2, "one search for all three"
    with pytest.raises(StoreUnavailable):
        servers.search()
    assert len(asked) == 4, "who comes later searches again"
    store.close()


def test_tasks_share_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Address] = []

    async def ask(self: AsyncServers, address: Address, command: Any, share: float) -> Any:
        asked.append(address)
        await asyncio.sleep(0)
        return failures.server_unreachable(str(address), OSError("gone"))

    monkeypatch.setattr(AsyncServers, "_ask", ask)

    async def main() -> None:
        store = AsyncRedisStore("redis+cluster://a:1,b:1", retry_for=0)
        answers = await store.execute_many([claim() for _ in range(3)])
        assert [type(answer) for answer in answers] == [StoreUnavailable] * 3
        assert len(asked) == 2
        await store.close()

    run(main)


def test_a_sentinel_that_names_a_master_that_is_gone_is_asked_last_the_next_time(
    private_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off from the others, and does not know of the failover; they do."""
    asked: list[str] = []
    gone = str(free_port()).encode()

    def says(address: Address) -> list[bytes]:
        asked.append(address.host)
        return [LOOPBACK.encode(), gone if address.host == "a" else str(private_redis.port).encode()]

    async def ask(self: AsyncServers, address: Address, command: Any, share: float) -> Any:
        return says(address)

    monkeypatch.setattr(Servers, "_ask", lambda self, address, command, share: says(address))
    monkeypatch.setattr(AsyncServers, "_ask", ask)
    url = "redis+sentinel://a:1,b:1,c:1/shop"
    with contextlib.closing(RedisStore(url, retry_for="20s")) as store:
        assert isinstance(store.execute(claim()), Claimed)
    assert asked == ["a", "b"]

    async def main() -> None:
        asked.clear()
        store = AsyncRedisStore(url, retry_for="20s")
        assert isinstance(await told(store, claim()), Claimed)
        await store.close()
        assert asked == ["a", "b"]

    run(main)


def test_all_who_lost_one_master_pass_over_one_sentinel() -> None:
    seeking = RedisStore("redis+sentinel://a:1,b:1,c:1/shop")._servers.topology

    def first_asked(answer: bytes) -> str:
        search = seeking.search()
        sentinel = next(search)[0]
        with pytest.raises(StopIteration):
            search.send([answer, b"6379"])
        return sentinel.host

    assert first_asked(b"old") == "a"
    for _ in range(2):
        seeking.forget(Address("old", 6379))
    assert first_asked(b"old") == "b"
    seeking.forget()
    assert first_asked(b"new") == "b", "nobody is to blame"
