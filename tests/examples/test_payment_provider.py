"""The example of a payment provider: killed between the charge and the commit, and everywhere else, it pays once."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from semel.testing.crashpoints import crash_everywhere
from tests.examples import paying

pytestmark = pytest.mark.process

FOLDER = Path(__file__).parents[2] / "examples" / "payment_provider"


@pytest.fixture
def provider(starts_process: None) -> Iterator[str]:
    command = [sys.executable, FOLDER / "provider.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def pay(database: Path, provider: str, order: str = "o-1", crash: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "service.py", database, provider, order, "500"],
        env={**os.environ, "CRASH": crash},
        capture_output=True,
        text=True,
        timeout=60,
    )


def charges(provider: str) -> list[dict[str, object]]:
    with urllib.request.urlopen(f"{provider}/charges", timeout=10) as answer:
        return list(json.load(answer))


def rows(database: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as conn:
        return conn.execute("SELECT order_id, charge, cents FROM payment").fetchall()


@pytest.mark.parametrize(
    ("place", "before"),
    [("asked", (0, 0)), ("charged", (1, 0)), ("committed", (1, 1))],
)
def test_a_service_killed_and_asked_again_has_charged_once(
    place: str, before: tuple[int, int], provider: str, tmp_path: Path
) -> None:
    database = tmp_path / "shop.db"
    assert pay(database, provider, crash=place).returncode == -signal.SIGKILL
    assert (len(charges(provider)), len(rows(database))) == before
    again = pay(database, provider)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == {"order": "o-1", "charge": "ch_1"}
    assert charges(provider) == [{"id": "ch_1", "order": "o-1", "cents": 500}]
    assert rows(database) == [("o-1", "ch_1", 500)]


def test_another_order_is_another_charge(provider: str, tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    for order in ("o-1", "o-2", "o-1"):
        assert pay(database, provider, order).returncode == 0
    assert [charge["order"] for charge in charges(provider)] == ["o-1", "o-2"]


@pytest.mark.slow
def test_it_pays_once_wherever_it_is_killed(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER", provider)
    report = crash_everywhere(paying.setup, paying.pay, paying.check, teardown=paying.remove)
    assert len(report.points) > 10
