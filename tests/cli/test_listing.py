"""``semel list``, ``stats``, ``purge``, and what all commands share that change records by hand."""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from semel import Semel, SQLiteStore, migrate_store
from semel.cli import listing, main, records
from semel.cli.app import COMMANDS, make_parser, parse
from tests.cli.conftest import Terminal, leave_in_doubt


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "app.db"
    with Semel(SQLiteStore(path)) as guard:
        for i in range(12):
            guard.run("pay" if i % 3 else "ship", key=f"k{i}", tenant="acme" if i % 2 else "zeta", call=lambda: "done")
        leave_in_doubt(guard)
    return f"sqlite:///{path}"


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(list(words)) == code
    return capsys.readouterr().out


def objects(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[Any]:
    return [json.loads(line) for line in printed(capsys, *words, "--json", code=code).splitlines()]


# list


def test_a_list_is_one_object_per_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, "list", url)
    assert len(found) == 13
    newest = found[0]
    assert newest.keys() == {
        "operation", "key", "tenant", "state", "id", "attempt", "token", "age", "expires_in",
    }  # fmt: skip
    assert (newest["operation"], newest["key"], newest["state"], newest["tenant"]) == ("pay", "doubtful", "unknown", "")
    assert [each["key"] for each in found[1:4]] == ["k11", "k10", "k9"]
    assert len(newest["id"]) == 32


@pytest.mark.parametrize(
    ("filters", "keys"),
    [
        (["--state", "unknown"], {"doubtful"}),
        (["--state", "unknown", "--state", "done", "--tenant", "zeta", "--operation", "ship"], {"k0", "k6"}),
        (["--operation", "ship"], {"k0", "k3", "k6", "k9"}),
        (["--tenant", ""], {"doubtful"}),
        (["--older", "1h"], set()),
        (["--limit", "2"], {"doubtful", "k11"}),
        (["--state", "running"], set()),
    ],
)
def test_filters(url: str, filters: list[str], keys: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert {each["key"] for each in objects(capsys, "list", url, *filters)} == keys


def test_a_list_for_people_has_columns(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "list", url, "--limit", "3").splitlines()
    assert lines[0].split() == ["STATE", "OPERATION", "KEY", "TENANT", "AGE", "ATTEMPT", "EXPIRES", "IN"]
    assert lines[1].startswith("unknown  pay        doubtful  -       ")
    assert lines[2].startswith("done     pay        k11       acme    ")
    assert "\x1b" not in "".join(lines)
    assert printed(capsys, "list", url, "--operation", "nothing") == "no records\n"


def test_colour_is_for_terminals_and_not_with_no_color(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name, value, coloured in (("NO_COLOR", "", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)):
        screen = Terminal()
        with monkeypatch.context() as within:
            within.setenv(name, value)
            within.setattr("sys.stdout", screen)
            assert main(["list", url, "--state", "unknown"]) == 0
        assert ("\x1b[31munknown" in screen.getvalue()) is coloured


def test_a_long_list_follows_its_pages_and_says_how_far_it_is(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(listing, "_PAGE", 2)
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("time.monotonic", iter(range(10_000)).__next__)
    assert len(objects(capsys, "list", url)) == 13
    assert "looked at 4 records" in screen.getvalue()
    assert screen.getvalue().endswith("\r\x1b[K"), "nothing of it stays"


def test_a_key_that_is_not_readable_is_shown_by_its_identity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "app.db"
    with Semel(SQLiteStore(path), secret=b"s" * 32, readable_keys=False) as guard:
        guard.run("pay", key="private", call=lambda: 1)
    (found,) = objects(capsys, "list", f"sqlite:///{path}")
    assert found["key"] is None
    assert f"id {found['id']}" in printed(capsys, "list", f"sqlite:///{path}")


def test_a_wrong_state_is_refused(url: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["list", url, "--state", "odd"])
    assert exit.value.code == 2
    assert main(["list", url, "--older", "soon"]) == 2


# stats


def test_stats(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = objects(capsys, "stats", url)
    assert (found["records"], found["exact"], found["looked_at"], found["complete"]) == (13, True, 13, True)
    assert found["states"] == {"done": 12, "unknown": 1}
    assert found["operations"] == {"pay": {"unknown": 1, "done": 8}, "ship": {"done": 4}}
    assert found["sweep_lag"] == 0
    assert found["oldest"].keys() == {"done", "unknown"}
    (part,) = objects(capsys, "stats", url, "--look", "5")
    assert (part["looked_at"], part["complete"]) == (5, False)
    text = printed(capsys, "stats", url)
    assert text.startswith("13 records, ")
    assert "  pay        1 unknown, 8 done" in text


# purge


def test_a_purge_deletes_finished_records_and_nothing_else(
    url: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert printed(capsys, "purge", url, "--operation", "pay", "--dry-run") == "8 finished records would be deleted\n"
    with caplog.at_level(logging.INFO, "semel.audit"):
        assert main(["purge", url, "--operation", "pay", "--yes"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "8 finished records deleted\n"
    assert shown.err.startswith("semel.audit: purge by ")
    assert 'deleted=8 operation="pay"' in shown.err
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 9
    assert "k1" not in " ".join(lines), "a key may be private"
    left = {each["key"] for each in objects(capsys, "list", url)}
    assert left == {"doubtful", "k0", "k3", "k6", "k9"}
    (found,) = objects(capsys, "stats", url)
    assert found["records"] == 5, "their rows are gone, not only expired"
    with Semel(url) as guard:
        assert guard.run("pay", key="k1", tenant="acme", call=lambda: "again") == "again"


def test_a_purge_asks_and_needs_a_filter(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["purge", url, "--yes"]) == 2
    assert "--all" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["purge", url, "--all"]) == 2
    assert "--yes" in capsys.readouterr().err
    for answer, code, left in (("n", 1, 13), ("", 1, 13), ("yes", 0, 1)):
        monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
        assert main(["purge", url, "--all"]) == code
        assert "delete 12 finished records?" in capsys.readouterr().err
        assert len(objects(capsys, "list", url)) == left
    assert objects(capsys, "purge", url, "--all", "--yes") == [{"count": 0, "dry_run": False}]


def test_a_record_that_was_claimed_again_meanwhile_stays(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list shows it, somebody releases it and runs it again, and then the purge comes to it."""
    real = listing._free

    def slow(guard: Semel, records: Any, stopping: Any) -> Any:
        guard.release("ship", "k0", tenant="zeta", stored="any")
        guard.run("ship", key="k0", tenant="zeta", call=lambda: "new")
        return real(guard, records, stopping)

    monkeypatch.setattr(listing, "_free", slow)
    assert "3 finished" in printed(capsys, "purge", url, "--operation", "ship", "--yes")
    with Semel(url) as guard:
        assert guard.run("ship", key="k0", tenant="zeta", call=lambda: "other") == "new"


def store_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of this kind."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    if kind == "dynamodb":
        url: str = request.getfixturevalue("dynamodb").table()
    elif kind == "redis_cluster":
        cluster = request.getfixturevalue("redis_cluster")
        cluster.flush()
        url = cluster.url
    elif kind == "tiered":
        url = f"tiered:sqlite:///{tmp_path / 'app.db'},{request.getfixturevalue('redis_url')}"
    else:
        url = request.getfixturevalue(f"{kind}_url")
    return url


@pytest.mark.parametrize(
    "kind",
    [
        "sqlite",
        *(
            pytest.param(kind, marks=[pytest.mark.server, getattr(pytest.mark, mark)])
            for kind, mark in {
                "postgres": "postgres", "mariadb": "mariadb", "redis": "redis", "redis_cluster": "redis_cluster",
                "dynamodb": "dynamodb", "tiered": "redis",
            }.items()
        ),
    ],
)  # fmt: skip
def test_every_store_lists_with_filters_and_pages(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = store_url(kind, request, tmp_path)
    migrate_store(url)
    with Semel(url) as guard:
        for i in range(6):
            guard.run("pay" if i % 2 else "ship", key=f"k{i}", tenant="acme" if i < 3 else "zeta", call=lambda: "done")
        leave_in_doubt(guard)
    monkeypatch.setattr(listing, "_PAGE", 2)

    def keys(*filters: str) -> list[str]:
        found = objects(capsys, "list", url, *filters)
        return sorted(each["key"] for each in found if each["operation"] != "semel.tiered")  # the name of a cache

    assert keys() == ["doubtful", "k0", "k1", "k2", "k3", "k4", "k5"]
    assert keys("--state", "unknown") == ["doubtful"]
    assert keys("--operation", "ship") == ["k0", "k2", "k4"]
    assert keys("--tenant", "acme", "--operation", "pay", "--state", "done") == ["k1"]
    assert keys("--tenant", "") == ["doubtful"]
    assert keys("--older", "1h") == []
    assert len(objects(capsys, "list", url, "--limit", "3")) == 3
    assert "k5" in printed(capsys, "list", url)
    (found,) = objects(capsys, "stats", url)
    own = int(kind == "tiered")
    assert found["states"] == {"done": 6 + own, "unknown": 1}
    assert objects(capsys, "purge", url, "--all", "--yes") == [{"count": 6, "dry_run": False}]
    assert keys() == ["doubtful"]
    if kind != "dynamodb":  # it counts its items every six hours
        assert objects(capsys, "stats", url)[0]["records"] == 1 + own, "not only expired, but gone"


# release and resolve


@pytest.mark.parametrize("words", [["release"], ["resolve", "--result", "1"]])
def test_settling_asks_at_a_terminal_and_writes_an_audit_line(
    words: list[str],
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [words[0], url, "pay", "doubtful", *words[1:]]
    assert f"would {words[0]} pay[doubtful], which is unknown" in printed(capsys, *asked, "--dry-run")
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    assert main(asked) == 1
    shown = capsys.readouterr()
    assert f"{words[0]} pay[doubtful], which is unknown? Then " in shown.err
    assert "semel.audit" not in shown.err
    assert [each["state"] for each in objects(capsys, "list", url, "--state", "unknown")] == ["unknown"]
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    with caplog.at_level(logging.INFO, "semel.audit"):
        assert main([*asked, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {
        "operation": "pay", "key": "doubtful", "tenant": "", "was": "unknown", "action": words[0], "dry_run": False,
    }  # fmt: skip
    assert f"semel.audit: {words[0]} by " in shown.err
    (line,) = [record.getMessage() for record in caplog.records if record.name == "semel.audit"]
    assert re.fullmatch(
        rf'{words[0]} by \S+@\S+ at 20\S+Z: via="cli" operation="pay" tenant="" id="[0-9a-f]{{32}}" was="unknown" '
        "changed=true",
        line,
    )
    assert "doubtful" not in line


def test_a_dry_run_says_no_where_the_command_would(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["release", "pay", "nobody"], ["release", "pay", "k1", "--tenant", "acme"]):
        assert main([words[0], url, *words[1:], "--dry-run"]) == 1
    assert main(["release", url, "pay", "k1", "--tenant", "acme", "--stored", "failure", "--dry-run"]) == 1
    assert main(["release", url, "pay", "k1", "--tenant", "acme", "--stored", "any", "--dry-run"]) == 0
    capsys.readouterr()
    assert len(objects(capsys, "list", url)) == 13


def test_yes_does_not_ask(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert main(["release", url, "pay", "doubtful", "--yes"]) == 0


@pytest.mark.parametrize(
    "words", [["release"], ["release", "--force", "--stored", "any"], ["resolve", "--result", "1"]]
)
def test_what_has_changed_while_somebody_reads_the_question_stays(
    words: list[str], url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another operator settles it, it runs again, and the second attempt comes to the same state."""

    def answer_late(question: str, args: argparse.Namespace, **settings: Any) -> bool:
        with Semel(url) as guard:
            guard.release("pay", "doubtful")
            leave_in_doubt(guard)
        return True

    monkeypatch.setattr(records, "confirmed", answer_late)
    assert main([words[0], url, "pay", "doubtful", *words[1:]]) == 1
    shown = capsys.readouterr().err
    assert "pay[doubtful] has changed since it was looked up" in shown
    assert "semel.audit" not in shown
    assert [each["key"] for each in objects(capsys, "list", url, "--state", "unknown")] == ["doubtful"]


def test_what_was_not_there_is_not_released_without_a_question(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record comes into doubt between the look and the act."""
    with Semel(url) as guard:
        guard.release("pay", "doubtful")
    find = records._find

    def look(args: argparse.Namespace) -> Any:
        found = find(args)
        with Semel(url) as guard:
            leave_in_doubt(guard)
        return found

    monkeypatch.setattr(records, "_find", look)
    assert main(["release", url, "pay", "doubtful"]) == 1
    assert "pay[doubtful]: there is no such record" in capsys.readouterr().err
    assert [each["key"] for each in objects(capsys, "list", url, "--state", "unknown")] == ["doubtful"]


# all commands


def test_every_command_has_json() -> None:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(commands.choices) == {command.name for command in COMMANDS}
    for name, parser in commands.choices.items():
        inner = [a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for each in [each for below in inner for each in below] or [parser]:
            options = {option for action in each._actions for option in action.option_strings}
            assert "--json" in options, name


def test_a_long_migration_says_for_how_long_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Terminal()

    def migrate(url: str) -> list[str]:
        while "migrating … 1s" not in screen.getvalue():
            time.sleep(0.01)
        return []

    monkeypatch.setattr("semel.stores.urls.migrate_store", migrate)
    monkeypatch.setattr("sys.stderr", screen)
    assert main(["migrate", f"sqlite:///{tmp_path / 'new.db'}"]) == 0
    assert screen.getvalue().endswith("\r\x1b[K")


def test_upkeep_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'new.db'}"
    (first,) = objects(capsys, "migrate", url)
    assert first["applied"]
    assert objects(capsys, "migrate", url) == [{"applied": [], "up_to_date": True}]
    assert objects(capsys, "migrate", url, "--check") == [{"applied": [], "up_to_date": True}]
    assert objects(capsys, "migrate", "memory:") == [{"applied": [], "up_to_date": True}]
    assert objects(capsys, "sweep", url) == [{"removed": 0, "unknown": 0}]
    (drawn,) = objects(capsys, "diagram")
    assert drawn["mermaid"].startswith("stateDiagram")


def test_the_environment_names_the_store_in_every_command_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL_STORE", "sqlite:///here.db")
    needed = {
        "lookup": ["pay", "k"], "release": ["pay", "k"], "resolve": ["pay", "k"], "dlq show": ["message"],
        "once": ["--key", "k"], "relay": ["--to", "kafka://h/t"],
    }  # fmt: skip
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        inner = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for words, each in {f"{name} {action}": p for below in inner for action, p in below.items()}.items() or [
            (name, parser)
        ]:
            taken = {action.dest for action in each._actions}
            if "url" in taken or "urls" in taken or "stores" in taken:
                args = parse([*words.split(), *needed.get(words, [])])
                found = vars(args).get("url") or vars(args).get("urls") or vars(args).get("stores")
                assert found in ("sqlite:///here.db", ["sqlite:///here.db"]), words


def test_the_environment_names_the_store_of_the_new_commands(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_STORE", url)
    assert len(objects(capsys, "list", "--operation", "ship")) == 4
    assert objects(capsys, "stats")[0]["records"] == 13
    assert objects(capsys, "purge", "--all", "--dry-run")[0]["count"] == 12


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = printed(capsys, "completions", shell)
    assert objects(capsys, "completions", shell) == [{"shell": shell, "script": script[:-1]}]
    for command in COMMANDS:
        assert command.name in script
    assert "remember-failures" in script
    if shell == "bash":
        for words, found in {
            "semel st": ["stats", "stores"],
            "semel dlq re": ["redrive"],
            "semel list --st": ["--state"],
            "semel list --state a": ["abandoned"],
            "semel dlq purge --dry": ["--dry-run"],
        }.items():
            script += f"\nCOMP_WORDS=({words}); COMP_CWORD={words.count(' ')}; _shtab_semel; echo ${{COMPREPLY[@]}}"
            script += f"; [ \"${{COMPREPLY[*]}}\" = '{' '.join(found)}' ] || exit 1"
        run = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout


def test_completions_name_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completions", "bash"]) == 2
    assert "semel[cli]" in capsys.readouterr().err
