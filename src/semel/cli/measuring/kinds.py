"""How each kind of store is measured. The user's own data is never touched.

What is on this machine is measured here: this process's memory, or a temporary SQLite file. Servers have modules of
their own.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import sqlite3
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from semel.cli.measuring.dynamodb import dynamodb
from semel.cli.measuring.redis import copies, redis
from semel.cli.measuring.samples import Sample
from semel.cli.measuring.sizing import Measured, Work, in_pages
from semel.cli.measuring.sql import mysql, postgres
from semel.errors import StoreUnavailable
from semel.stores.settings import plain_url
from semel.stores.urls import SCHEMES, has_tables, sqlite_path, tiers

__all__ = ["MEASURES", "measure"]

FLOOR: Final = 2000
"""Records that tell what one takes in SQLite: its indexes have some thirty pages then."""


def measure(url: str, sample: Sample) -> list[Measured]:
    """Measure in the store of this URL. A tiered store is measured in both tiers."""
    url = plain_url(url)
    has_tables(url)  # raises if no store has such a URL
    return MEASURES[SCHEMES[url.partition(":")[0]].name](url, sample)


def _tiered(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.tiered.copies import cache_settings

    primary, cache = tiers(url)
    cache_settings(cache, None, "5s", "5s")  # refused before anything is written
    measured, cached = measure(primary, sample), copies(cache, sample.again())
    if any(each.records for each in cached):
        seldom = "each retry that the cache has no copy of"
        measured = [replace(each, work=tuple(replace(work, which=seldom) for work in each.work)) for each in measured]
    return [*measured, *cached]


def memory(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.memory import MemoryStore

    store = MemoryStore()
    Sample(sample.answer[:1000], 10, sample.interrupts).write(store)  # so that one-time allocations are not measured
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

    sqlite_path(url)  # checks the URL; the file is not needed
    folder = Path(tempfile.gettempdir(), f"semel-size-{secrets.token_hex(6)}")
    path = folder / "sample.db"

    def remove() -> None:
        if folder.exists():
            shutil.rmtree(folder)

    with sample.interrupts.place(remove, f"the folder {folder}"):
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise StoreUnavailable(f"samples are written in a temporary folder: {error}") from error
        with closing(SQLiteStore(path, synchronous="normal")) as store:
            empty = _pages(path)
            sample.fill(store, FLOOR, lambda: sum(_pages(path)[:2]) - sum(empty[:2]))
            full = _pages(path)
    tables, indexes = (full[i] - empty[i] for i in (0, 1))
    # A replay is read without a transaction.
    work = (Work("commits", first=2, again=0),)
    return [
        in_pages("sqlite", len(sample.ids), tables, indexes if full[2] else None, "pages of a temporary file", work)
    ]


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


MEASURES: Final[dict[str, Callable[[str, Sample], list[Measured]]]] = {
    "memory": memory,
    "SQLite": sqlite,
    "PostgreSQL": postgres,
    "MySQL": mysql,
    "Redis": redis,
    "DynamoDB": dynamodb,
    "tiered": _tiered,
}
"""How each kind of store is measured."""
