"""A Redis store that waits for replicas, where the two connections of a call end differently: the second leads to
another server than the first, is not opened, or the store is closed meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from semel import AsyncRedisStore, RedisStore, StoreUnavailable, StoreUncertain
from semel.core.ops import Claimed, Complete, Existing, Lookup, Sweep, Swept
from semel.core.states import State, Takeover
from tests.servers import RedisServer
from tests.servers.base import LOOPBACK
from tests.stores.test_redis_confirmed import answer, finished, shut, until
from tests.stores.test_redis_server import claim

pytestmark = pytest.mark.server

PATIENT: dict[str, Any] = {"wait_replicas": 1, "wait_timeout": "20s", "timeout": "40s", "retry_for": "20s"}


class Switch:
    """One address, behind which a failover may happen: connections go to the server that is named when they come."""

    def __init__(self, *ports: int | None) -> None:
        """A port for each connection, the last one for all that follow; None takes it, and never says a word."""
        self._ports = list(ports)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._sockets: list[socket.socket] = []
        self.url = f"redis://{LOOPBACK}:{self._listener.getsockname()[1]}/0"
        self.taken = 0
        self._threads = [threading.Thread(target=self._take)]
        self._threads[0].start()

    def _take(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            port = self._ports[min(self.taken, len(self._ports) - 1)]
            self._sockets.append(near)
            if port is not None:
                far = socket.create_connection((LOOPBACK, port))
                self._sockets.append(far)
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                    self._threads[-1].start()
            self.taken += 1

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := source.recv(65536):
                target.sendall(said)
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(20)
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for each in (self._listener, *self._sockets):
            each.close()


@contextlib.contextmanager
def switched(*ports: int | None) -> Iterator[Switch]:
    switch = Switch(*ports)
    try:
        yield switch
    finally:
        switch.close()


@pytest.fixture
def successor() -> Iterator[RedisServer]:
    """A master with a replica."""
    with RedisServer() as master, RedisServer("--replicaof", f"{LOOPBACK} {master.port}"):
        until(lambda: "state=online" in master.cli("INFO", "replication"))
        yield master


def test_an_answer_that_is_gone_before_it_is_confirmed_is_not_handed_out(
    private_redis: RedisServer, successor: RedisServer
) -> None:
    """The first connection leads to the old master, which has an answer that its successor has never heard of."""
    op = finished(private_redis.url)

    async def main() -> None:
        with switched(private_redis.port, successor.port) as switch:
            aio = AsyncRedisStore(switch.url, **{**PATIENT, "retry_for": 0})
            with pytest.raises(StoreUnavailable, match="lost the answer before it was confirmed") as told:
                await aio.execute(claim(op.id, 2))
            assert told.value.answered
            await aio.close()
        for number, kind in enumerate((RedisStore, AsyncRedisStore)):
            with switched(private_redis.port, successor.port) as switch:
                store = kind(switch.url, **PATIENT)
                met = await answer(store, claim(op.id, 3 + number))
                wanted = Existing if number else Claimed  # of the successor, where it is tried again
                assert isinstance(met, wanted)
                await shut(store)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_a_failover_behind_one_address_is_followed_by_both_connections(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer
) -> None:
    """The old master is a replica of the new one now: it takes no writes on either."""

    async def main() -> None:
        with RedisServer() as new, switched(private_redis.port, private_redis.port, new.port) as switch:
            one_lane = {"connections": 1} if kind is RedisStore else {}
            store = kind(switch.url, **{**PATIENT, "wait_timeout": "300ms", "retry_for": "2s"}, **one_lane)
            with pytest.raises(StoreUncertain):
                await answer(store, claim())
            private_redis.cli("REPLICAOF", LOOPBACK, str(new.port))
            await asyncio.to_thread(until, lambda: "state=online" in new.cli("INFO", "replication"))
            for _ in range(2):
                assert isinstance(await answer(store, claim()), Claimed)
            await shut(store)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_a_sweep_follows_a_failover(kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer) -> None:
    """The old master is a replica now. It still reads, and finds a record that a sweep must mark."""

    async def main() -> None:
        silent = dataclasses.replace(claim(lease=0.01, takeover=Takeover.REJECT), ttl=0.01)
        with RedisServer() as new, switched(private_redis.port, new.port) as switch:
            one_lane = {"connections": 1} if kind is RedisStore else {}
            store = kind(switch.url, listen=False, retry_for="20s", **one_lane)
            await answer(store, silent)
            found = await answer(store, Lookup(silent.id))
            while found.state is not State.ABANDONED or found.expires_in > 0:
                found = await answer(store, Lookup(silent.id))
            private_redis.cli("REPLICAOF", LOOPBACK, "1")
            assert await answer(store, Sweep(10)) == Swept(0, 0)
            assert switch.taken == 2
            await shut(store)

    asyncio.run(main())


def test_an_answer_that_is_held_behind_a_wait_is_stored_although_the_store_is_closed(
    private_redis: RedisServer,
) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, wait_replicas=1, wait_timeout="300ms", retry_for=0)
        op = claim()
        with contextlib.suppress(StoreUncertain):
            await store.execute(op)
        plain = AsyncRedisStore(private_redis.url)
        record = await plain.execute(Lookup(op.id))
        assert record is not None
        calling = [asyncio.create_task(store.execute(claim()))]
        await asyncio.to_thread(until, lambda: "cmd=wait" in private_redis.cli("CLIENT", "LIST"))
        calling.append(asyncio.create_task(store.execute(Complete(op.id, record.token, b"answer", 60.0))))
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*calling, return_exceptions=True)
        stored = await plain.execute(Lookup(op.id))
        assert stored is not None
        assert stored.snapshot == b"answer"
        await plain.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RedisStore, AsyncRedisStore])
def test_a_claim_that_is_lost_before_it_is_confirmed_is_made_anew_where_it_was_lost(
    kind: type[RedisStore] | type[AsyncRedisStore], private_redis: RedisServer, successor: RedisServer
) -> None:
    async def main() -> None:
        with switched(private_redis.port, successor.port) as switch:
            one_lane = {"connections": 1} if kind is RedisStore else {}
            store = kind(switch.url, **PATIENT, **one_lane)
            for _ in range(2):
                op = claim()
                won = await answer(store, op)
                assert isinstance(won, Claimed)
                assert successor.cli("EXISTS", f"semel:{op.id.hex()}") == "1\n"
                assert await answer(store, Complete(op.id, won.token, b"answer", 60.0)) is True
            met = await answer(store, claim(op.id, 2))
            assert isinstance(met, Existing)
            assert met.record.snapshot == b"answer"
            assert switch.taken == 4, "both connections were opened anew, once"
            await shut(store)

    asyncio.run(main())


@pytest.mark.parametrize("ready", [False, True])
def test_a_store_that_is_closed_during_a_claim_leaves_no_connection_and_tells_that_it_may_be_made(
    ready: bool, private_redis: RedisServer
) -> None:
    async def main() -> None:
        store = AsyncRedisStore(private_redis.url, wait_replicas=1, wait_timeout="200ms", retry_for="500ms")
        with contextlib.suppress(StoreUncertain):
            await store.execute(claim() if ready else Lookup(os.urandom(16)))
        op = claim()
        calling = asyncio.create_task(store.execute(op))
        await asyncio.sleep(0)  # its SET is queued
        await store.close()
        with pytest.raises(StoreUncertain):
            await calling
        assert private_redis.cli("EXISTS", f"semel:{op.id.hex()}") == "1\n"
        assert not store._servers._connections
        assert not store._servers._durable_connections
        await asyncio.to_thread(until, lambda: "name=semel" not in private_redis.cli("CLIENT", "LIST"))
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.execute(claim())

    asyncio.run(main())


def test_who_waits_for_a_connection_when_the_store_is_closed_is_told_and_not_cancelled(
    private_redis: RedisServer,
) -> None:
    async def main() -> None:
        with switched(private_redis.port, None) as switch:
            store = AsyncRedisStore(switch.url, wait_replicas=1, retry_for=0)
            assert await store.execute(Lookup(os.urandom(16))) is None
            calling = [asyncio.create_task(store.execute(claim())) for _ in range(2)]
            await asyncio.to_thread(until, lambda: switch.taken == 2)
            calling[1].cancel()
            await asyncio.wait([calling[1]])
            assert calling[1].cancelled(), "whom somebody cancelled is"
            await store.close()
            with pytest.raises(StoreUncertain, match="closed"):
                await calling[0]
        with switched(None) as switch:
            store = AsyncRedisStore(switch.url.replace("redis:", "redis+cluster:").removesuffix("/0"), retry_for=0)
            seeking = asyncio.create_task(store.execute(claim()))
            await asyncio.to_thread(until, lambda: switch.taken == 1)
            await store.close()
            with pytest.raises(StoreUnavailable, match="closed"):
                await seeking

    asyncio.run(main())
