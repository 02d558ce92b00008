"""Processes killed in the middle of transactions: the ledger is exact, and each operation was applied once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from semel import Wait
from semel.stores import mysql
from semel.stores.postgres import migrate
from tests.partial_failures.nursery import Nursery
from tests.transactional import storm
from tests.transactional.kinds import (
    ASYNC_MYSQL,
    ASYNC_SQLITE,
    MYSQL,
    SQLITE,
    TABLE,
    in_mysql,
    mysql_parameters,
    till,
)
from tests.transactional.marked import marked

pytestmark = [pytest.mark.faults, pytest.mark.slow]

OPERATIONS = 400
WORKERS = 8
KILLS = 40


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery(storm.run, storm.prepare)
    yield made
    made.close()


@pytest.fixture
def stormed(nursery: Nursery, tmp_path: Path) -> Callable[..., Any]:
    """What came of a storm in processes."""

    def do(what: str, **asked: Any) -> Any:
        report = tmp_path / "report.json"
        assert nursery.run((what, asked, str(report))) == 0, "the storm failed: it has said why"
        return json.loads(report.read_text())

    return do


def database(kind: str, folder: Path, request: pytest.FixtureRequest) -> str:
    if kind in SQLITE + ASYNC_SQLITE:
        desk = till(kind, str(folder / "shop.db"))  # makes the tables
        desk.close()
        return str(folder / "shop.db")
    url: str
    if kind in MYSQL + ASYNC_MYSQL:
        url = request.getfixturevalue("mariadb_url")
        mysql.migrate(url)
        with pymysql.connect(**mysql_parameters(url)) as made:
            made.cursor().execute(in_mysql(TABLE))
        return url
    url = request.getfixturevalue("postgres_url")
    migrate(url)
    with psycopg.connect(url) as conn:
        conn.execute(TABLE.encode())
    return url


BOTH = ("sqlite3", "psycopg", "asyncpg", "pymysql", "asyncmy")
"""Every driver by itself: in the caller's transaction and in one of ours."""
CALLERS = ("session-psycopg", "django-postgres")
OURS = ("psycopg-autocommit", "session-asyncpg")


@pytest.mark.parametrize(
    ("kind", "own_transaction"),
    [
        marked(kind, own, id=f"{kind}-{whose}")
        for own, whose, kinds in ((False, "the caller's", BOTH + CALLERS), (True, "Semel's", BOTH + OURS))
        for kind in kinds
    ],
)
def test_killed_between_any_two_statements_the_effect_and_its_record_are_both_there_or_neither(
    kind: str,
    own_transaction: bool,
    stormed: Callable[..., Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    url = database(kind, tmp_path, request)
    deaths = stormed("points", kind=kind, url=url, own_transaction=own_transaction)["deaths"]
    assert len(deaths) >= 6
    desk = till(kind, url)
    try:
        committed = desk.rows()
        assert len(committed) == len(set(committed))
        assert set(deaths) - set(committed)  # some died before their commit
        assert set(deaths) & set(committed)  # and some after it
        for key in deaths:
            outcome = desk.pay(key, own_transaction=own_transaction, on_duplicate=Wait("30s"))
            assert outcome.replayed is (key in committed), key
            assert outcome.value == {"paid": key}
        rows = [key for key in desk.rows() if key in deaths]
        assert rows == sorted(deaths)
    finally:
        desk.close()


# Every driver, and a library of each kind above one. Within a process all kinds meet rivals: see test_duplicates.py.
RIVALS = (
    *("sqlite3", "session-aiosqlite"),
    *("psycopg", "asyncpg", "session-psycopg", "django-postgres"),
    *("pymysql", "asyncmy"),
)


@pytest.mark.parametrize("kind", [marked(kind) for kind in RIVALS])
def test_two_processes_at_once_pay_each_key_once(
    kind: str, stormed: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = database(kind, tmp_path, request)
    keys = [f"k{number:02}" for number in range(20)]
    assert stormed("rivals", kind=kind, url=url, keys=keys)["codes"] == [0, 0]
    desk = till(kind, url)
    assert desk.rows() == keys
    desk.close()


def test_hundreds_of_operations_by_eight_workers_killed_at_random_are_each_applied_once(
    postgres_url: str, stormed: Callable[..., Any]
) -> None:
    migrate(postgres_url)
    with psycopg.connect(postgres_url) as conn:
        conn.execute("CREATE TABLE ledger (operation integer, amount bigint, slot integer)")
    done = stormed("storm", url=postgres_url, operations=OPERATIONS, workers=WORKERS, kills=KILLS, seed=20261115)
    assert done["killed"] == KILLS
    with psycopg.connect(postgres_url) as conn:
        total = "SELECT sum(amount), count(*), count(DISTINCT operation), count(DISTINCT slot) FROM ledger"
        assert conn.execute(total.encode()).fetchone() == (
            OPERATIONS * (OPERATIONS + 1) // 2, OPERATIONS, OPERATIONS, WORKERS,
        )  # fmt: skip
        assert conn.execute("SELECT state, count(*) FROM semel_record GROUP BY state").fetchall() == [(2, OPERATIONS)]
