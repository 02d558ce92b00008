"""The harness itself, on real servers: what every other test with a server relies on."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psycopg
import pymysql
import pytest

from tests.servers import (
    KINDS,
    DynamoDBServer,
    MariaDBServer,
    PostgresServer,
    RedisClusterServers,
    RedisSentinelServers,
    RedisServer,
    Server,
    ServerError,
    ServerMissing,
    ServerPool,
    base,
)
from tests.servers import install as installer
from tests.servers.install import install, missing_is_an_error

ROOT = Path(__file__).parents[1]


class Nowhere(Server):
    """A kind that no machine has."""

    name = "nowhere"
    binaries = ("semel-no-such-server",)
    packages = ("no-such-package",)

    def command(self) -> list[str]:
        raise AssertionError

    def ready(self) -> bool:
        raise AssertionError


class Sleeper(Server):
    """The smallest kind: starts at once, ends at SIGTERM. `script` says what it does."""

    name = "sleeper"
    binaries = ("sh",)
    packages = ("dash",)
    start_timeout = 0.5
    script = "echo awake; exec sleep 600"

    def command(self) -> list[str]:
        return ["sh", "-c", self.script]

    def ready(self) -> bool:
        return "awake" in self.log_tail()


def query(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int, folder: Path) -> bool:
    return not alive(pid) and not folder.exists()


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((base.LOOPBACK, port)) == 0


# Postgres


def test_postgres_runs_on_loopback_with_real_durability(private_postgres: PostgresServer) -> None:
    assert private_postgres.url == f"postgresql://postgres@127.0.0.1:{private_postgres.port}/postgres"
    names = ("fsync", "synchronous_commit", "wal_level", "listen_addresses", "max_connections", "server_encoding")
    settings = [query(private_postgres.url, f"SHOW {name}")[0][0] for name in names]
    assert settings == ["on", "on", "logical", "127.0.0.1", "200", "UTF8"]


def test_the_sessions_postgres_does_not_wait_for_the_disk(postgres: PostgresServer) -> None:
    assert query(postgres.url, "SHOW fsync") == [("off",)]


def test_the_session_has_one_postgres(postgres: PostgresServer, servers: ServerPool) -> None:
    assert servers.get("postgres") is postgres


def test_fresh_databases_do_not_see_each_other(postgres: PostgresServer, postgres_url: str) -> None:
    other = postgres.create_database()
    assert other != postgres_url
    query(postgres_url, "CREATE TABLE things (id int)")
    assert query(other, "SELECT to_regclass('things')") == [(None,)]
    assert query(postgres_url, "SELECT count(*) FROM things") == [(0,)]
    postgres.drop_database(other)
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        query(other, "SELECT 1")


def test_a_database_in_use_is_dropped(postgres: PostgresServer) -> None:
    url = postgres.create_database()
    with psycopg.connect(url) as connection:
        connection.execute("SELECT 1")
        postgres.drop_database(url)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_keeps_port_and_data(private_postgres: PostgresServer, postgres: PostgresServer, mode: str) -> None:
    server = private_postgres
    assert server.port != postgres.port
    url, pid = server.create_database(), server.pid
    query(url, "CREATE TABLE things AS SELECT 7 AS id")
    with psycopg.connect(url) as connection:
        server.restart(mode)  # type: ignore[arg-type]
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert server.pid != pid
    assert query(url, "SELECT id FROM things") == [(7,)]
    assert (server.port, mode == "immediate") == (int(url.split(":")[2].split("/")[0]), "recovery" in server.log_tail())


def test_stop_leaves_nothing_behind(private_postgres: PostgresServer) -> None:
    server = private_postgres
    pid, folder = server.pid, server.folder
    children = query(server.url, "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    assert pid is not None
    assert len(children) >= 4
    server.stop()
    assert not any(alive(process) for process in [pid, *(int(str(child)) for (child,) in children)])
    assert not folder.exists()
    assert not accepts(server.port)
    assert "database system is shut down" in server.log_tail()
    server.stop()  # once more does no harm


# MariaDB


def asked(url: str, statement: str) -> list[tuple[object, ...]]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    with pymysql.connect(
        host=parts.hostname, port=parts.port or 0, user=parts.username, database=parts.path[1:], autocommit=True
    ) as connection:
        cursor = connection.cursor()
        cursor.execute(statement)
        return list(cursor.fetchall())


def test_mariadb_runs_on_loopback_with_real_durability(mariadb: MariaDBServer) -> None:
    assert mariadb.url == f"mysql://root@127.0.0.1:{mariadb.port}/mysql"
    settings = mariadb.execute("SELECT @@innodb_flush_log_at_trx_commit, @@bind_address, @@max_connections")
    assert settings == [(1, "127.0.0.1", 200)]


def test_fresh_databases_of_mariadb_do_not_see_each_other(mariadb: MariaDBServer, mariadb_url: str) -> None:
    other = mariadb.create_database()
    assert other != mariadb_url
    asked(mariadb_url, "CREATE TABLE things (id int)")
    assert asked(other, "SHOW TABLES") == []
    with pymysql.connect(
        host="127.0.0.1", port=mariadb.port, user="root", database=other[other.rindex("/") + 1 :]
    ) as one:
        one.cursor().execute("SELECT 1")
        mariadb.drop_database(other)
        with pytest.raises(pymysql.MySQLError):
            one.cursor().execute("SELECT 1")
    with pytest.raises(pymysql.OperationalError, match="Unknown database"):
        asked(other, "SELECT 1")


@pytest.mark.parametrize("mode", ["clean", "crash"])
def test_a_restart_of_mariadb_keeps_port_and_data(private_mariadb: MariaDBServer, mode: str) -> None:
    server = private_mariadb
    url, pid = server.create_database(), server.pid
    asked(url, "CREATE TABLE things AS SELECT 7 AS id")
    server.restart(mode)  # type: ignore[arg-type]
    assert server.pid != pid
    assert asked(url, "SELECT id FROM things") == [(7,)]
    pid, folder = server.pid, server.folder
    assert pid is not None
    server.stop()
    assert gone(pid, folder)
    assert not accepts(server.port)


# Redis


def test_redis_runs_on_loopback_and_its_databases_do_not_see_each_other(redis: RedisServer, redis_url: str) -> None:
    assert redis.url == f"redis://127.0.0.1:{redis.port}/0"
    other = redis.database()
    assert other != redis_url
    redis.cli("-n", redis_url.rpartition("/")[2], "SET", "thing", "7")
    assert redis.cli("-n", other.rpartition("/")[2], "DBSIZE") == "0\n"
    assert redis.cli("CONFIG", "GET", "bind") == "bind\n127.0.0.1\n"


def test_a_restart_of_redis_keeps_the_port_and_a_stop_leaves_nothing(private_redis: RedisServer) -> None:
    server = private_redis
    pid, port, folder = server.pid, server.port, server.folder
    server.restart()
    assert (server.port, server.pid != pid) == (port, True)
    server.crash()
    assert not accepts(port)
    server.return_()
    assert accepts(port)
    pid = server.pid
    assert pid is not None
    server.stop()
    assert gone(pid, folder)


def test_a_redis_cluster_has_three_masters_with_a_replica_each_and_leaves_nothing(
    private_redis_cluster: RedisClusterServers,
) -> None:
    masters = private_redis_cluster.masters()
    assert len(masters) == 3
    assert all("connected_slaves:1" in master.cli("INFO", "replication") for master in masters)
    left = [(member.pid, member.folder) for member in private_redis_cluster.members]
    private_redis_cluster.stop()
    assert all(pid is not None and gone(pid, folder) for pid, folder in left)
    private_redis_cluster.stop()  # once more does no harm


def test_sentinels_name_the_master_and_leave_nothing(private_redis_sentinel: RedisSentinelServers) -> None:
    group = private_redis_sentinel
    assert group.master is group.data[0]
    assert "connected_slaves:2" in group.master.cli("INFO", "replication")
    left = [(member.pid, member.folder) for member in group.members]
    assert len(left) == 6
    group.stop()
    assert all(pid is not None and gone(pid, folder) for pid, folder in left)


# DynamoDB


def test_dynamodb_answers_on_loopback_and_leaves_nothing_behind(private_dynamodb: DynamoDBServer) -> None:
    server = private_dynamodb
    pid, folder = server.pid, server.folder
    assert pid is not None
    assert server.table() != server.table()
    with pytest.raises(HTTPError) as answer:
        urlopen(server.url, b"{}", timeout=10)
    assert answer.value.headers["x-amzn-RequestId"]
    assert answer.value.headers["Date"], "the store takes its time from it"
    answer.value.close()
    server.stop()
    assert gone(pid, folder)
    assert not accepts(server.port)


# What all kinds share


def test_a_port_lost_to_another_process_is_replaced(
    monkeypatch: pytest.MonkeyPatch, private_server: Callable[[str], Server]
) -> None:
    with socket.socket() as squatter:
        squatter.bind((base.LOOPBACK, 0))
        squatter.listen()
        taken = squatter.getsockname()[1]
        ports = iter([taken, taken])
        free_port = base.free_port
        monkeypatch.setattr(base, "free_port", lambda: next(ports, None) or free_port())
        server = private_server("postgres")
        assert isinstance(server, PostgresServer)
        assert server.port != taken
        assert query(server.url, "SELECT 1") == [(1,)]


def test_a_port_that_is_always_lost_is_an_error() -> None:
    class Unlucky(Sleeper):
        script = "echo Address already in use; exit 1"

    server = Unlucky()
    with pytest.raises(ServerError, match=r"lost its port 5 times\n(.*\n){4}Address already in use"):
        server.start()
    assert server.pid is None


def test_a_server_that_does_not_start_shows_its_log() -> None:
    class Broken(Sleeper):
        script = "echo no such setting; exit 3"

    with pytest.raises(ServerError, match="ended with 3 while it started\nno such setting"):
        Broken().start()


def test_a_server_that_is_never_ready_is_ended() -> None:
    class Mute(Sleeper):
        script = "echo $$; exec sleep 600"

    server = Mute()
    with pytest.raises(ServerError, match=r"not ready after 0\.5 s") as caught:
        server.start()
    assert not alive(int(str(caught.value).splitlines()[-1]))


def test_a_server_of_the_session_may_rest_and_go_on() -> None:
    with ServerPool({"sleeper": Sleeper}) as pool:
        server = pool.get("sleeper")
        pids = [server.pid]
        pool.resume("sleeper")  # it does not rest
        pids.append(server.pid)
        pool.rest("sleeper")
        pids.append(server.pid)
        pool.resume("sleeper")
        pids.append(server.pid)
        assert pool.get("sleeper") is server
    first, unchanged, rests, again = pids
    assert (unchanged, rests, server.pid) == (first, None, None)
    assert again not in (first, None)


def test_a_server_that_ignores_the_signal_is_killed() -> None:
    class Stubborn(Sleeper):
        stop_timeout = 0.2
        script = "trap '' TERM; echo awake; while :; do sleep 0.05; done"

    with Stubborn() as server:
        pid = server.pid
    assert pid is not None
    assert not alive(pid)


@pytest.mark.slow
def test_a_server_outlives_neither_its_session_nor_a_killed_one() -> None:
    """When the test session itself is killed, its servers end all the same."""
    script = """
        import os, sys, time
        from tests.test_servers import Sleeper
        server = Sleeper()
        server.start()
        print(server.pid, server.folder, flush=True)
        if sys.argv[1] == "killed":
            time.sleep(600)
    """
    for fate in ("killed", "ends"):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), fate], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        pid, folder = child.stdout.readline().split()
        if fate == "killed":
            assert alive(int(pid))
            child.send_signal(signal.SIGKILL)
        child.communicate()
        assert wait_until(functools.partial(gone, int(pid), Path(folder))), fate


@pytest.mark.slow
def test_a_fork_does_not_stop_its_parents_server() -> None:
    script = """
        import os
        from tests.test_servers import Sleeper
        server = Sleeper()
        server.start()
        if os.fork() == 0:
            raise SystemExit  # through atexit, as a forked worker may
        os.wait()
        print(server.pid is not None)
    """
    run = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "True\n"


def test_the_newest_version_is_found(tmp_path: Path) -> None:
    for version in ("9", "17", "16"):
        (tmp_path / version / "bin").mkdir(parents=True)
        for binary in PostgresServer.binaries:
            (tmp_path / version / "bin" / binary).touch(mode=0o755)
    (tmp_path / "17" / "bin" / "initdb").unlink()

    class Versions(PostgresServer):
        search = (f"{tmp_path}/*/bin",)

    assert Versions.find() == tmp_path / "16" / "bin"


@pytest.mark.slow
def test_another_server_of_a_kind_is_named_by_its_path_and_then_no_other_is_taken(tmp_path: Path) -> None:
    for binary in ("valkey-server", "valkey-cli", "mysqld"):
        (tmp_path / binary).touch(mode=0o755)
    script = """
        from tests.servers import MariaDBServer, RedisClusterServers, RedisServer
        for kind in (RedisServer, RedisClusterServers, MariaDBServer):
            print(*(kind.binary(name) if kind.find() else None for name in kind.binaries))
    """
    for folder, expected in ((tmp_path, True), (tmp_path / "nowhere", False)):
        named = {
            "SEMEL_TEST_REDIS_SERVER": str(folder / "valkey-server"),
            "SEMEL_TEST_MYSQL_SERVER": str(folder / "mysqld"),
        }
        run = [sys.executable, "-c", textwrap.dedent(script)]
        found = subprocess.run(
            run, cwd=ROOT, env={**os.environ, **named}, capture_output=True, text=True, check=True
        ).stdout
        redis = f"{folder}/valkey-server {folder}/valkey-cli" if expected else "None None"
        assert found.splitlines() == [redis, redis, f"{folder}/mysqld" if expected else "None"]


# A server that is missing


def test_a_missing_server_names_its_package() -> None:
    with pytest.raises(
        ServerMissing, match="nowhere is not installed: no semel-no-such-server; install: no-such-package"
    ):
        Nowhere().start()
    with ServerPool({"nowhere": Nowhere}) as pool:
        with pytest.raises(ServerMissing):
            pool.get("nowhere")
        assert pool.running("nowhere") is None


def test_without_root_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran a command"))
    assert install([Nowhere, Sleeper]) == [Nowhere]


def test_services_of_packages_do_not_start_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(installer, "POLICY", policy)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/apt-get")
    commands: list[tuple[str, int]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append((" ".join(command), subprocess.call([policy])))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert install([Nowhere]) == [Nowhere]
    install_packages = "apt-get -qq install --yes --no-install-recommends no-such-package"
    assert commands == [("apt-get -qq update", 101), (install_packages, 101)]
    assert not policy.exists()


def test_ci_makes_a_missing_server_an_error() -> None:
    assert not any(missing_is_an_error(environ) for environ in ({}, {"CI": ""}, {"CI": "0"}, {"CI": "false"}))
    assert all(missing_is_an_error({"CI": value}) for value in ("1", "true", "yes"))


CHILD = """
    import pytest
    from tests.servers import KINDS
    from tests.servers.plugin import *
    from tests.test_servers import Nowhere, Sleeper

    KINDS["nowhere"] = Nowhere
    KINDS["sleeper"] = Sleeper

    @pytest.fixture(scope="session")
    def nowhere(shared_server):
        return shared_server("nowhere")

    @pytest.fixture(scope="session")
    def sleeper(shared_server):
        return shared_server("sleeper")
"""


def child_session(folder: Path, tests: str, *options: str, **environ: str) -> str:
    """A pytest session of its own on these tests; what it printed."""
    (folder / "conftest.py").write_text(textwrap.dedent(CHILD))
    (folder / "test_child.py").write_text(textwrap.dedent(tests))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "-ra"]
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to import them takes most of the time
    kept = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("COV")}
    run = subprocess.run(
        [*command, f"--rootdir={folder}", "-c", os.devnull, *options, str(folder)],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
    )
    return run.stdout + run.stderr


@pytest.mark.slow
def test_tests_of_a_missing_server_are_skipped_by_name(tmp_path: Path) -> None:
    tests = "def test_shared(nowhere): ...\ndef test_private(private_server): private_server('nowhere')\n"
    output = child_session(tmp_path, tests)
    assert "2 skipped" in output
    assert "nowhere is not installed: no semel-no-such-server; install: no-such-package" in output
    output = child_session(tmp_path, tests, CI="true")
    assert "1 failed, 1 error" in output
    assert "nowhere is not installed" in output


@pytest.mark.slow
def test_only_servers_of_selected_tests_are_started(tmp_path: Path) -> None:
    tests = """
        import pytest

        def test_plain(servers):
            assert servers.running("sleeper") is None and not servers._started

        def test_with(sleeper):
            assert sleeper.pid

        @pytest.mark.sleeper
        def test_by_hand(request):
            assert request.getfixturevalue("sleeper").pid
    """
    output = child_session(tmp_path, tests, "-m", "not server")
    assert "1 passed, 2 deselected" in output, output
    output = child_session(tmp_path, tests, "-m", "sleeper")
    assert "2 passed, 1 deselected" in output, output


@pytest.mark.slow
def test_the_log_of_a_used_server_stands_beside_the_failure(tmp_path: Path) -> None:
    tests = """
        def test_shared(sleeper): assert 0
        def test_private(private_server):
            assert private_server("sleeper") is None
        def test_none(): assert 0
    """
    output = child_session(tmp_path, tests)
    assert "3 failed" in output
    assert output.count("log of sleeper on port") == 2, output


def test_every_kind_is_complete() -> None:
    for name, kind in KINDS.items():
        assert name == kind.name
        assert kind.binaries
        assert kind.packages
