"""The doctor: what it finds in the settings of real servers, in tables, among records, in windows and in routes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
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
def test_postgres_that_confirms_too_early(postgres_url: str) -> None:
    migrate_store(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        (fsync,) = connection.execute("SHOW fsync").fetchone() or ("",)
        (name,) = connection.execute("SELECT current_database()").fetchone() or ("",)
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    # The tests' own server does not wait for the disk, which is the graver of both.
    assert rules(examine(postgres_url, NO_WINDOW)) == {"fsync-off" if fsync == "off" else "late-commits"}


@pytest.mark.server
def test_mariadb_is_asked(mariadb_url: str) -> None:
    migrate_store(mariadb_url)
    assert rules(examine(mariadb_url, NO_WINDOW)) <= {"late-commits"}


@pytest.mark.server
def test_redis_without_persistence(redis_url: str) -> None:
    found = examine(redis_url, NO_WINDOW)
    assert [finding.severity for finding in found if finding.rule == "no-persistence"] == ["error"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("on", "on", "on", False), []),
        (("on", "remote_apply", "on", False), []),
        (("off", "off", "on", False), ["fsync-off"]),
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
