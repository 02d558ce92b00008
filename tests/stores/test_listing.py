"""Lists of records: through a guard, from a place that no page gave out, and on large tables.

The conformance suite says what a list shows. Here it is about what a page costs: it looks at a bounded part of one
index, also if many records are of one moment.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
import redis

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel, State, migrate_store, open_store
from semel.core.ops import ListRecords, Measure
from semel.errors import ConfigurationError, PolicyError
from semel.sql.dialects import mysql, postgres, sqlite
from semel.sql.dialects.records import COUNTED
from semel.stores.postgres.connections import PostgresSettings, Psycopg
from tests.transactional.kinds import mysql_parameters

MANY = 100_000
_INTO = (
    "INSERT INTO semel_record (id, state, takeover, attempt, token, origin, nonce, lease_end, created, expires, "
    "sweep_after, fingerprint, tenant, operation)"
)


class Tables:
    """The tables of one kind of database."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        migrate_store(url)

    def fill(self, count: int, apart: int) -> None:
        """Add finished records, so many microseconds apart from each other."""
        if self.kind == "sqlite":
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file, file:
                now, day = 1_700_000_000_000_000, 10**15
                file.execute(
                    "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :count) "
                    f"{_INTO} SELECT randomblob(16), 2, 0, 1, 1, 1, 1, :now, :now, :now + :day + i * :apart, "
                    ":now + :day + i * :apart, x'', '', 'bulk.' || (i % 10) FROM n",
                    {"count": count, "now": now, "day": day, "apart": apart},
                )
        elif self.kind == "postgresql":
            with psycopg.connect(self.url, autocommit=True) as connection:
                connection.execute(
                    f"{_INTO} SELECT decode(md5(i::text), 'hex'), 2, 0, 1, 1, 1, 1, now(), now(), "
                    "now() + interval '1 day' + %(apart)s * i * interval '1 us', "
                    "now() + interval '1 day' + %(apart)s * i * interval '1 us', '', '', 'bulk.' || (i %% 10) "
                    "FROM generate_series(0, %(count)s - 1) AS i",
                    {"count": count, "apart": apart},
                )
                connection.execute("ANALYZE semel_record")
        else:
            digits = " UNION ALL ".join(f"SELECT {i} AS d" for i in range(10))
            number = " + ".join(f"{10**at} * n{at}.d" for at in range(5))
            numbers = ", ".join(f"({digits}) AS n{at}" for at in range(5))
            later = "UTC_TIMESTAMP(6) + INTERVAL 1 DAY + INTERVAL %(apart)s * i MICROSECOND"
            with pymysql.connect(**mysql_parameters(self.url), autocommit=True) as connection:
                connection.cursor().execute(
                    f"{_INTO} SELECT UNHEX(MD5(i)), 2, 0, 1, 1, 1, 1, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6), {later}, "
                    f"{later}, '', '', CONCAT('bulk.', i %% 10) FROM (SELECT {number} AS i FROM {numbers}) AS all_of "
                    "WHERE i < %(count)s",
                    {"count": count, "apart": apart},
                )
                connection.cursor().execute("ANALYZE TABLE semel_record")

    def plan(self, name: str) -> str:
        """How the database runs the statement of this name, in the words of its EXPLAIN."""
        if self.kind == "sqlite":
            values: dict[str, Any] = {"place": 2**62, "past": 0, "most": 50, "id": b"\xff", "now": 0, "oldest": 10}
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as file:
                plan = file.execute(f"EXPLAIN QUERY PLAN {sqlite._Q[name].sql}", values).fetchall()
        elif self.kind == "postgresql":
            values = {"place": "infinity", "past": 0, "most": 50, "id": b"\xff", "oldest": 10}
            statement = postgres._Q[name](**values)
            with closing(Psycopg().connect(PostgresSettings(self.url)).raw) as raw:
                text, given = statement.values("format")
                plan = raw.execute(f"EXPLAIN {text}".encode(), given).fetchall()
        else:
            values = {"place": "2500-01-01", "past": 0, "most": 50, "id": b"\xff", "oldest": 10}
            with pymysql.connect(**mysql_parameters(self.url)) as connection, connection.cursor() as cursor:
                text, given = mysql._Q[name](**values).values("format")
                cursor.execute(f"EXPLAIN {text}", given)
                plan = cursor.fetchall()
        return "\n".join(map(str, plan))


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=[pytest.mark.server, pytest.mark.postgres]),
        pytest.param("mysql", marks=[pytest.mark.server, pytest.mark.mariadb]),
    ]
)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    if request.param == "sqlite":
        return Tables("sqlite", f"sqlite:///{tmp_path / 'records.db'}")
    fixture = {"postgresql": "postgres_url", "mysql": "mariadb_url"}[request.param]
    return Tables(request.param, request.getfixturevalue(fixture))


def test_a_page_reads_one_index_in_its_order(tables: Tables) -> None:
    tables.fill(MANY, apart=1000)
    used = {"newest": "semel_record_sweep", "by_id": "PRIMARY|pkey|autoindex"}
    for name, index in used.items():
        plan = tables.plan(name)
        assert any(each in plan for each in index.split("|")), plan
        assert "Seq Scan" not in plan
        assert "SCAN semel_record" not in plan
        for sorting in ("Sort", "TEMP B-TREE", "filesort"):
            assert sorting not in plan, plan
    assert "Seq Scan on semel" not in tables.plan("measure")
    with closing(open_store(tables.url)) as store:
        page = store.execute(ListRecords())
        assert (len(page.records), page.looked_at) == (50, 50)
        assert [record.expires_in for record in page.records] == sorted(
            (record.expires_in for record in page.records), reverse=True
        )
        few = store.execute(ListRecords(operation="bulk.3", limit=100))
        assert (len(few.records), few.looked_at <= 5000) == (100, True)
        none = store.execute(ListRecords(states=(State.UNKNOWN,), after=few.after))
        assert none.records == ()
        assert 4900 < none.looked_at <= 5000
        size = store.execute(Measure())
        assert not size.exact
        assert MANY * 0.7 < size.records < MANY * 1.3, "the statistics of the server"
        assert size.bytes is not None
        assert size.bytes > MANY * 50


def test_more_records_of_one_moment_than_a_page_may_look_at(tables: Tables) -> None:
    tables.fill(3000, apart=0)
    with closing(open_store(tables.url)) as store:
        found: list[bytes] = []
        op = ListRecords(operation="bulk.3", limit=40, look=500)
        for _ in range(50):
            page = store.execute(op)
            assert page.looked_at <= 500
            found += [record.id for record in page.records]
            if page.after is None:
                break
            op = ListRecords(operation="bulk.3", limit=40, look=500, after=page.after)
        assert (len(found), len(set(found))) == (300, 300)
        assert page.after is None


@pytest.mark.parametrize("after", ["", "~", "nonsense", "nonsense~ff", "1~zz", "2026-01-01~0'; --", "9" * 40 + "~ff"])
def test_a_place_that_no_page_gave_out_is_refused(tables: Tables, after: str) -> None:
    with Semel(tables.url) as guard:
        if after == "9" * 40 + "~ff" and tables.kind == "sqlite":
            assert guard.list_page(after=after).records == ()  # a place all the same
        else:
            with pytest.raises(PolicyError, match="not the end of a page"):
                guard.list_page(after=after)


def test_records_of_one_store_are_counted_up_to_a_bound(tmp_path: Path) -> None:
    tables = Tables("sqlite", f"sqlite:///{tmp_path / 'records.db'}")
    with closing(open_store(tables.url)) as store:
        assert store.execute(Measure()).records == 0
        tables.fill(COUNTED, apart=1)
        size = store.execute(Measure())
        assert (size.records, size.exact) == (COUNTED, True)
        tables.fill(1, apart=1)
        size = store.execute(Measure())
        assert (size.records, size.exact) == (COUNTED + 1, False)


def test_a_guard_lists_with_filters_and_follows_the_pages() -> None:
    with Semel(MemoryStore()) as guard:
        for i in range(1200):
            guard.run("pay" if i % 2 else "ship", key=i, call=lambda: "done")
        page = guard.list_page(operation="pay", limit=3)
        assert [record.key for record in page.records] == ["1199", "1197", "1195"]
        assert page.records[0].snapshot is None
        following = guard.list_page(operation="pay", limit=3, after=page.after)
        assert [record.key for record in following.records] == ["1193", "1191", "1189"]
        assert len(list(guard.list(operation="pay"))) == 600
        assert list(guard.list(states=[State.RUNNING])) == []
        assert list(guard.list(older="1h")) == []
        assert list(guard.list(tenant="acme")) == []
        assert len(list(guard.list(tenant=""))) == 1200
        assert guard.measure().records == 1200


def test_an_async_guard_lists_too() -> None:
    async def pay() -> str:
        return "done"

    async def main() -> None:
        async with AsyncSemel(AsyncMemoryStore()) as guard:
            for i in range(3):
                await guard.run("pay", key=i, call=pay)
            page = await guard.list_page(limit=2)
            assert [record.key for record in page.records] == ["2", "1"]
            assert [record.key async for record in guard.list(operation="pay")] == ["2", "1", "0"]
            assert (await guard.measure()).records == 3

    asyncio.run(main())


def test_a_guard_refuses_limits_and_stores_that_cannot_list() -> None:
    store = MemoryStore()
    with Semel(store) as guard:
        for wrong in ({"limit": 0}, {"look": 0}, {"older": "soon"}):
            with pytest.raises(PolicyError):
                guard.list_page(**wrong)
        store.lists = False
        for asked in (guard.list_page, guard.measure):
            with pytest.raises(ConfigurationError, match="cannot list"):
                asked()


def test_root_and_parent_of_a_key_are_apart() -> None:
    with Semel(MemoryStore()) as guard:

        def outer() -> str:
            return guard.run("inner", key="k2", call=lambda: "x")

        guard.run("outer", key="k1", call=outer)
        inner = next(guard.list(operation="inner"))
        assert (inner.key, inner.root, inner.parent) == ("k2", "k1", "k1")


@pytest.mark.server
@pytest.mark.redis
def test_other_keys_of_a_redis_are_not_listed(redis_url: str) -> None:
    with Semel(redis_url) as guard, closing(redis.Redis.from_url(redis_url)) as client:
        for i in range(40):
            guard.run("pay", key=i, call=lambda: "done")
            client.set(f"session:{i}", "x")
        client.set("semel:notes", "text")
        client.set("semel:" + "0" * 32, "text")
        client.xadd("semel:" + "1" * 32, {"a": "b"})
        for limit in (1, 7, 500):
            found: list[bytes] = []
            after = None
            for _ in range(200):
                page = guard.list_page(limit=limit, after=after)
                found += [record.id for record in page.records]
                after = page.after
                if after is None:
                    break
            assert (len(found), len(set(found))) == (40, 40)
        size = guard.measure()
        assert size.records in (41, 42), "what stands under a key like ours counts as a record"
        assert size.exact
        assert size.bytes is not None
        for wrong in ("nonsense", "x@y~", "~ff"):
            with pytest.raises(PolicyError, match="not the end of a page"):
                guard.list_page(after=wrong)
