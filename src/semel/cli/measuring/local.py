"""Measured on this machine: the memory of this process, and a temporary SQLite file. The user's file is not opened."""

from __future__ import annotations

import gc
import os
import sqlite3
import tempfile
import tracemalloc
from contextlib import closing
from pathlib import Path

from semel.cli.measuring.samples import Sample
from semel.cli.sizing import Measured

__all__ = ["memory", "sqlite"]


def memory(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.memory import MemoryStore

    store = MemoryStore()
    Sample(sample.answer, 10).write(store)  # what is made once is made
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sample.write(store)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    return [Measured("memory", "memory", sample.count, taken / sample.count, None, "tracemalloc")]


def sqlite(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.sqlite import SQLiteStore

    with tempfile.TemporaryDirectory(prefix="semel-size-") as folder:
        path = Path(folder) / "sample.db"
        with closing(SQLiteStore(path, synchronous="normal")) as store:
            empty = _pages(path)
            sample.write(store)
            full = _pages(path)
    tables, indexes = (full[i] - empty[i] for i in (0, 1))
    how = "pages of a temporary file"
    if full[2]:
        return [Measured("sqlite", "disk", sample.count, tables / sample.count, indexes / sample.count, how)]
    return [Measured("sqlite", "disk", sample.count, tables / sample.count, None, how)]


def _pages(path: Path) -> tuple[int, int, bool]:
    """Bytes of tables and of indexes, and whether they could be told apart."""
    with closing(sqlite3.connect(os.fspath(path), isolation_level=None)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        try:
            found = dict(
                raw.execute(
                    "SELECT coalesce(m.type, 'table'), sum(s.pgsize) FROM dbstat s"
                    " LEFT JOIN sqlite_schema m ON m.name = s.name GROUP BY 1"
                ).fetchall()
            )
            return found.get("table", 0), found.get("index", 0), True
        except sqlite3.OperationalError:  # an SQLite that was built without dbstat
            count, page = (raw.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
            return count * page, 0, False
