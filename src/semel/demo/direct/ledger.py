"""A payment provider's ledger, in its own file. Every effect is one line, and no line is ever removed.

It stands for any system outside of Semel. It does *not* deduplicate: a second charge for a payment is a second line,
which is how the verdict finds duplicates. It offers what a good provider offers: it refuses a token that is older than
one it has seen for the key. Otherwise an owner that was only slow could charge after its successor had looked, found
nothing and charged too. No library can prevent that from the outside.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

__all__ = ["Effect", "Fenced", "Ledger"]

BUSY_TIMEOUT: Final = 30.0
_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS effect (
        receipt INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, payment INTEGER NOT NULL, amount INTEGER NOT NULL,
        pid INTEGER NOT NULL, attempt INTEGER NOT NULL, token INTEGER NOT NULL, what TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS effect_key ON effect (key);
    CREATE TABLE IF NOT EXISTS fence (key TEXT PRIMARY KEY, token INTEGER NOT NULL);
"""


class Fenced(Exception):
    """The ledger has seen a newer owner of this key."""


class Effect(NamedTuple):
    """One line of the ledger."""

    receipt: int
    key: str
    payment: int
    amount: int
    pid: int
    attempt: int
    token: int
    what: str = "charge"


class Ledger:
    """Many processes write to it at once. A killed process leaves a whole line or none."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._raw = sqlite3.connect(path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
        self._raw.execute("PRAGMA journal_mode = WAL").fetchall()
        self._raw.execute("PRAGMA synchronous = OFF")  # processes are killed here, the machine is not
        self._raw.executescript(_TABLES)

    def charge(
        self, key: str, payment: int, amount: int, attempt: int, token: int, *, what: str = "charge", once: bool = False
    ) -> int:
        """Add a line and return its receipt. With ``once``, return the existing line of this key, if there is one."""
        with self._alone():
            if once:
                known = self._raw.execute("SELECT receipt FROM effect WHERE key = ?", (key,)).fetchone()
                if known is not None:
                    return int(known[0])
            seen = self._raw.execute("SELECT token FROM fence WHERE key = ?", (key,)).fetchone()
            if seen is not None and seen[0] > token:
                raise Fenced(f"payment {payment}: token {token} is older than {seen[0]}")
            line = (key, payment, amount, os.getpid(), attempt, token, what)
            cursor = self._raw.execute(
                "INSERT INTO effect (key, payment, amount, pid, attempt, token, what) VALUES (?, ?, ?, ?, ?, ?, ?)",
                line,
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def find(self, key: str, token: int) -> Effect | None:
        """Return what was charged under this key. From now on, owners with an older token are refused."""
        with self._alone():
            self._raw.execute(
                "INSERT INTO fence VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET token = max(token, excluded.token)",
                (key, token),
            )
            row = self._raw.execute("SELECT * FROM effect WHERE key = ? ORDER BY receipt LIMIT 1", (key,)).fetchone()
            return Effect(*row) if row is not None else None

    def effects(self) -> list[Effect]:
        """All lines, in order."""
        with self._lock:
            return [Effect(*row) for row in self._raw.execute("SELECT * FROM effect ORDER BY receipt")]

    def count(self) -> int:
        with self._lock:
            found: int = self._raw.execute("SELECT count(*) FROM effect").fetchone()[0]
            return found

    def close(self) -> None:
        self._raw.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A transaction that takes the write lock first, so that what it reads cannot change before it ends."""
        with self._lock:
            self._raw.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._raw.execute("COMMIT")
            except BaseException:
                self._raw.execute("ROLLBACK")
                raise
