"""Redis loses a master under load: by Cluster and by Sentinel, with replicas that confirm and without.

With ``wait_replicas`` as many as there are replicas, what was answered is on every server that can take over: no key is
lost, and every operation has one effect. Without, a failover may forget the last writes; how many is counted, and what
is repeated is exactly what was forgotten. The last tests show such a loss on purpose, and what the callers are told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from semel import AsyncRedisStore, AsyncSemel, RedisStore, Semel, StoreError, StoreUncertain
from semel.core.states import State
from semel.testing.faults import Line, Workers, effects, until
from tests.faults.conftest import assert_exactly_once, goes_on
from tests.servers import RedisClusterServers, RedisSentinelServers, RedisServer
from tests.servers.base import LOOPBACK

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def replicated(masters: Callable[[], list[RedisServer]], count: int, each: int) -> bool:
    found = masters()
    return len(found) == count and all(
        master.cli("INFO", "replication").count("state=online") == each for master in found
    )


def lost(workers: Workers, lines: list[Line]) -> set[str]:
    """Keys that were answered and that the store no longer knows, or has begun anew."""
    answered = {line.key for line in lines if line.what == "answer"}
    begun_anew = {
        key
        for key in answered
        if len({line.token for line in lines if line.key == key and line.what == "begin" and line.attempt == 1}) > 1
    }
    return begun_anew | {key for key in answered if workers.lookup(key) is None}


def report(workers: Workers, lines: list[Line]) -> None:
    """The figures, for whoever runs this with -s."""
    found = effects(lines)
    executions = sum(line.what == "begin" for line in lines)
    refused = sum(line.what == "store" for line in lines)
    print(
        f"{len(found)} keys, {executions} executions, {sum(map(len, found.values()))} effects, "
        f"{len(lost(workers, lines))} keys lost, {refused} calls told that the store is away"
    )


def cluster_failover(cluster: RedisClusterServers) -> None:
    """Kill a master; its replica takes over; it comes back, empty, as a replica."""
    victim = cluster.masters()[0]
    victim.crash()
    until(lambda: len(cluster.masters()) == 3 and victim not in cluster.masters(), 60, "no replica took over")
    victim.return_()
    until(lambda: replicated(cluster.masters, 3, 1), 60, "the old master does not come back as a replica")


def sentinel_failover(group: RedisSentinelServers, *, comes_back: bool) -> None:
    victim = group.master
    victim.crash()
    until(lambda: group.master is not victim, 60, "the sentinels name no other master")
    if not comes_back:
        return
    victim.return_()
    until(lambda: replicated(lambda: [group.master], 1, 2), 60, "the old master does not come back as a replica")


def test_a_cluster_whose_replicas_confirm_loses_no_key_when_a_master_is_killed(
    private_redis_cluster: RedisClusterServers, tmp_path: Path
) -> None:
    with Workers(f"{private_redis_cluster.url}?wait_replicas=1", tmp_path, policy="recover", lease=2.0) as workers:
        workers.spawn(3)
        goes_on(workers)
        cluster_failover(private_redis_cluster)
        goes_on(workers)
        workers.stop()
        lines = workers.finish()
        report(workers, lines)
        assert lost(workers, lines) == set()
        assert_exactly_once(workers, lines)


def test_sentinels_whose_replicas_confirm_lose_no_key_when_the_master_is_killed(
    private_redis_sentinel: RedisSentinelServers, tmp_path: Path
) -> None:
    with Workers(f"{private_redis_sentinel.url}?wait_replicas=2", tmp_path, policy="recover", lease=2.0) as workers:
        workers.spawn(3)
        goes_on(workers)
        sentinel_failover(private_redis_sentinel, comes_back=True)
        goes_on(workers)
        workers.stop()
        lines = workers.finish()
        report(workers, lines)
        assert lost(workers, lines) == set()
        assert_exactly_once(workers, lines)


def test_without_confirmation_only_what_a_failover_forgot_is_repeated(
    private_redis_cluster: RedisClusterServers, tmp_path: Path
) -> None:
    with Workers(private_redis_cluster.url, tmp_path, policy="recover", lease=2.0) as workers:
        workers.spawn(3)
        goes_on(workers)
        cluster_failover(private_redis_cluster)
        goes_on(workers)
        workers.stop()
        lines = workers.finish()
        forgotten = lost(workers, lines)
        repeated = {key for key, found in effects(lines).items() if len(found) > 1}
        report(workers, lines)
        assert repeated <= forgotten
        assert len(forgotten) < 20, "more than were under way when the master died"
        assert workers.overwritten(lines) == []


def test_tasks_go_on_through_a_failover_of_a_cluster(private_redis_cluster: RedisClusterServers) -> None:
    goes_on_through(f"{private_redis_cluster.url}?wait_replicas=1", lambda: cluster_failover(private_redis_cluster))


def test_tasks_go_on_through_a_failover_by_sentinels(private_redis_sentinel: RedisSentinelServers) -> None:
    """One confirmation of two is enough here: the sentinels choose the replica that has the most."""
    group = private_redis_sentinel
    goes_on_through(f"{group.url}?wait_replicas=1", lambda: sentinel_failover(group, comes_back=False))


def goes_on_through(url: str, fail: Callable[[], None]) -> None:
    """The async store: every key that was answered is replayed with its answer afterwards, and ran once."""
    numbers = itertools.count()
    answered: dict[int, str] = {}
    ran: dict[int, int] = {}
    failed: list[StoreError] = []

    async def main() -> None:
        stopping = asyncio.Event()
        async with AsyncSemel(AsyncRedisStore(url), sweep_every=None, policy=None) as guard:

            async def ask(key: int) -> None:
                async def handler() -> str:
                    ran[key] = ran.get(key, 0) + 1
                    await asyncio.sleep(0.01)
                    return f"answer {key}"

                try:
                    answered[key] = await guard.run("ship", key=key, call=handler, completion_timeout="30s")
                except StoreError as error:
                    failed.append(error)
                    await asyncio.sleep(0.05)

            async def load() -> None:
                while not stopping.is_set():
                    await ask(next(numbers))

            async def answers(more: int) -> None:
                enough = len(answered) + more
                end = time.monotonic() + 60
                while len(answered) < enough:
                    assert time.monotonic() < end, f"the work does not go on: {failed[-1:]}"
                    await asyncio.sleep(0.01)

            tasks = [asyncio.create_task(load()) for _ in range(16)]
            await answers(200)
            await asyncio.to_thread(fail)
            await answers(200)
            stopping.set()
            await asyncio.gather(*tasks)
            replays = {key: await guard.run("ship", key=key, call=_never) for key in answered}
            assert replays == answered
            assert {ran[key] for key in answered} == {1}

    asyncio.run(main())


async def _never() -> str:
    raise AssertionError("an operation that was answered has run again")


# What a failover can lose, on purpose


class Pair:
    """A master and a replica whose line is cut: what is written now, the replica will never have."""

    def __init__(self, master: RedisServer, replica: RedisServer) -> None:
        self.master = master
        self.replica = replica
        until(lambda: replicated(lambda: [master], 1, 1), 20, "the replica does not come up")

    def catch_up(self) -> None:
        """Not by WAIT, which only waits for what its own connection has written."""

        def caught_up() -> bool:
            said = self.master.cli("INFO", "replication")
            return f"offset={said.partition('master_repl_offset:')[2].split()[0]}," in said

        until(caught_up, 20, "the replica does not catch up")

    def partition(self) -> None:
        self.replica.cli("REPLICAOF", "NO", "ONE")
        until(lambda: "connected_slaves:0" in self.master.cli("INFO", "replication"), 20, "they still talk")


def test_a_failover_forgets_what_no_replica_had(private_redis: RedisServer) -> None:
    with RedisServer("--replicaof", f"{LOOPBACK} {private_redis.port}") as replica:
        pair = Pair(private_redis, replica)
        ran: list[str] = []
        with Semel(RedisStore(pair.master.url), sweep_every=None) as guard:
            guard.run("ship", key="replicated", call=lambda: ran.append("replicated"))
            pair.catch_up()
            pair.partition()
            guard.run("ship", key="not", call=lambda: ran.append("not"))  # and the caller is told that it is done
        pair.master.crash()
        with Semel(RedisStore(replica.url), sweep_every=None) as guard:
            guard.run("ship", key="replicated", call=lambda: ran.append("replicated"))
            assert guard.lookup("ship", "not") is None
            guard.run("ship", key="not", call=lambda: ran.append("not"))
        assert ran == ["replicated", "not", "not"], "one key was forgotten, and its operation ran twice"


def test_with_confirmation_the_caller_is_not_told_what_is_not_so(private_redis: RedisServer) -> None:
    with RedisServer("--replicaof", f"{LOOPBACK} {private_redis.port}") as replica:
        pair = Pair(private_redis, replica)
        ran: list[str] = []
        patient = RedisStore(pair.master.url, wait_replicas=1, timeout="40s", wait_timeout="20s", retry_for=0)
        with Semel(patient, sweep_every=None) as guard:  # a replica may take its time, on a busy machine
            guard.run("ship", key="replicated", call=lambda: ran.append("replicated"))
        pair.partition()
        short = RedisStore(pair.master.url, wait_replicas=1, wait_timeout="100ms", retry_for=0)
        with Semel(short, sweep_every=None) as guard, pytest.raises(StoreUncertain, match="only 0 of 1 replicas"):
            guard.run("ship", key="not", call=lambda: ran.append("not"))
        assert ran == ["replicated"], "without its claim confirmed it does not run"
        pair.master.crash()
        with contextlib.closing(RedisStore(replica.url)) as other, Semel(other, sweep_every=None) as guard:
            record = guard.lookup("ship", "replicated")
            assert record is not None
            assert record.state is State.DONE
            guard.run("ship", key="not", call=lambda: ran.append("not"))
        assert ran == ["replicated", "not"]
