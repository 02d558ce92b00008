"""MariaDB is restarted under load, in good order and by a crash: no key is lost, nothing is done twice."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from semel.core.states import State
from semel.stores.urls import migrate_store
from semel.testing.faults import Workers, effects, unexcused, verdicts
from tests.faults.conftest import rage
from tests.faults.test_restarts import goes_on
from tests.servers import MariaDBServer

pytestmark = [pytest.mark.faults, pytest.mark.slow]

RESTARTS: tuple[Literal["clean", "crash"], ...] = ("clean", "crash", "crash")


def figures(what: str, workers: Workers) -> None:
    """For the reader of the run (``-s``): what was begun, done and lost."""
    lines = workers.log.read()
    begun = {line.key for line in lines if line.what == "begin"}
    done = effects(lines)
    lost = [key for key in begun if workers.lookup(key) is None]
    print(
        f"{what}: {len(begun)} keys, {len(lost)} lost, {sum(map(len, done.values()))} executions,"
        f" {len([key for key, found in done.items() if len(found) > 1])} keys executed more than once,"
        f" {len([line for line in lines if line.what == 'store'])} callers told of the store"
    )


@pytest.mark.parametrize("policy", ["recover"])  # what the others mean is proved on PostgreSQL
def test_restarts_under_load_lose_nothing_and_repeat_nothing(
    private_mariadb: MariaDBServer, tmp_path: Path, policy: Literal["recover", "at_most_once", "retry"]
) -> None:
    url = private_mariadb.create_database()
    migrate_store(url)
    with Workers(url, tmp_path, policy=policy, lease=3.0) as workers:
        workers.spawn(3)
        for mode in RESTARTS:
            goes_on(workers)
            private_mariadb.restart(mode)
        goes_on(workers)
        workers.stop()
        lines = workers.finish()
        figures(f"restarted {len(RESTARTS)} times, {policy}", workers)

        begun = {line.key for line in lines if line.what == "begin"}
        counts = {key: len(found) for key, found in effects(lines).items()}
        assert verdicts(lines) == []
        assert workers.overwritten(lines) == []
        # What a caller was told is what the ledger of effects has.
        assert {line.key for line in lines if line.what == "answer"} <= set(counts)
        if policy == "recover":
            assert counts == dict.fromkeys(begun, 1)
        elif policy == "at_most_once":
            assert max(counts.values()) == 1
        states = {key: record.state for key in begun if (record := workers.lookup(key)) is not None}
        assert set(states) == begun
        assert set(states.values()) <= ({State.DONE, State.UNKNOWN} if policy == "at_most_once" else {State.DONE})


def test_restarts_and_kills_together(private_mariadb: MariaDBServer, tmp_path: Path) -> None:
    url = private_mariadb.create_database()
    migrate_store(url)
    with Workers(url, tmp_path, policy="recover", lease=1.0) as workers:
        workers.spawn(3)
        for mode in RESTARTS:
            goes_on(workers)
            workers.kill(workers.dice.choice(workers.running))
            private_mariadb.restart(mode)
            workers.kill(workers.dice.choice(workers.running))
            workers.spawn(2)
        workers.stop()
        lines = workers.finish()
        figures(f"restarted {len(RESTARTS)} times, {2 * len(RESTARTS)} workers killed, recover", workers)
        begun = {line.key for line in lines if line.what == "begin"}
        assert {key: len(found) for key, found in effects(lines).items()} == dict.fromkeys(begun, 1)
        assert verdicts(lines) == []
        assert workers.overwritten(lines) == []


@pytest.mark.parametrize("policy", ["at_most_once"])  # what the others mean is proved on PostgreSQL
def test_kills_and_pauses_of_workers(
    mariadb_url: str, tmp_path: Path, policy: Literal["at_most_once", "recover", "retry"]
) -> None:
    migrate_store(mariadb_url)
    with Workers(mariadb_url, tmp_path, policy=policy) as workers:
        workers.spawn(3)
        rage(workers, kills=True, pauses=True)
        workers.stop()
        lines = workers.finish()
        figures(f"workers killed and paused, {policy}", workers)
        counts = {key: len(found) for key, found in effects(lines).items()}
        begun = {line.key for line in lines if line.what == "begin"}
        assert verdicts(lines) == []
        assert workers.overwritten(lines) == []
        if policy == "at_most_once":
            assert max(counts.values()) == 1
        elif policy == "recover":
            assert counts == dict.fromkeys(begun, 1)
        else:
            assert unexcused(lines, workers.hurt) == []
            assert set(counts) == begun
