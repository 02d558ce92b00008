"""What all commands share that change by hand what is stored: they ask, they can be tried, and they leave a trace."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from semel import Semel, SQLiteStore
from semel.cli import main
from semel.cli.app import make_parser
from semel.core.messaging.messages import BuryMessage, Message
from tests.cli.conftest import Terminal, leave_in_doubt

CHANGES = {
    "release": "release {} pay doubtful",
    "resolve": "resolve {} pay doubtful --result 12",
    "purge": "purge {} --operation pay",
    "dlq redrive": "dlq redrive {}",
    "dlq purge": "dlq purge {} --origin ledger",
    "outbox": "outbox {} --mode queue",
}
"""Each command, with words that change something."""
DELETE_FOR_GOOD = {"purge", "dlq purge"}
"""Without a terminal they need ``--yes``."""
PRIVATE = "k-secret"


@pytest.fixture
def url(tmp_path: Path) -> str:
    with Semel(SQLiteStore(tmp_path / "app.db")) as guard:
        guard.run("pay", key=PRIVATE, call=lambda: "done")
        leave_in_doubt(guard)
        for id in ("m-1", "m-2"):
            guard.store.execute(BuryMessage("ledger", Message(id, "paid", b"{}"), "it failed", 3))
    return f"sqlite:///{tmp_path / 'app.db'}"


def contents(url: str) -> list[str]:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as raw:
        return list(raw.iterdump())


def test_every_command_that_asks_is_in_the_table() -> None:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    found = set()
    for name, parser in commands.choices.items():
        inner = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        each = {f"{name} {action}": p for below in inner for action, p in below.items()} or {name: parser}
        for words, one in each.items():
            options = {option for action in one._actions for option in action.option_strings}
            assert ("--yes" in options) == ("--dry-run" in options), words
            found |= {words} if "--yes" in options else set()
    assert found == set(CHANGES)


@pytest.mark.parametrize("name", CHANGES)
def test_it_asks(
    name: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    command, before = CHANGES[name].format(url).split(), contents(url)
    caplog.set_level(logging.INFO, "semel.audit")
    refusals: list[tuple[io.StringIO, int]] = [(Terminal("n\n"), 1), (Terminal(""), 1)]
    if name in DELETE_FOR_GOOD:
        refusals.append((io.StringIO("y\n"), 2))
    for stdin, code in refusals:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(command) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        assert ("--yes" if code == 2 else " [y/N] ") in shown.err
    assert contents(url) == before
    assert not caplog.records
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(command) == 0
    assert " [y/N] " in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - DELETE_FOR_GOOD))
def test_a_script_is_not_asked(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(url)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(CHANGES[name].format(url).split()) == 0
    assert (contents(url) != before) or name == "outbox"


@pytest.mark.parametrize("words", CHANGES.values(), ids=CHANGES)
def test_it_can_be_tried_and_leaves_a_trace(
    words: str, url: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    command, before = words.format(url).split(), contents(url)
    caplog.set_level(logging.INFO, "semel.audit")
    assert main([*command, "--dry-run"]) == 0
    assert "would" in capsys.readouterr().out
    assert main([*command, "--dry-run", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert contents(url) == before
    assert not caplog.records
    assert main([*command, "--yes", "--json"]) == 0
    shown = capsys.readouterr()
    json.loads(shown.out)
    assert (contents(url) != before) or words.startswith("outbox"), "the mode of SQLite is always a queue"
    lines = [record.getMessage() for record in caplog.records]
    assert lines
    assert "semel.audit: " in shown.err
    assert PRIVATE not in "".join(lines) + shown.err, "a key may be private"


@pytest.mark.process
def test_ctrl_c_at_the_question_ends_it(url: str) -> None:
    """The handler that lets a purge finish its batch must not keep a person at the question."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "semel", *CHANGES["purge"].format(url).split()]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        asked = b""
        while not asked.endswith(b"[y/N] "):
            asked += process.stderr.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
        os.close(theirs)
    assert (process.returncode, out, err) == (130, b"", b"semel: interrupted\n")
