# ruff: noqa: PT018
"""Hard cases of the SQLite and the memory store, and of an adapter's attempt."""

import asyncio
import contextlib
import gc
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel, SQLiteStore
from semel.core.ops import Claim, Claimed, Complete, Lookup, Renew, SaveStep, Sweep
from semel.core.policy import Policy
from semel.core.states import Takeover
from semel.errors import ConfigurationError, StoreUnavailable
from semel.stores import sqlite


def claim(name: str, nonce: int = 1, ttl: float = 60.0, lease: float = 30.0) -> Claim:
    return Claim(name.ljust(16).encode(), nonce, b"", lease, ttl, Takeover.RETRY, "", "op", name)


def test_a_file_held_by_another_process_is_waited_for_once_not_once_for_every_op(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "a.db", busy_timeout=1.0)
    rival = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    before = time.monotonic()
    answers = store.execute_many([claim(f"k{i}") for i in range(10)])
    took = time.monotonic() - before
    rival.close()
    store.close()
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    assert took < 9.0, "each of them waited"


def test_steps_of_an_expired_record_are_forgotten_with_it(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "a.db")
    first = store.execute(claim("a", nonce=1, ttl=0.05))
    assert isinstance(first, Claimed)
    store.execute(SaveStep(claim("a").id, first.token, "secret", b"v" * 20, 0))
    store.execute(Complete(claim("a").id, first.token, b"x" * 20, 0.05))
    time.sleep(0.1)
    second = store.execute(claim("a", nonce=2, ttl=0.05))
    assert isinstance(second, Claimed) and second.attempt == 1
    store.execute(Complete(claim("a").id, second.token, b"x" * 20, 0.05))
    time.sleep(0.1)
    assert store.execute(Sweep(10)).removed == 1
    raw = sqlite3.connect(tmp_path / "a.db")
    left = raw.execute("SELECT count(*) FROM semel_step").fetchall()
    raw.close()
    store.close()
    assert left == [(0,)]


def test_a_wrong_setting_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        SQLiteStore(tmp_path / "a.db", synchronous="off")  # type: ignore[arg-type]


def test_a_full_memory_store_does_not_look_through_all_records_for_every_claim() -> None:
    looked: list[int] = []
    store = MemoryStore(clock=lambda: 1000.0, max_records=200)
    for i in range(200):
        store.execute(claim(f"k{i}"))
    sweep = store._records.sweep
    store._records.sweep = lambda *a: (looked.append(1), sweep(*a))[1]  # type: ignore[method-assign]
    for i in range(50):
        with pytest.raises(StoreUnavailable):
            store.execute(claim(f"new{i}"))
    assert len(looked) <= 2


def test_the_memory_stores_leases_do_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """NTP, a suspended laptop: the wall clock steps, and every lease in the process ends at once."""
    store = MemoryStore()
    assert isinstance(store.execute(claim("a", nonce=1)), Claimed)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    monkeypatch.setattr(store._records, "clock", time.time if store._records.clock is real else store._records.clock)
    assert not isinstance(store.execute(claim("a", nonce=2)), Claimed)


def test_a_step_of_the_wall_clock_moves_leases_and_fences_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, an owner that lives is replaced, and may not change the record. Back, leases last longer."""
    real, step = sqlite._now, [0]
    monkeypatch.setattr(sqlite, "_now", lambda: real() + step[0] * 1_000_000)
    with contextlib.closing(SQLiteStore(tmp_path / "a.db")) as store:
        owner = store.execute(claim("a", nonce=1))
        assert isinstance(owner, Claimed)
        step[0] = -3600
        assert not isinstance(store.execute(claim("a", nonce=2)), Claimed)
        record = store.execute(Lookup(claim("a").id))
        assert record is not None and record.lease_left > 3600
        step[0] = 31
        heir = store.execute(claim("a", nonce=3))
        assert isinstance(heir, Claimed) and heir.token > owner.token
        assert store.execute(Renew(claim("a").id, owner.token, 30.0)) is False
        assert store.execute(Complete(claim("a").id, owner.token, b"late", 60.0)) is False
        assert store.execute(Complete(claim("a").id, heir.token, b"heir", 60.0)) is True


@pytest.mark.slow
def test_an_attempt_that_its_adapter_forgot_is_not_kept_alive_for_ever() -> None:
    now = [1000.0]
    store = MemoryStore(clock=lambda: now[0])
    guard = Semel(store, sweep_every=None)
    call = guard.make_call("op", "k", "", b"", Policy())
    attempt = guard.begin(call)
    assert len(guard.driver.keeper.leases) == 1
    del attempt
    gc.collect()
    assert len(guard.driver.keeper.leases) == 0 and not guard.driver.flights.by_id
    guard.close()


def test_a_cancelled_end_is_a_cancellation_whatever_the_flow_found() -> None:
    """_drive() says so; _end() of an attempt does not."""

    async def scenario() -> None:
        inner = AsyncMemoryStore()
        reached, go = asyncio.Event(), asyncio.Event()

        class Store:
            wakes = counts = resumes = lists = trails = True
            adopt = accept = None
            wait, open, close, execute_many = inner.wait, inner.open, inner.close, inner.execute_many

            async def execute(self, op: Any) -> Any:
                if type(op) is Complete:
                    reached.set()
                    await go.wait()
                    return False  # fenced off
                return await inner.execute(op)

        guard = AsyncSemel(Store(), sweep_every=None)
        attempt: Any = await guard.begin(guard.make_call("op", "k", "", b"", Policy()))
        task = asyncio.create_task(attempt.complete(1))
        await reached.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


def test_a_file_that_cannot_be_migrated_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened again for every Op, it would use up all files of the process."""
    path = tmp_path / "a.db"
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE semel_record (id BLOB)")
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def recorded(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", recorded)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="semel_record"):
            SQLiteStore(path)
    assert len(opened) == 3
    for raw in opened:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            raw.execute("SELECT 1")


@pytest.mark.parametrize("kind", ["claim", "renew", "complete", "take over"])
def test_a_lease_counts_from_when_the_file_was_ours_not_from_when_we_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another process may hold the file for seconds: a lease of that length would be over before its handler began."""
    clock = [1_700_000_000.0]
    write, writes = sqlite._Writer._write, threading.Event()

    def note_write(*args: Any) -> None:
        writes.set()
        write(*args)

    monkeypatch.setattr("semel.stores.sqlite._now", lambda: int(clock[0] * 1_000_000))
    store = SQLiteStore(tmp_path / "a.db", busy_timeout=20)
    op: Any = claim("a", lease=5.0)
    if kind != "claim":
        first = store.execute(op)
        assert isinstance(first, Claimed)
        op = {
            "renew": Renew(op.id, first.token, 5.0),
            "complete": Complete(op.id, first.token, b"", 60.0),
            "take over": claim("a", nonce=2, lease=5.0),
        }[kind]
        if kind == "take over":
            clock[0] += 6.0
    rival = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    rival.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(sqlite._Writer, "_write", note_write)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(store.execute(op)))
    asking.start()
    assert writes.wait(10), "the statement was never made"
    clock[0] += 100.0
    rival.execute("ROLLBACK")
    rival.close()
    asking.join(20)
    assert answers
    record = store.execute(Lookup(claim("a").id))
    assert record is not None
    if kind == "complete":
        assert record.expires_in == pytest.approx(60.0)
    else:
        assert record.lease_left == pytest.approx(5.0)
    store.close()
