"""``semel relay`` and ``semel outbox``: what they print, and how they end."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from semel import SQLiteStore
from semel.cli import main
from semel.core.messaging.messages import BrokerDown, DestinationDown, Refused, Sent, TryAgain
from semel.messaging import Outbox
from semel.stores import postgres
from tests.messaging.recording_broker import RecordingBroker
from tests.servers import RedisServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "shop.db"
    store = SQLiteStore(path)
    outbox = Outbox(store)
    with closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("BEGIN")
        for number in range(3):
            outbox.add(conn, "order.placed", number, stream=f"s{number}", id=f"m{number}")
        outbox.add(conn, "order.placed", 3, destination="mail", id="m3")
        conn.execute("COMMIT")
    store.close()
    return f"sqlite:///{path}"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> RecordingBroker:
    broker = RecordingBroker()
    monkeypatch.setattr("semel.messaging.open_broker", lambda url: broker)
    return broker


def test_once_sends_all_and_ends(url: str, broker: RecordingBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", url, "--to", "kafka://host/topic", "--once"]) == 0
    assert sorted(broker.ids()) == ["m0", "m1", "m2", "m3"]
    assert capsys.readouterr().out == "in all: 4 sent\n"
    assert main(["outbox", url]) == 0
    assert capsys.readouterr().out == "the outbox is empty\nno relay is running\n"


def test_once_says_what_stays_in_the_outbox(
    url: str, broker: RecordingBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answer = lambda message: Refused("no such queue") if message.id == "m1" else Sent()
    words = ["relay", url, "--to", "kafka://host/topic", "--once", "--tries", "1"]
    assert main(words) == 1
    assert capsys.readouterr().out == "in all: 3 sent, 1 blocked\n"
    assert main(words) == 0
    assert capsys.readouterr().out == "in all: 0 sent; 1 not due, or with another relay: see `semel outbox`\n"


def test_it_says_what_redis_can_lose(url: str, redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["relay", url, "--to", f"{redis.database()}?stream=s", "--once"]) == 0
    assert caplog.text.count("a restart forgets every record") == 1


def test_a_broker_that_cannot_be_reached_is_told_in_one_line(url: str) -> None:
    """In a process of its own, where nobody has configured the loggers of drivers."""
    command = [sys.executable, "-m", "semel", "relay", url, "--to", "amqp://127.0.0.1:1/?queue=q", "--once"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith("the broker is down, so messages wait: RabbitMQ cannot be reached: ")


def test_a_destination_that_is_down_is_told(
    url: str, broker: RecordingBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answer = lambda message: DestinationDown("no host") if message.destination else Sent()
    assert main(["relay", url, "--to", "kafka://host/topic", "--once"]) == 1
    assert sorted(broker.ids()) == ["m0", "m1", "m2"]
    assert capsys.readouterr().out == "in all: 3 sent, 1 destination is down\n"


@pytest.mark.postgres
@pytest.mark.server
def test_the_mode_of_the_outbox_is_changed_where_it_can_be(
    url: str, capsys: pytest.CaptureFixture[str], postgres_url: str
) -> None:
    assert main(["outbox", url, "--mode", "log", "--yes"]) == 2
    assert "needs PostgreSQL" in capsys.readouterr().err
    postgres.migrate(postgres_url)
    assert main(["outbox", postgres_url, "--mode", "log", "--yes"]) == 0
    assert capsys.readouterr().out == "the outbox is empty\nthe mode of the outbox is log\nno relay is running\n"


def test_once_fails_if_something_was_not_sent(
    url: str, broker: RecordingBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    results: dict[str, Any] = {"m0": TryAgain("busy\x1b", 600.0), "m1": Refused("bad")}
    broker.answer = lambda message: results.get(message.id) or RecordingBroker().answer(message)
    words = ["relay", url, "--to", "kafka://host/topic", "--once", "--on-poison", "park", "--json"]
    assert main(words) == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert {name: report[name] for name in ("sent", "failed", "dead")} == {"sent": 2, "failed": 1, "dead": 1}
    assert "busy\\u001b" in shown.err
    assert main(["outbox", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["destination", "messages", "failing", "oldest"]
    assert lines[1].split()[:4] == ["(the", "relay's)", "1", "1"]
    assert lines[2] == "stream s1: 0 wait, parked: bad"
    assert lines[3].startswith("stream s0: 1 wait, next try in ")
    assert lines[3].endswith(": busy\\u001b")
    assert lines[4] == "no relay is running"
    broker.answer = lambda message: BrokerDown("away")
    assert main(words) == 0, "nothing is due"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{url}"], 2, "name the broker"),
        (["{url}", "--to", "pigeon://host"], 2, "no broker is called 'pigeon'"),
        (["memory:", "--to", "kafka://host/t"], 2, "has no outbox"),
        (["sqlite:///none.db", "--to", "kafka://host/t"], 3, "none.db"),
    ],
)
def test_what_is_wrong_is_one_line(
    url: str, words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["relay", *[word.format(url=url) for word in words]]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none.db").exists()


def test_a_broker_without_order_is_refused(
    url: str, broker: RecordingBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.capabilities = RecordingBroker(ordered=False).capabilities
    assert main(["relay", url, "--to", "sqs://r/q", "--once"]) == 2
    assert "--allow-unordered" in capsys.readouterr().err
    assert main(["relay", url, "--to", "sqs://r/q", "--once", "--allow-unordered"]) == 0


SCRIPT = """
import sys
from pathlib import Path
import semel.messaging
from tests.messaging.relay_worker import FolderBroker
semel.messaging.open_broker = lambda url: FolderBroker(Path(url.removeprefix("folder://")))
if sys.argv[1] == "async":
    import semel.stores.urls
    from semel.errors import MissingDependency
    def missing(url):
        raise MissingDependency("driver", "driver")
    semel.stores.urls.open_store = missing
sys.stdout.isatty = lambda: True
from semel.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_runs_until_a_signal_and_says_what_it_does(url: str, tmp_path: Path, kind: str, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind, "relay", url, "--to", f"folder://{tmp_path}"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:  # fmt: skip
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "relaying; Ctrl-C stops it\n"
            line = running.stdout.readline()
            assert "4 sent, 4 in all, 64 of 64 lanes" in line
            running.send_signal(number)
            assert running.stdout.read().endswith("in all: 4 sent\n")
            assert running.wait(30) == 0
        finally:
            running.kill()
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as conn:
        assert conn.execute("SELECT count(*) FROM semel_relay").fetchone() == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("once", [True, False])
def test_a_signal_ends_it_after_the_batch_in_hand(url: str, tmp_path: Path, kind: str, once: bool) -> None:
    (tmp_path / "hold").touch()
    words = ["relay", url, "--to", f"folder://{tmp_path}", "--batch", "1", *(["--once"] if once else [])]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind, *words],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as running:  # fmt: skip
        try:
            while not (tmp_path / "inside").exists():
                assert running.poll() is None
                time.sleep(0.01)
            running.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # nothing can be seen of it from outside
            assert running.poll() is None
            (tmp_path / "hold").unlink()
            assert running.wait(30) == 0
            assert running.stdout is not None
            assert running.stdout.read().endswith("in all: 1 sent\n")
        finally:
            running.kill()


def test_to_a_real_broker(url: str, redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", url, "--to", f"{redis_url}?stream=orders", "--once"]) == 0
    assert capsys.readouterr().out == "in all: 4 sent\n"
    with Redis.from_url(redis_url) as redis:
        (_, first), *rest = redis.xrange("orders")
        assert len(rest) == 2
        assert redis.xlen("mail") == 1
    assert (first[b"ce-id"], first[b"ce-type"], first[b"ce-stream"], first[b"ce-sequence"], first[b"data"]) == (
        b"m0", b"order.placed", b"s0", b"1", b"0",
    )  # fmt: skip


def test_a_real_broker_that_cannot_be_reached(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", url, "--to", "redis://127.0.0.1:1?stream=orders", "--once"]) == 1
    assert "the broker is down" in capsys.readouterr().out
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as conn:
        assert conn.execute("SELECT count(*), sum(starts) FROM semel_outbox").fetchone() == (4, 0)
