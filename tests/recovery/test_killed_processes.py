"""Processes killed while they work, and resumers in others that finish all of it, each effect once."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from semel import Semel, State, migrate_store, open_store

ROOT = Path(__file__).parents[2]
WORKERS = ("w1", "w2", "w3")
PLACES = ("asked", "charged", "marked", "booked")
ORDERS = sorted(f"{worker}-{place}" for worker in WORKERS for place in PLACES)
PATIENCE = 30.0


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    path = tmp_path / "effects.db"
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("CREATE TABLE effect (key TEXT PRIMARY KEY, kind TEXT, order_id TEXT)")
        conn.execute("CREATE TABLE asked (kind TEXT, order_id TEXT)")
    return path


@contextmanager
def process(*command: str, store: str, effects: Path) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "ORDERS_STORE": store, "ORDERS_EFFECTS": str(effects), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def kill_at_work(store: str, effects: Path) -> None:
    """Three processes, each in the middle of four orders, killed."""
    for worker in WORKERS:
        with process("tests.recovery.orders", worker, store=store, effects=effects) as started:
            assert started.stdout is not None
            reached = sorted(started.stdout.readline().strip() for _ in PLACES)
            assert reached == sorted(f"{worker}-{place}" for place in PLACES), started.stderr
            os.kill(started.pid, signal.SIGKILL)


def rows(effects: Path, query: str) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(effects)) as conn:
        return sorted(conn.execute(query).fetchall())


def check_all_is_done_once(store: str, effects: Path) -> None:
    done = sorted((order, kind) for order in ORDERS for kind in ("booked", "charged"))
    assert rows(effects, "SELECT order_id, kind FROM effect") == done
    with Semel(open_store(store), sweep_every=None) as guard:
        for order in ORDERS:
            record = guard.lookup("ship", order)
            assert record is not None
            assert record.state is State.DONE
            assert record.attempt >= 2  # more, where a resumer was so slow that it lost its lease
    # What had its mark was not even asked for again.
    marked = sorted(f"{worker}-{place}" for worker in WORKERS for place in ("booked", "marked"))
    asked = [order for (order,) in rows(effects, "SELECT order_id FROM asked WHERE kind = 'charged'")]
    assert [order for order in asked if order in marked] == marked


def all_done(store: str) -> bool:
    with Semel(open_store(store), sweep_every=None) as guard:
        found = [guard.lookup("ship", order) for order in ORDERS]
    return all(record is not None and record.state is State.DONE for record in found)


def finish_with_two_resumers(module: str, store: str, effects: Path) -> None:
    kill_at_work(store, effects)
    command = ("semel", "recover", f"tests.recovery.{module}:guard", "--every", "100ms", "--limit", "3")
    with (
        process(*command, store=store, effects=effects) as one,
        process(*command, store=store, effects=effects) as two,
    ):
        for resumer in (one, two):
            assert resumer.stdout is not None
            assert resumer.stdout.readline() == "recovering ship; Ctrl-C stops it\n"
        end = time.monotonic() + PATIENCE
        while not all_done(store):
            assert time.monotonic() < end, "the resumers do not finish"
            assert one.poll() is None
            assert two.poll() is None
            time.sleep(0.1)
        said = []
        for resumer in (one, two):
            resumer.send_signal(signal.SIGTERM)
            said.append(resumer.communicate(timeout=PATIENCE))
        assert [one.returncode, two.returncode] == [0, 0], said
    totals = [re.search(r"in all: resumed (\d+), 0 failed", out) for out, _ in said]
    assert sum(int(total[1]) for total in totals if total) == len(ORDERS), said
    check_all_is_done_once(store, effects)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["orders"])
def test_what_killed_processes_left_is_finished_on_sqlite(module: str, tmp_path: Path, effects: Path) -> None:
    store = f"sqlite:///{tmp_path}/records.db"
    migrate_store(store)
    finish_with_two_resumers(module, store, effects)


@pytest.mark.parametrize("module", ["aio_orders"])
def test_what_killed_processes_left_is_finished_on_postgres(module: str, postgres_url: str, effects: Path) -> None:
    migrate_store(postgres_url)
    finish_with_two_resumers(module, postgres_url, effects)


# The command


@pytest.mark.process
def test_one_round_says_what_it_did_and_what_failed(tmp_path: Path, effects: Path) -> None:
    store = f"sqlite:///{tmp_path}/records.db"
    migrate_store(store)
    with process("tests.recovery.orders", "w1", store=store, effects=effects) as started:
        assert started.stdout is not None
        for _ in PLACES:
            started.stdout.readline()
    command = ("semel", "recover", "tests.recovery.orders:guard", "--once")
    with closing(sqlite3.connect(tmp_path / "records.db")) as conn, conn:
        conn.execute("UPDATE semel_record SET lease_end = 0")
    with closing(sqlite3.connect(effects)) as conn, conn:
        conn.execute("ALTER TABLE asked RENAME TO gone")
    with process(*command, store=store, effects=effects) as failing:
        out, err = failing.communicate(timeout=PATIENCE)
    assert (failing.returncode, out) == (1, "in all: resumed 0, 4 failed\n"), err
    assert "ship[w1-asked]: attempt 2 failed: OperationalError" in err
    with closing(sqlite3.connect(effects)) as conn, conn:
        conn.execute("ALTER TABLE gone RENAME TO asked")
    with process(*command, "--tries", "2", store=store, effects=effects) as giving_up:
        out, err = giving_up.communicate(timeout=PATIENCE)
    assert (giving_up.returncode, out) == (1, "in all: resumed 0, 0 failed, 4 given up\n"), err
    assert "ship[w1-asked]: given up after 2 attempts" in err
    with process(*command, "--pause", "0s", store=store, effects=effects) as working:
        out, err = working.communicate(timeout=PATIENCE)
    assert (working.returncode, out) == (0, "in all: resumed 4, 0 failed\n"), err


def test_a_wrong_guard_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from semel.cli import main

    for target, complaint in (
        ("tests.servers", "'tests.servers' names no guard: write module:attribute"),
        ("tests.servers:KINDS", "name a Semel or an AsyncSemel"),
        ("tests.recovery.plain:guard", "has no resumable function"),
    ):
        assert main(["recover", target, "--app-dir", str(ROOT)]) == 2
        assert complaint in capsys.readouterr().err
