"""Where the output goes: another encoding, nowhere, a full disk, a narrow terminal, a reader that leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel import Semel, SQLiteStore
from semel.cli.commands import Progress
from tests.cli.conftest import Terminal


@pytest.fixture
def url(tmp_path: Path) -> str:
    with Semel(SQLiteStore(tmp_path / "app.db"), sweep_every=None) as guard:
        guard.run("pay", key="é", call=lambda: "Zürich → 東京 🎉")
        for i in range(2000):  # more than a pipe holds
            guard.run("pay", key=i, call=lambda: None)
    return f"sqlite:///{tmp_path / 'app.db'}"


def shell(line: str, url: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    semel = f"{sys.executable} -m semel"
    return subprocess.run(
        ["bash", "-c", f"semel() {{ {semel} \"$@\"; }}; {line}"],
        capture_output=True, timeout=60, env={**os.environ, "SEMEL_STORE": url, **environment},
    )  # fmt: skip


@pytest.mark.process
def test_an_encoding_that_lacks_characters(url: str) -> None:
    run = shell("semel lookup pay é --json && semel lookup pay é", url, PYTHONIOENCODING="latin-1")
    assert (run.returncode, run.stderr) == (0, b"")
    shown, *lines = run.stdout.decode("latin-1").splitlines()
    assert (json.loads(shown)["key"], json.loads(shown)["result"]) == ("é", "Zürich → 東京 🎉")
    assert "\\u6771" in "".join(lines)


@pytest.mark.process
def test_output_that_nobody_can_take_is_no_traceback(url: str) -> None:
    run = shell("semel list >&-; echo $?; semel list >&- 2>&-; echo $?; semel list >/dev/full; echo $?", url)
    assert run.stdout == b"0\n0\n1\n"
    assert run.stderr == b"semel: [Errno 28] No space left on device\n"
    run = shell("semel list | head -1; echo ${PIPESTATUS[0]}; semel list --json | head -1; echo ${PIPESTATUS[0]}", url)
    assert run.stderr == b""
    assert [line for line in run.stdout.splitlines() if len(line) == 1] == [b"0", b"0"]


@pytest.mark.process
@pytest.mark.server
@pytest.mark.redis
def test_what_a_server_can_lose_is_told_by_the_doctor_only(redis_url: str) -> None:
    run = shell("semel list; semel once --key k -- echo hi; semel doctor", redis_url)
    assert run.stderr == b""
    assert b"[no-persistence]" in run.stdout


@pytest.mark.process
def test_without_a_url_the_error_names_the_variable(url: str) -> None:
    run = shell("unset SEMEL_STORE; semel list", url)
    assert run.returncode == 2
    assert run.stderr.endswith(b"required: URL (or set SEMEL_STORE)\n")


def test_progress_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr("time.monotonic", iter(range(100)).__next__)
    monkeypatch.setenv("COLUMNS", "12")
    Progress().show("looked at 1,000,000 records …")
    assert screen.getvalue() == "\rlooked at 1\x1b[K"
