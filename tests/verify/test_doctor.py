"""The doctor: what it finds in the settings of real servers, in tables, among records, in windows and in routes."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from flask import Flask

from semel import MemoryStore, Policy, Semel
from semel.cli import main
from semel.http.describe.design import find_installation
from semel.http.flask import exempt, idempotent, install
from semel.messaging import Outbox
from semel.stores.risks import clock_skew, mysql_risks, postgres_risks
from semel.stores.sizing import Needs
from semel.stores.sqlite import SQLiteStore
from semel.stores.urls import migrate_store
from semel.verify.doctor import Window, examine
from semel.verify.findings import Finding
from tests.servers import RedisServer
from tests.transactional.kinds import mysql_parameters

NO_WINDOW = Window(None, Needs())


def rules(found: list[Finding]) -> set[str]:
    return {finding.rule for finding in found}


@pytest.fixture
def file(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/app.db"
    migrate_store(url)
    return url


# -- the server


@pytest.mark.server
@pytest.mark.postgres
def test_a_postgres_that_forgets_and_takes_no_writes(postgres_url: str) -> None:
    migrate_store(postgres_url)
    usual = rules(examine(postgres_url, NO_WINDOW))
    assert usual <= {"fsync-off"}, "the tests' own server does not wait for the disk"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
        assert rules(examine(postgres_url, NO_WINDOW)) == {*usual, "late-commits"}
        connection.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
        found = {each.rule: each for each in examine(postgres_url, NO_WINDOW)}
    assert found.keys() == {*usual, "late-commits", "read-only"}
    assert {each.severity for each in found.values()} == {"error"}


@pytest.mark.server
@pytest.mark.mariadb
def test_a_mariadb_that_forgets(mariadb_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    migrate_store(mariadb_url)
    setting = "innodb_flush_log_at_trx_commit"
    with pymysql.connect(**mysql_parameters(mariadb_url)) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT @@{setting}")
        ((usual,),) = cursor.fetchall()
        try:
            cursor.execute(f"SET GLOBAL {setting} = 1")
            assert main(["doctor", mariadb_url]) == 0
            cursor.execute(f"SET GLOBAL {setting} = 2")
            assert main(["doctor", mariadb_url]) == 1
            assert f"{setting} is 2" in capsys.readouterr().out
        finally:
            cursor.execute(f"SET GLOBAL {setting} = {usual}")
        cursor.execute("DROP INDEX semel_record_sweep ON semel_record")
    assert main(["doctor", mariadb_url]) == 1
    assert "semel_record_sweep" in capsys.readouterr().out


@pytest.mark.server
@pytest.mark.redis
def test_a_redis_that_forgets(private_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    private_redis.cli("CONFIG", "SET", "maxmemory", "1gb")
    private_redis.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert main(["doctor", private_redis.url, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {each["rule"]: each["severity"] for each in found} == {"eviction": "error", "no-persistence": "error"}
    for name, value in (("maxmemory-policy", "noeviction"), ("appendonly", "yes"), ("appendfsync", "always")):
        private_redis.cli("CONFIG", "SET", name, value)
    assert main(["doctor", private_redis.url]) == 0
    assert capsys.readouterr().out == "0 errors, 0 warnings\n"


@pytest.mark.server
@pytest.mark.parametrize(
    "server",
    [
        pytest.param("postgres_url", marks=pytest.mark.postgres),
        pytest.param("mariadb_url", marks=pytest.mark.mariadb),
        pytest.param("redis_url", marks=pytest.mark.redis),
    ],
)
def test_a_clock_that_is_wrong(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    url, real = request.getfixturevalue(server), time.time
    migrate_store(url)
    assert "clock-skew" not in rules(examine(url, NO_WINDOW))
    monkeypatch.setattr("time.time", lambda: real() + 60)
    found = {each.rule: each.message for each in examine(url, NO_WINDOW)}
    assert re.match(r"the server's clock is \d\d s behind this machine's", found["clock-skew"])


def test_the_cache_of_a_tiered_store(file: str) -> None:
    (found,) = examine(f"tiered:{file},redis://127.0.0.1:1", NO_WINDOW)
    assert (found.rule, found.severity) == ("cache-unreachable", "warning")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("on", "on", "on", False), []),
        (("on", "remote_apply", "on", False), []),
        (("off", "off", "on", False), ["fsync-off", "late-commits"]),
        (("on", "off", "on", False), ["late-commits"]),
        (("on", "on", "off", True), ["read-only", "torn-pages"]),
    ],
)
def test_what_settings_of_postgres_mean(row: tuple[Any, ...], expected: list[str]) -> None:
    assert risks_of(postgres_risks, row) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ((1, 0, 0, 0), []),
        ((1, 1, 1, 0), []),
        ((2, 0, 0, 0), ["late-commits"]),
        ((1, 1, 0, 1), ["read-only", "late-binlog"]),
    ],
)
def test_what_settings_of_mysql_mean(row: tuple[Any, ...], expected: list[str]) -> None:
    assert risks_of(mysql_risks, row) == expected


def risks_of(program: Callable[[Callable[[], float]], Any], row: tuple[Any, ...]) -> list[str]:
    steps = program(lambda: 1000.0)
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send([(*row, 1000.0)])
    return [risk.name for risk in end.value.value]


@pytest.mark.parametrize(
    ("server", "found"), [(100.0, False), (106.0, False), (108.0, True), (96.0, False), (94.0, True)]
)
def test_a_clock_is_judged_by_more_than_the_time_of_the_question(server: float, found: bool) -> None:
    assert bool(list(clock_skew(server, before=100.0, after=102.0))) is found


def test_a_store_that_is_away() -> None:
    found = examine("postgresql://nobody@127.0.0.1:1/none?connect_timeout=1", NO_WINDOW)
    assert rules(found) == {"unreachable"}


# -- the tables, and what is in them


def test_a_sound_file_has_no_findings(file: str) -> None:
    assert examine(file, NO_WINDOW) == []


def test_tables_that_are_missing(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as raw:
        raw.execute("CREATE TABLE shop (id)")
    assert "not-migrated" in rules(examine(f"sqlite:///{tmp_path}/app.db", NO_WINDOW))


@pytest.mark.server
@pytest.mark.postgres
def test_a_column_that_has_changed(postgres_url: str) -> None:
    migrate_store(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("ALTER TABLE semel_record ALTER COLUMN attempt TYPE bigint")
    (found,) = [each for each in examine(postgres_url, NO_WINDOW) if each.rule == "schema-drift"]
    assert "attempt" in found.message


def test_an_index_that_is_missing(file: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as raw:
        raw.execute("DROP INDEX semel_record_tenant")
    (found,) = examine(file, NO_WINDOW)
    assert found.rule == "schema-drift"
    assert "semel_record_tenant" in found.message


def test_operations_and_messages_that_wait(file: str, tmp_path: Path) -> None:
    with Semel(SQLiteStore(tmp_path / "app.db")) as guard:
        guard.run("pay", key="1", call=int)
        guard.run("ship", key="1", call=int)
        with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as raw:
            raw.execute("BEGIN")
            Outbox(guard.store).add(raw, "order.placed", {}, stream="order-7")
            raw.execute("COMMIT")
            hour = 3_600_000_000
            raw.execute("UPDATE semel_outbox SET created = created - ?", (hour,))
            raw.execute(
                "INSERT INTO semel_hold (stream, until, reason) VALUES ('order-7', 9000000000000000, 'refused')"
            )
            old = "created = created - ?, lease_end = created - ?"
            raw.execute(f"UPDATE semel_record SET state = 3, {old} WHERE operation = 'pay'", (2 * hour, hour))
            raw.execute(f"UPDATE semel_record SET state = 1, {old} WHERE operation = 'ship'", (2 * hour, hour))
    found = {finding.rule: finding for finding in examine(file, NO_WINDOW)}
    assert found.keys() == {"outbox-lag", "held-streams", "unknown-outcomes", "abandoned"}
    assert found["outbox-lag"].severity == "error"
    assert "no relay runs" in found["outbox-lag"].message
    assert "pay" in found["unknown-outcomes"].message
    assert "ship" in found["abandoned"].message


def test_records_that_nothing_sweeps(file: str, tmp_path: Path) -> None:
    with Semel(SQLiteStore(tmp_path / "app.db"), sweep_every=None) as guard:
        guard.run("pay", key="1", call=int)
        with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as raw:
            raw.execute(
                "UPDATE semel_record SET expires = expires - ?, sweep_after = sweep_after - ?", (10**11, 10**11)
            )
    assert rules(examine(file, NO_WINDOW)) == {"sweep-lag"}


# -- the window and the routes


def service(**policy: Any) -> Any:
    app = Flask("shop")
    with pytest.warns(UserWarning, match="tenant= is missing"):
        install(app, guard=Semel(MemoryStore(), policy=Policy(**policy)))

    @app.post("/payments")
    @idempotent(ttl="1h")
    def pay() -> str:
        return ""

    @app.post("/refunds")
    def refund() -> str:
        return ""

    @app.post("/search")
    @exempt("it reads only")
    def search() -> str:
        return ""

    return find_installation(app)


def test_the_routes_of_a_service(file: str) -> None:
    found = examine(file, Window(None, Needs(retry_budget=7200.0)), service(on_store_error="open"))
    assert [(each.rule, each.path) for each in found] == [
        ("window-too-short", "/payments"),
        ("scope-unset", ""),
        ("fails-open", "/payments"),
        ("undeclared", "/refunds"),
    ]


def test_the_longest_need_decides(file: str) -> None:
    needs = Needs(retry_budget=60.0, broker_retention=7 * 86400.0)
    (found,) = examine(file, Window(86400.0, needs))
    assert found.message == "answers are kept for 1d, and the broker retention is 7d: late retries run again"
    assert examine(file, Window(8 * 86400.0, needs)) == []


# -- the command


def test_the_command_prints_json_and_fails_on_errors(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", file, "--window", "1h", "--retry-budget", "3600", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"findings": []}
    assert main(["doctor", file, "--window", "1h", "--retry-budget", "2h", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert set(found) == {"rule", "path", "method", "severity", "message"}


def test_the_command_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "memory:"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("warning  records in memory are lost at a restart")
    assert lines[-1] == "0 errors, 1 warning"


def test_the_store_may_come_from_the_environment(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_STORE", file)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "0 errors, 0 warnings\n"
