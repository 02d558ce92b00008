"""``semel size`` while it removes its samples: the terminal goes, somebody holds a lock, nothing was made at all."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.cli import main
from semel.cli.sizing import measure
from tests.servers import MariaDBServer, RedisServer

pytestmark = pytest.mark.server

PATIENCE = 60.0
COMMAND = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from semel.cli import main
from semel.stores.redis.connection import RedisConnection

exchange = RedisConnection.exchange
removing, go_on = sys.argv[1:3]

def slow(self, commands, *more, **named):
    if commands and commands[0].parts[0] == b"UNLINK":
        open(removing, "w").close()
        ends = time.monotonic() + 30
        while not os.path.exists(go_on) and time.monotonic() < ends:
            time.sleep(0.01)
    return exchange(self, commands, *more, **named)

RedisConnection.exchange = slow
sys.exit(main(["size", "--qps", "1", "--records", "300", *sys.argv[3:]]))
"""


class Slow:
    """A process that measures in Redis, and waits to go on when it is about to remove the samples."""

    def __init__(self, folder: Path, url: str, **streams: Any) -> None:
        self._removing, self._go_on = folder / "removing", folder / "go on"
        words = [sys.executable, "-c", COMMAND, str(self._removing), str(self._go_on), "--store", url]
        # Without the shell, what is closed would be closed in this process.
        shell = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh"] if streams.pop("deaf", False) else []
        self.process = subprocess.Popen([*shell, *words], start_new_session=True, **streams)

    def until_it_removes(self) -> None:
        ends = time.monotonic() + PATIENCE
        while not self._removing.exists():
            assert self.process.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.01)

    def hang_up(self) -> int:
        """The signal is there before it goes on; answers how it ended."""
        self.process.send_signal(signal.SIGHUP)
        self._go_on.touch()
        return self.process.wait(PATIENCE)


@contextmanager
def slow(folder: Path, url: str, **streams: Any) -> Iterator[Slow]:
    child = Slow(folder, url, **streams)
    try:
        yield child
    finally:
        child.process.kill()
        child.process.communicate()


def keys_in(redis: RedisServer, url: str) -> int:
    return int(redis.cli("-n", url.rpartition("/")[2], "DBSIZE"))


def test_a_terminal_that_is_closed_does_not_stop_the_removal(
    redis: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    with slow(tmp_path, redis_url, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        try:
            child.until_it_removes()
            assert keys_in(redis, redis_url) == 300
        finally:
            os.close(ours)  # from now on, whatever is written there is an error
        child.hang_up()
    assert keys_in(redis, redis_url) == 0


def test_readers_that_left_do_not_stop_the_removal(redis: RedisServer, redis_url: str, tmp_path: Path) -> None:
    with slow(tmp_path, redis_url, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.until_it_removes()
        for pipe in (child.process.stdout, child.process.stderr):
            assert pipe is not None
            pipe.close()
        child.hang_up()
        child.process.stdout = child.process.stderr = None
    assert keys_in(redis, redis_url) == 0


def test_who_has_no_standard_error_gets_no_words_into_a_connection(
    redis: RedisServer, redis_url: str, tmp_path: Path
) -> None:
    """Without one, its number would be that of the next file that is opened: here, of the connection to Redis."""
    with slow(tmp_path, redis_url, stdout=subprocess.DEVNULL, deaf=True) as child:
        child.until_it_removes()
        assert os.readlink(f"/proc/{child.process.pid}/fd/2") == os.devnull, "the number is taken"
        assert child.hang_up() == 130, "the answers of Redis are not those to what was asked"
    assert keys_in(redis, redis_url) == 0


# Locks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LOCK_SECONDS", 1)


@pytest.mark.usefixtures("impatient")
def test_postgres_names_a_schema_that_somebody_holds(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from semel.stores import postgres

    migrate: Callable[[str], list[str]] = postgres.migrate
    made: list[str] = []
    with psycopg.connect(postgres_url) as holder:

        def held(url: str) -> list[str]:
            done = migrate(url)
            with psycopg.connect(url) as look:
                made.extend(look.execute("SELECT current_schema()").fetchone() or ())
            holder.execute("SET idle_in_transaction_session_timeout = '30s'")  # so that the test ends in any case
            holder.execute(f"LOCK TABLE {made[0]}.semel_record IN ACCESS SHARE MODE".encode())
            return done

        monkeypatch.setattr(postgres, "migrate", held)
        patient = f"{postgres_url}?options=-c%20lock_timeout%3D0"
        assert main(["size", "--qps", "1", "--records", "10", "--store", patient]) == 3
        holder.rollback()
        holder.execute(f"DROP SCHEMA {made[0]} CASCADE".encode())
    said = capsys.readouterr().err
    assert f"the schema {made[0]} could not be removed, do so by hand: canceling statement due to lock timeout" in said
    assert said.count("\n") == 1


@pytest.mark.usefixtures("impatient")
def test_mariadb_names_a_database_that_somebody_holds(
    mariadb: MariaDBServer,
    mariadb_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pymysql

    from semel.stores import mysql
    from semel.stores.mysql.connections import MySQLSettings

    migrate: Callable[[str], list[str]] = mysql.migrate
    made: list[str] = []
    with pymysql.connect(**MySQLSettings(mariadb_url).where) as holder, holder.cursor() as cursor:

        def held(url: str) -> list[str]:
            done = migrate(url)
            made.append(url.rpartition("/")[2])
            cursor.execute("SET SESSION idle_transaction_timeout = 30")  # so that the test ends in any case
            cursor.execute("BEGIN")
            cursor.execute(f"SELECT count(*) FROM {made[0]}.semel_record")
            return done

        monkeypatch.setattr(mysql, "migrate", held)
        assert main(["size", "--qps", "1", "--records", "10", "--store", mariadb_url]) == 3
        holder.rollback()
        cursor.execute(f"DROP DATABASE {made[0]}")
    said = capsys.readouterr().err
    assert f"the database {made[0]} could not be removed, do so by hand: " in said
    assert "Lock wait timeout exceeded" in said
    assert said.count("\n") == 1


def test_where_postgres_is_read_only_nothing_is_left_to_remove(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{postgres_url}?options=-c%20default_transaction_read_only%3Don"
    assert main(["size", "--qps", "1", "--records", "10", "--store", url]) == 3
    said = capsys.readouterr().err
    assert "cannot execute CREATE SCHEMA in a read-only transaction" in said
    assert "could not be removed" not in said
    assert said.count("\n") == 1
