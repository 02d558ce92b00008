"""``semel dlq``: what it shows of the dead letters, and how they come back or go."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from semel import SQLiteStore
from semel.cli import main
from semel.core.messaging.messages import BuryMessage, Message

SECRET = b"card 4242"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with three dead letters: two of the consumer ledger, one of the consumer mail."""
    store = SQLiteStore(tmp_path / "shop.db")
    for consumer, id, stream, sequence in (
        ("ledger", "m-1", "o-7", 1),
        ("ledger", "m-2", "o-7", 2),
        ("mail", "m-1", "", 0),
    ):
        message = Message(id, "paid", SECRET, "/shop", "orders", stream, sequence, headers={"traceparent": "t"})
        store.execute(BuryMessage(consumer, message, "ValueError('no such\nbook')", 5))
    store.close()
    return f"sqlite:///{tmp_path / 'shop.db'}"


def output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_list_hides_the_data(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dlq", "list", url, "--origin", "ledger"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("m-1  paid o-7#1  orders  given up by ledger ")
    assert "after 5 attempts: ValueError('no such\\nbook')\n" in shown
    assert shown.endswith("\n2 dead letters\n")
    assert "4242" not in shown
    assert main(["dlq", "list", url, "--json", "--limit", "1"]) == 0
    shown = output(capsys)
    (letter,) = shown["letters"]
    assert shown["more"] is True
    assert main(["dlq", "list", url, "--limit", "1"]) == 0
    assert capsys.readouterr().out.endswith("\n1 dead letter, and there are more\n")
    assert main(["dlq", "list", url, "--limit", "3", "--json"]) == 0
    shown = output(capsys)
    assert (len(shown["letters"]), shown["more"]) == (3, False)
    assert (letter["id"], letter["origin"], letter["starts"], letter["bytes"]) == ("m-1", "ledger", 5, len(SECRET))
    assert "data" not in letter
    assert main(["dlq", "list", url, "--show-data", "--older-than", "1h"]) == 0
    assert capsys.readouterr().out == "0 dead letters\n"
    assert main(["dlq", "list", url, "--show-data", "--reason", "no such"]) == 0
    assert "card 4242" in capsys.readouterr().out


def test_show_finds_one(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMEL_STORE", url)
    assert main(["dlq", "show", "m-1", "--origin", "mail"]) == 0
    shown = capsys.readouterr().out
    assert "origin        mail\n" in shown
    assert re.search(r"^died +20\d\d-\d\d-\d\d \d\d:\d\d:\d\dZ$", shown, re.MULTILINE)
    assert "4242" not in shown
    assert main(["dlq", "show", url, "m-2", "--json", "--show-data"]) == 0
    assert output(capsys)["data"] == SECRET.decode()
    assert main(["dlq", "show", url, "m-9"]) == 1
    assert "no dead letter with the message m-9" in capsys.readouterr().err


def test_redrive_moves_them_into_the_outbox(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dlq", "redrive", url, "--dry-run"]) == 0
    assert capsys.readouterr().out == "3 dead letters would be moved back into the outbox\n"
    assert main(["dlq", "redrive", url, "--limit", "1", "--rate", "100", "--yes"]) == 0
    assert capsys.readouterr().out == "1 dead letter moved back into the outbox\n"
    assert main(["dlq", "redrive", url, "--json", "--yes"]) == 0
    assert output(capsys) == {"count": 2, "dry_run": False}
    assert main(["dlq", "redrive", url, "--json", "--yes"]) == 0
    assert output(capsys) == {"count": 0, "dry_run": False}


def test_purge_deletes_what_fits(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dlq", "purge", url, "--stream", "o-7", "--yes"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "2 dead letters deleted\n"
    assert "count=2 filter=\"stream 'o-7'\"" in shown.err
    assert main(["dlq", "purge", url, "--yes", "--json"]) == 0
    assert output(capsys) == {"count": 1, "dry_run": False}
    assert main(["dlq", "purge", url]) == 0, "there is nothing to ask about"


def test_a_store_without_the_tables_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dlq", "list", f"sqlite:///{tmp_path / 'none.db'}"]) != 0
    assert not (tmp_path / "none.db").exists()
    assert main(["dlq", "list", "memory:"]) == 2
    assert "no table for dead letters" in capsys.readouterr().err
