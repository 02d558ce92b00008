"""Where a cell is carried out: a store with an effect beside it, and the operation in every mode.

The effect of the leased modes is outside, in a file of its own, which stands for another company's system. That of the
transactional modes is a row in the database that the records are in.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal, NamedTuple

from semel import (
    NOT_DONE,
    MemoryStore,
    Operation,
    Policy,
    PostgresStore,
    Recovered,
    Semel,
    SQLiteStore,
    current_operation,
)
from tests.partial_failures.table import Mode
from tests.partial_failures.trouble import EffectFailed, Trouble, Troubled

LEASE = 60.0
TABLE = "CREATE TABLE IF NOT EXISTS effect (name TEXT NOT NULL, key TEXT NOT NULL)"
TRANSACTIONAL = (Mode.OWN_TRANSACTION, Mode.CALLERS_TRANSACTION)


class Clock:
    """Of the memory store."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class World(NamedTuple):
    """Can be sent to another process, unless it is in memory."""

    kind: Literal["memory", "sqlite", "postgres"]
    folder: str
    url: str = ""
    memory: tuple[MemoryStore, Clock] | None = None

    @property
    def outside(self) -> str:
        return f"{self.folder}/outside.db"

    @property
    def records(self) -> str:
        return f"{self.folder}/records.db"

    def store(self) -> Any:
        if self.memory is not None:
            return self.memory[0]
        if self.kind == "sqlite":
            return SQLiteStore(self.records, synchronous="normal")
        return PostgresStore(self.url, connections=1, listen=False)

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """To the database of the records, without a transaction."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.records, isolation_level=None)) as conn:
                yield conn
        else:
            import psycopg

            with psycopg.connect(self.url, autocommit=True) as conn:
                yield conn

    def set_up(self) -> None:
        with closing(sqlite3.connect(self.outside, isolation_level=None)) as conn:
            conn.execute("PRAGMA journal_mode = WAL")
            conn.execute(TABLE)
        if self.kind != "memory":
            with self.connection() as conn:
                conn.execute(TABLE)

    def effects(self, name: str) -> int:
        """How often it has happened, outside and inside."""
        with closing(sqlite3.connect(self.outside)) as conn:
            found: int = conn.execute("SELECT count(*) FROM effect WHERE name = ?", (name,)).fetchone()[0]
        if self.kind != "memory":
            with self.connection() as conn:
                found += conn.execute(f"SELECT count(*) FROM effect WHERE name = '{name}'").fetchone()[0]
        return found

    def end_lease(self, name: str) -> None:
        """As if its time had passed."""
        if self.memory is not None:
            self.memory[1].now += LEASE + 1
        else:
            past = "0" if self.kind == "sqlite" else "statement_timestamp() - interval '1 s'"
            with self.connection() as conn:
                conn.execute(f"UPDATE semel_record SET lease_end = {past} WHERE key = '{name}' AND state = 1")


class Teller:
    """Makes the call of a cell, and remembers what happened in it."""

    def __init__(self, world: World, mode: Mode, name: str, trouble: Trouble) -> None:
        self.world = world
        self.mode = mode
        self.name = name
        self.trouble = trouble
        self.seen: list[str] = []
        self.guard = Semel(
            Troubled(world.store(), trouble), policy=Policy(lease=LEASE, completion_timeout="30ms"), sweep_every=None
        )

    def close(self) -> None:
        self.guard.close()

    def call(self) -> Any:
        if self.mode in TRANSACTIONAL:
            return self._in_transaction()
        changes: dict[str, Any] = {}
        if self.mode is Mode.AT_MOST_ONCE:
            changes = {"guarantee": "at_most_once"}
        elif self.mode is Mode.RECOVER_HOOK:
            changes = {"recover": self._recover}
        return self.guard.run("pay", key=self.name, call=self._handler, **changes)

    def _in_transaction(self) -> Any:
        with self.world.connection() as conn:

            def handler() -> str:
                self.seen.append("handler")
                self._effect(lambda: conn.execute(f"INSERT INTO effect VALUES ('{self.name}', '')"))
                return "paid"

            if self.mode is Mode.OWN_TRANSACTION:
                return self.guard.run_in_transaction(conn, "pay", key=self.name, call=handler, own_transaction=True)
            conn.execute("BEGIN")
            try:
                answer = self.guard.run_in_transaction(conn, "pay", key=self.name, call=handler)
                self.trouble.at("before", "commit")
            except Exception:
                conn.execute("ROLLBACK")
                raise
            conn.execute("COMMIT")
            self.trouble.at("after", "commit")
            return answer

    def _handler(self) -> str:
        self.seen.append("handler")
        op = current_operation()
        assert isinstance(op, Operation)
        if self.mode is Mode.STEPS:
            op.step("charge", self._charge)
            op.step("later", self._later)
        else:
            self._charge()
        return "paid"

    def _charge(self) -> str:
        op = current_operation()
        assert op is not None
        key = op.derive("charge")
        once = "WHERE NOT EXISTS (SELECT 1 FROM effect WHERE key = :key)" if self.mode is Mode.DERIVED_KEY else ""

        def send() -> None:
            with closing(sqlite3.connect(self.world.outside, isolation_level=None)) as conn:
                conn.execute(f"INSERT INTO effect SELECT :name, :key {once}", {"name": self.name, "key": key})

        self._effect(send)
        return "paid"

    def _effect(self, happen: Callable[[], object]) -> None:
        self.seen.append("effect")
        self.trouble.at("before", "effect")
        happen()
        self.trouble.at("after", "effect")

    def _later(self) -> None:
        self.trouble.at("before", "later")

    def _recover(self) -> Any:
        op = current_operation()
        assert op is not None
        with closing(sqlite3.connect(self.world.outside)) as conn:
            found = conn.execute("SELECT 1 FROM effect WHERE key = ?", (op.derive("charge"),)).fetchone()
        if not found:
            return NOT_DONE
        self.seen.append("found")
        return Recovered("paid")


__all__ = ["LEASE", "TRANSACTIONAL", "Clock", "EffectFailed", "Teller", "World"]
