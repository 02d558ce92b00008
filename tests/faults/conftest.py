"""The stores that are put through faults, and the faults' own schedule."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from semel.core.states import State
from semel.stores.urls import migrate_store
from semel.testing.faults import HammerPolicy, Line, Workers, effects, until, verdicts

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


def begun(lines: list[Line]) -> set[str]:
    return {line.key for line in lines if line.what == "begin"}


def state_of(workers: Workers, key: str) -> State:
    record = workers.lookup(key)
    return State.ABSENT if record is None else record.state


def goes_on(workers: Workers) -> None:
    """Wait until ten more operations have had their effect."""
    done = len(effects(workers.log.read()))
    until(lambda: len(effects(workers.log.read())) >= done + 10, 90, "the work does not go on")


def figures(what: str, workers: Workers) -> None:
    """For the reader of the run (``-s``): what was begun, done and lost."""
    lines = workers.log.read()
    done = effects(lines)
    lost = [key for key in begun(lines) if workers.lookup(key) is None]
    print(
        f"{what}: {len(begun(lines))} keys, {len(lost)} lost, {sum(map(len, done.values()))} executions,"
        f" {len([key for key, found in done.items() if len(found) > 1])} keys executed more than once,"
        f" {len([line for line in lines if line.what == 'store'])} callers told of the store"
    )


def assert_sound(workers: Workers, lines: list[Line]) -> None:
    """Check what holds under any policy: no attempts overlap, no answers differ, no stale owner has written."""
    assert verdicts(lines) == []
    assert workers.overwritten(lines) == []


def assert_exactly_once(workers: Workers, lines: list[Line]) -> None:
    """Check that every operation that began had one effect."""
    assert {key: len(found) for key, found in effects(lines).items()} == dict.fromkeys(begun(lines), 1)
    assert_sound(workers, lines)


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


def restart_under_load(server: Any, modes: Sequence[str], folder: Path, policy: HammerPolicy, lease: float) -> None:
    """Restart a database server while workers use it: no key is lost, and nothing is done twice."""
    url = server.create_database()
    migrate_store(url)
    with Workers(url, folder, policy=policy, lease=lease) as workers:
        workers.spawn(3)
        for mode in modes:
            goes_on(workers)
            server.restart(mode)
        goes_on(workers)
        workers.stop()
        lines = workers.finish()
        figures(f"restarted {len(modes)} times, {policy}", workers)

        done = effects(lines)
        # What a caller was told is what the ledger of effects has.
        assert {line.key for line in lines if line.what == "answer"} <= set(done)
        states = {state_of(workers, key) for key in begun(lines)}
        if policy == "recover":
            assert_exactly_once(workers, lines)
            assert states == {State.DONE}
        else:
            assert_sound(workers, lines)
            assert max(map(len, done.values())) == 1
            assert states <= {State.DONE, State.UNKNOWN}


def restart_and_kill(server: Any, modes: Sequence[str], folder: Path) -> None:
    """Restart a database server and kill workers on both sides of the restart."""
    url = server.create_database()
    migrate_store(url)
    with Workers(url, folder, policy="recover", lease=1.0) as workers:
        workers.spawn(3)
        for mode in modes:
            goes_on(workers)
            workers.kill(workers.dice.choice(workers.running))
            server.restart(mode)
            workers.kill(workers.dice.choice(workers.running))
            workers.spawn(2)
        workers.stop()
        lines = workers.finish()
        figures(f"restarted {len(modes)} times, {2 * len(modes)} workers killed, recover", workers)
        assert_exactly_once(workers, lines)
