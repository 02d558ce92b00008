"""The quota when several processes share a store: each sees the others' keys when it counts, no sooner."""

import subprocess
import sys
from pathlib import Path

import pytest

from semel import Quota, Semel, SQLiteStore, TooManyKeys
from semel.core.ops import Count
from semel.core.quota import FEWEST
from semel.stores.postgres import migrate
from semel.stores.urls import open_store

pytestmark = pytest.mark.slow

LIVE_KEYS = 60
PROCESSES = 3
CLAIMS = """
import sys
from semel import Quota, Semel, TooManyKeys
from semel.stores.urls import open_store

url, name = sys.argv[1:]
made = 0
with Semel(open_store(url), quota=Quota(live_keys=60), sweep_every=None) as guard:
    sys.stdin.readline()  # all begin together
    for number in range(60):
        try:
            guard.run("ship", key=f"{name}-{number}", tenant="acme", call=lambda: number)
            made += 1
        except TooManyKeys:
            pass
print(made)
"""


def claimed_together(url: str) -> int:
    """How many keys the processes made."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMS, url, str(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in range(PROCESSES)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES
    return sum(map(int, printed))


def assert_near_the_quota(url: str) -> None:
    with Semel(open_store(url), sweep_every=None) as guard:
        guard.run("ship", key="first", tenant="acme", call=lambda: "first")
    made = 1 + claimed_together(url)
    assert LIVE_KEYS <= made <= LIVE_KEYS + PROCESSES * FEWEST, "each goes on for so many keys before it counts again"
    with Semel(open_store(url), quota=Quota(live_keys=LIVE_KEYS), sweep_every=None) as guard:
        assert guard.store.execute(Count("acme", 1000)) == made
        with pytest.raises(TooManyKeys):
            guard.run("ship", key="one more", tenant="acme", call=lambda: 1)
        assert guard.run("ship", key="first", tenant="acme", call=lambda: "again") == "first"
        assert guard.run("ship", key="one more", tenant="other", call=lambda: 1) == 1


def test_processes_on_one_file_keep_near_the_quota(tmp_path: Path) -> None:
    SQLiteStore(tmp_path / "records.db").close()
    assert_near_the_quota(f"sqlite:///{tmp_path / 'records.db'}")


def test_processes_on_one_server_keep_near_the_quota(postgres_url: str) -> None:
    migrate(postgres_url)
    assert_near_the_quota(postgres_url)
