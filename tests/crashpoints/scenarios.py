"""Operations that are killed at every point: each with its world, and what must be true of it afterwards."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from semel import Operation, Policy, Semel, SQLiteStore, current_operation
from semel.testing import faulty

LEASE = 0.15


def folder() -> str:
    """A world on SQLite: a table of charges, with the operation's key beside each."""
    path = tempfile.mkdtemp(prefix="semel-crash-")
    with sqlite3.connect(f"{path}/shop.db", isolation_level=None) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE charge (key TEXT, amount INTEGER)")
        db.execute("CREATE TABLE shipment (key TEXT)")
    db.close()
    Semel(SQLiteStore(f"{path}/shop.db")).close()
    return path


def remove(path: str) -> None:
    import shutil

    shutil.rmtree(path)


def rows(path: str, table: str) -> list[Any]:
    db = sqlite3.connect(f"{path}/shop.db")
    try:
        return db.execute(f"SELECT * FROM {table}").fetchall()
    finally:
        db.close()


def guard(path: str, **policy: Any) -> Semel:
    store = faulty.store(SQLiteStore(f"{path}/shop.db", synchronous="normal"))
    return Semel(store, policy=Policy(lease=LEASE, completion_timeout="50ms", **policy), sweep_every=None)


def _charge(path: str, key: str) -> int:
    """An effect that cannot be told apart from a second one: what a payment provider without keys would do."""
    db = sqlite3.connect(f"{path}/shop.db", isolation_level=None)
    try:
        db.execute("INSERT INTO charge VALUES (?, 5)", (key,))
    finally:
        db.close()
    return 5


def _charge_once(path: str, key: str) -> int:
    """The same effect, for a provider that knows keys."""
    db = sqlite3.connect(f"{path}/shop.db", isolation_level=None)
    try:
        db.execute("INSERT INTO charge SELECT ?, 5 WHERE NOT EXISTS (SELECT 1 FROM charge WHERE key = ?)", (key, key))
    finally:
        db.close()
    return 5


def leased_with_derived_key(path: str) -> None:
    """Leased: the effect is outside, and the key is sent on to it."""

    def pay() -> int:
        op = current_operation()
        assert op is not None
        return _charge_once(path, op.derive("charge"))

    guard(path).run("pay", key="k1", call=pay)


def leased_and_careless(path: str) -> None:
    """Leased, with an effect that nobody can repeat safely: a crash after it and before the record runs it again."""
    guard(path).run("pay", key="k1", call=lambda: _charge(path, "k1"))


def at_most_once(path: str) -> None:
    from semel.errors import OutcomeUnknown

    try:
        guard(path, guarantee="at_most_once").run("pay", key="k1", call=lambda: _charge(path, "k1"))
    except OutcomeUnknown:
        Path(path, "unknown").touch()


def steps(path: str) -> None:
    """Two effects, each a step with a derived key."""

    def work() -> None:
        op = current_operation()
        assert isinstance(op, Operation)
        op.step("charge", _charge_once, path, op.derive("charge"))
        op.step("ship", _ship_once, path, op.derive("ship"))

    guard(path).run("order", key="k1", call=work)


def _ship_once(path: str, key: str) -> None:
    db = sqlite3.connect(f"{path}/shop.db", isolation_level=None)
    try:
        db.execute("INSERT INTO shipment SELECT ? WHERE NOT EXISTS (SELECT 1 FROM shipment WHERE key = ?)", (key, key))
    finally:
        db.close()


def one_charge(path: str) -> None:
    found = rows(path, "charge")
    assert len(found) == 1, f"{len(found)} charges"


def at_most_one_charge_and_said_so(path: str) -> None:
    found = rows(path, "charge")
    assert len(found) <= 1, f"{len(found)} charges"
    assert found or os.path.exists(f"{path}/unknown"), "no charge, and nobody was told"


def one_of_each(path: str) -> None:
    assert len(rows(path, "charge")) == 1, rows(path, "charge")
    assert len(rows(path, "shipment")) == 1, rows(path, "shipment")


def broken(path: str) -> None:
    guard(path).run("pay", key="k1", call=lambda: 1 // 0)
