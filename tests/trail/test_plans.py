"""What is read of a long history: with many moments in the tables, each question is answered from its index."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from psycopg import sql

from semel import PostgresStore, SQLiteStore, migrate_store
from semel.core.trail.moments import ForgetTrail, ReadRecent, ReadStories
from semel.sql.program import Piece
from semel.sql.trail import trail_program
from semel.stores import postgres as postgres_store
from semel.stores import sqlite as sqlite_store
from semel.stores.postgres.connections import PostgresSettings, Psycopg
from semel.trail import TrailReader
from tests.servers import MariaDBServer, PostgresServer
from tests.transactional.kinds import mysql_parameters

MOMENTS = 20_000
NOW = int(time.time())
VALUES: dict[str, dict[str, Any]] = {
    "linked": {"root": b"r" * 16, "most": 100},
    "stories": {"id": b"i" * 16, "ids": [b"i" * 16] * 5, "most": 1000},
    "newest": {"route": "GET /never", "look": 500, "most": 50},
    "newest_of_kind": {"kind": "rare", "route": None, "look": 50, "most": 50},
    "minutes": {"since": NOW - 3600, "until": NOW},
    "forget_moments": {"older": 3_600_000_000, "most": 100, "now": NOW * 1_000_000},
    "forget_minutes": {"older": 86400, "most": 100, "now": NOW * 1_000_000},
}
"""The statements, with values that few or no rows have."""
INDEXES = {
    "linked": "semel_moment_root",
    "stories": "semel_moment_id",
    "newest": "semel_moment_pkey",
    "newest_of_kind": "semel_moment_kind",
    "minutes": "semel_minute_pkey",
    "forget_moments": "semel_moment_pkey",
    "forget_minutes": "semel_minute_pkey",
}
MOST_ROWS = 1000
"""Rows that one question may look at."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(Path(tmp_path_factory.mktemp("plans")) / "history.db")
    sqlite_store.migrate(path)
    with closing(sqlite3.connect(path)) as raw:
        raw.executescript(
            f"""
            WITH n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {MOMENTS})
            INSERT INTO semel_moment (at, number, id, root, attempt, kind, route, who, details)
            SELECT ({NOW} - n / 5) * 1000000, randomblob(16), randomblob(16), iif(n % 2, randomblob(16), x''), 1,
                   iif(n % 2, 'started', 'completed'), 'POST /' || (n % 100), 'shop@host:1', '{{}}' FROM n;
            WITH n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {MOMENTS})
            INSERT INTO semel_minute (at, writer, route, count, kinds)
            SELECT ({NOW} / 60 - n / 100) * 60, x'00', 'POST /' || (n % 100), 1, '{{"started":[1,0]}}' FROM n;
            ANALYZE
            """
        )
        raw.commit()
    return path


@pytest.fixture(scope="module")
def url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.create_database()
    postgres_store.migrate(url)
    with psycopg.connect(url, autocommit=True) as raw:
        raw.execute(
            f"""
            INSERT INTO semel_moment (at, number, id, root, attempt, kind, route, who, details)
            SELECT ({NOW} - n / 5)::bigint * 1000000, decode(md5(n::text), 'hex'), decode(md5('i' || n), 'hex'),
                   CASE WHEN n % 2 = 1 THEN decode(md5('r' || n), 'hex') ELSE '' END, 1,
                   CASE WHEN n % 2 = 1 THEN 'started' ELSE 'completed' END, 'POST /' || (n % 100), 'shop@host:1', '{{}}'
            FROM generate_series(0, {MOMENTS}) AS n
            """
        )
        raw.execute(
            f"""
            INSERT INTO semel_minute (at, writer, route, count, kinds)
            SELECT ({NOW} / 60 - n / 100) * 60, '\\x00', 'POST /' || (n % 100), 1, '{{"started":[1,0]}}'
            FROM generate_series(0, {MOMENTS}) AS n
            """
        )
        raw.execute("ANALYZE")
    yield url
    postgres.drop_database(url)


def query_of(dialect: Any, name: str) -> Any:
    return trail_program.__globals__["_TABLES"][dialect]._queries[name]


@pytest.mark.server
@pytest.mark.postgres
@pytest.mark.parametrize("name", sorted(VALUES))
def test_postgres_looks_at_few_rows_of_many(url: str, name: str) -> None:
    query = query_of("postgresql", name)
    text, names = query.rendered("numeric")
    values = sql.SQL(", ").join(sql.Literal(VALUES[name][each]) for each in names)
    with closing(Psycopg().connect(PostgresSettings(url)).raw) as raw:
        raw.execute("BEGIN")
        raw.execute(f"PREPARE asked AS {text}".encode())  # as the store does: one plan for all values
        rows = raw.execute(sql.SQL("EXPLAIN (ANALYZE, TIMING off) EXECUTE asked ({})").format(values))
        plan = [line for (line,) in rows.fetchall()]
        raw.execute("ROLLBACK")
    assert any(INDEXES[name] in line for line in plan), "\n".join(plan)
    assert not any("Seq Scan" in line for line in plan), "\n".join(plan)
    seen = [
        int(rows) * int(loops) for line in plan for rows, loops in re.findall(r"actual rows=(\d+) loops=(\d+)", line)
    ]
    seen += [int(rows) for line in plan for rows in re.findall(r"Rows Removed by \w+: (\d+)", line)]
    assert seen
    assert max(seen) <= (6100 if name == "minutes" else MOST_ROWS), "\n".join(plan)


@pytest.mark.server
@pytest.mark.postgres
def test_no_other_index_of_postgres_has_the_order_of_a_kind(url: str) -> None:
    """A plan for all kinds takes each for a frequent one: it would walk by time, through everything if it is rare."""
    text, _ = query_of("postgresql", "newest_of_kind").rendered("numeric")
    with closing(Psycopg().connect(PostgresSettings(url)).raw) as raw:
        raw.execute("BEGIN")
        raw.execute("DROP INDEX semel_moment_kind")
        raw.execute(f"PREPARE asked AS {text}".encode())
        plan = [line for (line,) in raw.execute("EXPLAIN EXECUTE asked ('rare', 20, NULL, 20)").fetchall()]
        raw.execute("ROLLBACK")
    assert not any("Index Scan Backward using semel_moment_pkey" in line for line in plan), "\n".join(plan)


@pytest.fixture(scope="module")
def mariadb_file(mariadb: MariaDBServer) -> Iterator[dict[str, Any]]:
    url = mariadb.create_database()
    migrate_store(url)
    parameters = mysql_parameters(url)
    with pymysql.connect(**parameters, autocommit=True) as raw:
        raw.cursor().execute(
            f"""
            INSERT INTO semel_moment (at, number, id, root, attempt, kind, route, who, details)
            SELECT ({NOW} - seq DIV 5) * 1000000, UNHEX(MD5(seq)), UNHEX(MD5(CONCAT('i', seq))),
                   IF(seq % 2, UNHEX(MD5(CONCAT('r', seq))), ''), 1, IF(seq % 2, 'started', 'completed'),
                   CONCAT('POST /', seq % 100), 'shop@host:1', '{{}}' FROM seq_0_to_{MOMENTS}
            """
        )
        raw.cursor().execute(
            f"""
            INSERT INTO semel_minute (at, writer, route, count, kinds)
            SELECT ({NOW} DIV 60 - seq DIV 100) * 60, '', CONCAT('POST /', seq % 100), 1, '{{"started":[1,0]}}'
            FROM seq_0_to_{MOMENTS}
            """
        )
        raw.cursor().execute("ANALYZE TABLE semel_moment, semel_minute")
    yield parameters
    mariadb.drop_database(url)


@pytest.mark.server
@pytest.mark.mariadb
@pytest.mark.parametrize("name", sorted(name for name in VALUES if not name.startswith("forget")))
def test_mariadb_reads_few_rows_of_many(mariadb_file: dict[str, Any], name: str) -> None:
    """Counted by the server itself, not estimated."""
    text, values = Piece(query_of("mysql", name), [VALUES[name]] if name == "stories" else (), **VALUES[name]).values()
    with pymysql.connect(**mariadb_file) as raw, raw.cursor() as cursor:
        cursor.execute(f"ANALYZE FORMAT=JSON {text}", values)
        plan = json.loads(cursor.fetchone()[0])
    tables = [each for each in _objects(plan) if str(each.get("table_name", "")).startswith("semel_")]
    assert tables
    for table in tables:
        assert table["key"] == re.sub(r"semel_\w+_pkey", "PRIMARY", INDEXES[name]), plan
        assert (table["r_rows"] or 0) <= (6100 if name == "minutes" else MOST_ROWS), plan


def _objects(plan: Any) -> Iterator[dict[str, Any]]:
    """Every object of a JSON document."""
    if isinstance(plan, dict):
        yield plan
    for each in plan.values() if isinstance(plan, dict) else plan if isinstance(plan, list) else ():
        yield from _objects(each)


@pytest.mark.parametrize("name", sorted(VALUES))
def test_sqlite_searches_an_index(file: str, name: str) -> None:
    sql = query_of("sqlite", name).sql
    with closing(sqlite3.connect(file)) as raw:
        plan = [row[3] for row in raw.execute(f"EXPLAIN QUERY PLAN {sql}", VALUES[name])]
    index = INDEXES[name]
    wanted = f"USING COVERING INDEX {index}|USING INDEX {index}" if "pkey" not in index else "USING PRIMARY KEY"
    if name == "newest":  # the table itself is in this order, and the scan ends at its limit
        assert plan[:2] == ["CO-ROUTINE (subquery-1)", "SCAN semel_moment"] or "SCAN semel_moment" in plan
        assert not any("TEMP B-TREE" in line for line in plan[:2]), plan
    else:
        assert any(re.search(wanted, line) and "SEARCH" in line for line in plan), plan
        assert not any(line.startswith("SCAN semel_") for line in plan), plan


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=[pytest.mark.server, pytest.mark.postgres])])
def test_a_page_of_the_console_is_cheap(request: pytest.FixtureRequest, kind: str) -> None:
    """An hour of 100 routes, and the newest moments, in Python calls of this process: it merges them."""
    store: Any = (
        SQLiteStore(request.getfixturevalue("file"))
        if kind == "sqlite"
        else PostgresStore(request.getfixturevalue("url"), connections=1, listen=False)
    )
    with closing(store):
        reader = TrailReader(store)
        reader.recent(1)
        calls = Counter[str]()
        sys.setprofile(lambda frame, event, argument: calls.update((event,)))
        try:
            minutes = reader.minutes(NOW - 3600, NOW)
            reader.recent(50)
            reader.recent(50, kinds=["rare", "started"], route="POST /7")
        finally:
            sys.setprofile(None)
        assert len(minutes) >= 5900
        assert calls["call"] < 10 * len(minutes)
        assert store.execute(ReadStories((b"?" * 16,), 100)) == ()
        assert store.execute(ReadRecent(10, ("rare",))) == ()
        assert store.execute(ForgetTrail(2_000.0, 10**9, 10)) == 10
