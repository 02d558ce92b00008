"""SQLite: what is its own: one file and many processes, shared commits, and every way a file can be in the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import AsyncSQLiteStore, NotMigrated, SchemaDrift, Semel, SQLiteStore, State, StoreError, StoreUnavailable
from semel.core.ops import Claim, Claimed, Complete, Existing, Lookup, Op, Release, SaveStep
from semel.core.states import Takeover
from semel.sql.migrations import SQLITE
from semel.sql.sync import check
from semel.stores.sqlite import SQLiteConnection, migrate

PATIENCE = 30.0


def claim(number: int, **changes: Any) -> Claim:
    id = b"record %08d" % number
    return Claim(id, changes.get("nonce", number), b"", 30.0, 3600.0, Takeover.RETRY, "", "test", str(number))


def finished(store: SQLiteStore, number: int, snapshot: bytes = b"answer") -> Claimed:
    claimed = store.execute(claim(number))
    assert isinstance(claimed, Claimed)
    assert store.execute(Complete(claim(number).id, claimed.token, snapshot, 3600.0))
    return claimed


@contextlib.contextmanager
def writing_elsewhere(path: Path) -> Iterator[None]:
    """Another connection holds the write lock."""
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        raw.execute("ROLLBACK")
        raw.close()


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement that connections opened from now on run."""
    seen: list[str] = []
    connect = sqlite3.connect

    def traced(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        raw: sqlite3.Connection = connect(*args, **kwargs)
        raw.set_trace_callback(seen.append)
        return raw

    monkeypatch.setattr(sqlite3, "connect", traced)
    return seen


def count(statements: list[str], word: str) -> int:
    return sum(statement.startswith(word) for statement in statements)


def processes(script: str, *args: object, number: int, **options: Any) -> list[str]:
    """Run so many interpreters at once; what each printed."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, args), str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        for i in range(number)
    ]
    printed = []
    for process in running:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        printed.append(out.strip())
    return printed


# Round trips and commits


def test_a_first_execution_commits_twice_and_a_replay_reads_once(tmp_path: Path, statements: list[str]) -> None:
    with contextlib.closing(SQLiteStore(tmp_path / "records.db")) as store:
        guard = Semel(store, sweep_every=None)
        statements.clear()
        assert guard.run("ship", key="1", call=lambda: 7) == 7
        assert (count(statements, "BEGIN"), count(statements, "COMMIT")) == (2, 2)
        statements.clear()
        assert guard.run("ship", key="1", call=lambda: 8) == 7
        assert len(statements) == 1
        assert count(statements, "SELECT") == 1
        guard.close()


def test_concurrent_callers_share_a_commit(tmp_path: Path, statements: list[str]) -> None:
    path = tmp_path / "records.db"
    with contextlib.closing(SQLiteStore(path)) as store:
        statements.clear()
        answers: list[Any] = []
        entered = threading.Semaphore(0)

        def call(i: int) -> None:
            entered.release()
            answers.append(store.execute(claim(i)))

        threads = [threading.Thread(target=call, args=(i,)) for i in range(32)]
        with writing_elsewhere(path):
            for thread in threads:
                thread.start()
            for _ in threads:
                assert entered.acquire(timeout=PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        assert [type(answer) for answer in answers] == [Claimed] * 32
        assert 1 <= count(statements, "COMMIT") < 32


def test_concurrent_tasks_share_a_commit(tmp_path: Path, statements: list[str]) -> None:
    async def main() -> None:
        store = AsyncSQLiteStore(tmp_path / "records.db")
        statements.clear()
        answers = await asyncio.gather(*(store.execute(claim(i)) for i in range(32)))
        assert [type(answer) for answer in answers] == [Claimed] * 32
        assert count(statements, "COMMIT") == 1
        await store.close()

    asyncio.run(main())


def test_a_replay_asks_for_no_write_lock(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with contextlib.closing(SQLiteStore(path, busy_timeout=0.01)) as store:
        finished(store, 1)
        store.execute(claim(2))
        with writing_elsewhere(path):
            replay = store.execute(claim(1, nonce=99))
            assert isinstance(replay, Existing)
            assert replay.record.snapshot == b"answer"
            shown = store.execute(claim(2, nonce=99))
            assert isinstance(shown, Existing)
            assert shown.record.state is State.RUNNING
            assert isinstance(store.execute(claim(2)), Claimed)
            assert store.execute(Lookup(claim(1).id)) is not None


def test_the_event_loop_goes_on_while_the_writer_waits(tmp_path: Path) -> None:
    path = tmp_path / "records.db"

    async def main() -> None:
        store = AsyncSQLiteStore(path, busy_timeout=PATIENCE)
        with writing_elsewhere(path):
            waits = asyncio.ensure_future(store.execute(claim(1)))
            for _ in range(5):
                await asyncio.sleep(0.005)  # a blocked loop would never let go of the lock that it waits for
            assert not waits.done()
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await waits, Claimed)
        await store.close()

    asyncio.run(main())


# Many processes

CLAIMS = """
import sys
from semel import SQLiteStore
from semel.core.ops import Claim, Claimed
from semel.core.states import Takeover
store = SQLiteStore(sys.argv[1], synchronous="normal")
me = int(sys.argv[2])
for i in range(100):
    answer = store.execute(Claim(b"record %08d" % i, me, b"", 30.0, 3600.0, Takeover.RETRY, "", "test", None))
    if isinstance(answer, Claimed):
        print(i, answer.token)
store.close()
"""


@pytest.mark.slow
def test_of_many_processes_one_wins_each_record(tmp_path: Path) -> None:
    won = [line.split()[0] for out in processes(CLAIMS, tmp_path / "records.db", number=4) for line in out.splitlines()]
    assert sorted(won, key=int) == [str(i) for i in range(100)]


FORKS = """
import os, sys
from semel import SQLiteStore
from semel.core.ops import Claim, Claimed, Complete, Lookup
from semel.core.states import Takeover
store = SQLiteStore(sys.argv[1])
def claim(i, nonce):
    return store.execute(Claim(b"record %08d" % i, nonce, b"", 30.0, 3600.0, Takeover.RETRY, "", "test", None))
before = claim(0, 1)
pid = os.fork()
won = [i for i in range(50) if isinstance(claim(i, 2 if pid else 3), Claimed)]
if not pid:
    with open(sys.argv[1] + ".child", "w") as file:
        file.write(" ".join(map(str, won)))
    store.close()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert store.execute(Complete(b"record %08d" % 0, before.token, b"answer", 3600.0))
assert store.execute(Lookup(b"record %08d" % 0)).snapshot == b"answer"
print(*won)
store.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_connection_of_its_own(tmp_path: Path) -> None:
    (parent,) = processes(FORKS, tmp_path / "records.db", number=1)
    child = (tmp_path / "records.db.child").read_text()
    assert sorted([*map(int, parent.split()), *map(int, child.split())]) == list(range(1, 50))


MIGRATES = """
import sys
from semel.stores.sqlite import migrate
print(*migrate(sys.argv[1]))
"""


MIGRATIONS = [f"{number:04d}_{name}" for number, name, _ in SQLITE.migrations()]


@pytest.mark.slow
def test_many_processes_may_migrate_at_once(tmp_path: Path) -> None:
    printed = processes(MIGRATES, tmp_path / "records.db", number=6)
    assert sorted(printed) == ["", "", "", "", "", " ".join(MIGRATIONS)]
    raw = sqlite3.connect(tmp_path / "records.db")
    applied = raw.execute("SELECT version, name FROM semel_migration").fetchall()
    assert [f"{version:04d}_{name}" for version, name in applied] == MIGRATIONS
    check(SQLiteConnection(raw), SQLITE)
    raw.close()


# What stands in the way


def test_a_file_held_for_too_long_is_unavailable_and_nothing_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with contextlib.closing(SQLiteStore(path, busy_timeout=0.02)) as store:
        claimed = store.execute(claim(1))
        assert isinstance(claimed, Claimed)
        with writing_elsewhere(path):
            ops: list[Op[Any]] = [
                claim(2),
                Complete(claim(1).id, claimed.token, b"answer", 60.0),
                Release(claim(1).id, claimed.token),
            ]
            for op in ops:
                with pytest.raises(StoreUnavailable, match="busy timeout"):
                    store.execute(op)
        assert store.execute(Lookup(claim(2).id)) is None
        record = store.execute(Lookup(claim(1).id))
        assert record is not None
        assert record.state is State.RUNNING
        assert store.execute(Complete(claim(1).id, claimed.token, b"answer", 60.0))


def test_a_full_disk_is_unavailable_and_nothing_is_half_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    opened: list[sqlite3.Connection] = []

    def small(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        raw: sqlite3.Connection = connect(*args, **kwargs)
        raw.execute("PRAGMA max_page_count = 40")
        opened.append(raw)
        return raw

    monkeypatch.setattr(sqlite3, "connect", small)
    with contextlib.closing(SQLiteStore(tmp_path / "records.db")) as store:
        kept = 0
        for kept in range(1000):
            try:
                finished(store, kept, b"x" * 10_000)
            except StoreUnavailable:
                break
        assert 0 < kept < 999
        with pytest.raises(StoreUnavailable, match="full"):
            finished(store, kept + 2, b"x" * 1_000_000)
        for i in range(kept):
            record = store.execute(Lookup(claim(i).id))
            assert record is not None
            assert record.snapshot == b"x" * 10_000
        record = store.execute(Lookup(claim(kept).id))
        assert record is None or (record.state, record.snapshot) == (State.RUNNING, None)
        opened[0].execute("PRAGMA max_page_count = 100000")
        finished(store, kept + 1, b"x" * 10_000)


def test_a_step_that_does_not_fit_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(SQLiteStore(tmp_path / "records.db")) as store:
        claimed = store.execute(claim(1))
        assert isinstance(claimed, Claimed)
        with pytest.raises(StoreError):
            store.execute(SaveStep(claim(1).id, claimed.token, "charge", "no bytes", 0))  # type: ignore[arg-type]
        assert store.execute(claim(1)) == claimed


def test_an_op_that_fails_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    with contextlib.closing(SQLiteStore(tmp_path / "records.db")) as store:
        claimed = store.execute(claim(1))
        assert isinstance(claimed, Claimed)
        wrong = Complete(claim(1).id, claimed.token, "no bytes", 60.0)  # type: ignore[arg-type]
        first, failed, last = store.execute_many([claim(2), wrong, claim(3)])
        assert (type(first), type(last)) == (Claimed, Claimed)
        assert isinstance(failed, StoreError)
        found = store.execute_many([Lookup(claim(i).id) for i in (1, 2, 3)])
        assert [record.token for record in found] == [claimed.token, first.token, last.token]
        assert found[0].state is State.RUNNING


def test_an_op_that_the_driver_refuses_does_not_fail_its_neighbours(tmp_path: Path) -> None:
    """Text that is no text never reaches SQLite: the driver raises an error that is none of its own."""
    with contextlib.closing(SQLiteStore(tmp_path / "records.db")) as store:
        claimed = store.execute(claim(1))
        assert isinstance(claimed, Claimed)
        wrong = SaveStep(claim(1).id, claimed.token, "\ud800", b"", 0)
        first, failed, last = store.execute_many([claim(2), wrong, claim(3)])
        assert (type(first), type(last)) == (Claimed, Claimed)
        assert isinstance(failed, StoreError)


def test_what_is_not_a_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"not a database " * 100)
    words = re.escape(f"the database file {str(path)!r} cannot be used: ")
    with pytest.raises(StoreUnavailable, match=words):
        SQLiteStore(path)
    assert path.read_bytes() == b"not a database " * 100
    with pytest.raises(StoreUnavailable, match=words):
        migrate(path)


@pytest.mark.parametrize("made_by", ["store", "async store", "migrate"])
def test_only_the_owner_may_read_a_new_file(tmp_path: Path, made_by: str) -> None:
    path = tmp_path / "new.db"
    if made_by == "migrate":
        migrate(path)
    elif made_by == "store":
        with contextlib.closing(SQLiteStore(path)) as store:
            finished(store, 1)
            assert {file.name for file in tmp_path.iterdir()} == {"new.db", "new.db-wal", "new.db-shm"}
            assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    else:
        asyncio.run(AsyncSQLiteStore(path).close())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_exists_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "shared.db"
    path.touch(0o664)
    path.chmod(0o664)
    with contextlib.closing(SQLiteStore(path)) as store:
        finished(store, 1)
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o664}


@pytest.mark.parametrize("where", ["", "no/such/folder/records.db"])
def test_a_path_that_cannot_be_opened_is_unavailable(tmp_path: Path, where: str) -> None:
    words = re.escape(f"the database file {str(tmp_path / where)!r} cannot be used: ")
    with pytest.raises(StoreUnavailable, match=words):
        SQLiteStore(tmp_path / where)
    with pytest.raises(StoreUnavailable, match=words):
        migrate(tmp_path / where)


READS_ONLY = """
import os, sys
from semel import SQLiteStore, StoreUnavailable
from semel.core.ops import Claim, Existing, Lookup
from semel.core.states import Takeover
SQLiteStore(":memory:").close()  # all that is imported late, while the sources can be read
if os.geteuid() == 0:  # who may write anything
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
claim = lambda i: Claim(b"record %08d" % i, 99, b"", 30.0, 3600.0, Takeover.RETRY, "", "test", None)
try:
    store = SQLiteStore(sys.argv[1])
    assert isinstance(store.execute(claim(1)), Existing)
    store.execute(claim(2))
except StoreUnavailable as error:
    print("unavailable:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", [False, True])
def test_a_file_that_may_not_be_written_is_unavailable(folder: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "records.db"
        with contextlib.closing(SQLiteStore(path)) as store:
            finished(store, 1)
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        Path(name).chmod(0o555 if folder else 0o777)
        (printed,) = processes(READS_ONLY, path, number=1)
        assert printed.startswith("unavailable:")
        Path(name).chmod(0o755)
        with contextlib.closing(SQLiteStore(path)) as store:
            assert store.execute(Lookup(claim(2).id)) is None
            replay = store.execute(claim(1, nonce=99))
            assert isinstance(replay, Existing)


@pytest.mark.parametrize("made", [True, False])
def test_without_tables_every_op_says_how_to_make_them(tmp_path: Path, made: bool) -> None:
    path = tmp_path / "records.db"
    if made:
        raw = sqlite3.connect(path)
        raw.execute("CREATE TABLE orders (id INTEGER)")
        raw.commit()
        raw.close()
    with contextlib.closing(SQLiteStore(path, migrate=False)) as store:
        ops: list[Op[Any]] = [claim(1), Lookup(b"x" * 16), Complete(b"x" * 16, 1, b"", 1.0), Release(b"x" * 16, 1)]
        for op in ops:
            with pytest.raises(NotMigrated, match="semel migrate"):
                store.execute(op)
    raw = sqlite3.connect(path)
    assert raw.execute("SELECT name FROM sqlite_master").fetchall() == ([("orders",)] if made else [])
    raw.close()
    migrate(path)
    with contextlib.closing(SQLiteStore(path, migrate=False)) as store:
        assert isinstance(store.execute(claim(1)), Claimed)


def test_a_closed_store_is_unavailable(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "records.db")
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.execute(claim(1))


def test_every_answer_is_on_the_disk(tmp_path: Path, statements: list[str]) -> None:
    SQLiteStore(tmp_path / "full.db").close()
    assert "PRAGMA synchronous = full" in statements
    SQLiteStore(tmp_path / "normal.db", synchronous="normal").close()
    assert "PRAGMA synchronous = normal" in statements


# Drift


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("DROP INDEX semel_record_sweep", "semel_record_sweep"),
        ("ALTER TABLE semel_record ADD COLUMN note TEXT", "semel_record"),
        ("ALTER TABLE semel_record DROP COLUMN snapshot", "semel_record"),
        ("ALTER TABLE semel_record RENAME COLUMN nonce TO once", "semel_record"),
        ("DROP TABLE semel_step", "semel_step"),
        ("CREATE INDEX semel_extra ON semel_record (tenant)", "semel_extra"),
    ],
)
def test_a_changed_schema_is_found(tmp_path: Path, change: str, names: str) -> None:
    migrate(tmp_path / "records.db")
    raw = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    check(SQLiteConnection(raw), SQLITE)
    raw.execute(change)
    with pytest.raises(SchemaDrift, match=names):
        check(SQLiteConnection(raw), SQLITE)
    assert not raw.in_transaction
    raw.close()


def test_tables_of_others_are_no_drift(tmp_path: Path) -> None:
    migrate(tmp_path / "records.db")
    raw = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    raw.execute("CREATE TABLE semelfactive (id INTEGER)")
    raw.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, semel_id TEXT)")
    check(SQLiteConnection(raw), SQLITE)
    raw.close()


def test_a_database_without_our_tables_is_not_migrated(tmp_path: Path) -> None:
    raw = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    with pytest.raises(NotMigrated, match="0001_records"):
        check(SQLiteConnection(raw), SQLITE)
    raw.close()


def test_migrating_again_changes_nothing(tmp_path: Path) -> None:
    assert migrate(tmp_path / "records.db") == MIGRATIONS
    assert migrate(tmp_path / "records.db") == []
