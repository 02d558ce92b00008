"""Histories of several processes, of one that is killed, and of a store that is locked or cannot be reached."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from semel import MemoryStore, Semel, open_store
from semel.observe import events
from semel.trail import Trail, TrailReader
from tests.trail.histories import marked, server_of

WRITER = """
import sys
from semel import MemoryStore, Semel
from semel.trail import Trail

url, name, calls, ending = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
trail = Trail(url, service=name, interval=0.05)
guard = Semel(MemoryStore(), on_event=trail)
for number in range(calls):
    guard.run("pay", key=str(number), call=lambda: 7)
    guard.run("pay", key=str(number), call=lambda: 7)
print("done", flush=True)
if ending == "wait":
    sys.stdin.read()
if ending == "close":
    trail.close()
"""
"""Without close(), the interpreter closes the trail when it ends."""


def start(url: str, name: str, calls: int, ending: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url, name, str(calls), ending],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.process
@pytest.mark.parametrize("kind", marked("sqlite", "postgres", "redis"))
def test_the_histories_of_several_processes_are_one(kind: str, empty_url: Callable[[str], str]) -> None:
    url = empty_url(server_of(kind))
    url = f"sqlite:///{url}" if kind == "sqlite" else url
    if kind == "sqlite":
        open_store(url).close()
    began = time.time()
    writers = [start(url, f"shop{number}", 100, "close" if number else "end") for number in range(2)]
    for writer in writers:
        assert writer.communicate(timeout=60)[0] == "done\n"
        assert writer.returncode == 0
    with closing(open_store(url)) as store:
        reader = TrailReader(store)
        counts: dict[str, int] = {}
        for minute in reader.minutes(began - 60):
            counts[minute.kind] = counts.get(minute.kind, 0) + minute.count
        assert counts == {"started": 200, "completed": 200, "replayed": 200}
        moments = reader.recent(5000)
        assert len(moments) == 600
        assert {each.who.partition("@")[0] for each in moments} == {"shop0", "shop1"}
        story = reader.story(moments[0].id)
        for name in ("shop0", "shop1"):  # they share the record's identity, and each has its own store of records
            kinds = [each.kind for each in story if each.who.startswith(name)]
            assert kinds == ["started", "completed", "replayed"]


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_process_leaves_what_it_has_written(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'history.db'}"
    with closing(open_store(url)) as store:
        reader = TrailReader(store)
        writer = start(url, "shop", 50, "wait")
        assert writer.stdout is not None
        assert writer.stdout.readline() == "done\n"
        wait_until(lambda: len(reader.recent(500)) == counted(reader) == 150)
        os.kill(writer.pid, signal.SIGKILL)
        writer.communicate(timeout=30)
        second = start(url, "shop", 50, "close")
        second.communicate(timeout=60)
        assert len(reader.recent(500)) == counted(reader) == 300


def counted(reader: TrailReader) -> int:
    return sum(each.count for each in reader.minutes(time.time() - 300))


def test_a_locked_file_makes_nobody_wait(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    url = f"sqlite:///{path}"
    open_store(url).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        trail = Trail(url, service="shop", interval=0.01)
        with Semel(MemoryStore(), on_event=trail) as guard:
            for number in range(50):
                guard.run("pay", key=str(number), call=lambda: 7)
                time.sleep(0.001)  # the thread begins to wait for the file
        assert not trail._closed
        other.execute("ROLLBACK")
    trail.close()
    with closing(open_store(url)) as store:
        assert len(TrailReader(store).recent(500)) == 100


def test_a_server_that_cannot_be_reached_makes_nobody_wait(caplog: pytest.LogCaptureFixture) -> None:
    trail = Trail("redis://127.0.0.1:1", service="shop", interval=0.01)
    with Semel(MemoryStore(), on_event=trail) as guard:
        assert guard.run("pay", key="k1", call=lambda: 7) == 7
        wait_until(lambda: "cannot be written" in caplog.text)
        assert guard.run("pay", key="k1", call=lambda: 7) == 7
    trail.close()
    assert "3 events could not be written" in caplog.text


def test_records_may_be_elsewhere(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'history.db'}"
    with Trail(url, service="shop") as trail:
        trail(events.Mismatched("pay", "", "k1"))
    with closing(open_store(url)) as store:
        assert [each.kind for each in TrailReader(store).recent()] == ["mismatched"]


@pytest.mark.parametrize("kind", marked("redis"))
def test_records_and_their_history_share_a_server(kind: str, empty_url: Callable[[str], str]) -> None:
    """Whoever walks over the keys of the store must leave those of the history alone."""
    url = empty_url(kind)
    with Trail(url, service="shop") as trail, Semel(url, on_event=trail) as guard:
        guard.run("pay", key="k1", call=lambda: 7)
        trail.close()
        assert [record.key for record in guard.list()] == ["k1"]
        assert guard.sweep().removed == 0
        assert len(TrailReader(guard.store).recent()) == 2
