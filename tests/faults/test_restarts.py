"""Postgres is restarted under load, in good order and by a crash: nothing is lost, nothing is done twice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Literal

import pytest

from semel.stores.urls import migrate_store
from semel.testing.faults import Workers, until
from tests.faults.conftest import assert_exactly_once, goes_on, restart_and_kill, restart_under_load
from tests.servers import PostgresServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

RESTARTS = ("fast", "immediate")


@pytest.mark.parametrize("policy", ["recover", "at_most_once"])
def test_restarts_under_load_lose_nothing_and_repeat_nothing(
    private_postgres: PostgresServer, tmp_path: Path, policy: Literal["recover", "at_most_once"]
) -> None:
    restart_under_load(private_postgres, RESTARTS, tmp_path, policy, lease=2.0)


def test_restarts_and_kills_together(private_postgres: PostgresServer, tmp_path: Path) -> None:
    restart_and_kill(private_postgres, RESTARTS, tmp_path)


def test_an_outage_longer_than_the_stores_patience_is_an_error_and_no_more(
    private_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = private_postgres.create_database()
    migrate_store(url)
    with Workers(url, tmp_path, policy="recover", lease=1.0) as workers:
        workers.spawn(3)
        goes_on(workers)
        private_postgres._halt(signal.SIGQUIT)  # and not started again until callers have been told
        until(lambda: any(line.what == "store" for line in workers.log.read()), 90, "no caller was told")
        assert private_postgres._launch()
        goes_on(workers)
        workers.stop()
        lines = workers.finish()
        assert_exactly_once(workers, lines)
