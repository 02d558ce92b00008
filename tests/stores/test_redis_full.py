"""A Redis that becomes full, and evicts nothing: who has not begun is refused, who has begun can end."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from semel import AsyncRedisStore, AsyncSemel, InProgress, RedisStore, Semel, StoreUnavailable, Wait
from semel.core.ops import Claimed, Complete, Existing, Lookup, Release, Renew, Resolve, SaveStep
from semel.core.states import State
from tests.servers import RedisClusterServers, RedisServer
from tests.stores.test_redis_confirmed import until
from tests.stores.test_redis_refusals import refused
from tests.stores.test_redis_server import claim, told

pytestmark = pytest.mark.server

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

    with Semel(RedisStore(private_redis.url, retry_for=0), sweep_every=None) as guard:
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
        async with AsyncSemel(AsyncRedisStore(private_redis.url, retry_for=0), sweep_every=None) as guard:
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
        with pytest.raises(StoreUnavailable, match="no memory left"):
            store.execute(done)  # said again: it is no duplicate of itself
        met = store.execute(claim(done.id, 2))
        assert isinstance(met, Existing)
        assert met.record.state is State.RUNNING
        assert met.record.lease_left > 0
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


def test_an_attempt_that_ended_without_a_word_is_not_taken_over_on_a_full_server(private_redis: RedisServer) -> None:
    with contextlib.closing(RedisStore(private_redis.url)) as store:
        op = claim()
        won = store.execute(op)
        assert isinstance(won, Claimed)
        assert store.execute(Release(op.id, won.token, State.ABANDONED)) is True
        fill(private_redis)
        with pytest.raises(StoreUnavailable, match="no memory left"):
            store.execute(claim(op.id, 2))
        private_redis.cli("CONFIG", "SET", "maxmemory", "0")
        again = store.execute(claim(op.id, 2))
        assert isinstance(again, Claimed)
        assert again.attempt == 2


def test_duplicates_of_an_operation_that_runs_on_a_full_server_wait_for_it(private_redis: RedisServer) -> None:
    """They were refused, and with a policy that fails open they ran it a second time."""
    ran: list[int] = []
    policy: dict[str, Any] = {"on_duplicate": Wait("60s"), "on_store_error": "open"}
    first, second = (Semel(RedisStore(private_redis.url, retry_for=0), sweep_every=None) for _ in range(2))

    def awaited() -> bool:
        (key,) = private_redis.cli("KEYS", "semel:*").split()
        return private_redis.cli("--no-raw", "GETRANGE", key, "3", "3").strip() == '"\\x01"'

    with first, second, ThreadPoolExecutor(1) as others:

        def charge() -> str:
            ran.append(1)
            fill(private_redis)
            with pytest.raises(InProgress):
                second.run("charge", key=1, call=charge)
            duplicates.append(others.submit(second.run, "charge", key=1, call=charge, **policy))
            until(awaited)  # a full server takes that mark, too
            return "charged"

        duplicates: list[Future[str]] = []
        assert first.run("charge", key=1, call=charge) == "charged"
        assert duplicates[0].result(60) == "charged"
    assert ran == [1]


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
