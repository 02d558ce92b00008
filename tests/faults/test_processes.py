"""Worker processes on one store, killed and paused at random points: what each policy promises, from the effect log."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.core.states import State
from semel.errors import InProgress
from semel.testing.faults import OPERATION, Workers, effects, unexcused, until, verdicts
from tests.faults.conftest import assert_exactly_once, assert_sound, begun, rage, state_of

pytestmark = [pytest.mark.faults, pytest.mark.slow]

# A test is about a policy. Each runs on one store: a file that processes share, a server, or PostgreSQL.
on_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)
on_redis = pytest.mark.parametrize("store", [pytest.param("redis", marks=pytest.mark.redis)], indirect=True)


@on_redis
def test_after_kills_and_pauses_at_most_once_has_at_most_one_effect(store: str, tmp_path: Path) -> None:
    with Workers(store, tmp_path, policy="at_most_once") as workers:
        workers.spawn(3)
        rage(workers, kills=True, pauses=True)
        workers.stop()
        lines = workers.finish()
        done = effects(lines)

        assert [key for key, lines in done.items() if len(lines) > 1] == []
        assert_sound(workers, lines)
        # Every attempt that ended without a word is reported as unknown, and nothing else is.
        unknown = {line.key for line in lines if line.what == "unknown"}
        assert unknown
        for key in begun(lines):
            record = workers.lookup(key)
            assert record is not None
            assert record.state in (State.DONE, State.UNKNOWN), key
            if record.state is State.UNKNOWN:
                assert key in unknown
                assert {line.pid for line in lines if line.key == key and line.what == "begin"} & workers.hurt
            else:
                assert len(done[key]) == 1


def test_after_kills_a_recover_hook_makes_exactly_one_effect(server_store: str, tmp_path: Path) -> None:
    with Workers(server_store, tmp_path, policy="recover") as workers:
        workers.spawn(3)
        rage(workers, kills=True)
        workers.stop()
        lines = workers.finish()

        assert any(line.what == "recover" for line in lines)
        assert_exactly_once(workers, lines)
        assert [key for key in begun(lines) if state_of(workers, key) is not State.DONE] == []


@on_sqlite
def test_after_kills_and_pauses_a_fenced_effect_happens_exactly_once(store: str, tmp_path: Path) -> None:
    """The token goes with the effect, and whoever recovers fences the older ones off: pauses do no harm either."""
    with Workers(store, tmp_path, policy="recover") as workers:
        workers.spawn(3)
        rage(workers, kills=True, pauses=True)
        workers.stop()
        lines = workers.finish()

        assert_exactly_once(workers, lines)


def test_after_kills_and_pauses_plain_retry_repeats_only_what_was_hurt(server_store: str, tmp_path: Path) -> None:
    with Workers(server_store, tmp_path, policy="retry") as workers:
        workers.spawn(3)
        rage(workers, kills=True, pauses=True)
        workers.stop()
        lines = workers.finish()
        done = effects(lines)

        assert any(line.attempt > 1 for line in lines if line.what == "begin")
        assert unexcused(lines, workers.hurt) == []
        assert_sound(workers, lines)
        # Every abandoned operation was resumed.
        assert begun(lines) == set(done)
        assert [key for key in begun(lines) if state_of(workers, key) is not State.DONE] == []


@on_sqlite
def test_without_faults_every_operation_has_one_effect(store: str, tmp_path: Path) -> None:
    with Workers(store, tmp_path, policy="retry", lease=30.0) as workers:
        workers.spawn(3)
        until(lambda: len(effects(workers.log.read())) > 40, 90, "no 40 effects")
        workers.stop()
        lines = workers.finish()
        assert {len(done) for done in effects(lines).values()} == {1}
        assert verdicts(lines) == []
        assert any(line.what == "refused" for line in lines)


@on_redis
@pytest.mark.parametrize("policy", ["retry", "recover"])
def test_a_paused_owner_that_wakes_finds_its_completion_refused(store: str, tmp_path: Path, policy: str) -> None:
    with Workers(store, tmp_path, policy=policy, lease=2.0) as workers:  # type: ignore[arg-type]
        (sleeper,) = workers.spawn(only="k", work=6.0)
        until(lambda: "begin" in _whats(workers, sleeper.pid), 60, "the first owner did not begin")
        workers.pause(sleeper)
        until(lambda: state_of(workers, "k") is State.ABANDONED, 60, "the lease did not end")
        (second,) = workers.spawn(only="k", work=0.0)
        assert second.wait(60) == 0
        taken = workers.lookup("k")
        assert taken is not None
        assert taken.state is State.DONE
        assert taken.attempt == 2

        workers.resume(sleeper)
        assert sleeper.wait(60) == 0
        lines = workers.log.read()
        last = [line for line in lines if line.pid == sleeper.pid][-1]
        answer = next(line.note for line in lines if line.pid == second.pid and line.what == "answer")
        assert last.what == "lost" or (last.what, last.note) == ("answer", answer)
        now = workers.lookup("k")
        assert now is not None
        assert (now.state, now.token, now.snapshot) == (State.DONE, taken.token, taken.snapshot)
        assert workers.overwritten(lines) == []
        # A woken owner may still touch the world, unless its effect goes behind the fence.
        assert len(effects(lines)["k"]) == (1 if policy == "recover" else 2)


@on_sqlite
def test_a_paused_at_most_once_owner_is_unknown_until_it_reports(store: str, tmp_path: Path) -> None:
    with Workers(store, tmp_path, policy="at_most_once", lease=2.0) as workers:
        (sleeper,) = workers.spawn(only="k", work=6.0)
        until(lambda: "begin" in _whats(workers, sleeper.pid), 60, "the owner did not begin")
        workers.pause(sleeper)
        until(lambda: state_of(workers, "k") is State.ABANDONED, 60, "the lease did not end")
        (second,) = workers.spawn(only="k")
        assert second.wait(60) == 0
        assert _whats(workers, second.pid) == ["unknown"]
        assert state_of(workers, "k") is State.UNKNOWN

        workers.resume(sleeper)
        assert sleeper.wait(60) == 0
        assert state_of(workers, "k") is State.DONE
        assert len(effects(workers.log.read())["k"]) == 1
        assert _whats(workers, sleeper.pid)[-1] == "answer"


@on_redis
def test_a_killed_owner_blocks_its_key_for_one_lease_and_no_longer(store: str, tmp_path: Path) -> None:
    with Workers(store, tmp_path, policy="retry", lease=0.5) as workers:
        (owner,) = workers.spawn(only="k", work=30.0)
        until(lambda: "begin" in _whats(workers, owner.pid), 60, "the owner did not begin")
        workers.kill(owner)
        (second,) = workers.spawn(only="other")
        assert second.wait(60) == 0
        workers.running.clear()
        lines = workers.finish()
        assert [line.attempt for line in lines if line.key == "k" and line.what == "begin"] == [1, 2]
        assert state_of(workers, "k") is State.DONE


@on_redis
def test_a_lease_is_renewed_while_its_handler_outlasts_it(store: str, tmp_path: Path) -> None:
    with Workers(store, tmp_path, policy="retry", lease=4.0) as workers:
        (owner,) = workers.spawn(only="k", work=10.0)
        # From the second half of its work on, the first lease is over: only renewals keep a rival away.
        until(lambda: "effect" in _whats(workers, owner.pid), 60, "the owner did not begin")
        with pytest.raises(InProgress):
            workers.guard.run(OPERATION, key="k", call=lambda: None)
        assert owner.wait(60) == 0
        assert len(effects(workers.log.read())["k"]) == 1


def _whats(workers: Workers, pid: int) -> list[str]:
    return [line.what for line in workers.log.read() if line.pid == pid]
