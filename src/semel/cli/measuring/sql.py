"""Measured in a database server: in a new schema of PostgreSQL, in a new database of MySQL, dropped afterwards."""

from __future__ import annotations

import secrets
from contextlib import closing, suppress

from semel.cli.measuring.samples import Sample
from semel.cli.sizing import Measured
from semel.errors import StoreUnavailable

__all__ = ["mysql", "postgres"]


def postgres(url: str, sample: Sample) -> list[Measured]:
    from semel.stores.postgres import PostgresStore, migrate
    from semel.stores.postgres.settings import Settings
    from semel.stores.postgres.sync import connect

    schema = f"semel_size_{secrets.token_hex(6)}"
    with closing(connect(Settings.for_migration(url)).raw) as raw:
        from psycopg import Error
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        options = conninfo_to_dict(url).get("options") or ""
        inside = make_conninfo(url, options=f"{options} -c search_path={schema}".strip())
        try:
            raw.execute(f"CREATE SCHEMA {schema}".encode())
        except Error as error:
            raise StoreUnavailable(
                f"samples are written in a schema of their own, which this user may not make: {error}"
            ) from error
        query = (
            "SELECT sum(pg_table_size(c.oid)), sum(pg_indexes_size(c.oid)) FROM pg_class c"
            f" WHERE c.relnamespace = '{schema}'::regnamespace AND c.relkind = 'r'"
        ).encode()
        try:
            migrate(inside)
            empty = raw.execute(query).fetchone() or (0, 0)
            with closing(PostgresStore(inside, listen=False)) as store:
                sample.write(store)
            full = raw.execute(query).fetchone() or (0, 0)
        finally:
            raw.execute(f"DROP SCHEMA {schema} CASCADE".encode())
    record, index = (float(full[i] - empty[i]) / sample.count for i in (0, 1))
    return [Measured("postgresql", "disk", sample.count, record, index, "a schema of its own")]


def mysql(url: str, sample: Sample) -> list[Measured]:
    from urllib.parse import urlsplit

    from semel.stores.mysql import MySQLStore, migrate
    from semel.stores.mysql.settings import Settings
    from semel.stores.mysql.sync import connect

    database = f"semel_size_{secrets.token_hex(6)}"
    inside = urlsplit(url)._replace(path=f"/{database}").geturl()
    with closing(connect(Settings.for_migration(url)).raw) as raw, raw.cursor() as cursor:
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

        try:
            cursor.execute(f"CREATE DATABASE {database}")
        except Error as error:
            raise StoreUnavailable(
                f"samples are written in a database of their own, which this user may not make: {error}"
            ) from error
        try:
            migrate(inside)
            empty = sizes()
            with closing(MySQLStore(inside)) as store:
                sample.write(store)
            full = sizes()
        finally:
            cursor.execute(f"DROP DATABASE {database}")
    record, index = ((full[i] - empty[i]) / sample.count for i in (0, 1))
    return [Measured("mysql", "disk", sample.count, record, index, "a database of its own")]
