"""SQLite: one commit per statement by the bare driver, beside Semel's group commit. All in WAL, synchronous=FULL."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from bench import guarded, job
from bench.contest import BARE_FIRST, BARE_REPLAY, Contestant, Match
from bench.turns import threads
from semel import AsyncSQLiteStore, SQLiteStore

__all__ = ["ONE_COMMIT_PER_OP", "matches"]

_TABLE: Final = (
    "CREATE TABLE bare (id BLOB PRIMARY KEY, state INTEGER, token INTEGER, lease_end INTEGER, snapshot BLOB)"
)
_INSERT: Final = "INSERT INTO bare (id, state, token, lease_end) VALUES (?, 1, ?, ?)"
_UPDATE: Final = "UPDATE bare SET state = 2, snapshot = ? WHERE id = ?"
_SELECT: Final = "SELECT state, token, lease_end, snapshot FROM bare WHERE id = ?"
_SNAPSHOT: Final = b'{"id":"pay_1001","amount":4200,"ok":true}'


@contextmanager
def matches(callers: int) -> Iterator[list[Match]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
        yield [
            Match("sqlite", "SQLite, threads (sqlite3)", [
                *_bare(stack, folder / "bare.db", callers),
                *guarded.sync_contestants(_sync(stack, folder), (1, callers)),
                *guarded.sync_contestants(_alone(_sync(stack, folder, "alone.db")), (callers,), ONE_COMMIT_PER_OP),
            ]),
            Match("sqlite", "SQLite, asyncio (sqlite3 in one thread)", [
                *_bare(stack, folder / "bare-beside-async.db", callers),
                *guarded.async_contestants(*(pair := _async(stack, folder)), (1, callers)),
                *guarded.async_contestants(
                    pair[0], _alone(_async(stack, folder, "alone-async.db", pair[0])[1]), (callers,), ONE_COMMIT_PER_OP
                ),
            ], ["the bare contestants are threads here too: sqlite3 knows no event loop"]),
        ]  # fmt: skip


ONE_COMMIT_PER_OP: Final = "Semel, one commit per Op"
"""The same path with nothing shared: what the group commit is worth."""

S = TypeVar("S", SQLiteStore, AsyncSQLiteStore)


def _alone(store: S) -> S:
    store._combiner._max_batch = 1
    return store


def _sync(stack: ExitStack, folder: Path, name: str = "semel.db") -> SQLiteStore:
    store = SQLiteStore(folder / name)
    stack.callback(store.close)
    return store


def _async(
    stack: ExitStack, folder: Path, name: str = "semel-async.db", runner: asyncio.Runner | None = None
) -> tuple[asyncio.Runner, AsyncSQLiteStore]:
    runner = runner or stack.enter_context(asyncio.Runner())
    store = AsyncSQLiteStore(folder / name)
    stack.callback(lambda: runner.run(store.close()))
    return runner, store


def _connect(path: Path) -> sqlite3.Connection:
    raw = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
    raw.execute("PRAGMA journal_mode = WAL").fetchall()
    raw.execute("PRAGMA synchronous = FULL")
    return raw


def _bare(stack: ExitStack, path: Path, callers: int) -> list[Contestant]:
    shared = _connect(path)
    stack.callback(shared.close)
    shared.execute(_TABLE)
    known = [job.raw_id() for _ in range(job.KNOWN)]
    for id in known:
        shared.execute(_INSERT, (id, 1, 1))
        shared.execute(_UPDATE, (_SNAPSHOT, id))
    lock = threading.Lock()
    mine = threading.local()

    def under_lock(sql: str, values: tuple[Any, ...]) -> None:
        with lock:
            shared.execute(sql, values).fetchall()

    def on_my_own(sql: str, values: tuple[Any, ...]) -> None:
        raw = getattr(mine, "raw", None)
        if raw is None:
            raw = mine.raw = _connect(path)
            stack.callback(raw.close)
        raw.execute(sql, values).fetchall()

    def first(execute: Callable[[str, tuple[Any, ...]], None]) -> Callable[[int], None]:
        def call(number: int) -> None:
            id = job.raw_id()
            execute(_INSERT, (id, number, number))
            job.handler()
            execute(_UPDATE, (_SNAPSHOT, id))

        return call

    def replay(execute: Callable[[str, tuple[Any, ...]], None]) -> Callable[[int], None]:
        return lambda number: execute(_SELECT, (known[number % job.KNOWN],))

    found = [
        Contestant(BARE_FIRST, "first", 1, threads(first(under_lock), 1), yardstick=True),
        Contestant(BARE_REPLAY, "replay", 1, threads(replay(under_lock), 1), yardstick=True),
    ]
    for name, execute in ((", one connection, a lock", under_lock), (", a connection each", on_my_own)):
        found.append(Contestant(BARE_FIRST + name, "first", callers, threads(first(execute), callers), yardstick=True))
        found.append(
            Contestant(BARE_REPLAY + name, "replay", callers, threads(replay(execute), callers), yardstick=True)
        )
    return found
