"""How each kind of store is measured. The user's own data is never touched.

Samples are written to this process's memory, to a temporary SQLite file, to a new schema of PostgreSQL or to a new
database of MySQL, which is dropped afterwards. Redis and DynamoDB have modules of their own.
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
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from semel.cli.measuring.dynamodb import dynamodb
from semel.cli.measuring.redis import copies, redis
from semel.cli.measuring.samples import Measured, Sample, Work, in_pages
from semel.engine.ports import Store
from semel.errors import StoreUnavailable, StoreUncertain
from semel.stores.settings import plain_url
from semel.stores.urls import SCHEMES, has_tables, sqlite_path, tiers

FLOOR: Final = 2000
"""Records that tell what one takes in SQLite, whose indexes have some thirty pages then, and in PostgreSQL, which gives
out room by pages of 8 kB."""
MYSQL_FLOOR: Final = 10_000
"""InnoDB soon gives out room by the megabyte."""
LOCKED: Final = 30
"""Seconds for which a removal waits behind somebody who looks at the samples: a backup, an open transaction."""


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


def postgres(url: str, sample: Sample) -> list[Measured]:
    from semel.sql.connections.errors import postgres_error
    from semel.stores.postgres import PostgresStore, migrate
    from semel.stores.postgres.connections import PostgresSettings, Psycopg

    schema = f"semel_size_{secrets.token_hex(6)}"
    settings = PostgresSettings.for_migration(url)
    query = (
        "SELECT sum(pg_table_size(c.oid)), sum(pg_indexes_size(c.oid)) FROM pg_class c"
        f" WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r'"
    ).encode()

    def remove() -> None:
        with closing(Psycopg().connect(settings).raw) as again, again.transaction():  # the other may be lost
            again.execute(f"SET LOCAL lock_timeout = '{LOCKED}s'".encode())
            again.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())

    def sizes() -> tuple[float, float]:
        data, index = raw.execute(query).fetchone() or (0, 0)
        return float(data), float(index)

    with closing(Psycopg().connect(settings).raw) as raw:
        from psycopg import Error
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        options = conninfo_to_dict(url).get("options") or ""
        inside = make_conninfo(url, options=f"{options} -c search_path={schema}".strip())
        return _in_new_place(
            "postgresql", f"schema {schema}", sample, FLOOR, Error,
            create=lambda: raw.execute(f"CREATE SCHEMA {schema}".encode()),
            refused=lambda error: not isinstance(postgres_error(error.sqlstate, ""), StoreUncertain),
            migrate=lambda: migrate(inside),
            open_store=lambda: PostgresStore(inside, listen=False),
            sizes=sizes,
            remove=remove,
        )  # fmt: skip


def mysql(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.mysql import MySQLStore, migrate
    from semel.stores.mysql.connections import MySQLSettings, PyMySQL

    database = f"semel_size_{secrets.token_hex(6)}"
    inside = urlsplit(url)._replace(path=f"/{database}").geturl()
    settings = MySQLSettings.for_migration(url)

    def remove() -> None:
        with closing(PyMySQL().connect(settings).raw) as again, again.cursor() as last:  # the other may be lost
            last.execute(f"SET SESSION lock_wait_timeout = {LOCKED}, innodb_lock_wait_timeout = {LOCKED}")
            last.execute(f"DROP DATABASE IF EXISTS {database}")

    with closing(PyMySQL().connect(settings).raw) as raw, raw.cursor() as cursor:
        from pymysql import Error

        def sizes() -> tuple[float, float]:
            cursor.execute(f"ANALYZE TABLE {database}.semel_record, {database}.semel_step")
            cursor.fetchall()
            with suppress(Error):  # MySQL 8 remembers these numbers for a day; MariaDB has no such setting
                cursor.execute("SET SESSION information_schema_stats_expiry = 0")
            cursor.execute(
                "SELECT coalesce(sum(data_length), 0), coalesce(sum(index_length), 0) FROM information_schema.tables"
                f" WHERE table_schema = '{database}' AND table_name LIKE 'semel%'"
            )
            data, index = cursor.fetchone()
            return float(data), float(index)

        return _in_new_place(
            "mysql", f"database {database}", sample, MYSQL_FLOOR, Error,
            create=lambda: cursor.execute(f"CREATE DATABASE {database}"),
            refused=lambda error: 1000 <= error.args[0] < 2000,  # the server's word; others: the connection broke
            migrate=lambda: migrate(inside),
            open_store=lambda: MySQLStore(inside),
            sizes=sizes,
            remove=remove,
        )  # fmt: skip


def _in_new_place(
    store: str,
    place: str,
    sample: Sample,
    floor: int,
    errors: type[Exception],
    *,
    create: Callable[[], object],
    refused: Callable[[Any], bool],
    migrate: Callable[[], object],
    open_store: Callable[[], Store],
    sizes: Callable[[], tuple[float, float]],
    remove: Callable[[], None],
) -> list[Measured]:
    """Measure in a schema or database that is made for the samples.

    :param errors: what the driver raises.
    :param refused: whether the error of ``create`` is the server's refusal, so that there is nothing to remove.
    :param sizes: returns the bytes of tables and of indexes.
    """
    made = True

    def remove_if_made() -> None:
        if made:
            remove()

    what = place.partition(" ")[0]
    with sample.interrupts.place(remove_if_made, f"the {place}"):
        try:
            create()
        except errors as error:
            made = not refused(error)
            raise StoreUnavailable(
                f"samples are written in a {what} of their own, which this user may not make: {_line(error)}"
            ) from error
        migrate()
        try:
            empty = sizes()
            with closing(open_store()) as opened:
                sample.fill(opened, floor, lambda: sum(sizes()) - sum(empty))
            full = sizes()
        except errors as error:
            raise StoreUnavailable(f"the samples cannot be measured: {_line(error)}") from error
    work = (Work("statements", first=2, again=1),)
    data, index = (full[i] - empty[i] for i in (0, 1))
    return [in_pages(store, len(sample.ids), data, index, f"a {what} of its own", work)]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


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
