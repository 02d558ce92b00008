"""MariaDB is restarted under load, in good order and by a crash: no key is lost, nothing is done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.stores.urls import migrate_store
from semel.testing.faults import Workers, effects
from tests.faults.conftest import assert_sound, figures, rage, restart_and_kill, restart_under_load
from tests.servers import MariaDBServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

RESTARTS = ("clean", "crash", "crash")

# One policy for each test: what the others mean is proved on PostgreSQL.


def test_restarts_under_load_lose_nothing_and_repeat_nothing(private_mariadb: MariaDBServer, tmp_path: Path) -> None:
    restart_under_load(private_mariadb, RESTARTS, tmp_path, "recover", lease=3.0)


def test_restarts_and_kills_together(private_mariadb: MariaDBServer, tmp_path: Path) -> None:
    restart_and_kill(private_mariadb, RESTARTS, tmp_path)


def test_kills_and_pauses_of_workers(mariadb_url: str, tmp_path: Path) -> None:
    migrate_store(mariadb_url)
    with Workers(mariadb_url, tmp_path, policy="at_most_once") as workers:
        workers.spawn(3)
        rage(workers, kills=True, pauses=True)
        workers.stop()
        lines = workers.finish()
        figures("workers killed and paused, at_most_once", workers)
        assert_sound(workers, lines)
        assert max(map(len, effects(lines).values())) == 1
