"""The commands: what they print, what they change, and the exit code of every kind of failure."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

import semel
from semel import Codec, KeyRing, OutcomeUnknown, Semel, SQLiteStore, State
from semel.cli import main
from semel.cli.app import COMMANDS, make_parser
from semel.core.messaging.messages import BuryMessage, Message
from semel.core.states import mermaid
from semel.errors import ConfigurationError
from semel.http.wsgi import WSGIMiddleware, idempotent
from semel.stores.urls import SCHEMES, open_any_store
from tests.cli.conftest import leave_in_doubt
from tests.servers import PostgresServer

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A migrated SQLite store with one record in each stored state but RUNNING."""
    path = tmp_path / "app.db"
    with Semel(SQLiteStore(path)) as guard:
        guard.run("pay", key="done", call=lambda: {"paid": 12})
        leave_in_doubt(guard)
    return f"sqlite:///{path}"


def state_of(url: str, key: str) -> State:
    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard:
        record = guard.lookup("pay", key)
    return State.ABSENT if record is None else record.state


# the store


def test_the_environment_names_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_STORE", url)
    for command in (
        ["migrate", "--check"],
        ["sweep", "--limit", "5"],
        ["lookup", "pay", "done"],
        ["lookup", "--json", "pay", "done", "--tenant", ""],
        ["resolve", "pay", "doubtful", "--result", "1", "--yes"],
    ):
        assert main(command) == 0, command
    assert main(["release", "pay", "done"]) == 1, "it is not in doubt"
    assert "secret" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_url_on_the_command_line_comes_before_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_STORE", "postgresql://u:secret@127.0.0.1:1/d")
    assert main(["lookup", url, "pay", "done"]) == 0
    assert main(["lookup", url, "--json", "pay", "done"]) == 0
    assert main(["lookup", "--tenant", "", url, "--json", "pay", "done"]) == 0
    for words in (["lookup", url, "pay"], ["lookup", "pay"], ["sweep", "--limit", "none"]):
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert exit.value.code == 2, words
    assert main(["lookup", "pay", "done"]) == 3
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sweep", "memory:", "{}"], ["sweep", "memory:", "--limit", "{}"], ["{}"]])
def test_a_command_line_that_cannot_be_read_shows_no_password(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([word.format("postgresql://user:se/cr@et@host/d") for word in words])
    error = capsys.readouterr().err
    assert "postgresql://…@host/d" in error
    assert "se/cr" not in error


@pytest.mark.slow
def test_an_option_without_a_url_takes_the_store_of_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_STORE", "memory:")
    assert main(["demo", "--store", "--once"]) == 2
    assert "cannot share a store in memory" in capsys.readouterr().err
    monkeypatch.setenv("SEMEL_STORE", url)
    assert main(["size", "--qps", "1", "--records", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"][0]["store"] == "memory", "nobody asked for the other"
    assert main(["size", "--qps", "1", "--records", "10", "--json", "--store"]) == 0
    assert json.loads(capsys.readouterr().out)["store"][0]["store"] == "sqlite"
    monkeypatch.delenv("SEMEL_STORE")
    with pytest.raises(SystemExit) as exit:
        main(["size", "--qps", "1", "--store"])
    assert exit.value.code == 2
    assert "SEMEL_STORE" in capsys.readouterr().err


def commands_of(url: str) -> None:
    """Every command that works on a store, once."""
    with closing(open_any_store(url)) as store, Semel(store, sweep_every=None) as guard:
        for key in ("doubtful", "released"):
            leave_in_doubt(guard, key)
        for id in ("m-1", "m-2"):
            store.execute(BuryMessage("ledger", Message(id, "paid", b"{}"), "it failed", 3))
        with pytest.raises(ConfigurationError, match="install psycopg"):
            guard.run_in_transaction(object(), "pay", key="k", call=print)
    assert main(["dlq", "list", url]) == 0
    assert main(["dlq", "show", url, "m-1"]) == 0
    assert main(["dlq", "redrive", url, "--id", "m-1", "--yes"]) == 0
    assert main(["dlq", "purge", url, "--yes"]) == 0
    assert main(["outbox", url]) == 0
    assert main(["lookup", url, "pay", "doubtful"]) == 0
    assert main(["resolve", url, "pay", "doubtful", "--result", "12", "--yes"]) == 0
    assert main(["release", url, "pay", "released", "--yes"]) == 0
    assert main(["lookup", url, "pay", "released"]) == 1
    assert main(["sweep", url]) == 0


def test_all_commands_work_where_only_asyncpg_is_installed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert main(["migrate", postgres_url, "--check"]) == 1
    assert main(["migrate", postgres_url]) == 0
    assert main(["migrate", postgres_url, "--check"]) == 0
    commands_of(postgres_url)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert "1 dead letter moved back into the outbox\n1 dead letter deleted" in printed.out


def test_all_commands_work_where_only_asyncmy_is_installed(mariadb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    assert main(["migrate", mariadb_url]) == 0
    assert main(["migrate", mariadb_url, "--check"]) == 0
    commands_of(mariadb_url)


# migrate


def test_migrate_makes_the_tables_and_may_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    assert main(["migrate", url]) == 0
    assert capsys.readouterr().out.startswith("applied 0001_")
    assert main(["migrate", url]) == 0
    assert capsys.readouterr().out == "up to date\n"
    assert main(["migrate", url, "--check"]) == 0


def test_migrate_check_reports_drift(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        raw.execute("DROP INDEX semel_record_sweep")
    raw.close()
    assert main(["migrate", url, "--check"]) == 1
    assert "semel_record_sweep" in capsys.readouterr().err


def test_every_kind_of_store_is_checked_or_has_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(("check" in kind.functions) == ("migrate" in kind.functions) for kind in SCHEMES.values())
    without = ["memory:", "redis+sentinel://h/shop", "unix:///run/redis.sock", "tiered:memory:,redis://h:1"]
    without += [f"{scheme}://h:1" for scheme in ("redis", "rediss", "redis+cluster")]
    for url in without:
        assert main(["migrate", url, "--check"]) == 0
        assert capsys.readouterr().out == "nothing to check: this store has no tables\n"
        assert main(["migrate", url]) == 0
        assert capsys.readouterr().out == "nothing to migrate: this store has no tables\n"
    for url in ("redis://h:port", "redis://h?colour=red", "tiered:memory:,redis://h/db", "tiered:redis://h"):
        assert main(["migrate", url, "--check"]) == 2
        assert "Redis" in capsys.readouterr().err


def test_migrate_prints_the_table_and_the_rights_of_dynamodb(capsys: pytest.CaptureFixture[str]) -> None:
    url = "dynamodb://eu-central-1/shop"
    for what, words in (("iam", '"dynamodb:'), ("cloudformation", "AWS::DynamoDB::Table"), ("terraform", "resource ")):
        assert main(["migrate", url, "--print", what]) == 0
        printed = capsys.readouterr().out
        assert words in printed
        assert "shop" in printed
    for other in ("sqlite:///app.db", "postgresql://h/shop", "redis://h"):
        assert main(["migrate", other, "--print", "iam"]) == 2
        assert "--print is for a table of DynamoDB: write semel migrate dynamodb://" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["migrate", url, "--check", "--print", "iam"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_migrate_check_of_a_tiered_store_checks_the_store_that_decides(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tiered = f"tiered:{url},redis://h:1"
    assert main(["migrate", tiered, "--check"]) == 0
    with sqlite3.connect(url.removeprefix("sqlite:///")) as raw:
        raw.execute("DROP INDEX semel_record_sweep")
    raw.close()
    assert main(["migrate", tiered, "--check"]) == 1
    assert "semel_record_sweep" in capsys.readouterr().err


def test_migrate_check_of_a_database_without_our_tables_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE orders (id INTEGER)")
    raw.close()
    before = path.read_bytes()
    assert main(["migrate", f"sqlite:///{path}", "--check"]) == 1
    assert "semel migrate" in capsys.readouterr().err
    assert main(["lookup", f"sqlite:///{path}", "pay", "k"]) == 2
    assert "semel migrate" in capsys.readouterr().err
    assert path.read_bytes() == before, "looking has changed somebody's database"


@pytest.mark.parametrize("words", ["dlq list", "outbox", "sweep", "purge --all --yes", "doctor"])
def test_no_command_migrates_a_database_on_the_way(url: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of an older version: somebody has to decide when it is migrated."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as raw:
        for (name,) in raw.execute(
            "SELECT name FROM sqlite_master WHERE name LIKE 'semel%' AND type = 'table'"
        ).fetchall():
            if name not in ("semel_record", "semel_step", "semel_migration"):
                raw.execute(f"DROP TABLE {name}")
        raw.execute("DELETE FROM semel_migration WHERE version >= 4")
        before = list(raw.iterdump())
        assert main([*words.split(), url]) == (1 if words == "doctor" else 2)
        shown = capsys.readouterr()
        assert "the database lacks 0004_messages" in shown.out + shown.err
        assert main(["list", url]) == 0, "what is there can be read"
        assert list(raw.iterdump()) == before


def test_migrate_and_check_on_postgres(
    postgres: PostgresServer, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import psycopg

    assert main(["migrate", postgres_url, "--check"]) == 1
    assert main(["lookup", postgres_url, "pay", "k"]) == 2
    assert "semel migrate" in capsys.readouterr().err
    assert main(["migrate", postgres_url]) == 0
    assert main(["migrate", postgres_url, "--check"]) == 0
    with psycopg.connect(postgres_url) as connection:
        connection.execute("ALTER TABLE semel_record ADD COLUMN extra text")
    assert main(["migrate", postgres_url, "--check"]) == 1
    assert "extra" in capsys.readouterr().err


# lookup, resolve, release


def test_lookup_shows_a_record_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", url, "pay", "done", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["attempt"], shown["result"]) == ("done", 1, {"paid": 12})
    assert shown["operation"] == "pay"
    assert shown["expires_in"] > 3600
    assert "lease_left" not in shown


def test_lookup_shows_a_record_to_people(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", url, "pay", "doubtful"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert lines["state"] == "unknown"
    assert lines["key"] == "doubtful"


def test_what_is_stored_cannot_control_the_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[31mred\x9b2J\x7f\u202eright to left\u2066\nnew line é"
    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard:
        guard.run("pay", key="evil", call=lambda: {"note": evil})
        guard.run("pay", key="text", call=lambda: evil)
    for key in ("evil", "text"):
        assert main(["lookup", url, "pay", key]) == 0
        shown = capsys.readouterr().out
        assert all(c.isprintable() or c == "\n" for c in shown), shown
        assert "\\u001b[31mred" in shown
        assert "new line é" in shown
    assert main(["lookup", url, "pay", "evil", "--json"]) == 0
    shown = capsys.readouterr().out
    assert all(c.isprintable() for c in shown.rstrip("\n")), shown
    assert json.loads(shown)["result"] == {"note": evil}


def test_an_error_that_quotes_a_key_cannot_control_the_terminal(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["release", url, "pay", "none\u202e"]) == 1
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().err)


def test_lookup_shows_a_response_as_it_looks_on_the_wire(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"id": 7, "note": "\xc3\xa9"}'

    def pay(environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [("Content-Type", "application/json"), ("ETag", '"1"')])
        return [body]

    with Semel(SQLiteStore(url.removeprefix("sqlite:///")), tenant="acme") as guard:
        app = WSGIMiddleware(pay, guard=guard, routes={"POST /payments": idempotent()})
        environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "PATH_INFO": "/payments", "HTTP_IDEMPOTENCY_KEY": "k1"}
        setup_testing_defaults(environ)
        assert b"".join(app(environ, lambda *head: lambda data: None)) == body
    assert main(["lookup", url, "POST /payments", "k1", "--tenant", "acme"]) == 0
    lines = [line[12:].lower() for line in capsys.readouterr().out.splitlines()]
    response = lines[lines.index("201") :]
    assert {"content-type: application/json", 'etag: "1"'} <= set(response[1:-2])
    assert response[-2:] == ["", '{"id": 7, "note": "é"}']
    assert main(["lookup", url, "POST /payments", "k1", "--tenant", "acme", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)["response"]
    assert (stored["status"], stored["body"]) == (201, body.decode())
    assert ["etag", '"1"'] in [[name.lower(), value] for name, value in stored["headers"]]


def test_lookup_in_a_file_needs_no_write_access(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    connect = sqlite3.connect

    def watched(database: Any, *args: Any, **settings: Any) -> sqlite3.Connection:
        opened.append(str(database))
        return connect(database, *args, **settings)

    monkeypatch.setattr(sqlite3, "connect", watched)
    assert main(["lookup", url, "pay", "done"]) == 0
    assert opened
    assert all(database.endswith("?mode=ro") for database in opened)


UNPRIVILEGED = """
import os, sys
from semel.cli import main
main(sys.argv[1:])  # imports all that it needs, which nobody else may read
if os.getuid() == 0:
    os.setuid(65534)
try:
    open(os.path.dirname(sys.argv[2].removeprefix("sqlite:///")) + "/new", "w")
except OSError:
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_lookup_in_a_folder_that_may_not_be_written(url: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(url.removeprefix("sqlite:///"), folder / "app.db")
        (folder / "app.db").chmod(0o444)
        command = [sys.executable, "-c", UNPRIVILEGED, "lookup", f"sqlite:///{folder}/app.db", "pay", "done"]
        folder.chmod(0o555)
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        finally:
            folder.chmod(0o700)
    assert (done.returncode, done.stderr, done.stdout.count('{"paid": 12}')) == (0, "", 2)


def test_lookup_of_nothing_is_absent_and_exit_code_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", url, "pay", "done", "--tenant", "another", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "absent"


def test_lookup_shows_a_remembered_failure(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def decline() -> None:
        raise ValueError("no funds")

    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard, pytest.raises(ValueError, match="no funds"):
        guard.run("pay", key="failed", call=decline, remember_errors=ValueError)
    assert main(["lookup", url, "pay", "failed", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] == "done"
    assert "no funds" in json.dumps(shown["failure"])
    assert "result" not in shown


def test_resolve_gives_an_unknown_operation_its_result(url: str) -> None:
    assert main(["resolve", url, "pay", "doubtful", "--result", '{"paid": 7}', "--yes"]) == 0
    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard:
        assert guard.run("pay", key="doubtful", call=lambda: pytest.fail("it ran again")) == {"paid": 7}


def test_release_lets_an_unknown_operation_run_again(url: str) -> None:
    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard:
        with pytest.raises(OutcomeUnknown):
            guard.run("pay", key="doubtful", call=lambda: 1)
        assert main(["release", url, "pay", "doubtful", "--yes"]) == 0
        assert guard.run("pay", key="doubtful", call=lambda: 1) == 1


def test_release_drops_a_stored_failure_where_it_is_told_to(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def pay() -> str:
        if not paid:
            raise ValueError("the provider is down")
        return "paid"

    paid: list[int] = []
    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard, pytest.raises(ValueError, match="provider"):
        guard.run("pay", key="failed", tenant="acme", call=pay, remember_errors=ValueError)
    command = ["release", url, "pay", "failed", "--tenant", "acme", "--yes"]
    assert main([*command, "--force"]) == 1
    assert "--stored failure" in capsys.readouterr().err
    assert main(["release", url, "pay", "failed", "--stored", "failure"]) == 1, "another tenant"
    assert main([*command, "--stored", "failure"]) == 0
    assert "released pay[failed]: the next call runs it" in capsys.readouterr().out
    assert main([*command, "--stored", "failure"]) == 1
    assert "no such record" in capsys.readouterr().err
    paid.append(1)
    with Semel(SQLiteStore(url.removeprefix("sqlite:///"))) as guard:
        assert guard.run("pay", key="failed", tenant="acme", call=pay) == "paid"
    assert main([*command, "--stored", "failure"]) == 1
    assert "--stored any" in capsys.readouterr().err
    assert main([*command, "--stored", "any"]) == 0
    with pytest.raises(SystemExit):
        main([*command, "--stored", "success"])


# the guard of a service in place of a store

SERVICE = """
from semel import {guard}, {store}, Codec, KeyRing

guard = {guard}(
    {store}({path!r}), tenant="acme", secret=b"s" * 32, readable_keys=False,
    codec=Codec(cipher=KeyRing({{"one": b"k" * 32}})),
)
guards = [guard]


def make() -> {guard}:
    return guard


shop = "no guard"
"""


@pytest.fixture(params=[("Semel", "SQLiteStore"), ("AsyncSemel", "AsyncSQLiteStore")], ids=["sync", "async"])
def service(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module of a service with a secret and a cipher. Two outcomes are stored, and one operation is in doubt."""
    name = f"service_{os.urandom(4).hex()}"
    path = str(tmp_path / "service.db")
    guard, store = request.param
    (tmp_path / f"{name}.py").write_text(SERVICE.format(guard=guard, store=store, path=path))
    monkeypatch.syspath_prepend(str(tmp_path))

    def fail() -> None:
        raise ValueError("the provider is down")

    codec = Codec(cipher=KeyRing({"one": b"k" * 32}))
    settings: Any = {"tenant": "acme", "secret": b"s" * 32, "readable_keys": False, "codec": codec}
    with Semel(SQLiteStore(path), **settings) as shop:
        shop.run("pay", key="done", call=lambda: {"paid": 12})
        with pytest.raises(ValueError, match="provider"):
            shop.run("pay", key="failed", call=fail, remember_errors=ValueError)
        leave_in_doubt(shop)
    yield name
    module = sys.modules.pop(name, None)
    if module is not None:
        closing = module.guard.close()
        if closing is not None:
            asyncio.run(closing)


def test_a_guard_reads_what_it_has_encrypted_under_hashed_keys(
    service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lookup", f"sqlite:///{tmp_path}/service.db", "pay", "done", "--tenant", "acme"]) == 1
    capsys.readouterr()
    for target in (f"{service}:guard", f"{service}:make()"):
        assert main(["lookup", target, "pay", "done", "--json", "--app-dir", str(tmp_path)]) == 0
        assert json.loads(capsys.readouterr().out)["result"] == {"paid": 12}
    assert main(["lookup", f"{service}:guard", "pay", "done", "--tenant", "other"]) == 1


def test_a_guard_resolves_and_releases(service: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard = f"{service}:guard"
    assert main(["resolve", guard, "pay", "doubtful", "--result", '"by hand, in secret"', "--yes"]) == 0
    assert b"by hand" not in (tmp_path / "service.db").read_bytes()
    assert main(["release", guard, "pay", "done", "--stored", "failure"]) == 1
    assert "what is stored is a result" in capsys.readouterr().err
    assert main(["release", guard, "pay", "failed", "--stored", "failure", "--yes"]) == 0
    capsys.readouterr()
    assert main(["lookup", guard, "pay", "failed"]) == 1
    assert main(["lookup", guard, "pay", "doubtful"]) == 0
    assert "by hand, in secret" in capsys.readouterr().out


def test_what_is_no_guard_is_refused(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    for target, words in {
        f"{service}:shop": "is a str: name a Semel or an AsyncSemel",
        f"{service}:guardd": "did you mean guard?",
        "no.such.module:guard": "there is no module",
        "sqlite:app.db": "sqlite:///",
    }.items():
        assert main(["lookup", target, "pay", "done"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["resolve", "release"])
def test_what_is_not_in_doubt_is_left_alone(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, url, "pay", "done"]) == 1
    assert capsys.readouterr().err.startswith("semel: pay[done] is done")
    assert main([command, url, "pay", "never"]) == 1
    assert state_of(url, "done") is State.DONE


def test_a_result_that_is_no_json_resolves_nothing(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolve", url, "pay", "doubtful", "--result", "paid"]) == 2
    assert "--result is not JSON" in capsys.readouterr().err
    assert state_of(url, "doubtful") is State.UNKNOWN


# sweep


def expire(url: str, count: int) -> None:
    """Make done records and set their time back."""
    path = url.removeprefix("sqlite:///")
    with Semel(SQLiteStore(path, synchronous="normal")) as guard:
        for i in range(count):
            guard.run("old", key=i, call=lambda: None)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE semel_record SET expires = 1, sweep_after = 1 WHERE operation = 'old'")
    raw.close()


def count(url: str) -> int:
    raw = sqlite3.connect(url.removeprefix("sqlite:///"))
    try:
        found: int = raw.execute("SELECT count(*) FROM semel_record WHERE operation = 'old'").fetchone()[0]
        return found
    finally:
        raw.close()


def test_sweep_removes_one_batch_or_all(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    expire(url, 10)
    assert main(["sweep", url, "--limit", "3"]) == 0
    assert capsys.readouterr().out == "removed 3 expired records\n"
    assert main(["sweep", url, "--limit", "3", "--all"]) == 0
    assert capsys.readouterr().out == "removed 7 expired records\n"
    assert count(url) == 0
    assert state_of(url, "done") is State.DONE
    assert state_of(url, "doubtful") is State.UNKNOWN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_sweep_finish_the_batch_in_hand(
    url: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expire(url, 10)
    sweep = Semel.sweep

    def interrupted(guard: Semel, limit: int) -> semel.Swept:
        signal.raise_signal(number)
        return sweep(guard, limit)

    monkeypatch.setattr(Semel, "sweep", interrupted)
    before = signal.getsignal(number)
    assert main(["sweep", url, "--limit", "4", "--all"]) == 130
    assert capsys.readouterr().out == "removed 4 expired records\n"
    assert count(url) == 6
    assert signal.getsignal(number) is before


# the rest


def test_diagram_is_drawn_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagram"]) == 0
    assert capsys.readouterr().out == mermaid() + "\n"


def test_python_dash_m_and_the_version() -> None:
    run = subprocess.run([sys.executable, "-m", "semel", "--version"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, f"semel {semel.__version__}\n")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m semel diagram | true; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (run.returncode, run.stderr) == (0, "")


def test_an_unknown_scheme_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["migrate", "sqlit:///x.db"],
        ["migrate", "sqlit:///x.db", "--check"],
        ["lookup", "sqlit:///x.db", "pay", "k"],
        ["demo", "--once", "--store", "sqlit:///x.db"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "sqlite" in error
        assert "postgresql" in error


def test_a_missing_driver_names_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for driver in ("psycopg", "asyncpg"):
        monkeypatch.setitem(sys.modules, driver, None)
    for command in (
        ["migrate", "postgresql://h/d"],
        ["migrate", "postgresql://h/d", "--check"],
        ["sweep", "postgres://h/d"],
    ):
        assert main(command) == 2
        assert "pip install 'semel[postgres]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.db"
    noise = tmp_path / "noise.txt"
    noise.write_text("no database, but long enough to be read as one. " * 100)
    for command in (
        ["lookup", f"sqlite:///{missing}", "pay", "k"],
        ["migrate", f"sqlite:///{missing}", "--check"],
        ["migrate", f"sqlite:///{tmp_path}/no/such/folder/a.db"],
        ["migrate", f"sqlite:///{noise}"],
        ["sweep", f"sqlite:///{noise}"],
        ["lookup", "postgresql://nobody@127.0.0.1:1/none", "pay", "k"],
    ):
        assert main(command) == 3, command
        error = capsys.readouterr().err
        assert error.startswith("semel: ")
        assert error.count("\n") == 1, error
        if command[1].startswith("sqlite:"):
            assert command[1].removeprefix("sqlite:///") in error, "it does not say which file"
    assert not missing.exists(), "looking has made a database"


def test_bad_usage_is_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["no-such-command"],
        ["lookup", url],
        ["sweep", url, "--limit", "0"],
        ["demo", "--seconds", "0"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(command)
        assert exit.value.code == 2
    assert main(["lookup", url, "pay", "x" * 10_000]) == 2
    assert main(["lookup", url, "pay", ""]) == 2
    assert main(["demo", "--store", "memory:"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_without_a_command_the_help_is_shown_and_a_script_sees_that_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for command in COMMANDS:
        assert f"    {command.name}" in [line[: 4 + len(command.name)] for line in shown.err.splitlines()]
    monkeypatch.setattr(sys, "argv", ["semel"])
    assert main() == 2
    assert capsys.readouterr().err == shown.err
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == shown.err


def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("semel.core.states.mermaid", interrupt)
    assert main(["diagram"]) == 130
    assert capsys.readouterr().err == "semel: interrupted\n"


def test_every_command_and_option_has_its_place_in_the_reference() -> None:
    sections = {part.split("\n", 1)[0].strip("` "): part for part in DOCS.read_text().split("\n## ")}
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parsers: dict[str, argparse.ArgumentParser] = commands.choices
    assert set(parsers) == {command.name for command in COMMANDS}
    for name, parser in parsers.items():
        section = sections.get(f"semel {name}")
        assert section is not None, f"docs/reference/cli.md has no section `semel {name}`"
        inner = [a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for action in [*parser._actions, *(action for below in inner for each in below for action in each._actions)]:
            for option in action.option_strings:
                assert option in section or option in ("-h", "--help"), f"{name}: {option} is not described"
