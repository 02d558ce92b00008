"""The stores that are put through faults, and the faults' own schedule."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from semel.stores.urls import migrate_store
from semel.testing.faults import Workers

FAULTS = 4
PAUSES = 2
OPERATIONS = 25
PATIENCE = 90.0


POSTGRES = pytest.param("postgres", marks=pytest.mark.postgres)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a fresh store of the kind that the test names."""
    return _fresh(request, tmp_path)


@pytest.fixture(params=[POSTGRES])
def server_store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that processes share over a network: for what is the engine's affair, whatever the store."""
    return _fresh(request, tmp_path)


def _fresh(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 'semel.db'}" if sqlite else request.getfixturevalue(f"{request.param}_url")
    migrate_store(url)
    return url


def rage(workers: Workers, *, kills: bool = False, pauses: bool = False, lease: float = 1.0) -> None:
    """Kill and replace workers, or pause them past their lease and wake them, at random moments of their work.

    Until there were enough faults, among enough operations: how long that takes is the machine's affair.
    """
    end = time.monotonic() + PATIENCE
    woken_at, paused = 0.0, None
    wanted = {"kill": FAULTS if kills else 0, "pause": PAUSES if pauses else 0}
    while True:
        time.sleep(0.05 + 0.3 * workers.dice.random())
        if paused is not None and time.monotonic() >= woken_at:
            workers.resume(paused)
            paused = None
        lines = workers.log.read()
        if not any(wanted.values()) and len({line.key for line in lines if line.what == "begin"}) > OPERATIONS:
            return
        assert time.monotonic() < end, f"the storm does not get on: {wanted} left, {len(lines)} lines"
        at_work = {line.pid for line in lines}
        standing = [worker for worker in workers.running if worker.pid in at_work and not worker.paused]
        if not standing:
            continue
        if wanted["pause"] and paused is None:
            wanted["pause"] -= 1
            paused = workers.dice.choice(standing)
            workers.pause(paused)
            woken_at = time.monotonic() + lease * (1.2 + 0.4 * workers.dice.random())
        elif wanted["kill"]:
            wanted["kill"] -= 1
            workers.kill(workers.dice.choice(standing))
            workers.spawn()
