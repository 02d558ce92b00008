"""A worker of function views that dies: the retry runs or is refused, and rows of the view's transaction are gone."""

from __future__ import annotations

import os
import signal
import sqlite3
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.http.apps_wsgi_server import Service
from tests.http.test_wsgi_races import (  # noqa: F401 (these tests, and their fixtures, are for the service below)
    pool,
    tag,
    test_a_crashed_process_does_not_block_the_key_and_the_retry_runs,
    test_a_crashed_process_leaves_the_outcome_unknown_where_the_route_says_so,
    until_free,
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with closing(sqlite3.connect(folder / "django.db")) as raw:
        raw.execute("CREATE TABLE ledger (tag TEXT)")
    service = Service("tests.http.apps_django:wsgi('function')", folder, "--workers=2")
    yield service
    service.close()


def rows(folder: Path, word: str) -> int:
    with closing(sqlite3.connect(folder / "django.db")) as raw:
        count: int = raw.execute("SELECT count(*) FROM ledger WHERE tag = ?", [word]).fetchone()[0]
        return count


@pytest.mark.faults
def test_a_killed_process_leaves_no_row_and_the_retry_writes_one(service: Service) -> None:
    word, folder = uuid.uuid4().hex, service.folder
    with ThreadPoolExecutor(1) as client, service.gate() as gate:
        where = f"/ledger?gate={gate.name}"
        lost = client.submit(service.ask, where, key=word, tag=word)
        gate.reached()
        assert rows(folder, word) == 0, "the answer would be known before the row is"
        os.kill(service.runs(word)[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            lost.result()
    assert rows(folder, word) == 0
    answers = [until_free(service, where, word) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert rows(folder, word) == 1
