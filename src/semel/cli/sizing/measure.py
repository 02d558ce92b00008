"""Measure what a record takes in each kind of store. The user's own data is never touched.

Samples are written to a place of their own, measured and removed: this process's memory, a temporary SQLite file, a new
schema of PostgreSQL, a new database of MySQL, a new table of DynamoDB, or keys of Redis with another prefix.
"""

from __future__ import annotations

import gc
import math
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from semel.cli.sizing.samples import Measured, Sample, Work, in_one_line, in_pages
from semel.core.policy import seconds
from semel.engine.ports import Store
from semel.errors import SemelError, StoreUnavailable, StoreUncertain
from semel.stores.batching.batches import result_of
from semel.stores.settings import plain_url
from semel.stores.urls import SCHEMES, has_tables, sqlite_path, tiers

FLOOR: Final = 2000
"""Records that are enough to know the size of one in SQLite and PostgreSQL, which allocate space by the page: their
indexes fill about thirty pages then."""
MYSQL_FLOOR: Final = 10_000
"""The same for InnoDB, which soon allocates space by the megabyte."""
LOCK_SECONDS: Final = 30
"""Seconds for which a removal waits for a lock that a backup or an open transaction holds on the samples."""


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
            again.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'".encode())
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
            last.execute(f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}, innodb_lock_wait_timeout = {LOCK_SECONDS}")
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
                f"samples are written in a {what} of their own, which this user may not make: {in_one_line(error)}"
            ) from error
        migrate()
        try:
            empty = sizes()
            with closing(open_store()) as opened:
                sample.fill(opened, floor, lambda: sum(sizes()) - sum(empty))
            full = sizes()
        except errors as error:
            raise StoreUnavailable(f"the samples cannot be measured: {in_one_line(error)}") from error
    work = (Work("statements", first=2, again=1),)
    data, index = (full[i] - empty[i] for i in (0, 1))
    return [in_pages(store, len(sample.ids), data, index, f"a {what} of its own", work)]


# -- Redis

KEY_OVERHEAD: Final = 72
"""Bytes of a key that MEMORY USAGE leaves out, in Redis 7: its entry among those that expire (32), what the allocator
adds to its other entry (8), and its share of the two hash tables, which are half empty at worst (16 each)."""
BATCH: Final = 1000
CONNECT_SECONDS: Final = 10.0


def redis(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.redis import RedisStore
    from semel.stores.redis.programs import RedisPrograms
    from semel.stores.redis.settings import PREFIX
    from semel.stores.tiered.copies import cache_settings

    prefix = _prefix(url, PREFIX)
    key_of = RedisPrograms(cache_settings(url, prefix, "5s", "5s")).key
    with _usage(url, prefix, sample, key_of) as usage:
        with closing(RedisStore(url, prefix=prefix)) as store:
            sample.write(store)
        taken = usage()
    how = f"MEMORY USAGE of each key, and {KEY_OVERHEAD} B that it leaves out"
    work = (Work("commands", first=2, again=1),)
    return [Measured("redis", "memory", sample.count, taken, None, how, work=work)]


def copies(url: str, sample: Sample) -> list[Measured]:
    """Measure the cache of a tiered store. It keeps no copies of large answers, so those take nothing."""
    from semel.stores.memory import MemoryStore
    from semel.stores.tiered import RedisCache, TieredStore
    from semel.stores.tiered.copies import PREFIX, copy_key
    from semel.stores.tiered.rules import KEEP, MAX_COPY_BYTES

    if sample.stored() > MAX_COPY_BYTES:
        how = f"no copies are made of answers above {MAX_COPY_BYTES // 1024} KiB (max_copy_bytes=)"
        return [Measured("cache in redis", "memory", 0, 0.0, None, how, 0.0, (Work("commands", first=1, again=1),))]
    prefix = _prefix(url, PREFIX)
    cache = RedisCache(url, prefix=prefix, timeout="5s")
    # The cache has the name of its primary from the first Op on.
    with _usage(url, prefix, sample, lambda id: copy_key(prefix.encode() + cache.name, id)) as usage:
        with closing(TieredStore(MemoryStore(), cache)) as store:  # closed before measuring: its thread writes
            ends = time.monotonic() + CONNECT_SECONDS
            while not cache.connect(0.1):
                sample.interrupts.check()
                if time.monotonic() > ends:
                    raise StoreUnavailable("Redis, the cache of the tiered store, cannot be reached")
            try:
                sample.write(store, after=lambda: cache.settle(b""))
            finally:
                cache.settle(b"")
        taken = usage()
    how = f"MEMORY USAGE of each copy, and {KEY_OVERHEAD} B that it leaves out"
    work = (Work("commands", first=2, again=1),)
    return [Measured("cache in redis", "memory", sample.count, taken, None, how, seconds(KEEP), work)]


def _prefix(url: str, usual: str) -> str:
    """A prefix other than the user's, of the same length (it is measured too), but at least ``size-:``."""
    from semel.stores.tiered.copies import cache_settings

    asked = "prefix=" in url.partition("?")[2]
    users = cache_settings(url, None if asked else usual, "5s", "5s").prefix
    length = max(len("size-:"), len(users.encode()))
    beginning = f"size-{secrets.token_hex(length)}"[: length - 1]
    return f"{beginning}." if users == f"{beginning}:" else f"{beginning}:"


@contextmanager
def _usage(url: str, prefix: str, sample: Sample, key_of: Callable[[bytes], bytes]) -> Iterator[Callable[[], float]]:
    """Yield a function that returns the bytes of one key, asked from each server. The keys are removed at the end."""
    from semel.stores.redis.commands import RedisCommand
    from semel.stores.redis.connection import RedisConnection, Servers
    from semel.stores.tiered.copies import cache_settings

    settings = cache_settings(url, prefix, "5s", "5s")
    servers = Servers(settings)
    links: dict[Any, RedisConnection] = {}

    def ask(*words: bytes) -> Iterator[list[Any]]:
        """Send the command for each key, a batch at a time."""
        groups: dict[Any, list[bytes]] = {}
        for id in sample.ids:
            key = key_of(id)
            groups.setdefault(servers.address_of(key), []).append(key)
        for address, keys in groups.items():
            for first in range(0, len(keys), BATCH):
                if address not in links or links[address].closed:
                    links[address] = RedisConnection(settings, address)
                answers = links[address].exchange([RedisCommand((*words, key)) for key in keys[first : first + BATCH]])
                yield [result_of(answer) for answer in answers]

    def usage() -> float:
        taken: list[int] = []
        for answers in ask(b"MEMORY", b"USAGE"):
            if None in answers:
                raise StoreUnavailable("Redis has not kept all samples: it has no memory left, or forgets what is old")
            taken += answers
            sample.interrupts.check()
        return sum(taken) / len(taken) + KEY_OVERHEAD

    def remove() -> None:
        for _ in ask(b"UNLINK"):
            pass

    try:
        for address in servers.masters():  # connect first: if a server is down, nothing is written
            links[address] = RedisConnection(settings, address)
        with sample.interrupts.place(remove, f"the keys {prefix}* (they expire within an hour)"):
            yield usage
    finally:
        for link in links.values():
            link.close()


# -- DynamoDB: items are weighed by the rules of billing

ITEM_OVERHEAD: Final = 100
"""Bytes that the service adds to each item when it bills storage."""
WRITE_UNIT: Final = 1024
READ_UNIT: Final = 4096
PAGE: Final = 1024 * 1024
CREATE_SECONDS: Final = 120.0
"""Seconds for creating a table, or until it can be deleted. The service needs about ten."""
RETRY_SECONDS: Final = 10.0
"""Seconds for which the deletion is retried when the service does not answer."""
POLL_SECONDS: Final = 1.0
_NOT_YET: Final = ("ResourceInUseException", "LimitExceededException", "ThrottlingException", "InternalServerError")
"""Error codes for a table that cannot be deleted yet, because it is still being created."""


def dynamodb(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.dynamodb import DynamoDBStore
    from semel.stores.dynamodb.failures import error_of
    from semel.stores.dynamodb.programs import SCAN_PAGES
    from semel.stores.dynamodb.settings import DynamoDBSettings
    from semel.stores.dynamodb.sync import open_client
    from semel.stores.retries import public_error

    DynamoDBSettings(url)  # checks the URL; the table is another one
    inside = urlsplit(url)._replace(path=f"/semel-size-{secrets.token_hex(6)}").geturl()
    settings = DynamoDBSettings(inside)
    with closing(open_client(settings)) as client:
        table = _Table(client, settings.table, sample)
        with sample.interrupts.place(table.remove, f"the table {settings.table}"):
            try:
                table.make()
                with closing(DynamoDBStore(inside)) as store:
                    sample.write(store)
                items = table.items()
            except SemelError:
                raise
            except Exception as error:
                raise public_error(error_of(error, settings.table)) from error
    begun, done = (sum(map(_item_bytes, some)) / len(items) for some in (map(_as_claimed, items), items))
    largest = max(map(_item_bytes, items))
    # A write is billed by the larger item, before or after it. A claim that finds a record is billed as a write of it.
    finished = math.ceil(largest / WRITE_UNIT)
    work = (
        Work("write capacity units", first=math.ceil(begun / WRITE_UNIT) + finished, again=finished),
        Work("read capacity units", first=0, again=0, sweep=SCAN_PAGES * PAGE // READ_UNIT),
    )
    how = "the items of a table of its own"
    return [Measured("dynamodb", "disk", len(items), done + ITEM_OVERHEAD, None, how, work=work)]


class _Table:
    """A table for the samples. It has no time to live, because it is deleted as a whole."""

    def __init__(self, client: Any, name: str, sample: Sample) -> None:
        self._client = client
        self._name = name
        self._check = sample.interrupts.check
        self._refused = False

    def make(self) -> None:
        from semel.stores.dynamodb import table
        from semel.stores.dynamodb.failures import error_of

        self._check()
        try:
            self._client.create_table(**table.create_table_parameters(self._name))
        except Exception as error:
            self._refused = not isinstance(error_of(error, self._name), StoreUncertain)
            raise
        ends = time.monotonic() + CREATE_SECONDS
        while not self._is_there():
            self._check()
            if time.monotonic() > ends:
                raise StoreUnavailable(f"the table {self._name} was not made within {CREATE_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)

    def _is_there(self) -> bool:
        try:
            found = self._client.describe_table(TableName=self._name)
        except self._client.exceptions.ResourceNotFoundException:  # it may be unknown for a moment after its creation
            return False
        return bool(found["Table"]["TableStatus"] == "ACTIVE")

    def items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for page in self._client.get_paginator("scan").paginate(TableName=self._name, ConsistentRead=True):
            found += page["Items"]
            self._check()
        return found

    def remove(self) -> None:
        begun = time.monotonic()
        while not self._refused:
            try:
                self._client.delete_table(TableName=self._name)
                return
            except self._client.exceptions.ResourceNotFoundException:
                return
            except Exception as error:
                code = (getattr(error, "response", None) or {}).get("Error", {}).get("Code")
                patience = CREATE_SECONDS if code in _NOT_YET else RETRY_SECONDS if code is None else 0.0
                if time.monotonic() - begun >= patience:
                    raise
            time.sleep(POLL_SECONDS)


def _as_claimed(item: dict[str, Any]) -> dict[str, Any]:
    """The item as the claim wrote it."""
    return {name: value for name, value in item.items() if name != "snapshot"}


def _item_bytes(item: dict[str, Any]) -> int:
    """Bytes of an item, by the rules of billing."""
    return _attribute_bytes({"M": item}) - 3


def _attribute_bytes(value: dict[str, Any]) -> int:
    """Bytes of an attribute. Names count; a number takes half a byte per digit."""
    ((kind, content),) = value.items()
    if kind == "M":
        return 3 + sum(len(name.encode()) + 1 + _attribute_bytes(each) for name, each in content.items())
    if kind == "L":
        return 3 + sum(1 + _attribute_bytes(each) for each in content)
    if kind == "N":
        return len(content.strip("-0.")) // 2 + 2
    if kind == "S":
        return len(content.encode("utf-8", "surrogatepass"))
    return len(content) if kind == "B" else 1


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
