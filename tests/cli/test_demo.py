"""The demo, run as users run it: a clean verdict, a verdict that can fail, and an end that leaves nothing behind.

First storms straight on the store, then the service and the storms over HTTP.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pty
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.cli.app import main
from semel.cli.demo import MODES
from semel.demo.screen import Screen
from semel.demo.storm import RATE
from semel.demo.worker import DYING, TILLS

pytestmark = [pytest.mark.slow, pytest.mark.faults]


@functools.cache
def stormy_seed(seconds: float) -> str:
    """A seed under which several of the payments of a storm see their first attempt die right after its effect."""
    payments = range(20, int(seconds * RATE))

    def deaths(seed: int) -> int:
        return sum(DYING <= random.Random(f"{seed}/{payment}/1").random() < 2 * DYING for payment in payments)

    return str(next(seed for seed in range(10_000) if deaths(seed) >= 4))


class Demo:
    """A running demo, whose processes are known by the temporary folder that is only theirs."""

    def __init__(self, folder: Path, *options: str, **settings: Any) -> None:
        self.folder = folder
        env = {**os.environ, "TMPDIR": str(folder), **settings.pop("env", {})}
        command = [sys.executable, "-m", "semel", "demo", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
        self.process = subprocess.Popen(command, env=env, text=True, **pipes)

    def workers(self) -> list[int]:
        """The pids of worker processes that are alive."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and str(self.folder).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # gone meanwhile
        return [pid for pid in found if pid != self.process.pid]

    def read_until(self, text: str) -> str:
        """Wait for a line with this text. Returns all lines up to it."""
        assert self.process.stdout is not None
        seen = ""
        while text not in seen:
            line = self.process.stdout.readline()
            assert line, seen + self.end()[2]
            seen += line
        return seen

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    started = []

    def start(*options: str, **settings: Any) -> Demo:
        started.append(Demo(tmp_path, *options, **settings))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


def storm(
    demo: Callable[..., Demo], *options: str, seconds: float, seed: str, until: str, **settings: Any
) -> tuple[int, dict[str, Any], str]:
    """The code, verdict and output of a storm in which something happened. On a slow machine it takes longer."""
    for times in (1, 4, 12):
        lasting = ("--seconds", str(times * seconds), "--seed", seed)
        code, out, err = demo("--once", "--json", *options, *lasting, **settings).end()
        verdict = json.loads(out)
        if verdict[until] > 0:
            break
    return code, verdict, out + err


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_the_verdict_of_a_storm_is_clean(demo: Callable[..., Demo], mariadb_url: str) -> None:
    where = ("--store", mariadb_url)
    code, verdict, out = storm(demo, *where, seconds=3, seed=stormy_seed(2), until="recovered")
    assert (code, verdict["clean"]) == (0, True), out
    assert [verdict[name] for name in ("duplicates", "lost", "mismatched", "unsettled", "crashes")] == [0] * 5
    for name in ("operations", "attempts", "replays", "takeovers", "recovered", "kills", "refused", "failures"):
        assert verdict[name] > 0, name
    assert verdict["effects"] == verdict["operations"]
    assert verdict["attempts"] >= verdict["operations"]
    assert verdict["takeovers"] >= verdict["recovered"]
    assert verdict["calls"] >= verdict["operations"] + verdict["replays"]
    assert (verdict["mode"], verdict["storms"]) == ("leased", 1)
    assert verdict["store"] in ("mysql", "mariadb")
    assert "kills" in out.partition("}")[2], "no progress was shown"


@pytest.mark.parametrize(
    ("sabotage", "what"),
    [("unprotected", "duplicates"), ("blind", "duplicates"), ("silent", "lost"), ("broken", "crashes")],
)
def test_the_verdict_can_fail(demo: Callable[..., Demo], sabotage: str, what: str) -> None:
    """Semel left out; a recover hook that never looks; a handler that has no effect; one with an unexpected error."""
    env = {"SEMEL_DEMO_SABOTAGE": sabotage}
    code, verdict, out = storm(demo, "--workers", "2", seconds=1.5, seed=stormy_seed(1.5), until=what, env=env)
    assert (code, verdict["clean"]) == (1, False), out
    assert verdict[what] > 0
    if sabotage == "unprotected":
        assert verdict["mismatched"] > 0
        assert verdict["unsettled"] == verdict["operations"]


def test_in_a_transaction_nothing_is_ever_done_again(demo: Callable[..., Demo], postgres_url: str) -> None:
    """No lease is waited for, no hook looks for what was done, and still no row is there twice."""
    options = ("--mode", "transactional", "--workers", "2", "--store", postgres_url)
    code, verdict, out = storm(demo, *options, seconds=4, seed=stormy_seed(2), until="kills")
    assert (code, verdict["clean"], verdict["mode"]) == (0, True, "transactional"), out
    assert verdict["effects"] == verdict["operations"] > 0
    assert verdict["takeovers"] == verdict["recovered"] == 0
    for name in ("kills", "replays"):
        assert verdict[name] > 0, name
    assert verdict["attempts"] > verdict["operations"], "nothing was rolled back, so nothing was shown"


def test_in_steps_each_is_done_once_and_in_order(demo: Callable[..., Demo], postgres_url: str) -> None:
    options = ("--mode", "steps", "--workers", "2", "--store", postgres_url)
    code, verdict, out = storm(demo, *options, seconds=4, seed=stormy_seed(2), until="takeovers")
    assert (code, verdict["clean"], verdict["mode"]) == (0, True, "steps"), out
    assert verdict["effects"] == 2 * verdict["operations"] > 0
    for name in ("kills", "replays", "takeovers"):
        assert verdict[name] > 0, name


@pytest.mark.parametrize(
    ("mode", "sabotage", "what"),
    [
        ("transactional", "torn", "duplicates"),
        ("steps", "forgetful", "repeated"),
        ("steps", "disordered", "disordered"),
    ],
)
def test_the_verdict_of_each_mode_can_fail(demo: Callable[..., Demo], mode: str, sabotage: str, what: str) -> None:
    """The row committed apart from its record; steps that nobody remembers; steps in another order."""
    options, env = ("--mode", mode, "--workers", "2"), {"SEMEL_DEMO_SABOTAGE": sabotage}
    code, verdict, out = storm(demo, *options, seconds=1.5, seed=stormy_seed(1.5), until=what, env=env)
    assert (code, verdict["clean"]) == (1, False), out
    assert verdict[what] > 0, out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--once", "--mode", "transactional", "--store", "redis://127.0.0.1:1/0"], "PostgreSQL or MySQL, not redis"),
        (["--once", "--mode", "transactional", "--store", "memory://"], "cannot share a store in memory"),
        (["--once", "--store", "tiered:memory:,redis://127.0.0.1:1/0"], "cannot share a store in memory"),
        (["--port", "0", "--store", "tiered:memory:,redis://127.0.0.1:1/0"], "cannot share a store in memory"),
        (["--once", "--store", "sqlite:///:memory:"], "cannot share a store in memory"),
        (["--once", "--store", "sqlite:///%3Amemory%3A"], "cannot share a store in memory"),
        (["--once", "--store", "tiered:sqlite:///:memory%3A,redis://127.0.0.1:1/0"], "cannot share a store in memory"),
        (["--once", "--store", "sqlite://here"], "is no SQLite URL"),
        (["--once", "--store", "tiered:memory:"], "a tiered store is the one that decides, a comma"),
        (["--once", "--mode", "steps", "--http"], "leave out --http"),
        (["--once", "--no-storm"], "--no-storm only serves: leave it out"),
        (["--direct", "--no-storm"], "--no-storm only serves: leave it out"),
        (["--http", "--once", "--no-storm"], "--no-storm only serves: leave it out"),
        (["--direct", "--once", "--no-storm", "--port", "7"], "--no-storm only serves: leave it out"),
        (["--once", "--port", "7"], "--port is for the service, and straight on the store there is none"),
        (["--direct", "--port", "0"], "--port is for the service, and straight on the store there is none"),
        (["--mode", "steps", "--port", "7"], "--port is for the service, and straight on the store there is none"),
    ],
)
def test_what_cannot_be_had_is_said_at_once(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *options]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_there_is_a_till_for_each_mode() -> None:
    assert tuple(TILLS) == MODES


def test_ctrl_c_ends_the_storm_with_its_verdict_and_no_process_is_left(
    demo: Callable[..., Demo], tmp_path: Path
) -> None:
    running = demo("--direct", "--seconds", "60")
    until(lambda: len(running.workers()) >= 4, "the workers did not start")
    assert running.process.stdout is not None
    until(lambda: "operations 0 " not in running.process.stdout.readline(), "nothing was done")  # type: ignore[union-attr]
    running.process.send_signal(signal.SIGINT)
    code, out, err = running.end()
    assert code == 0, out + err
    assert "\nstopping: what was started is finished first" in "\n" + out
    assert out.rstrip().endswith("CLEAN")
    assert "NOT CLEAN" not in out
    assert "Traceback" not in err
    assert running.workers() == []
    assert list(tmp_path.iterdir()) == [], "the temporary folder is left behind"


def test_storm_follows_storm_until_it_is_told_to_stop(demo: Callable[..., Demo]) -> None:
    running = demo("--direct", "--seconds", "0.5", "--workers", "2")
    running.read_until("storm 2")
    running.process.send_signal(signal.SIGINT)
    code, out, _ = running.end()
    assert code == 0
    assert "all " in out
    assert out.rstrip().endswith("CLEAN")


@pytest.mark.parametrize("way", [("--direct",), ("--http", "--no-storm", "--port", "0")], ids=["direct", "http"])
def test_the_workers_die_with_a_demo_that_is_killed_and_never_show_the_url_of_the_store(
    demo: Callable[..., Demo], way: tuple[str, ...], tmp_path: Path
) -> None:
    """The URL may hold a password, and everybody on the machine can read the arguments of a process."""
    (tmp_path / "here").mkdir()
    env = {"SEMEL_STORE": f"sqlite:///{tmp_path}/here/secret.db"}
    running = demo(*way, "--store", "--workers", "2", env=env)
    until(lambda: len(running.workers()) >= 2, "the workers did not start")
    arguments = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running.workers()]
    running.process.kill()
    running.end()
    assert all(b"semel.demo" in each and b"secret" not in each for each in arguments), arguments
    until(lambda: running.workers() == [], "workers outlived the demo")


def test_on_a_terminal_the_progress_is_drawn_in_place(demo: Callable[..., Demo]) -> None:
    ours, theirs = pty.openpty()
    env = {"TERM": "xterm", "NO_COLOR": "1"}
    running = demo("--once", "--seconds", "2", "--workers", "2", env=env, stdout=theirs, stdin=theirs)
    os.close(theirs)
    drawn = b""
    try:
        while chunk := os.read(ours, 65536):
            drawn += chunk
    except OSError:
        pass  # how a terminal says that its other side is closed
    os.close(ours)
    running.process.wait(30)
    assert running.process.returncode == 0, drawn
    assert drawn.count(b"\x1b[4A") > 10, "the block was not drawn again in place"
    assert b"\x1b[1m" not in drawn, "colours although NO_COLOR is set"
    assert b"\x1b[1;32m" not in drawn
    assert drawn.rstrip().endswith(b"CLEAN")


# Over HTTP


def test_the_verdict_of_a_storm_over_http_is_clean(demo: Callable[..., Demo], postgres_url: str) -> None:
    where = ("--store", postgres_url)
    code, out, err = demo("--once", "--http", "--json", "--seconds", "3", "--seed", "1", "--workers", "2", *where).end()
    verdict = json.loads(out)
    assert (code, verdict["clean"]) == (0, True), out + err
    assert [verdict[name] for name in ("duplicates", "lost", "mismatched", "unsettled", "crashes")] == [0] * 5
    for name in ("operations", "replays", "takeovers", "kills", "refused", "failures", "declined"):
        assert verdict[name] > 0, name
    assert verdict["effects"] + verdict["declined"] == verdict["operations"]
    assert verdict["attempts"] >= verdict["operations"]
    assert verdict["calls"] >= verdict["operations"] + verdict["replays"]
    assert (verdict["store"], verdict["over"]) == ("postgresql", "http")
    counted = verdict["stats"]
    assert (counted["executions"], counted["payments"]) == (verdict["attempts"], verdict["effects"])
    assert "requests" in err, "no progress was shown"


def test_the_verdict_over_http_can_fail(demo: Callable[..., Demo]) -> None:
    """Semel left out. Without HTTP there are more."""
    env = {"SEMEL_DEMO_SABOTAGE": "unprotected"}
    code, verdict, out = storm(demo, "--http", "--workers", "1", seconds=1.5, seed="1", until="duplicates", env=env)
    assert (code, verdict["clean"]) == (1, False), out
    assert verdict["mismatched"] > 0
    assert verdict["unsettled"] == verdict["operations"]


def test_the_service_says_where_it_is_and_a_signal_ends_all_of_it(demo: Callable[..., Demo], tmp_path: Path) -> None:
    running = demo("--port", "0", "--workers", "1", "--no-storm")
    said = running.read_until("openapi.json")
    calls = [line.strip() for line in said.splitlines() if line.strip().startswith("curl")]
    answers = [subprocess.run(shlex.split(call), capture_output=True, text=True).stdout for call in calls]
    assert [answer[:12] for answer in answers[:2]] == ["HTTP/1.1 201", "HTTP/1.1 201"]
    assert [("idempotent-replayed: true" in answer.lower()) for answer in answers[:2]] == [False, True]
    assert answers[0].splitlines()[-1] == answers[1].splitlines()[-1]
    assert (json.loads(answers[2])["executions"], json.loads(answers[2])["payments"]) == (1, 1)
    assert running.workers()
    running.process.send_signal(signal.SIGTERM)
    code, out, err = running.end()
    assert (code, err) == (0, ""), out
    assert running.workers() == []
    assert list(tmp_path.iterdir()) == [], "the temporary folder is left behind"


def test_beside_the_service_there_is_a_storm_until_it_is_told_to_stop(
    demo: Callable[..., Demo], tmp_path: Path
) -> None:
    running = demo("--port", "0", "--workers", "1", "--seconds", "0.5")
    seen = running.read_until("storm 1 over HTTP")
    assert seen.splitlines()[-1].endswith("CLEAN")
    stats = next(line for line in seen.splitlines() if line.strip().endswith("/stats"))
    call = next(line for line in seen.splitlines() if line.strip().startswith("curl -i"))
    subprocess.run(shlex.split(call), capture_output=True, text=True)
    counted = json.loads(subprocess.run(shlex.split(stats), capture_output=True, text=True).stdout)
    assert counted["executions"] == 1, "the storm is another service's"
    running.process.send_signal(signal.SIGINT)
    code, out, err = running.end()
    assert (code, err) == (0, ""), out
    assert json.loads(out.rstrip().rpartition("GET /stats, at the end: ")[2]) == counted
    assert "NOT CLEAN" not in out
    assert running.workers() == []
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["demo", "--no-storm", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 cannot be used" in error
    assert "--port" in error
    assert error.count("\n") == 1


def test_the_extra_is_named_when_its_packages_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'semel[demo]'" in error


class _Late:
    """A storm whose time is over, while its payments are being finished."""

    title, phase, seconds, elapsed = "a storm", "finish", 8.0, 14.0

    def numbers(self) -> list[tuple[str, int]]:
        return [("kills", 1)]


def test_the_bar_ends_where_the_storm_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    Screen(stream).show(_Late())
    assert "8.0 s of 8 s  finish" in stream.getvalue()
    assert "14" not in stream.getvalue()


@pytest.mark.parametrize("way", [("--direct",), ("--http", "--port", "0")], ids=["direct", "http"])
def test_a_second_signal_ends_the_storm_at_once(demo: Callable[..., Demo], way: tuple[str, ...]) -> None:
    running = demo(*way, "--seconds", "60", "--workers", "2")
    assert running.process.stdout is not None
    wanted = ["storm ", "stopping: "]
    while wanted:
        line = running.process.stdout.readline()
        assert line, running.end()[2]
        if line.startswith(wanted[0]):
            del wanted[0]
            running.process.send_signal(signal.SIGINT)
    code, out, err = running.end()
    assert (code, err) == (130, "semel: interrupted\n"), out
    assert "CLEAN" not in out, "there was no time for a verdict"
    until(lambda: running.workers() == [], "workers outlived the demo")


def test_a_storm_over_http_where_only_asyncpg_is_installed(
    demo: Callable[..., Demo], postgres_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['psycopg'] = None\n")
    env = {"SEMEL_STORE": postgres_url, "PYTHONPATH": str(folder)}
    few = ("--once", "--seconds", "0.5", "--workers", "1", "--store")
    code, out, err = demo("--http", "--json", *few, env=env).end()
    assert code == 0, out + err
    verdict = json.loads(out)
    assert (verdict["clean"], verdict["store"]) == (True, "postgresql")
    assert verdict["operations"] > 0
    code, out, err = demo(*few, env=env).end()
    assert (code, err) == (2, "semel: psycopg is not installed: pip install 'semel[postgres]'\n"), out
