"""A Redis that becomes full, and evicts nothing: who has not begun is refused, who has begun can end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from semel import AsyncRedisStore, AsyncSemel, RedisStore, Semel, StoreUnavailable
from semel.core.ops import Claimed, Complete, Existing, Lookup, Release, Renew, Resolve, SaveStep
from semel.core.states import State
from tests.servers import RedisClusterServers, RedisServer
from tests.stores.test_redis_refusals import refused
from tests.stores.test_redis_server import claim, told

FULL = "1mb"
"""Less than an empty server takes."""


def fill(server: RedisServer) -> None:
    server.cli("CONFIG", "SET", "maxmemory", FULL)


def test_an_operation_that_runs_when_the_server_becomes_full_is_finished_and_does_not_run_again(
    private_redis: RedisServer,
) -> None:
    ran: list[str] = []

    def charge() -> str:
        ran.append("sync")
        fill(private_redis)
        return "charged"

    with Semel(RedisStore(private_redis.url, patience=0), sweep_every=None) as guard:
        assert guard.run("charge", key=1, call=charge) == "charged"
        assert guard.run("charge", key=1, call=charge) == "charged", "a full server still replays"
        with pytest.raises(StoreUnavailable, match="no memory left"):
            guard.run("charge", key=2, call=charge)
    private_redis.cli("CONFIG", "SET", "maxmemory", "0")

    async def charged() -> str:
        ran.append("async")
        fill(private_redis)
        return "charged"

    async def main() -> None:
        async with AsyncSemel(AsyncRedisStore(private_redis.url, patience=0), sweep_every=None) as guard:
            assert await guard.run("charge", key=3, call=charged) == "charged"
            assert await guard.run("charge", key=3, call=charged) == "charged"
            with pytest.raises(StoreUnavailable, match="no memory left"):
                await guard.run("charge", key=4, call=charged)

    asyncio.run(main())
    assert ran == ["sync", "async"]


def test_whatever_an_owner_says_is_written_and_claims_are_refused(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        done, released, doubtful = claim(), claim(), claim()
        first, second, third = store.execute_many([done, released, doubtful])
        fill(private_redis)
        refused(private_redis.url, StoreUnavailable, "no memory left")
        for known in (claim(done.id, 1), claim(done.id, 2)):
            with pytest.raises(StoreUnavailable, match="no memory left"):
                store.execute(known)
        assert store.execute(SaveStep(done.id, first.token, "charge", b"1" * 1000, 0)) is True
        assert store.execute(Renew(done.id, first.token, 120.0)) is True
        assert store.execute(Complete(done.id, first.token, b"answer", 60.0)) is True
        assert store.execute(Release(released.id, second.token)) is True
        assert store.execute(Release(doubtful.id, third.token, State.UNKNOWN)) is True
        assert store.execute(Resolve(doubtful.id, b"it was sent", 60.0)) is State.UNKNOWN
        for op, answer in ((done, b"answer"), (doubtful, b"it was sent")):
            record = store.execute(Lookup(op.id))
            assert record is not None
            assert (record.state, record.snapshot) == (State.DONE, answer)
        assert store.execute(Lookup(released.id)) is None


def test_a_full_server_still_replays(private_redis: RedisServer) -> None:
    async def main() -> None:
        sync, aio = RedisStore(private_redis.url), AsyncRedisStore(private_redis.url)
        op = claim()
        won = sync.execute(op)
        assert isinstance(won, Claimed)
        sync.execute(Complete(op.id, won.token, b"answer", 60.0))
        fill(private_redis)
        for shown in (sync.execute(claim(op.id, 2)), await aio.execute(claim(op.id, 3))):
            assert isinstance(shown, Existing)
            assert (shown.record.state, shown.record.snapshot) == (State.DONE, b"answer")
        sync.close()
        await aio.close()

    asyncio.run(main())


def test_nodes_of_a_cluster_take_the_flagged_scripts_in_full_as_well(
    private_redis_cluster: RedisClusterServers,
) -> None:
    """A script with flags may touch no key that it was not given: it has the one of its record."""

    async def main() -> None:
        sync, aio = RedisStore(private_redis_cluster.url), AsyncRedisStore(private_redis_cluster.url)
        stores: list[Any] = [sync, aio]
        for store in stores:
            op = claim()
            won = await answer(store, op)
            for master in private_redis_cluster.masters():
                master.cli("SCRIPT", "FLUSH")
                fill(master)
            for said in (
                SaveStep(op.id, won.token, "charge", b"1", 0),
                Renew(op.id, won.token, 60.0),
                Complete(op.id, won.token, b"answer", 60.0),
            ):
                assert await answer(store, said) is True
            for master in private_redis_cluster.masters():
                master.cli("CONFIG", "SET", "maxmemory", "0")
        sync.close()
        await aio.close()

    asyncio.run(main())


async def answer(store: Any, op: Any) -> Any:
    return store.execute(op) if isinstance(store, RedisStore) else await told(store, op)
