"""Processes killed in the middle of transactions: the ledger is exact, and each operation was applied once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from semel import Wait
from semel.stores import mysql
from semel.stores.postgres import migrate
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

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = 1000
WORKERS = 8
KILLS = 60


def stormed(**asked: Any) -> Any:
    run = subprocess.run(
        [sys.executable, "-m", "tests.transactional.storm", json.dumps(asked)],
        cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


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
    kind: str, own_transaction: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = database(kind, tmp_path, request)
    deaths = stormed(do="points", kind=kind, url=url, own_transaction=own_transaction)["deaths"]
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
def test_two_processes_at_once_pay_each_key_once(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = database(kind, tmp_path, request)
    keys = [f"k{number:02}" for number in range(20)]
    assert stormed(do="rivals", kind=kind, url=url, keys=keys)["codes"] == [0, 0]
    desk = till(kind, url)
    assert desk.rows() == keys
    desk.close()


@pytest.mark.timeout(300)
def test_a_thousand_operations_by_eight_workers_killed_at_random_are_each_applied_once(postgres_url: str) -> None:
    migrate(postgres_url)
    with psycopg.connect(postgres_url) as conn:
        conn.execute("CREATE TABLE ledger (operation integer, amount bigint, slot integer)")
    done = stormed(do="storm", url=postgres_url, operations=OPERATIONS, workers=WORKERS, kills=KILLS, seed=20261115)
    assert done["killed"] == KILLS
    with psycopg.connect(postgres_url) as conn:
        total = "SELECT sum(amount), count(*), count(DISTINCT operation), count(DISTINCT slot) FROM ledger"
        assert conn.execute(total.encode()).fetchone() == (
            OPERATIONS * (OPERATIONS + 1) // 2, OPERATIONS, OPERATIONS, WORKERS,
        )  # fmt: skip
        assert conn.execute("SELECT state, count(*) FROM semel_record GROUP BY state").fetchall() == [(2, OPERATIONS)]
