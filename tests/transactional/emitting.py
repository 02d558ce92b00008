"""Two steps that each write a row and emit a message, to be killed at every point: see ``test_outbox.py``."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing

import semel.messaging.outbox
import semel.sql.connections.sqlite  # noqa: F401
from semel import Operation, Semel, SQLiteStore


def world() -> str:
    folder = tempfile.mkdtemp(prefix="semel-emitting-")
    SQLiteStore(f"{folder}/shop.db").close()
    with closing(sqlite3.connect(f"{folder}/shop.db")) as conn:
        conn.execute("CREATE TABLE payment (key text NOT NULL)")
    return folder


def remove(folder: str) -> None:
    shutil.rmtree(folder)


def pay(folder: str) -> None:
    with (
        closing(sqlite3.connect(f"{folder}/shop.db", timeout=20)) as conn,
        Semel(SQLiteStore(f"{folder}/shop.db", migrate=False), sweep_every=None) as guard,
    ):

        def handler(op: Operation) -> None:
            for name in ("first", "second"):

                def write(name: str) -> None:
                    conn.execute("INSERT INTO payment VALUES (?)", (name,))
                    op.emit("paid", name, stream="s")

                with conn:
                    op.step(name, write, name, connection=conn)

        guard.run("pay", key="k1", call=handler, lease="200ms")


def check(folder: str) -> None:
    """Every row has its message, and no message is told twice or has no row."""
    with closing(sqlite3.connect(f"{folder}/shop.db")) as conn:
        rows = [name for (name,) in conn.execute("SELECT key FROM payment ORDER BY rowid")]
        messages = conn.execute("SELECT data, sequence FROM semel_outbox ORDER BY position").fetchall()
    assert rows == ["first", "second"]
    assert messages == [(b"first", 1), (b"second", 2)]
