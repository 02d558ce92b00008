"""A worker that dies inside of the view's transaction: the rows go with it, and the retry writes them once."""

from __future__ import annotations

import os
import signal
import sqlite3
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.http.apps_wsgi_server import Service
from tests.http.test_wsgi_races import until_free


def rows(folder: Path, tag: str) -> int:
    with closing(sqlite3.connect(folder / "django.db")) as raw:
        count: int = raw.execute("SELECT count(*) FROM ledger WHERE tag = ?", [tag]).fetchone()[0]
        return count


@pytest.mark.faults
def test_a_killed_process_leaves_no_row_and_the_retry_writes_one(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "django.db")) as raw:
        raw.execute("CREATE TABLE ledger (tag TEXT)")
    service, tag = Service("tests.http.apps_django:wsgi('function')", tmp_path, "--workers=2"), uuid.uuid4().hex
    try:
        with ThreadPoolExecutor(1) as pool, service.gate() as gate:
            where = f"/ledger?gate={gate.name}"
            lost = pool.submit(service.ask, where, key=tag, tag=tag)
            gate.reached()
            assert rows(tmp_path, tag) == 0, "the answer would be known before the row is"
            os.kill(service.runs(tag)[0], signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                lost.result()
        assert rows(tmp_path, tag) == 0
        answers = [until_free(service, where, tag) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [201, 201]
        assert answers[1].headers["Idempotent-Replayed"] == "true"
        assert rows(tmp_path, tag) == 1
    finally:
        service.close()
