"""``semel client``: what it shows of a journal, and what it finishes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel import NoAnswer
from semel.cli import main
from semel.client import Retry
from tests.client.clients import HANG_UP, OK, HttpxClient, Server, http


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server([HANG_UP])
    yield server
    server.close()


@pytest.fixture
def journal(server: Server, tmp_path: Path) -> str:
    """A journal with one request in doubt."""
    path = str(tmp_path / "calls.db")
    client = HttpxClient(journal=path, retry=Retry(attempts=1, quota=None))
    with pytest.raises(NoAnswer):
        client.send("POST", f"{server.url}/payments", b"{}", {"Idempotency-Key": "pay-7", "Authorization": "Bearer 1"})
    client.close()
    return path


def output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_list_shows_what_is_in_doubt(journal: str, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "list", journal]) == 0
    shown = capsys.readouterr().out
    assert "in doubt" in shown
    assert f"pay-7  POST {server.url}/payments\n1 entry\n" in shown
    assert main(["client", "list", "--json", journal]) == 0
    (entry,) = output(capsys)["entries"]
    assert (entry["key"], entry["state"], entry["method"]) == ("pay-7", "in doubt", "POST")


def test_resume_finishes_it(
    journal: str, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAY_TOKEN", "Bearer 2")
    server.script = [OK]
    assert main(["client", "resume", journal, "--json", "--header", "Authorization=PAY_TOKEN"]) == 0
    report = output(capsys)
    assert [entry["key"] for entry in report.pop("finished")] == ["pay-7"]
    assert report == {"rejected": [], "unknown": [], "expired": []}
    assert server.seen[-1].headers["authorization"] == "Bearer 2"
    assert server.keys == ["pay-7", "pay-7"]
    assert main(["client", "resume", journal]) == 0
    assert capsys.readouterr().out == "finished: 0\nrejected: 0\nunknown: 0\nexpired: 0\n"


def test_resume_tells_what_is_still_unknown(journal: str, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = [http(401)]
    assert main(["client", "resume", journal]) == 1
    expected = f"finished: 0\nrejected: 0\nunknown: 1\n  pay-7  POST {server.url}/payments\nexpired: 0\n"
    assert capsys.readouterr().out == expected
    server.script = [http(422)]
    assert main(["client", "resume", journal, "--json"]) == 0
    assert len(output(capsys)["rejected"]) == 1


def test_progress_is_shown_on_a_terminal(
    journal: str, server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    server.script = [OK]
    assert main(["client", "resume", journal]) == 0
    assert capsys.readouterr().err == "\r1 of 1 \n"


@pytest.mark.parametrize("action", ["list", "resume"])
def test_a_journal_that_does_not_exist_is_not_made(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["client", action, str(tmp_path / "none.db")]) == 2
    assert "there is no journal" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_library_that_is_missing_is_named(
    journal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert main(["client", "resume", journal]) == 2
    assert "pip install 'semel[httpx]'" in capsys.readouterr().err


def test_a_variable_that_is_not_set_is_named(journal: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "resume", journal, "--header", "Authorization=NO_SUCH_TOKEN"]) == 2
    assert "NO_SUCH_TOKEN" in capsys.readouterr().err
