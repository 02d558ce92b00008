"""Measure in a database server: in a new schema of PostgreSQL or a new database of MySQL, dropped afterwards."""

from __future__ import annotations

import secrets
from contextlib import closing, suppress
from typing import Final

from semel.cli.measuring.samples import Sample
from semel.cli.measuring.sizing import Measured, Work, in_pages
from semel.errors import StoreUnavailable, StoreUncertain

__all__ = ["mysql", "postgres"]

POSTGRES_FLOOR: Final = 2000
MYSQL_FLOOR: Final = 10_000
"""Records that tell what one takes: PostgreSQL gives out room by pages of 8 kB, InnoDB soon by the megabyte."""
LOCKED: Final = 30
"""Seconds for which a removal waits behind somebody who looks at the samples: a backup, an open transaction."""
_WORK: Final = (Work("statements", first=2, again=1),)


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
    refused = False

    def remove() -> None:
        if not refused:  # where nothing may be made, nothing may be dropped, either
            with closing(Psycopg().connect(settings).raw) as again, again.transaction():  # the other may be lost
                again.execute(f"SET LOCAL lock_timeout = '{LOCKED}s'".encode())
                again.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())

    def sizes() -> tuple[int, int]:
        data, index = raw.execute(query).fetchone() or (0, 0)
        return int(data), int(index)

    with closing(Psycopg().connect(settings).raw) as raw:
        from psycopg import Error
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        options = conninfo_to_dict(url).get("options") or ""
        inside = make_conninfo(url, options=f"{options} -c search_path={schema}".strip())
        with sample.interrupts.place(remove, f"the schema {schema}"):
            try:
                raw.execute(f"CREATE SCHEMA {schema}".encode())
            except Error as error:
                refused = not isinstance(postgres_error(error.sqlstate, ""), StoreUncertain)
                raise StoreUnavailable(
                    f"samples are written in a schema of their own, which this user may not make: {_line(error)}"
                ) from error
            migrate(inside)
            try:
                empty = sizes()
                with closing(PostgresStore(inside, listen=False)) as store:
                    sample.fill(store, POSTGRES_FLOOR, lambda: sum(sizes()) - sum(empty))
                full = sizes()
            except Error as error:
                raise StoreUnavailable(f"the samples cannot be measured: {_line(error)}") from error
    data, index = (full[i] - empty[i] for i in (0, 1))
    return [in_pages("postgresql", len(sample.ids), data, index, "a schema of its own", _WORK)]


def mysql(url: str, sample: Sample) -> list[Measured]:
    from urllib.parse import urlsplit

    from semel.stores.mysql import MySQLStore, migrate
    from semel.stores.mysql.connections import MySQLSettings, connect

    database = f"semel_size_{secrets.token_hex(6)}"
    inside = urlsplit(url)._replace(path=f"/{database}").geturl()
    settings = MySQLSettings.for_migration(url)
    refused = False

    def remove() -> None:
        if not refused:  # who may not make a database may not drop one, either
            with closing(connect(settings).raw) as again, again.cursor() as last:  # the other may be lost
                last.execute(f"SET SESSION lock_wait_timeout = {LOCKED}, innodb_lock_wait_timeout = {LOCKED}")
                last.execute(f"DROP DATABASE IF EXISTS {database}")

    with closing(connect(settings).raw) as raw, raw.cursor() as cursor:
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

        with sample.interrupts.place(remove, f"the database {database}"):
            try:
                cursor.execute(f"CREATE DATABASE {database}")
            except Error as error:
                refused = 1000 <= error.args[0] < 2000  # the server's word; the others are of a connection that broke
                raise StoreUnavailable(
                    f"samples are written in a database of their own, which this user may not make: {_line(error)}"
                ) from error
            migrate(inside)
            try:
                empty = sizes()
                with closing(MySQLStore(inside)) as store:
                    sample.fill(store, MYSQL_FLOOR, lambda: sum(sizes()) - sum(empty))
                full = sizes()
            except Error as error:
                raise StoreUnavailable(f"the samples cannot be measured: {_line(error)}") from error
    data, index = (full[i] - empty[i] for i in (0, 1))
    return [in_pages("mysql", len(sample.ids), data, index, "a database of its own", _WORK)]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
