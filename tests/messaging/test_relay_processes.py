"""Relays in processes that are killed, stopped and started, on real databases: nothing is lost or out of order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from semel.core.messaging.messages import InspectOutbox, OutboxMode
from semel.core.messaging.relaying import LARGE
from semel.messaging import Outbox
from tests.messaging.desks import Desk

pytestmark = [pytest.mark.faults, pytest.mark.server, pytest.mark.postgres, pytest.mark.mariadb]
ROOT = Path(__file__).parents[2]
LEASE = "1s"
Worker = subprocess.Popen[str]


def wait_until(condition: Callable[[], object], patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Site:
    """A database, the folder that is its broker, and the relays between them."""

    def __init__(self, desk: Desk, folder: Path, stack: ExitStack, kind: str, mode: OutboxMode) -> None:
        self.desk, self.folder, self._stack, self._kind = desk, folder, stack, kind
        self.outbox = Outbox(desk.store)
        self.outbox.switch(mode)

    @property
    def url(self) -> str:
        return f"sqlite:///{self.desk.url}" if self.desk.dialect == "sqlite" else self.desk.url

    def start(self, **settings: object) -> Worker:
        settings = {"lease": LEASE, **settings}
        command = [sys.executable, "-m", "tests.messaging.relay_worker", self._kind, self.url, str(self.folder)]
        worker = subprocess.Popen(
            [*command, *(f"{name}={value}" for name, value in settings.items())],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._stack.enter_context(worker)
        self._stack.callback(worker.kill)
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        return worker

    def add(self, count: int, streams: int, type: str = "made") -> None:
        with self.desk.transaction(self.desk.conn):
            for number in range(count):
                self.outbox.add(self.desk.conn, type, number, stream=f"s{number % streams}")

    def lines(self) -> list[list[str]]:
        path = self.folder / "taken"
        return [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []

    def waiting(self) -> int:
        return sum(each.messages for each in self.desk.execute(InspectOutbox(1)).destinations)

    def lanes(self) -> list[int]:
        owners = Counter(self.desk.state()["lane"].values())
        return sorted(owners.values())

    def check(self, total: int) -> None:
        """All were sent, and in each stream for the first time in order."""
        seen: set[str] = set()
        streams: dict[str, list[int]] = {}
        for _, id, stream, sequence in self.lines():
            if id not in seen:
                seen.add(id)
                streams.setdefault(stream, []).append(int(sequence))
        assert len(seen) == total
        for sequences in streams.values():
            assert sequences == list(range(1, len(sequences) + 1))


@pytest.fixture
def open_site(open_desk: Callable[[str], Desk], tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:
        yield lambda dialect, kind="sync", mode="queue": Site(open_desk(dialect), tmp_path, stack, kind, mode)


@pytest.mark.parametrize(
    ("dialect", "kind", "mode"),
    [("sqlite", "async", "queue"), ("mysql", "sync", "queue"), ("postgres", "async", "log")],
)
def test_killed_in_the_middle_of_a_batch(open_site: Callable[..., Site], dialect: str, kind: str, mode: str) -> None:
    site = open_site(dialect, kind, mode)
    batch = 10 if mode == "queue" else 10 // LARGE
    (site.folder / "hold").touch()
    site.add(30, 5)
    first = site.start(batch=batch)
    wait_until((site.folder / "inside").exists)
    first.kill()
    first.wait()
    (site.folder / "hold").unlink()
    site.start(batch=batch)
    wait_until(lambda: len(site.lines()) >= 30 and site.waiting() == 0)
    site.check(30)
    once = {"queue": 10, "log": batch * LARGE, "wal": 30}[mode]  # 30 are one transaction, which is read whole
    repeats = Counter(id for _, id, _, _ in site.lines())
    assert sorted(repeats.values()) == [1] * (30 - once) + [2] * once, "only the batch in hand is sent again"


@pytest.mark.parametrize(("kind", "mode"), [("sync", "queue"), ("async", "queue"), ("sync", "log")])
def test_stopped_for_longer_than_its_lease(open_site: Callable[..., Site], kind: str, mode: str) -> None:
    """When it goes on, it has sent messages that are no longer its own: it must not settle them."""
    site = open_site("postgres", kind, mode)
    (site.folder / "hold").touch()
    site.add(20, 4)
    first = site.start(batch=10)
    wait_until((site.folder / "inside").exists)
    first.send_signal(signal.SIGSTOP)
    (site.folder / "hold").unlink()
    second = site.start(batch=10)
    wait_until(lambda: site.waiting() == 0)
    # What comes now belongs to the second one.
    (site.folder / "down").touch()
    site.add(8, 4)
    first.send_signal(signal.SIGCONT)
    assert first.stdout is not None
    assert first.stdout.readline() == "relay_late\n"
    assert site.waiting() == 8
    (site.folder / "down").unlink()
    wait_until(lambda: site.waiting() == 0)
    wait_until(lambda: site.lanes() == [32, 32])
    site.check(28)
    for worker in (first, second):
        worker.terminate()
        assert worker.wait(30) == 0
    assert site.desk.state()["relay"] == {}


@pytest.mark.parametrize("mode", ["queue", "log"])
def test_a_message_that_kills_its_relay_reaches_the_dead_letters(open_site: Callable[..., Site], mode: str) -> None:
    site = open_site("postgres", mode=mode)
    site.add(4, 4)
    with site.desk.transaction(site.desk.conn):
        site.outbox.add(site.desk.conn, "kill", {}, id="poison", stream="bad")
    site.add(4, 4)
    deaths = 0
    while site.waiting():
        worker = site.start(on_poison="skip", tries=3)
        wait_until(lambda worker=worker: worker.poll() is not None or not site.waiting())  # type: ignore[misc]
        deaths += worker.poll() == -signal.SIGKILL
    assert deaths == 3
    assert [(id, starts) for id, _, starts in site.desk.state()["dead"]] == [("poison", 3)]
    site.check(8)


@pytest.mark.parametrize(("dialect", "kind"), [("postgres", "async"), ("mysql", "sync")])
def test_relays_share_the_lanes_while_some_die_and_leave(
    open_site: Callable[..., Site], dialect: str, kind: str
) -> None:
    site = open_site(dialect, kind)
    workers = [site.start(batch=20) for _ in range(3)]
    wait_until(lambda: site.lanes() == [20, 22, 22])
    total = 0
    for turn in range(30):
        site.add(12, 9)
        total += 12
        if turn == 5:
            workers[0].kill()
        if turn == 10:
            workers[1].terminate()
        if turn == 15:
            workers.append(site.start(batch=20))
    assert workers[1].wait(30) == 0
    wait_until(lambda: site.waiting() == 0)
    wait_until(lambda: site.lanes() == [32, 32])
    site.check(total)
    assert {int(line[0]) for line in site.lines()} >= {workers[2].pid}


def test_a_broker_that_is_down_for_a_while(open_site: Callable[..., Site]) -> None:
    site = open_site("postgres")
    (site.folder / "down").touch()
    site.add(10, 2)
    worker = site.start(tries=3, on_poison="skip")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "broker_lost\n"
    wait_until(lambda: [started for _, started in site.desk.state()["relay"].values()] == [[]])
    worker.kill()
    worker.wait()
    worker = site.start(tries=3, on_poison="skip")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "broker_lost\n"
    assert {starts for _, starts, _ in site.desk.state()["outbox"]} == {0}
    (site.folder / "down").unlink()
    assert worker.stdout.readline() == "broker_back\n"
    wait_until(lambda: site.waiting() == 0)
    site.check(10)


FORK = """
import os, sys
from pathlib import Path
from semel import open_store
from semel.messaging.relay import Relay
from tests.messaging.relay_worker import FolderBroker
relay = Relay(open_store(sys.argv[1]), FolderBroker(Path(sys.argv[2])), batch=5)
relay.start()
while not relay.report.sent:
    pass
child = os.fork()
if not child:
    assert relay._background._thread is None
    relay.start()
    while relay.report.lanes < 64:
        pass
    relay.stop()
    os._exit(0)
relay.stop()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_can_start_its_own(open_site: Callable[..., Site]) -> None:
    site = open_site("postgres")
    site.add(5, 1)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, site.url, str(site.folder)], cwd=ROOT, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert run.returncode == 0
    assert site.desk.state()["relay"] == {}
