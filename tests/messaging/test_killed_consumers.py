"""Consumers in processes of their own: rivals, and killed at the worst moments, on a real broker and real databases."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from semel.core.messaging.messages import Message, attributes
from tests.messaging.desks import Desk
from tests.messaging.racing_consumers import MESSAGES
from tests.messaging.test_consumer import open_books

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
POSTGRES = [pytest.mark.server, pytest.mark.postgres]
MYSQL = [pytest.mark.server, pytest.mark.mariadb]


@pytest.mark.parametrize(
    "dialect", ["sqlite", pytest.param("postgres", marks=POSTGRES), pytest.param("mysql", marks=MYSQL)]
)
def test_two_processes_apply_every_message_once(dialect: str, open_desk: Callable[[str], Desk]) -> None:
    books = open_books(open_desk(dialect))
    command = [sys.executable, "-m", "tests.messaging.racing_consumers", dialect, books.desk.url]
    subprocess.run(command, cwd=ROOT, timeout=100, check=True)
    assert sorted(books.applied) == [f"m-{number:02}" for number in range(MESSAGES)]


@pytest.mark.server
@pytest.mark.redis
@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        ("sqlite", ""),
        pytest.param("postgres", "batches", marks=POSTGRES),
        pytest.param("mysql", "", marks=MYSQL),
        ("sqlite", "guard"),
    ],
)
def test_every_message_is_applied_once_and_the_one_that_kills_is_given_up(
    dialect: str, kind: str, open_desk: Callable[[str], Desk], redis_url: str, tmp_path: Path
) -> None:
    books = open_books(open_desk(dialect))
    with redis_client.Redis.from_url(redis_url) as client:
        for id in ("m-1", "m-2", "m-3", "poison", "m-4"):
            fields: dict[Any, Any] = {**attributes(Message(id, "paid", b"{}", "/shop")), "data": b"{}"}
            client.xadd("orders", fields)
    command = [
        sys.executable,
        "-m",
        "tests.messaging.dying_consumer",
        dialect,
        books.desk.url,
        redis_url,
        str(tmp_path),
        kind,
    ]
    deaths = int(subprocess.run(command, cwd=ROOT, timeout=100, check=True, stdout=subprocess.PIPE).stdout)
    assert sorted(books.applied) == ["m-1", "m-2", "m-3", "m-4"]
    assert [row[0] for row in books.dead] == ["poison"]
    assert "each time that it was applied" in books.dead[0][1]
    assert {mark.name for mark in tmp_path.iterdir()} == {"effect", "acknowledge"}
    assert deaths >= 4  # one for each mark, and the poison has had its tries
