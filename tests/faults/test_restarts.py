"""Postgres is restarted under load, in good order and by a crash: nothing is lost, nothing is done twice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Literal

import pytest

from semel.core.states import State
from semel.stores.urls import migrate_store
from semel.testing.faults import Workers, effects, until, verdicts
from tests.servers import PostgresServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

RESTARTS: tuple[Literal["fast", "immediate"], ...] = ("fast", "immediate")


def goes_on(workers: Workers) -> None:
    """Wait until ten more operations have had their effect."""
    done = len(effects(workers.log.read()))
    until(lambda: len(effects(workers.log.read())) >= done + 10, 90, "the work does not go on")


@pytest.mark.parametrize("policy", ["recover", "at_most_once"])
def test_restarts_under_load_lose_nothing_and_repeat_nothing(
    private_postgres: PostgresServer, tmp_path: Path, policy: Literal["recover", "at_most_once"]
) -> None:
    url = private_postgres.create_database()
    migrate_store(url)
    with Workers(url, tmp_path, policy=policy, lease=2.0) as workers:
        workers.spawn(3)
        for mode in RESTARTS:
            goes_on(workers)
            private_postgres.restart(mode)
        goes_on(workers)
        workers.stop()
        lines = workers.finish()

        begun = {line.key for line in lines if line.what == "begin"}
        counts = {key: len(found) for key, found in effects(lines).items()}
        assert verdicts(lines) == []
        assert workers.overwritten(lines) == []
        # What a caller was told is what the ledger of effects has.
        assert {line.key for line in lines if line.what == "answer"} <= set(counts)
        if policy == "recover":
            assert counts == dict.fromkeys(begun, 1)
        else:
            assert max(counts.values()) == 1
        states = {key: record.state for key in begun if (record := workers.lookup(key)) is not None}
        assert set(states) == begun
        assert set(states.values()) <= ({State.DONE, State.UNKNOWN} if policy == "at_most_once" else {State.DONE})


def test_restarts_and_kills_together(private_postgres: PostgresServer, tmp_path: Path) -> None:
    url = private_postgres.create_database()
    migrate_store(url)
    with Workers(url, tmp_path, policy="recover", lease=1.0) as workers:
        workers.spawn(3)
        for mode in RESTARTS:
            goes_on(workers)
            workers.kill(workers.dice.choice(workers.running))
            private_postgres.restart(mode)
            workers.kill(workers.dice.choice(workers.running))
            workers.spawn(2)
        workers.stop()
        lines = workers.finish()
        begun = {line.key for line in lines if line.what == "begin"}
        assert {key: len(found) for key, found in effects(lines).items()} == dict.fromkeys(begun, 1)
        assert verdicts(lines) == []
        assert workers.overwritten(lines) == []


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
        begun = {line.key for line in lines if line.what == "begin"}
        assert {key: len(found) for key, found in effects(lines).items()} == dict.fromkeys(begun, 1)
        assert verdicts(lines) == []
        assert workers.overwritten(lines) == []
