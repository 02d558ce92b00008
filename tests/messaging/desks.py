"""Databases with an outbox, behind one small face: the store, a plain connection beside it, and the clock of leases."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pymysql
import pytest

from semel import (
    AsyncMySQLStore,
    AsyncPostgresStore,
    AsyncSQLiteStore,
    MySQLStore,
    PostgresStore,
    SQLiteStore,
)
from semel.core.messaging.messages import lane_of
from semel.core.ops import Op
from tests.transactional.kinds import mysql_parameters

TABLES = ("outbox", "stream", "hold", "relay", "lane", "dead_letter")
DIALECTS = ("sqlite", "postgres", "mysql")
KINDS = (*DIALECTS, "async-sqlite", "asyncpg", "async-psycopg", "asyncmy")
MARKS = {
    "sqlite": (),
    "postgres": (pytest.mark.postgres, pytest.mark.server),
    "mysql": (pytest.mark.mariadb, pytest.mark.server),
}
PAST = {"sqlite": "0", "postgres": "'epoch'", "mysql": "'1970-01-02'"}


def dialect_of(kind: str) -> str:
    return "sqlite" if "sqlite" in kind else "mysql" if kind in ("mysql", "asyncmy") else "postgres"


def marked(*kinds: str) -> list[Any]:
    """The kinds as parameters of a test, marked with the server that they need."""
    return [pytest.param(kind, marks=MARKS[dialect_of(kind)]) for kind in kinds]


class Desk:
    """A migrated database of one kind."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.url = kind, url
        self.dialect = dialect_of(kind)
        self._runner = asyncio.Runner() if kind not in DIALECTS else None
        self.store = self.open_store()
        self.conn = self.connect()

    def open_store(self) -> Any:
        stores: dict[str, Callable[[], Any]] = {
            "sqlite": lambda: SQLiteStore(self.url),
            "postgres": lambda: PostgresStore(self.url, connections=2, listen=False),
            "mysql": lambda: MySQLStore(self.url, connections=2),
            "async-sqlite": lambda: AsyncSQLiteStore(self.url),
            "asyncpg": lambda: AsyncPostgresStore(self.url, driver="asyncpg", connections=2, listen=False),
            "async-psycopg": lambda: AsyncPostgresStore(self.url, driver="psycopg", connections=2, listen=False),
            "asyncmy": lambda: AsyncMySQLStore(self.url, connections=2),
        }
        return stores[self.kind]()

    def connect(self) -> Any:
        """A plain connection in autocommit; `transaction()` opens one."""
        if self.dialect == "sqlite":
            return sqlite3.connect(self.url, isolation_level=None, timeout=30, check_same_thread=False)
        if self.dialect == "postgres":
            return psycopg.connect(self.url, autocommit=True)
        return pymysql.connect(**mysql_parameters(self.url), autocommit=True)

    def execute(self, op: Op[Any]) -> Any:
        if self._runner is None:
            return self.store.execute(op)
        return self._runner.run(self.store.execute(op))

    def sql(self, text: str, *values: Any, conn: Any = None) -> list[tuple[Any, ...]]:
        cursor = (conn or self.conn).cursor()
        cursor.execute(text.replace("%s", "?") if self.dialect == "sqlite" else text, values)
        return list(cursor.fetchall()) if cursor.description else []

    @contextmanager
    def transaction(self, conn: Any) -> Iterator[None]:
        """A transaction on a plain connection."""
        self.sql("BEGIN", conn=conn)
        try:
            yield
        except BaseException:
            self.sql("ROLLBACK", conn=conn)
            raise
        self.sql("COMMIT", conn=conn)

    def add(self, id: str, stream: str = "", *, conn: Any = None, sequence: int = 0) -> None:
        """A message, without the care that the outbox takes."""
        now = self.now
        self.sql(
            "INSERT INTO semel_outbox (sequence, due, created, lane, starts, redrives, id, type, source, destination, "
            f"stream, subject, content_type, headers, data) VALUES (%s, {now}, {now}, %s, 0, 0, %s, 'made', '/here', "
            "'orders', %s, '', 'text/plain', %s, %s)",
            sequence, lane_of(stream, id), id, stream, json.dumps({"a": "1"}), id.encode(), conn=conn,
        )  # fmt: skip

    def end_lease(self, relay: bytes) -> None:
        """As if the relay had been silent for too long."""
        self.sql(f"UPDATE semel_relay SET lease_end = {PAST[self.dialect]} WHERE relay = %s", relay)

    def end_waiting(self) -> None:
        """As if the time of all holds and delays were over; parked streams stay parked."""
        now, past = self.now, PAST[self.dialect]
        self.sql(f"UPDATE semel_outbox SET due = {past} WHERE due > {now}")
        self.sql(f"UPDATE semel_hold SET until = {past} WHERE NOT {self.parked}")

    @property
    def now(self) -> str:
        if self.dialect == "sqlite":  # its own clock counts only milliseconds
            return str(time.time_ns() // 1000)
        return "now()" if self.dialect == "postgres" else "UTC_TIMESTAMP(6)"

    @property
    def parked(self) -> str:
        return {"sqlite": "until = 9223372036854775807", "postgres": "until = 'infinity'"}.get(
            self.dialect, "until = '9999-12-31'"
        )

    def state(self) -> dict[str, Any]:
        """What the tables hold, as plain data."""
        now = self.now
        relays = self.sql(f"SELECT relay, lease_end > {now}, started FROM semel_relay")
        return {
            "outbox": [
                (id, starts, bool(due))
                for id, starts, due in self.sql(f"SELECT id, starts, due <= {now} FROM semel_outbox ORDER BY position")
            ],
            "hold": {
                stream: ("parked" if parked else "waits" if waits else "over", reason)
                for stream, parked, waits, reason in self.sql(
                    f"SELECT stream, {self.parked}, until > {now}, reason FROM semel_hold"
                )
            },
            "relay": {
                bytes(relay): (bool(alive), sorted(json.loads(started) if isinstance(started, str) else started))
                for relay, alive, started in relays
            },
            "lane": {
                lane: bytes(relay)
                for lane, relay in self.sql("SELECT lane, relay FROM semel_lane")
                if relay is not None
            },
            "dead": self.sql("SELECT id, reason, starts FROM semel_dead_letter ORDER BY position"),
        }

    def clear(self) -> None:
        if self.dialect == "postgres":
            self.sql("SELECT semel_switch('queue')")
            self.sql(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
                "WHERE database = current_database()"
            )
        for table in TABLES:
            self.sql(f"DELETE FROM semel_{table}")

    def close(self) -> None:
        self.conn.close()
        if self._runner is None:
            self.store.close()
        else:
            self._runner.run(self.store.close())
            self._runner.close()
