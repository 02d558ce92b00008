"""Redis Cluster: any record on any node, redirections while slots move, and one connection to each master."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest
from redis.crc import key_slot

from semel import AsyncRedisStore, RedisStore, StoreUnavailable
from semel.core.ops import Claimed, Complete, Existing, Lookup, Sweep
from semel.core.states import State, Takeover
from tests.servers import RedisClusterServers, RedisServer
from tests.stores.test_redis_server import claim, run, told

pytestmark = pytest.mark.server


def id_in(slot: int) -> bytes:
    while True:
        id = os.urandom(16)
        if key_slot(b"semel:" + id.hex().encode()) == slot:
            return id


def node_id(server: RedisServer) -> str:
    return server.cli("CLUSTER", "MYID").strip()


def test_records_lie_on_all_masters_and_a_batch_reaches_them_at_once(redis_cluster: RedisClusterServers) -> None:
    redis_cluster.flush()
    with contextlib.closing(RedisStore(redis_cluster.url)) as store:
        answers = store.execute_many([claim() for _ in range(60)])
        assert {type(answer) for answer in answers} == {Claimed}
    sizes = [int(master.cli("DBSIZE")) for master in redis_cluster.masters()]
    assert sum(sizes) == 60
    assert min(sizes) > 0


def test_a_sweep_looks_at_every_master(redis_cluster: RedisClusterServers) -> None:
    redis_cluster.flush()
    with contextlib.closing(RedisStore(redis_cluster.url)) as store:
        ops = [claim(lease=0.001, takeover=Takeover.REJECT) for _ in range(30)]
        for op in ops:
            object.__setattr__(op, "ttl", 0.001)
        store.execute_many(ops)
        time.sleep(0.01)  # ten times as long as they last
        assert store.execute(Sweep(7)).unknown == 7
        assert store.execute(Sweep(100)).unknown == 23
        assert store.execute(Sweep(100)).unknown == 0


def test_a_slot_that_moves_is_followed(private_redis_cluster: RedisClusterServers) -> None:
    """First while it moves (ASK), then when it has moved (MOVED); by stores that know the old place."""
    source, target = private_redis_cluster.masters()[:2]
    first, last = (int(word) for word in source.cli("CLUSTER", "SLOTS").split()[:2])
    owner = int(source.cli("CLUSTER", "SLOTS").split()[3])
    if owner != source.port:  # the first range is another master's
        source, target = next(one for one in private_redis_cluster.masters() if one.port == owner), source
    slot = (first + last) // 2

    async def main() -> None:
        sync, aio = RedisStore(private_redis_cluster.url), AsyncRedisStore(private_redis_cluster.url)
        old = claim(id_in(slot))
        won = sync.execute(old)
        assert isinstance(won, Claimed)
        assert isinstance(await told(aio, claim(old.id, 2)), Existing)
        target.cli("CLUSTER", "SETSLOT", str(slot), "IMPORTING", node_id(source))
        source.cli("CLUSTER", "SETSLOT", str(slot), "MIGRATING", node_id(target))
        # What is there still is answered there; what is new is made at the target, script or not.
        assert isinstance(sync.execute(claim(old.id, 3)), Existing)
        target.cli("SCRIPT", "FLUSH")
        new, other = claim(id_in(slot)), claim(id_in(slot))
        fresh = sync.execute(new)
        assert isinstance(fresh, Claimed)
        assert isinstance(await told(aio, other), Claimed)
        assert isinstance(await told(aio, claim(new.id, 2)), Existing)
        assert sync.execute(Complete(new.id, fresh.token, b"new", 60.0)) is True
        assert target.cli("CLUSTER", "COUNTKEYSINSLOT", str(slot)) == "2\n"
        key = f"semel:{old.id.hex()}"
        source.cli("MIGRATE", "127.0.0.1", str(target.port), key, "0", "5000")
        for server in (target, source, *private_redis_cluster.masters()):
            server.cli("CLUSTER", "SETSLOT", str(slot), "NODE", node_id(target))
        assert await aio.execute(Complete(old.id, won.token, b"old", 60.0)) is True
        for op, snapshot in ((old, b"old"), (new, b"new")):
            for record in (sync.execute(Lookup(op.id)), await aio.execute(Lookup(op.id))):
                assert record is not None
                assert (record.state, record.snapshot) == (State.DONE, snapshot)
        assert isinstance(sync.execute(claim(other.id, 5)), Existing)
        sync.close()
        await aio.close()

    run(main)


def _ours(master: RedisServer) -> list[str]:
    return [line for line in master.cli("CLIENT", "LIST").splitlines() if "name=semel" in line]


def test_tasks_share_one_connection_to_each_master(redis_cluster: RedisClusterServers) -> None:
    async def main() -> None:
        store = AsyncRedisStore(redis_cluster.url)
        await asyncio.gather(*(store.execute(claim()) for _ in range(200)))
        assert len(store._servers._connections) == 3
        end = time.monotonic() + 20
        for master in redis_cluster.masters():
            # Connections of other tests' stores, closed a moment ago, may still be listed.
            while len(_ours(master)) > 1 and time.monotonic() < end:  # noqa: ASYNC110 (nothing tells us)
                await asyncio.sleep(0.02)
            assert len(_ours(master)) == 1
        await store.close()

    run(main)


def test_a_slot_that_nobody_has_is_an_error_and_is_sought_again(private_redis_cluster: RedisClusterServers) -> None:
    master = private_redis_cluster.masters()[0]
    op = claim()
    slot = str(key_slot(b"semel:" + op.id.hex().encode()))
    members = private_redis_cluster.members
    for server in members:
        server.cli("CONFIG", "SET", "cluster-require-full-coverage", "no")
    # Until it is asked itself, the owner goes on telling those who had forgotten the slot already.
    while "OK\n" in [server.cli("CLUSTER", "DELSLOTS", slot) for server in members]:
        pass

    async def main() -> None:
        sync = RedisStore(private_redis_cluster.url, retry_for=0)
        aio = AsyncRedisStore(private_redis_cluster.url, retry_for=0)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="slot"):
                sync.execute(op)
            with pytest.raises(StoreUnavailable, match="slot"):
                await aio.execute(op)
        master.cli("CLUSTER", "ADDSLOTS", slot)
        until = time.monotonic() + 30
        while True:
            try:
                found = (sync.execute(op), await aio.execute(op))
                break
            except StoreUnavailable:
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
        assert [type(answer) for answer in found] == [Claimed, Claimed]
        sync.close()
        await aio.close()

    run(main)


def test_who_waits_is_woken_whichever_node_ends_the_attempt(
    redis_cluster: RedisClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.stores.listening.LISTEN_AGAIN", 60.0)
    first = [int(words) for words in redis_cluster.members[0].cli("CLUSTER", "SLOTS").split()[:1]]
    slots = [first[0], (first[0] + 5500) % 16384, (first[0] + 11000) % 16384]

    async def main() -> None:
        sync, aio = RedisStore(redis_cluster.url), AsyncRedisStore(redis_cluster.url)
        for slot in slots:
            op = claim(id_in(slot))
            won = await aio.execute(op)
            assert isinstance(won, Claimed)
            waiting = [
                asyncio.create_task(asyncio.to_thread(sync.wait, op.id, 50)),
                asyncio.create_task(aio.wait(op.id, 50)),
            ]
            await asyncio.sleep(0.1)
            assert await aio.execute(Complete(op.id, won.token, b"", 60.0)) is True
            async with asyncio.timeout(20):
                await asyncio.gather(*waiting)
        sync.close()
        await aio.close()

    run(main)
