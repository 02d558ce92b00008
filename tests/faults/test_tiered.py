"""Redis in front of a database is flushed, stopped, killed and restarted under load: speed changes, no outcome does.

Several processes work on the same keys. What they did stands in a log of its own, beside the stores: every operation
has one effect, all callers of a key were given the same bytes, and the database's own count of statements shows that
the cache has answered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel import AsyncRedisCache, AsyncSemel, AsyncSQLiteStore, AsyncTieredStore, Semel, SQLiteStore, Wait
from semel.core.ops import Claim, Op
from semel.core.states import State
from semel.stores.sqlite import migrate
from semel.stores.urls import migrate_store, open_store
from semel.testing.faults import Line, Worker, Workers, until
from tests.faults.conftest import assert_exactly_once, begun, goes_on, state_of
from tests.servers import PostgresServer, RedisServer
from tests.servers.freezing import freeze

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def answers_go_on(workers: Workers, more: int = 50) -> None:
    """Wait until some more callers were answered, whether by a first execution or by a replay."""
    done = sum(line.what == "answer" for line in workers.log.read())
    until(
        lambda: sum(line.what == "answer" for line in workers.log.read()) >= done + more, 90, "callers are not answered"
    )


def stopped(redis: RedisServer, meanwhile: Callable[[], None]) -> None:
    """SIGSTOP: connections stay open, the kernel takes new ones, and nobody answers."""
    assert redis.pid is not None
    freeze(redis.pid)
    try:
        meanwhile()
    finally:
        os.kill(redis.pid, signal.SIGCONT)


def pause_outside_of_commits(workers: Workers, database: Path) -> Worker:
    """Pause a worker that does not hold the lock of the SQLite file: with the lock held, nobody could go on."""
    while True:
        victim: Worker = workers.dice.choice(workers.running)
        workers.pause(victim)
        freeze(victim.pid)
        with closing(sqlite3.connect(database, timeout=1, isolation_level=None)) as raw:
            try:
                raw.execute("BEGIN IMMEDIATE")
                raw.execute("ROLLBACK")
                return victim
            except sqlite3.OperationalError:
                workers.resume(victim)


def killed(redis: RedisServer, meanwhile: Callable[[], None]) -> None:
    redis.crash()
    meanwhile()
    redis.return_()


def judged(workers: Workers, lines: list[Line]) -> None:
    assert_exactly_once(workers, lines)
    assert [line.note for line in lines if line.what == "store"] == [], "the loss of the cache was told to a caller"
    assert {state_of(workers, key) for key in begun(lines)} == {State.DONE}


def test_redis_is_flushed_stopped_killed_and_started_again_under_load(
    postgres_url: str, private_redis: RedisServer, tmp_path: Path
) -> None:
    url = f"tiered:{postgres_url},{private_redis.url}"
    migrate_store(url)
    with Workers(url, tmp_path, policy="recover", lease=2.0) as workers:
        workers.spawn(3)
        goes_on(workers)
        for _ in range(2):
            for _ in range(5):
                private_redis.cli("FLUSHALL")
                answers_go_on(workers, 10)
            stopped(private_redis, lambda: goes_on(workers))
            goes_on(workers)
            killed(private_redis, lambda: goes_on(workers))
            goes_on(workers)
        workers.stop()
        judged(workers, workers.finish())


def test_owners_are_killed_and_paused_while_redis_comes_and_goes(private_redis: RedisServer, tmp_path: Path) -> None:
    """Marks of owners that died must not outlive their leases; owners that come back must not undo what was done."""
    url = f"tiered:sqlite:///{tmp_path / 'semel.db'},{private_redis.url}"
    migrate_store(url)
    with Workers(url, tmp_path, policy="recover", lease=1.0, work=0.3) as workers:
        workers.spawn(3)
        goes_on(workers)
        for _ in range(2):
            workers.kill(workers.dice.choice(workers.running))
            workers.spawn()
            private_redis.cli("FLUSHALL")
            goes_on(workers)
            victim = pause_outside_of_commits(workers, tmp_path / "semel.db")
            stopped(private_redis, lambda: goes_on(workers))
            workers.resume(victim)
            killed(private_redis, lambda: goes_on(workers))
        workers.stop()
        lines = workers.finish()
        assert_exactly_once(workers, lines)


def test_the_mark_of_an_owner_that_was_killed_ends_before_its_lease(private_redis: RedisServer, tmp_path: Path) -> None:
    """Nobody is left to take it away; and who takes over when the lease has ended finds no mark in the way."""
    url = f"tiered:sqlite:///{tmp_path / 'semel.db'},{private_redis.url}"
    migrate_store(url)
    with Workers(url, tmp_path, policy="retry", lease=2.0) as workers:
        store: Any = workers.guard.store
        assert store.cache.connect(20)
        (owner,) = workers.spawn(1, only="k", work=120.0)
        until(lambda: "semel-tier:" in private_redis.cli("KEYS", "semel-tier:*"), 60, "the attempt is not marked")
        workers.kill(owner)
        until(lambda: state_of(workers, "k") is State.ABANDONED, 20, "the lease does not end")
        lines = workers.finish()  # asks once, and would say if it is turned away
        assert [line.what for line in lines if line.key == "k"][-1] == "answer"
        assert store.tally.turned_away == 0


# The cache does answer, and the bytes are the same


def statements(server: PostgresServer, url: str) -> int:
    """Statements on one database that the server has logged."""
    name = url.rpartition("/")[2]
    lines = server.log.read_text(errors="replace").splitlines()
    return sum(f" {name} LOG:  " in line and ("execute " in line or "statement: " in line) for line in lines)


def test_replays_are_answered_by_the_cache_and_by_the_database_alike(
    private_redis: RedisServer, postgres: PostgresServer, postgres_url: str
) -> None:
    """With Redis whole the database sees no statement; without it, one for each replay. The bytes are the same."""
    url = f"tiered:{postgres_url},{private_redis.url}"
    migrate_store(url)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute(f"ALTER DATABASE \"{postgres_url.rpartition('/')[2]}\" SET log_statement = 'all'".encode())
    answers: dict[int, list[bytes]] = defaultdict(list)
    store: Any = open_store(url)
    assert store.cache.connect(20)
    with Semel(store, sweep_every=None) as guard:

        def ask_all() -> int:
            """Ask for every key once; how many statements the database has seen meanwhile."""
            before = statements(postgres, postgres_url)
            for key in range(40):
                answer = guard.run("pay", key=key, call=lambda key=key: {"paid": key, "text": "é" * key})
                answers[key].append(json.dumps(answer).encode())
            return statements(postgres, postgres_url) - before

        guard.run("pay", key="opens the connection", call=lambda: None)
        assert ask_all() == 80, "two for a first execution"
        until(lambda: store.tally.written >= 41, 20, "the copies are not written")
        assert ask_all() == 0, "all were answered by the cache"
        private_redis.crash()
        assert ask_all() == 40, "all were answered by the database"
        private_redis.return_()
        assert store.cache.connect(20)
        assert ask_all() == 40, "Redis came back empty"
        until(lambda: store.tally.written >= 81, 20, "the copies are not written again")
        assert ask_all() == 0
    assert {len(given) for given in answers.values()} == {5}
    assert [key for key, given in answers.items() if len(set(given)) > 1] == []


class Counted(AsyncSQLiteStore):
    """Counts the claims that reach the database."""

    claims = 0

    async def execute(self, op: Op[Any]) -> Any:
        self.claims += type(op) is Claim
        return await super().execute(op)

    async def execute_many(self, ops: Sequence[Op[Any]]) -> list[Any]:
        return await super().execute_many(ops)


def test_tasks_go_on_whatever_becomes_of_redis(private_redis: RedisServer, tmp_path: Path) -> None:
    """The async store: 16 tasks ask for a few hot keys and new ones; none is told of the cache, none runs twice."""
    path = tmp_path / "semel.db"
    migrate(path)
    ran: dict[int, int] = defaultdict(int)
    answered: dict[int, set[str]] = defaultdict(set)
    numbers = itertools.count()
    asked = 0

    async def main() -> None:
        nonlocal asked
        primary = Counted(path, synchronous="normal")
        store = AsyncTieredStore(primary, AsyncRedisCache(private_redis.url, timeout=1.0), mark_after="5ms")
        assert await store.cache.connect(20)
        stopping = asyncio.Event()
        async with AsyncSemel(store, sweep_every=None) as guard, asyncio.TaskGroup() as tasks:

            async def ask(key: int) -> None:
                nonlocal asked

                async def handler() -> str:
                    ran[key] += 1
                    await asyncio.sleep(0.02 * (key % 2))
                    return f"answer {key} {ran[key]}"

                answered[key].add(await guard.run("pay", key=key, call=handler, on_duplicate=waiting))
                asked += 1

            async def load() -> None:
                while not stopping.is_set():
                    newest = next(numbers)
                    await ask(newest // 8)
                    await ask(max(0, newest // 8 - 20))

            async def more(count: int) -> None:
                enough, end = asked + count, time.monotonic() + 60
                while asked < enough:
                    assert time.monotonic() < end, "the work does not go on"
                    await asyncio.sleep(0.01)

            for _ in range(16):
                tasks.create_task(load())
            await more(500)
            for _ in range(5):
                await asyncio.to_thread(private_redis.cli, "FLUSHALL")
                await more(100)
            assert private_redis.pid is not None
            freeze(private_redis.pid)
            await more(300)
            os.kill(private_redis.pid, signal.SIGCONT)
            await more(300)
            await asyncio.to_thread(private_redis.crash)
            await more(300)
            await asyncio.to_thread(private_redis.return_)
            assert await store.cache.connect(20)
            await more(500)
            stopping.set()
        print(f"{asked} calls, {primary.claims} claims reached the database, {store.tally}")
        assert store.tally.replayed > 0
        assert primary.claims < asked, "the cache has answered some"

    waiting = Wait("30s")
    asyncio.run(main())
    assert set(ran.values()) == {1}
    assert {len(given) for given in answered.values()} == {1}


def test_a_sync_program_goes_on_after_its_truth_alone(tmp_path: Path) -> None:
    """The records are the truth's: a program without the cache finds all of them."""
    path = tmp_path / "semel.db"
    with Semel(open_store(f"tiered:sqlite:///{path},redis://127.0.0.1:1"), sweep_every=None) as guard:
        guard.run("pay", key="k", call=lambda: "answer")
    with Semel(SQLiteStore(path), sweep_every=None) as guard:
        assert guard.run("pay", key="k", call=lambda: "never") == "answer"
