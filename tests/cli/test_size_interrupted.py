"""``semel size`` leaves nothing behind: real processes, interrupted while they write, between two steps, anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis as redis_client

from tests.faults.dynamodb_proxy import REFUSALS, Proxy
from tests.servers import DynamoDBServer, MariaDBServer, PostgresServer

PATIENCE = 60.0
ENDED = 130
MANY = ("--records", "1000000", "--body", "10")
"""More than are ever written before the signal comes."""
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a session in the background ignores it, and nohup the other
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from semel.cli import main
sys.exit(main(["size", "--qps", "1", *sys.argv[1:]]))
"""
ANYWHERE = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from semel.cli import main
from semel.cli.sizing import measure
measure.FLOOR = measure.MYSQL_FLOOR = 0

def run(at):
    calls, begun = 0, False
    def count(frame, event, argument):
        nonlocal calls, begun
        if event == "call" and "semel" in frame.f_code.co_filename:
            begun = begun or frame.f_code.co_name == "handled"
            calls += begun
            if begun and calls == at:
                os.kill(os.getpid(), signal.SIGINT)
    sys.setprofile(count)
    try:
        return main(["size", "--qps", "1", "--records", "200", "--json", *sys.argv[2:]]), calls
    finally:
        sys.setprofile(None)

points = int(sys.argv[1])
run(0)  # what is imported once is imported
code, calls = run(0)
assert code == 0 and calls > points, (code, calls)
print(json.dumps([run(calls * point // points)[0] for point in range(1, points)]), file=sys.stderr)
"""
POINTS = 8


@contextlib.contextmanager
def sizing(*words: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that measures; its temporary files go into the folder."""
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < ends
        time.sleep(0.005)


def interrupted(url: str, written: Callable[[], bool], how: signal.Signals, folder: Path, *words: str) -> None:
    """Measure there; once samples are written, end it by that signal."""
    with sizing("--store", url, *(words or MANY), folder=folder) as child:
        until(written, child)
        child.send_signal(how)
        _, said = child.communicate(timeout=PATIENCE)
        assert child.returncode == ENDED, said
        assert said.endswith("semel: interrupted\n")


def anywhere(*words: str, folder: Path) -> None:
    """Measure there again and again, interrupted at points all over the way."""
    done = subprocess.run(
        [sys.executable, "-c", ANYWHERE, str(POINTS), *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == [ENDED] * (POINTS - 1)


ctrl_c = pytest.mark.parametrize("how", [signal.SIGINT], ids=["ctrl-c"])
sigterm = pytest.mark.parametrize("how", [signal.SIGTERM], ids=["sigterm"])
both = pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
"""The signals are told apart on Redis and on a file; whoever cleans up after them is the same for all stores."""

# Redis


def keys_in(url: str) -> int:
    with redis_client.Redis.from_url(url) as client:
        return int(client.dbsize())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["ctrl-c", "sigterm", "sighup"])
def test_redis_has_no_samples_left(how: signal.Signals, redis_url: str, tmp_path: Path) -> None:
    interrupted(redis_url, lambda: keys_in(redis_url) > 300, how, tmp_path)
    assert keys_in(redis_url) == 0


def test_redis_has_no_samples_left_wherever_it_ends(redis_url: str, tmp_path: Path) -> None:
    anywhere("--store", redis_url, folder=tmp_path)
    assert keys_in(redis_url) == 0


@ctrl_c
def test_a_tier_has_no_copies_left(how: signal.Signals, redis_url: str, tmp_path: Path) -> None:
    words = ("--records", "6000", "--body", "10")
    interrupted(f"tiered:memory:,{redis_url}", lambda: keys_in(redis_url) > 300, how, tmp_path, *words)
    assert keys_in(redis_url) == 0


def test_a_tier_has_no_copies_left_wherever_it_ends(redis_url: str, tmp_path: Path) -> None:
    anywhere("--store", f"tiered:memory:,{redis_url}", folder=tmp_path)
    assert keys_in(redis_url) == 0


# SQL


def schemas_in(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'semel%'").fetchall()
    return [name for (name,) in found]


@sigterm
def test_postgres_has_no_schema_left(how: signal.Signals, postgres_url: str, tmp_path: Path) -> None:
    def written() -> bool:
        with psycopg.connect(postgres_url, autocommit=True) as connection, contextlib.suppress(psycopg.Error):
            for name in schemas_in(postgres_url):
                found = connection.execute(f"SELECT 1 FROM {name}.semel_record LIMIT 1".encode()).fetchone()
                return found is not None
        return False

    interrupted(postgres_url, written, how, tmp_path)
    assert schemas_in(postgres_url) == []


def test_postgres_has_no_schema_left_wherever_it_ends(postgres_url: str, tmp_path: Path) -> None:
    anywhere("--store", postgres_url, folder=tmp_path)
    assert schemas_in(postgres_url) == []


def databases_in(mariadb: MariaDBServer) -> list[str]:
    return [name for (name,) in mariadb.execute("SHOW DATABASES LIKE 'semel%size%'")]


@ctrl_c
def test_mariadb_has_no_database_left(
    how: signal.Signals, mariadb: MariaDBServer, mariadb_url: str, tmp_path: Path
) -> None:
    import pymysql

    def written() -> bool:
        with contextlib.suppress(pymysql.Error):
            return any(mariadb.execute(f"SELECT 1 FROM {name}.semel_record LIMIT 1") for name in databases_in(mariadb))
        return False

    interrupted(mariadb_url, written, how, tmp_path)
    assert databases_in(mariadb) == []


def test_mariadb_has_no_database_left_wherever_it_ends(
    mariadb: MariaDBServer, mariadb_url: str, tmp_path: Path
) -> None:
    anywhere("--store", mariadb_url, folder=tmp_path)
    assert databases_in(mariadb) == []


@pytest.mark.slow
@both
def test_no_temporary_file_is_left(how: signal.Signals, tmp_path: Path) -> None:
    interrupted("sqlite:///mine.db", lambda: any(tmp_path.rglob("sample.db-wal")), how, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_no_temporary_file_is_left_wherever_it_ends(tmp_path: Path) -> None:
    anywhere("--store", "sqlite:///mine.db", folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


# DynamoDB


@pytest.fixture
def tables(dynamodb: DynamoDBServer) -> Iterator[Callable[[], list[str]]]:
    """The tables of samples; those that a test leaves on purpose go with it."""
    import boto3

    client = boto3.client(
        "dynamodb",
        region_name="eu-central-1",
        endpoint_url=dynamodb.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )

    def found() -> list[str]:
        return [name for name in client.list_tables()["TableNames"] if name.startswith("semel-size")]

    yield found
    for name in found():
        client.delete_table(TableName=name)
    client.close()


class Ending(Proxy):
    """Interrupts a process when it asks for an action, and refuses others for a while."""

    def __init__(self, table: str, action: str, how: signal.Signals, refused: dict[str, list[str]]) -> None:
        super().__init__(table, 0.0)
        self.child: subprocess.Popen[str] | None = None
        self._action, self._how, self._refused = action, how, refused

    def fate(self, action: str) -> str:
        super().fate(action)
        if action == self._action and self.child is not None:
            self.child.send_signal(self._how)
        return self._refused[action].pop(0) if self._refused.get(action) else ""


@pytest.mark.parametrize(
    ("action", "how"),
    [
        ("CreateTable", signal.SIGINT),
        ("UpdateItem", signal.SIGTERM),
        ("Scan", signal.SIGINT),
        ("DeleteTable", signal.SIGTERM),
    ],
)
def test_dynamodb_has_no_table_left(
    action: str, how: signal.Signals, dynamodb: DynamoDBServer, tables: Callable[[], list[str]], tmp_path: Path
) -> None:
    with (
        Ending(dynamodb.table(), action, how, {}) as proxy,
        sizing("--store", proxy.url, "--records", "20", folder=tmp_path) as child,
    ):
        proxy.child = child
        _, said = child.communicate(timeout=PATIENCE)
        assert child.returncode == ENDED, said
        assert proxy.counted[action] > 0
        assert proxy.counted["CreateTable"] == 1
    assert tables() == []


def test_a_table_that_dynamodb_is_still_making_is_deleted_when_it_is_there(
    dynamodb: DynamoDBServer, tables: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REFUSALS, "ResourceInUseException", 400)
    refused = {"DeleteTable": ["ResourceInUseException", "dropped before"]}
    with (
        Ending(dynamodb.table(), "CreateTable", signal.SIGINT, refused) as proxy,
        sizing("--store", proxy.url, "--records", "20", folder=tmp_path) as child,
    ):
        proxy.child = child
        assert child.wait(PATIENCE) == ENDED
        assert proxy.counted["DeleteTable"] == 3
    assert tables() == []


def test_what_cannot_be_removed_from_dynamodb_is_named(
    dynamodb: DynamoDBServer, tables: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REFUSALS, "AccessDeniedException", 400)
    refused = {"PutItem": ["AccessDeniedException"], "DeleteTable": ["AccessDeniedException"]}
    with (
        Ending(dynamodb.table(), "", signal.SIGINT, refused) as proxy,
        sizing("--store", proxy.url, "--records", "20", folder=tmp_path) as child,
    ):
        _, said = child.communicate(timeout=PATIENCE)
    (left,) = tables()
    assert child.returncode == 3
    assert f"the table {left} could not be removed, do so by hand" in said
    assert "refused the credentials or their rights" in said
    assert said.count("\n") == 1


def test_who_may_not_make_a_table_in_dynamodb_is_told_so(
    dynamodb: DynamoDBServer, tables: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(REFUSALS, "AccessDeniedException", 400)
    refused = {name: ["AccessDeniedException"] * 9 for name in ("CreateTable", "DeleteTable", "UpdateTimeToLive")}
    with (
        Ending(dynamodb.table(), "", signal.SIGINT, refused) as proxy,
        sizing("--store", proxy.url, "--records", "20", folder=tmp_path) as child,
    ):
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 3
    assert "refused the credentials or their rights" in said
    assert "could not be removed" not in said
    assert tables() == []


# The others


def test_a_lost_connection_does_not_keep_samples(postgres_url: str, tmp_path: Path, postgres: PostgresServer) -> None:
    """The connection that made the schema is ended by somebody; another one drops it."""
    with sizing("--store", postgres_url, *MANY, folder=tmp_path) as child:
        until(lambda: bool(schemas_in(postgres_url)), child)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=PATIENCE)
        assert child.returncode in (3, ENDED), said
        assert "Traceback" not in said
    assert schemas_in(postgres_url) == []


def test_who_may_not_make_a_database_is_told_so(
    mariadb: MariaDBServer, mariadb_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from semel.cli import main

    name = mariadb_url.rpartition("/")[2]
    user: Any = f"'{name}_guest'@'%'"
    mariadb.execute(f"CREATE USER {user}")
    try:
        mariadb.execute(f"GRANT ALL ON `{name}`.* TO {user}")
        assert main(["size", "--qps", "1", "--store", mariadb_url.replace("root@", f"{name}_guest@")]) == 3
    finally:
        mariadb.execute(f"DROP USER {user}")
    said = capsys.readouterr().err
    assert "in a database of their own, which this user may not make" in said
    assert "could not be removed" not in said


def test_who_may_not_make_a_schema_is_told_so(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    from semel.cli import main

    role = f"{postgres_url.rpartition('/')[2]}_guest"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            assert main(["size", "--qps", "1", "--store", postgres_url.replace("postgres@", f"{role}@")]) == 3
        finally:
            connection.execute(f"DROP ROLE {role}".encode())
    said = capsys.readouterr().err
    assert "in a schema of their own, which this user may not make" in said
    assert "could not be removed" not in said
    assert said.count("\n") == 1
