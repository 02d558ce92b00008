"""The journal: durable before the request leaves, owned by a living process, bounded, without secrets."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import semel.client.journal as journal_module
from semel import ConfigurationError, JournalFull, KeyExpired, KeyReused, KeyRing, NoAnswer, StoreUnavailable
from semel.client import Journal, JournalReport, Retry, owners
from semel.client.flow import Intent
from semel.client.httpx import AsyncIdempotencyTransport, IdempotencyTransport
from semel.client.journal import Entry, FindEntries, TakeEntry, WriteEntry
from semel.errors import SnapshotUnreadable
from semel.observe.events import Event

ONCE = Retry(attempts=1, quota=None)


def intent(key: str = "k", body: bytes = b"{}", url: str = "http://pay.example/charges", **headers: str) -> Intent:
    return Intent("POST", url, key, {}, headers=headers, body=body)


def write(journal: Journal, *args: Any, lifetime: float = 1000, **kwargs: Any) -> int:
    op = journal.write(intent(*args, **kwargs), lifetime)
    journal.execute(op)
    return op.id


def take(journal: Journal) -> list[Entry]:
    taken = [journal.execute(TakeEntry(id)) for id in journal.execute(FindEntries())]
    return [entry for entry in taken if entry is not None]


def keys(journal: Journal, state: str = "") -> list[str]:
    return [entry.key for entry in journal.entries() if state in ("", entry.state)]


def rows(path: Path) -> int:
    """How many entries another process would find."""
    other = sqlite3.connect(path)
    (count,) = other.execute("SELECT count(*) FROM semel_journal").fetchone()
    other.close()
    return int(count)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal(path) as journal:
        yield journal


def test_only_the_owner_may_read_it(journal: Journal, path: Path) -> None:
    write(journal)
    for name in (path, f"{path}-wal", f"{path}-owners"):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600


def test_an_entry_is_durable_before_the_request_is_sent(path: Path) -> None:
    def service(request: httpx.Request) -> httpx.Response:
        other = sqlite3.connect(path)
        found = other.execute("SELECT key, method, url FROM semel_journal").fetchall()
        other.close()
        assert found == [(request.headers["Idempotency-Key"], "POST", "http://pay.example/charges")]
        return httpx.Response(200)

    with httpx.Client(transport=IdempotencyTransport(httpx.MockTransport(service), journal=path)) as client:
        client.post("http://pay.example/charges")


def test_an_entry_is_written_with_an_fsync_and_removed_without(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    journal.batches.connection().set_trace_callback(said.append)
    id = write(journal)
    assert not any("synchronous" in text for text in said)
    assert journal.batches.connection().execute("PRAGMA synchronous").fetchone() == (2,)
    journal.settle(id, remove=True)
    assert [text for text in said if "NORMAL" in text or "FULL" in text] == [
        "PRAGMA synchronous = NORMAL",
        "PRAGMA synchronous = FULL",
    ]


def test_the_password_of_a_url_is_not_written(journal: Journal) -> None:
    write(journal, url="http://user:s3cret@pay.example:8000/charges?a=b")
    assert [entry.url for entry in journal.entries()] == ["http://pay.example:8000/charges?a=b"]


def test_further_headers_are_written_if_they_are_named(path: Path) -> None:
    with Journal(path, headers=["X-Tenant"]) as journal:
        journal.execute(
            journal.write(
                Intent("POST", "u", "k", {}, headers={"x-tenant": "a", "X-Other": "b", "If-Match": '"1"'}), 1000
            )
        )
        (entry,) = journal.entries()
    assert entry.headers == {"x-tenant": "a", "If-Match": '"1"'}


# Owners


def test_an_entry_in_flight_is_left_alone(journal: Journal) -> None:
    id = write(journal)
    assert take(journal) == []
    journal.settle(id, remove=False)
    assert [entry.key for entry in take(journal)] == ["k"]
    assert take(journal) == []  # it is in flight again


def test_two_journals_of_a_process_are_one_owner(journal: Journal, path: Path) -> None:
    id = write(journal)
    with Journal(path) as other:
        assert keys(other, "in flight") == ["k"]
        assert take(other) == []
    with Journal(path) as other:  # the first one still holds its lock
        assert keys(other, "in flight") == ["k"]
        other.settle(id, remove=False)
    assert keys(journal, "in doubt") == ["k"]


def test_two_calls_with_one_key_end_one_by_one(journal: Journal) -> None:
    id = write(journal)
    assert journal.execute(journal.write(intent(), 1000)).known
    journal.settle(id, remove=False)
    assert keys(journal, "in flight") == ["k"]
    journal.settle(id, remove=False)
    assert keys(journal, "in doubt") == ["k"]


CHILD = """
import sys
from semel.client import Journal
from semel.client.flow import Intent
journal = Journal(sys.argv[1])
journal.execute(journal.write(Intent("POST", "http://pay.example/", "child", {}, body=b"1"), 1000))
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_the_entries_of_a_living_process_are_its_own(journal: Journal, child: subprocess.Popen[str]) -> None:
    assert keys(journal, "in flight") == ["child"]
    assert take(journal) == []
    child.kill()
    child.wait()
    assert keys(journal, "in doubt") == ["child"]
    assert [entry.body for entry in take(journal)] == [b"1"]


@pytest.mark.slow
def test_a_call_with_the_key_of_a_dead_process_takes_it_over(journal: Journal, child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    op = journal.write(Intent("POST", "http://pay.example/", "child", {}, body=b"1"), 1000)
    assert journal.execute(op).known
    assert keys(journal, "in flight") == ["child"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_entries(journal: Journal) -> None:
    write(journal, "parent")
    ready, go = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            assert keys(journal, "in flight") == ["parent"]
            assert take(journal) == []
            write(journal, "child")
            os.write(ready[1], b"1")
            os.read(go[0], 1)
        finally:
            os._exit(0)
    assert os.read(ready[0], 1) == b"1"
    both = sorted(keys(journal, "in flight"))
    os.write(go[1], b"1")
    os.waitpid(pid, 0)
    assert both == ["child", "parent"]
    assert keys(journal, "in doubt") == ["child"]
    assert keys(journal, "in flight") == ["parent"]
    for end in (*ready, *go):
        os.close(end)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_closed_journal_leaves_the_files_of_a_forked_child_alone(path: Path) -> None:
    reader, writer = os.pipe()  # before the number is free: neither end may have it
    journal = Journal(path)
    number = journal._presence._file
    journal.close()
    os.dup2(reader, number)  # the number of the closed file is given to another one
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            os.fstat(number)
            os.write(writer, b"1")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(number)


@pytest.mark.slow
def test_the_lock_of_a_closed_journal_is_dropped(path: Path, journal: Journal) -> None:
    program = CHILD.replace("sys.stdin.read()", "journal.close(); print('closed', flush=True); sys.stdin.read()")
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() + process.stdout.readline() == "written\nclosed\n"
        assert keys(journal, "in doubt") == ["child"]
        process.kill()


# Interrupted calls


def test_a_cancelled_call_stays_in_doubt(path: Path) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def service(request: httpx.Request) -> httpx.Response:
            started.set()
            await asyncio.sleep(60)
            raise AssertionError

        journal = Journal(path)
        transport = AsyncIdempotencyTransport(httpx.MockTransport(service), journal=journal)
        async with httpx.AsyncClient(transport=transport) as client:
            call = asyncio.create_task(client.post("http://pay.example/charges", content=b"1"))
            await started.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await journal.execute_async(FindEntries())  # all before it is done
            assert [entry.state for entry in journal.entries()] == ["in doubt"]
            (id,) = await journal.execute_async(FindEntries())
            assert await journal.execute_async(TakeEntry(id)) is not None
            assert await journal.execute_async(TakeEntry(id)) is None
        journal.close()

    asyncio.run(main())


def test_the_key_of_a_cancelled_call_without_a_journal_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    keys = []

    async def main() -> None:
        async def service(request: httpx.Request) -> httpx.Response:
            keys.append(request.headers["Idempotency-Key"])
            await asyncio.sleep(60)
            raise AssertionError

        async with httpx.AsyncClient(transport=AsyncIdempotencyTransport(httpx.MockTransport(service))) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post("http://pay.example/charges?token=s3cret"), 0.05)

    asyncio.run(main())
    assert f"It may have been executed with the key {keys[0]!r}" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_call_that_is_cancelled_while_it_is_written_stays_in_doubt(path: Path) -> None:
    async def main() -> None:
        journal = Journal(path)
        transport = AsyncIdempotencyTransport(httpx.MockTransport(lambda request: httpx.Response(500)), journal=journal)
        async with httpx.AsyncClient(transport=transport) as client:
            call = asyncio.create_task(client.post("http://pay.example/charges", content=b"1"))
            while journal._loops.get(asyncio.get_running_loop()) is None:  # noqa: ASYNC110 until the write is queued
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await journal.execute_async(FindEntries())  # all before it is done
            assert [entry.state for entry in journal.entries()] == ["in doubt"]
        journal.close()

    asyncio.run(main())


def test_a_refused_call_does_not_end_another_with_its_key(path: Path) -> None:
    with Journal(path) as journal:

        def service(request: httpx.Request) -> httpx.Response:
            with pytest.raises(KeyReused):
                client.post("http://pay.example/charges", content=b"2", headers={"Idempotency-Key": "k"})
            assert keys(journal, "in flight") == ["k"]
            return httpx.Response(200)

        with httpx.Client(transport=IdempotencyTransport(httpx.MockTransport(service), journal=journal)) as client:
            client.post("http://pay.example/charges", content=b"1", headers={"Idempotency-Key": "k"})


def test_an_unexpected_error_leaves_the_call_in_doubt(path: Path) -> None:
    def service(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    with Journal(path) as journal:
        transport = IdempotencyTransport(httpx.MockTransport(service), journal=journal)
        with httpx.Client(transport=transport) as client, pytest.raises(KeyboardInterrupt):
            client.post("http://pay.example/charges", content=b"1")
        assert [entry.state for entry in journal.entries()] == ["in doubt"]


def test_an_answer_is_delivered_even_if_its_entry_cannot_be_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(path) as journal:
        network = httpx.MockTransport(lambda request: httpx.Response(201))
        with httpx.Client(transport=IdempotencyTransport(network, journal=journal)) as client:
            with monkeypatch.context() as broken:
                broken.setattr(journal.batches, "_settle", lambda raw, op: raw.execute("no statement"))
                assert client.post("http://pay.example/charges", content=b"1").status_code == 201
            assert [entry.state for entry in journal.entries()] == ["in doubt"]


# Bounds


def test_it_is_bounded(path: Path) -> None:
    sent = []

    def service(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200)

    with Journal(path, max_bytes=100_000) as journal:
        write(journal, "large", b"x" * 80_000)
        with httpx.Client(transport=IdempotencyTransport(httpx.MockTransport(service), journal=journal)) as client:
            with pytest.raises(JournalFull, match="max_bytes is 100000"):
                client.post("http://pay.example/charges", content=b"x" * 80_000)
            assert sent == []
            assert client.post("http://pay.example/charges", content=b"x").status_code == 200
        assert journal.forget("large") == 1
        write(journal, "second", b"x" * 80_000)  # the room is used again


def test_one_that_does_not_fit_does_not_hinder_the_others(path: Path) -> None:
    with Journal(path, max_bytes=100_000) as journal:
        ops = [journal.write(intent(key, b"x" * size), 1000) for key, size in (("a", 1), ("b", 200_000), ("c", 1))]
        first, second, third = journal.batches.run(ops)
        assert isinstance(second, JournalFull)
        assert not first.known
        assert not third.known
        assert keys(journal) == ["a", "c"]


def test_an_entry_that_is_too_old_is_reported_and_not_sent(path: Path) -> None:
    def service(request: httpx.Request) -> httpx.Response:
        raise AssertionError

    with Journal(path) as journal:
        journal.settle(write(journal, "old", lifetime=0), remove=False)
        assert keys(journal, "expired") == ["old"]
        told: list[Event] = []
        sending = httpx.MockTransport(service)
        with IdempotencyTransport(sending, journal=journal, on_event=told.append) as transport:
            report = transport.resume()
        assert [entry.key for entry in report.expired] == ["old"]
        assert journal.entries() == []
        assert [(event.name, event.key) for event in told] == [("call_unknown", "old")]


def test_a_key_that_is_too_old_is_not_sent_again(path: Path) -> None:
    def service(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("lost")

    told: list[Event] = []
    transport = IdempotencyTransport(
        httpx.MockTransport(service), journal=path, retry=Retry(window=0, quota=None), on_event=told.append
    )
    with httpx.Client(transport=transport) as client:
        for kind in (NoAnswer, KeyExpired):
            with pytest.raises(kind):
                client.post("http://pay.example/charges", headers={"Idempotency-Key": "k"})
    assert [event.name for event in told] == ["call_unknown", "call_resumed", "call_unknown"]


def test_a_resume_looks_through_the_journal_once(journal: Journal) -> None:
    """Not for each entry again: that would take hours for a large journal."""
    for number in range(20):
        journal.settle(write(journal, str(number)), remove=False)
    said: list[str] = []
    journal.batches.connection().set_trace_callback(said.append)
    network = httpx.MockTransport(lambda request: httpx.Response(200))
    assert len(IdempotencyTransport(network, journal=journal).resume().finished) == 20
    assert len([text for text in said if "ORDER BY" in text]) == 1
    assert len([text for text in said if "SELECT" in text and "WHERE id" not in text]) == 1


def test_a_resume_that_is_cancelled_while_it_takes_an_entry_gives_it_back(journal: Journal) -> None:
    journal.settle(write(journal), remove=False)

    async def main() -> None:
        transport = AsyncIdempotencyTransport(httpx.MockTransport(lambda _: httpx.Response(200)), journal=journal)
        (id,) = await journal.execute_async(FindEntries())
        taking = asyncio.create_task(journal.take_async(id))
        with journal.batches._lock:  # the journal is busy
            for _ in range(5):
                await asyncio.sleep(0)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
        while await journal.execute_async(FindEntries()) != [id]:  # noqa: ASYNC110 until it is given back
            await asyncio.sleep(0)
        assert len((await transport.resume()).finished) == 1

    asyncio.run(main())


def test_two_that_resume_at_once_send_each_entry_once(path: Path, journal: Journal) -> None:
    for number in range(20):
        journal.settle(write(journal, str(number)), remove=False)
    sent: list[str] = []
    both = threading.Barrier(2)

    def service(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["Idempotency-Key"])
        return httpx.Response(200)

    def resume(_: int) -> int:
        with IdempotencyTransport(httpx.MockTransport(service), journal=path) as transport:
            both.wait(30)
            return len(transport.resume().finished)

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(resume, range(2))) == 20
    assert sorted(sent, key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_client_with_a_longer_window_keeps_to_the_time_of_the_entry(path: Path, resumed: bool) -> None:
    """Another program may resume the journal, `semel client resume` for example, and not know the server's window."""
    sent = []

    def service(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(503, headers={"Retry-After": "2"})

    with Journal(path) as journal:
        journal.settle(write(journal, "k", lifetime=2), remove=False)
        longer = Retry(attempts=2, base=0, quota=None)
        transport = IdempotencyTransport(httpx.MockTransport(service), journal=journal, retry=longer)
        with httpx.Client(transport=transport) as client:
            if resumed:
                assert [entry.key for entry in transport.resume(client).unknown] == ["k"]
            else:
                client.post("http://pay.example/charges", content=b"{}", headers={"Idempotency-Key": "k"})
    assert len(sent) == 1


def test_an_outcome_is_reported_before_its_entry_is_removed(path: Path) -> None:
    """A program that is killed in between must find it again."""
    with Journal(path) as journal:
        journal.settle(write(journal, "old", lifetime=0), remove=False)
        journal.settle(write(journal, "new"), remove=False)
        transport = IdempotencyTransport(httpx.MockTransport(lambda _: httpx.Response(200)), journal=journal)
        left = []

        def store(report: JournalReport) -> None:
            left.append(rows(path))
            if len(left) == 2:
                raise OSError("the disk is full")

        with pytest.raises(OSError, match="full"):
            transport.resume(progress=store)
        assert left == [2, 1]
        assert keys(journal, "in doubt") == ["new"]
        assert len(transport.resume().finished) == 1
        assert keys(journal) == []


def test_a_cipher_hides_bodies_and_headers(path: Path) -> None:
    ring = KeyRing({"a": KeyRing.generate_key()})
    with Journal(path, cipher=ring) as journal:
        id = write(journal, "k", b"a secret body", Accept="text/secret")
        (entry,) = journal.entries()
        assert (entry.body, entry.headers) == (b"a secret body", {"Accept": "text/secret"})
        assert b"secret" not in path.read_bytes() + Path(f"{path}-wal").read_bytes()
        journal.settle(id, remove=False)
    with Journal(path) as journal:
        assert keys(journal) == ["k"]
        with pytest.raises(ConfigurationError, match="cipher"):
            take(journal)
    with Journal(path, cipher=KeyRing({"a": KeyRing.generate_key()})) as journal, pytest.raises(SnapshotUnreadable):
        take(journal)


# Files that are no journals


def test_a_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "NETWORK_FILE_SYSTEMS", ("",))
    with pytest.raises(ConfigurationError, match="Use a local disk"):
        Journal(path)


def test_another_database_is_refused(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("PRAGMA application_id = 7")
    other.close()
    with pytest.raises(ConfigurationError, match="is no journal"):
        Journal(path)


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnavailable):
        Journal(path)


def test_a_folder_that_does_not_exist_is_named(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="missing"):
        Journal(path.parent / "missing" / "calls.db")


# Many at once


class Commits:
    """Counts the commits of a journal, and those of them that wait for the disk, which takes its time here."""

    def __init__(self, journal: Journal) -> None:
        self.all = self.durable = 0
        self._durable = True
        journal.batches.connection().set_trace_callback(self._count)

    def _count(self, statement: str) -> None:
        if statement.startswith("PRAGMA synchronous"):
            self._durable = statement.endswith("FULL")
        elif statement == "COMMIT":
            self.all += 1
            if self._durable:
                self.durable += 1
                time.sleep(0.002)


def test_threads_share_commits(journal: Journal) -> None:
    commits = Commits(journal)
    together = threading.Barrier(32)

    def call(number: int) -> None:
        together.wait()
        for turn in range(20):
            journal.settle(write(journal, f"{number}-{turn}"), remove=True)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(call, range(32)))
    assert journal.entries() == []
    assert commits.durable < 640 / 8
    assert commits.all < 640 / 3  # usually 60: those that only remove are as many as the threads have turns


def test_calls_of_tasks_share_commits(journal: Journal) -> None:
    commits = Commits(journal)
    transport = AsyncIdempotencyTransport(httpx.MockTransport(lambda request: httpx.Response(200)), journal=journal)

    async def call(client: httpx.AsyncClient) -> None:
        for _ in range(5):
            await client.post("http://pay.example/charges")

    async def main() -> None:
        async with httpx.AsyncClient(transport=transport) as client:
            await asyncio.gather(*(call(client) for _ in range(32)))

    asyncio.run(main())
    assert journal.entries() == []
    assert commits.durable < 160 / 8
    assert commits.all < 160 / 2  # likewise


def test_a_call_alone_is_cleared_when_it_returns(path: Path) -> None:
    """It needs no thread for that: a program without threads may end, or fork, right after."""
    before = threading.active_count()
    transport = IdempotencyTransport(httpx.MockTransport(lambda _: httpx.Response(200)), journal=path)
    with httpx.Client(transport=transport) as client:
        client.post("http://pay.example/charges")
        assert rows(path) == 0
        assert threading.active_count() == before


def test_a_call_that_is_over_is_cleared_while_another_one_waits(path: Path) -> None:
    """Nothing else is written that could take the removal along."""
    arrived, answer = threading.Event(), threading.Event()

    def service(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/slow":
            arrived.set()
            answer.wait(30)
        return httpx.Response(200)

    with (
        httpx.Client(transport=IdempotencyTransport(httpx.MockTransport(service), journal=path)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        slow = pool.submit(client.post, "http://pay.example/slow")
        assert arrived.wait(30)
        client.post("http://pay.example/charges")
        while rows(path) > 1:
            time.sleep(0.001)
        answer.set()
        slow.result(30)
        assert rows(path) == 0


@pytest.mark.slow
def test_calls_that_are_over_are_cleared_when_the_interpreter_ends(path: Path) -> None:
    code = f"""
import threading, httpx
from semel.client.httpx import IdempotencyTransport
transport = IdempotencyTransport(httpx.MockTransport(lambda request: httpx.Response(200)), journal={str(path)!r})
client = httpx.Client(transport=transport)
for _ in range(16):
    threading.Thread(target=client.post, args=("http://pay.example/charges",)).start()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert rows(path) == 0


def test_a_removal_that_fails_is_logged_and_the_answer_is_returned(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "BUSY_TIMEOUT", 0.01)
    other = sqlite3.connect(path, isolation_level=None)

    def service(request: httpx.Request) -> httpx.Response:
        if not other.in_transaction:
            other.execute("BEGIN IMMEDIATE")
        return httpx.Response(200)

    transport = IdempotencyTransport(httpx.MockTransport(service), journal=path)
    with httpx.Client(transport=transport) as client:
        response = client.post("http://pay.example/charges", headers={"Idempotency-Key": "k"})
        assert response.extensions["idempotency"].outcome == "succeeded"
        assert "the entry of the key 'k' stays in the journal" in caplog.text
        other.close()
        assert rows(path) == 1
    with IdempotencyTransport(httpx.MockTransport(lambda _: httpx.Response(200)), journal=path) as transport:
        assert [entry.key for entry in transport.resume().finished] == ["k"]


def test_tasks_share_commits(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []
    run = journal.batches.run

    def counted(ops: Any) -> Any:
        batches.append([type(op) for op in ops])
        return run(ops)

    monkeypatch.setattr(journal.batches, "run", counted)

    async def main() -> None:
        await asyncio.gather(*(journal.execute_async(journal.write(intent(str(number)), 1000)) for number in range(32)))

    asyncio.run(main())
    asyncio.run(main())  # another loop: the entries are known
    assert batches == [[WriteEntry] * 32] * 2
    assert len(journal._loops) == 1  # a loop that is closed is forgotten


def test_a_call_that_ends_after_the_journal_is_closed_leaves_its_entry(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Journal(path) as journal:
        id = write(journal)
    journal.settle(id, remove=True, key="k")
    assert "'k' stays in the journal, which is closed" in caplog.text
    with Journal(path) as journal:
        assert keys(journal, "in doubt") == ["k"]


def test_a_closed_journal_says_so(path: Path) -> None:
    journal = Journal(path)
    journal.close()
    op = journal.write(intent(), 1000)
    with pytest.raises(StoreUnavailable, match="closed"):
        journal.execute(op)
    with pytest.raises(StoreUnavailable, match="closed"):
        asyncio.run(journal.execute_async(op))
    for use in (journal.entries, lambda: journal.forget("k1")):
        with pytest.raises(StoreUnavailable, match="closed"):
            use()
