"""``semel once``, with real processes: two at once, killed in between, signals, output byte for byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from semel import Semel, State
from semel.cli import main
from tests.servers import DynamoDBServer

PATIENCE = 60.0
RUNS = "echo x >> ran; echo $$ > pid; "
WAITS = f"{RUNS} while [ ! -e gate ]; do sleep 0.02; done; echo finished"


class Jobs:
    """Runs ``semel once`` in a folder, on a store in that folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'jobs.db'}"
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, script: str, *options: str, key: str = "k") -> subprocess.Popen[bytes]:
        words = ["once", self.url, "--key", key, *options, "--", "sh", "-c", script]
        process = subprocess.Popen(
            [sys.executable, "-m", "semel", *words],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, script: str, *options: str, key: str = "k") -> tuple[int, bytes, bytes]:
        process = self.start(script, *options, key=key)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def runs(self) -> int:
        """How often the command has run."""
        with suppress(FileNotFoundError):
            return len((self.folder / "ran").read_text().splitlines())
        return 0

    def pid(self) -> int:
        return int((self.folder / "pid").read_text())

    def record(self, key: str = "k") -> Any:
        with Semel(self.url) as guard:
            return guard.lookup("once", key)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    for process in jobs.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    return False


@pytest.mark.process
def test_two_at_once_run_once(jobs: Jobs) -> None:
    first = jobs.start(WAITS)
    until((jobs.folder / "pid").exists)
    code, out, err = jobs.run(WAITS)
    assert (code, out) == (75, b"")
    assert b"in progress" in err or b"running" in err, err
    waiting = jobs.start(WAITS, "--wait", "60s")
    (jobs.folder / "gate").touch()
    for process in (first, waiting):
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (0, b"finished\n", b"")
    assert jobs.runs() == 1


@pytest.mark.process
def test_output_and_exit_code_are_replayed_byte_for_byte(jobs: Jobs) -> None:
    script = f"{RUNS} printf 'a\\377\\000b\\n'; printf 'e\\376' >&2; printf c; exit 3"
    first = jobs.run(script, "--remember-failures")
    assert first == (3, b"a\xff\x00b\nc", b"e\xfe")
    assert jobs.run(script, "--remember-failures") == first
    assert jobs.run(script) == first, "what is remembered is replayed, whatever the option says later"
    assert jobs.runs() == 1


@pytest.mark.process
def test_standard_input_is_the_commands_own(jobs: Jobs) -> None:
    words = [sys.executable, "-m", "semel", "once", jobs.url, "--key", "k", "--", "cat"]
    for text in (b"first\0", b"second"):
        run = subprocess.run(words, input=text, capture_output=True, timeout=PATIENCE)
        assert (run.returncode, run.stdout, run.stderr) == (0, b"first\0", b"")


@pytest.mark.process
def test_after_its_ttl_it_runs_again(jobs: Jobs) -> None:
    assert jobs.run(RUNS, "--ttl", "1ms")[0] == 0
    until(lambda: jobs.record() is None)
    assert jobs.run(RUNS, "--ttl", "1h")[0] == 0
    assert jobs.run(RUNS, "--ttl", "1h")[0] == 0
    assert jobs.runs() == 2


@pytest.mark.process
def test_a_failure_is_run_again(jobs: Jobs) -> None:
    script = f"{RUNS} test -e gate && echo good"
    assert jobs.run(script)[:2] == (1, b"")
    assert jobs.record() is None
    (jobs.folder / "gate").touch()
    assert jobs.run(script)[:2] == (0, b"good\n")
    assert jobs.run(script)[:2] == (0, b"good\n")
    assert jobs.runs() == 2


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux kills the command with its parent")
@pytest.mark.parametrize("guarantee", ["effectively-once", "at-most-once"])
def test_killed_in_between(jobs: Jobs, guarantee: str) -> None:
    options = ("--lease", "1s", "--guarantee", guarantee)
    script = f'echo $SEMEL_KEY.$SEMEL_ATTEMPT; test "$SEMEL_ATTEMPT" = 2 || {{ {WAITS}; }}'
    first = jobs.start(script, *options)
    until((jobs.folder / "pid").exists)
    first.kill()
    until(lambda: not is_alive(jobs.pid()))  # it dies with its parent, so that two runs never overlap
    code, out, err = jobs.run(script, *options, "--wait", "60s")
    if guarantee == "at-most-once":
        assert (code, out) == (76, b"")
        assert b"attempt 1 was abandoned" in err
        assert jobs.record().state is State.UNKNOWN
    else:
        assert (code, out, err) == (0, b"k.2\n", b"")
        assert jobs.run(script, *options) == (0, b"k.2\n", b"")


@pytest.mark.process
@pytest.mark.slow
def test_the_lease_is_renewed_while_the_command_runs(jobs: Jobs) -> None:
    first = jobs.start(WAITS, "--lease", "300ms")
    until(lambda: (found := jobs.record()) is not None and found.age > 1.0)
    assert jobs.record().state is State.RUNNING
    assert jobs.run(WAITS, "--lease", "300ms")[0] == 75
    (jobs.folder / "gate").touch()
    assert first.wait(PATIENCE) == 0
    assert jobs.runs() == 1


@pytest.mark.process
def test_signals_reach_the_command(jobs: Jobs) -> None:
    script = f"trap 'echo asked; exit 9' TERM; {WAITS}"
    process = jobs.start(script)
    until((jobs.folder / "pid").exists)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (9, b"asked\n")
    assert jobs.record() is None, "it failed, so it is run again"
    assert jobs.run("kill -KILL $$", key="other")[0] == 128 + 9


@pytest.mark.process
@pytest.mark.slow
def test_one_that_was_paused_gets_the_outcome_of_its_successor(jobs: Jobs) -> None:
    script = f'test "$SEMEL_ATTEMPT" = 2 && exit 4; {WAITS}'
    options = ("--lease", "1s", "--remember-failures")
    first = jobs.start(script, *options)
    until((jobs.folder / "pid").exists)
    first.send_signal(signal.SIGSTOP)
    assert jobs.run(script, *options, "--wait", "60s")[0] == 4
    (jobs.folder / "gate").touch()
    until(lambda: not is_alive(jobs.pid()))
    first.send_signal(signal.SIGCONT)
    out, err = first.communicate(timeout=PATIENCE)
    assert (first.returncode, out) == (4, b"finished\n")
    assert b"another process took over" in err
    assert jobs.run(script, *options)[:2] == (4, b"")


@pytest.mark.process
def test_whoever_reads_the_output_may_go(jobs: Jobs) -> None:
    process = jobs.start(f"{RUNS} while [ ! -e gate ]; do sleep 0.02; done; yes | head -c 300000; exit 3")
    until((jobs.folder / "pid").exists)
    assert process.stdout is not None
    process.stdout.close()
    (jobs.folder / "gate").touch()
    assert process.wait(PATIENCE) == 3


@pytest.mark.process
def test_output_is_remembered_up_to_a_bound(jobs: Jobs) -> None:
    script = "yes | head -c 5000"
    code, out, err = jobs.run(script, "--max-output", "1kB")
    assert (code, len(out), err) == (0, 5000, b"")
    code, out, err = jobs.run(script)
    assert (code, len(out)) == (0, 1000)
    assert err == b"semel: 4,000 more bytes of output were not remembered\n"


@pytest.mark.process
@pytest.mark.slow
def test_a_process_that_is_left_behind_is_not_waited_for(jobs: Jobs) -> None:
    code, out, _ = jobs.run("sleep 600 & echo $! > pid; echo hi")
    assert (code, out) == (0, b"hi\n")
    os.kill(jobs.pid(), signal.SIGKILL)


# in this process


@pytest.mark.parametrize("options", [["--remember-failures"], ["--guarantee", "at-most-once"]])
def test_a_command_that_was_not_started_is_not_remembered(options: list[str], tmp_path: Path) -> None:
    words = ["once", f"sqlite:///{tmp_path / 'jobs.db'}", "--key", "a", *options, "--", str(tmp_path / "later")]
    assert main(words) == 127
    (tmp_path / "later").write_text("#!/bin/sh\nexit 3\n")
    assert main(words) == 126
    (tmp_path / "later").chmod(0o755)
    assert main(words) == 3
    (tmp_path / "later").unlink()
    assert main(words) == 3, "what has run is remembered"


@pytest.mark.server
def test_output_that_the_store_cannot_take(
    dynamodb: DynamoDBServer, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = dynamodb.table()
    assert main(["migrate", url]) == 0
    words = ["once", url, "--key", "a", "--", "sh", "-c", f"echo x >> {tmp_path}/ran; head -c 600000 /dev/urandom >&2"]
    assert main(words) == 0, "it has run, and its exit code counts"
    capfd.readouterr()
    assert main(words) == 76
    assert "its result was not stored" in capfd.readouterr().err
    assert (tmp_path / "ran").read_text() == "x\n"


def test_what_cannot_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    assert main(["once", url, "--key", "a", "--", str(tmp_path / "nothing")]) == 127
    assert main(["once", url, "--key", "a", "--", str(tmp_path)]) == 126
    assert main(["once", url, "--key", "a"]) == 2
    assert main(["once", url, "--key", "a", "--ttl", "soon", "--", "true"]) == 125
    assert main(["once", url, "--key", "a", "--max-output", "much", "--", "true"]) == 2
    assert main(["once", url, "--key", "a", "--max-output", "33MB", "--", "true"]) == 2
    assert main(["once", "redis://127.0.0.1:1/0", "--key", "a", "--", "true"]) == 125
    with Semel(url) as guard:
        assert guard.lookup("once", "a") is None
    assert main(["once", url, "--key", "a", "--", "true"]) == 0
    capfd.readouterr()
    assert main(["once", url, "--key", "a", "--", "echo", "other"]) == 65
    assert capfd.readouterr().err == "semel: once[a]: this key was used for another command\n"


def test_as_json_and_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEMEL_STORE", f"sqlite:///{tmp_path / 'jobs.db'}")
    words = ["once", "--key", "a", "--operation", "nightly", "--ttl", "forever", "--json", "--"]
    for replayed in (False, True):
        assert main([*words, "sh", "-c", "echo hi; echo no >&2; echo -- --key"]) == 0
        shown = json.loads(capfd.readouterr().out)
        assert shown == {
            "exit_code": 0, "replayed": replayed, "stdout": "hi\n-- --key\n", "stderr": "no\n", "dropped": 0,
        }  # fmt: skip
    with Semel(os.environ["SEMEL_STORE"]) as guard:
        record = guard.lookup("nightly", "a")
        assert record is not None
        assert record.expires_in > 500 * 365 * 86400


def test_a_run_removes_what_has_expired(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    assert main(["once", url, "--key", "old", "--ttl", "1ms", "--", "true"]) == 0
    time.sleep(0.01)
    assert main(["once", url, "--key", "new", "--", "true"]) == 0
    with Semel(url, sweep_every=None) as guard:
        assert guard.measure().records == 1


def test_a_signal_that_comes_while_the_command_starts_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not end us: the command would be killed without having been asked."""
    real = subprocess.Popen

    def start(*args: Any, **settings: Any) -> Any:
        process = real(*args, **settings)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    words = ["once", f"sqlite:///{tmp_path / 'jobs.db'}", "--key", "a", "--", "sleep", "600"]
    assert main(words) == 128 + signal.SIGTERM
