"""Tiered stores in programs: by URL, on the command line, in forked workers, for async functions, in transactions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel import (
    AsyncRedisCache,
    AsyncSemel,
    AsyncSQLiteStore,
    AsyncTieredStore,
    InProgress,
    NotResolvable,
    RedisCache,
    Semel,
    SQLiteStore,
    TieredStore,
    Wait,
)
from semel.cli import main
from semel.core.states import State
from semel.errors import StoreURLError
from semel.stores.urls import migrate_store, open_async_store, open_store, tiers
from tests.servers import RedisSentinelServers

PATIENT = 5.0
BOUND = 20.0


@pytest.fixture
def url(tmp_path: Path, redis_url: str) -> str:
    made = f"tiered:sqlite:///{tmp_path / 'semel.db'},{redis_url}"
    migrate_store(made)
    return made


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# By URL


@pytest.mark.parametrize(
    ("primary", "cache"),
    [
        ("postgresql://app:s%2Cecret@db:5432/shop?sslmode=require", "redis://cache:6379/1"),
        ("sqlite:////tmp/a,b.db", "rediss://u:p@cache?ssl_cert_reqs=none"),
        ("mysql://app@db/shop", "redis+sentinel://a:1,b:2,c:3/shop/0"),
        ("redis+cluster://a:1,b:2", "redis+cluster://c:1,d:2"),
        ("memory:", "unix:///run/redis.sock"),
    ],
)
def test_a_url_names_the_truth_and_then_the_cache(primary: str, cache: str) -> None:
    assert tiers(f"tiered:{primary},{cache}") == (primary, cache)


@pytest.mark.parametrize(
    "url",
    ["tiered:", "tiered:memory:", "tiered:memory:,", "tiered:redis://a", "tiered:memory:,memory:",
     "tiered:tiered:memory:,redis://a,redis://b"],
)  # fmt: skip
def test_a_url_that_names_no_two_stores_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(StoreURLError, match=r"write tiered:postgresql://user@host/database,redis://host:6379$"):
        open_store(url)


def test_a_typo_in_a_url_lists_what_exists() -> None:
    with pytest.raises(StoreURLError, match=r"this is no URL: .* there are also: memory, sqlite, .*tiered"):
        open_store("tierd:memory:,redis://a")
    with pytest.raises(StoreURLError, match=r"no store is called 'postgre'; there are: memory, sqlite, .*tiered"):
        open_store("tiered:postgre://x,redis://a")


def test_both_kinds_are_opened_by_url_and_share_records_and_copies(url: str) -> None:
    store: Any = open_store(url)
    assert store.cache.connect(BOUND)
    with Semel(store, sweep_every=None) as guard:
        assert guard.run("pay", key="k", call=lambda: "answer") == "answer"
        until(lambda: store.tally.written)

    async def replay() -> int:
        other: Any = open_async_store(url)
        assert await other.cache.connect(BOUND)
        async with AsyncSemel(other, sweep_every=None) as guard:
            assert await guard.run("pay", key="k", call=_never) == "answer"
            replayed: int = other.tally.replayed
            return replayed

    assert asyncio.run(replay()) == 1


async def _never() -> str:
    raise AssertionError("it has run again")


def test_commands_ask_the_truth(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Semel(open_store(url), sweep_every=None) as guard:
        guard.run("pay", key="k", call=lambda: "answer")
    assert main(["lookup", url, "pay", "k"]) == 0
    assert "answer" in capsys.readouterr().out
    assert main(["migrate", url, "--check"]) == 0
    assert main(["sweep", url]) == 0
    nowhere = f"tiered:sqlite:///{tmp_path / 'none.db'},redis://127.0.0.1:1"
    assert main(["lookup", nowhere, "pay", "k"]) == 3
    assert not (tmp_path / "none.db").exists()
    assert main(["migrate", "tiered:redis://a", "--check"]) == 2


# A finished record is freed

PAUSED = """
import sys
from semel import Semel
from semel.stores.urls import open_store

store = open_store(sys.argv[1])
assert store.cache.connect(20)
write = store.cache.write

def paused(what):
    if what.record is None or what.record.snapshot is None:
        return
    print("paused", flush=True)
    sys.stdin.readline()
    write(what)
    store.cache.settle(what.id)
    print("written", flush=True)

store.cache.write = paused
with Semel(store, sweep_every=None) as guard:
    print(guard.run("pay", key="k", call=lambda: "failed"), flush=True)
"""


@pytest.mark.parametrize("asked", ["finishes it", "replays it"])
def test_a_process_that_wakes_after_the_release_brings_no_old_outcome_back(url: str, asked: str) -> None:
    """It was paused between the answer of the primary and its write to the cache."""

    def pay(result: str) -> str:
        store = open_store(url)
        assert isinstance(store, TieredStore)
        assert store.cache.connect(BOUND)
        with Semel(store, sweep_every=None) as guard:
            return guard.run("pay", key="k", call=lambda: result)

    if asked == "replays it":
        with Semel(open_store(url.removeprefix("tiered:").partition(",")[0]), sweep_every=None) as guard:
            guard.run("pay", key="k", call=lambda: "failed")
    with subprocess.Popen(
        [sys.executable, "-c", PAUSED, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "paused\n"
        assert main(["release", url, "pay", "k", "--stored", "any", "--yes"]) == 0
        process.stdin.write("wake\n")
        process.stdin.flush()
        assert process.stdout.readline() == "written\n"
        assert pay("paid") == "paid"
        assert process.stdout.readline() == "failed\n", "its own call had ended before the release"
    assert process.returncode == 0
    assert [pay("never") for _ in range(3)] == ["paid"] * 3


@pytest.mark.slow
def test_processes_that_replay_while_an_outcome_is_released_all_come_to_the_new_one(url: str) -> None:
    replay = """
import sys, time
from semel import InProgress, Semel
from semel.stores.urls import open_store

store = open_store(sys.argv[1])
assert store.cache.connect(20)
with Semel(store, sweep_every=None) as guard:
    found, end = "", time.monotonic() + 20
    while time.monotonic() < end and found != "5":
        before = found
        try:
            found = guard.run("pay", key="k", call=lambda: "ran here")
        except InProgress:
            continue
        if found != before:
            print(found.replace(" ", "_"), flush=True)
"""
    with Semel(open_store(url), sweep_every=None) as guard:
        guard.run("pay", key="k", call=lambda: "0")
        command = [sys.executable, "-c", replay, url]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as one,
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other,
        ):
            for each in (one, other):
                assert each.stdout is not None
                assert each.stdout.readline() == "0\n"
            for number in "12345":
                found = ""
                while found != number:  # the others may run it first; then their outcome is released in turn
                    with contextlib.suppress(InProgress, NotResolvable):
                        guard.release("pay", "k", stored="any")
                    with contextlib.suppress(InProgress):
                        found = guard.run("pay", key="k", call=lambda number=number: number)  # type: ignore[misc]
            for each in (one, other):
                lines = each.communicate(timeout=BOUND)[0].split()
                numbers = [line for line in lines if line != "ran_here"]
                assert lines[-1:] == ["5"]
                assert numbers == sorted(numbers), "an outcome that was released came back"


# In programs


def test_a_sentinels_master_is_the_cache(private_redis_sentinel: RedisSentinelServers, tmp_path: Path) -> None:
    cache = RedisCache(private_redis_sentinel.url, timeout=PATIENT)
    store = TieredStore(SQLiteStore(tmp_path / "semel.db"), cache)
    assert cache.connect(BOUND)
    with Semel(store, sweep_every=None) as guard:
        guard.run("pay", key="k", call=lambda: "answer")
        until(lambda: store.tally.written)
        guard.run("pay", key="k", call=lambda: "never")
        assert store.tally.replayed == 1
        victim = private_redis_sentinel.master
        victim.crash()
        assert guard.run("pay", key="k", call=lambda: "never") == "answer"
        until(lambda: private_redis_sentinel.master is not victim)
        until(lambda: guard.run("pay", key="k", call=lambda: "never") == "answer" and store.tally.replayed > 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_lines_of_its_own(url: str) -> None:
    store: Any = open_store(url)
    assert store.cache.connect(BOUND)
    with Semel(store, sweep_every=None) as guard:
        guard.run("pay", key="k", call=lambda: "answer")
        until(lambda: store.tally.written)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                threading.Timer(15, os._exit, (9,)).start()
                assert guard.run("pay", key="k", call=lambda: "never") == "answer"
                assert store.tally.skipped == 1, "the parent's line is not used"
                assert store.cache.connect(10)
                assert guard.run("pay", key="k", call=lambda: "never") == "answer"
                assert store.tally.replayed == 1
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        for _ in range(50):
            assert guard.run("pay", key="k", call=lambda: "never") == "answer"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert store.tally.failed == 0


def test_a_cancelled_call_leaves_no_mark(tmp_path: Path, redis_url: str) -> None:
    async def program() -> None:
        cache = AsyncRedisCache(redis_url, timeout=PATIENT)
        store = AsyncTieredStore(AsyncSQLiteStore(tmp_path / "semel.db"), cache, mark_after=0, in_progress_ttl="1h")
        assert await cache.connect(BOUND)
        async with AsyncSemel(store, sweep_every=None) as guard:
            running = asyncio.Event()

            async def forever() -> None:
                running.set()
                await asyncio.sleep(3600)

            task = asyncio.create_task(guard.run("pay", key="k", call=forever, lease="1h"))
            await running.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            async def answer() -> str:
                return "answer"

            assert await guard.run("pay", key="k", call=answer) == "answer"

    asyncio.run(program())


def test_one_that_waits_is_woken_by_the_truth(url: str) -> None:
    """In another process's place: a second store on the same records."""
    first, second = open_store(url), open_store(url)
    for store in (first, second):
        assert store.cache.connect(BOUND)  # type: ignore[attr-defined]
    begun, finish = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert finish.wait(BOUND)
        return "answer"

    with Semel(first, sweep_every=None) as owner, Semel(second, sweep_every=None) as other:
        thread = threading.Thread(target=lambda: owner.run("pay", key="k", call=slow))
        thread.start()
        assert begun.wait(BOUND)
        until(lambda: first.tally.written)  # type: ignore[attr-defined]
        answers: list[str] = []
        waiter = threading.Thread(
            target=lambda: answers.append(other.run("pay", key="k", call=lambda: "never", on_duplicate=Wait(BOUND)))
        )
        waiter.start()
        until(lambda: second.tally.turned_away)  # type: ignore[attr-defined]
        finish.set()
        thread.join(BOUND)
        waiter.join(BOUND)
        assert answers == ["answer"]


def test_an_async_function_of_a_sync_program_uses_it_in_threads(url: str) -> None:
    with Semel(open_store(url), sweep_every=None) as guard:

        @guard.once(key="order")
        async def ship(order: int) -> int:
            return order

        assert asyncio.run(ship(3)) == 3
        assert asyncio.run(ship(3)) == 3


def test_a_unit_of_work_is_the_truths(url: str, tmp_path: Path) -> None:
    with Semel(open_store(url), sweep_every=None) as guard:
        connection = sqlite3.connect(tmp_path / "semel.db", isolation_level=None)
        unit = guard.store.adopt(connection)  # type: ignore[attr-defined]
        assert hasattr(unit, "lock")
        connection.close()
        guard.run("pay", key="k", call=lambda: 1)
        record = guard.lookup("pay", "k")
        assert record is not None
        assert record.state is State.DONE
