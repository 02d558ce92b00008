"""What takes two requests at a time, a raw socket, or a process that dies: against gunicorn's worker processes."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.http.apps_wsgi_server import PATIENCE, Service, read_all
from tests.servers.freezing import freeze

pytestmark = pytest.mark.process


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("edge()", "--workers=3"), id="plain-sync"),
        pytest.param(("flask_app()", "--workers=2", "--threads=4", "--preload"), id="flask-gthread-preload"),
        pytest.param(
            ("tests.http.apps_django:wsgi('drf')", "--workers=2", "--threads=4", "--preload"), id="django-rest"
        ),
        pytest.param(("tests.http.apps_django async_loop",), id="django-async-on-asgi"),
    ],
)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, starts_process: None
) -> Iterator[Service]:
    app, *options = request.param
    service = Service(app, tmp_path_factory.mktemp("service"), *options)
    yield service
    service.close()


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(50) as pool:
        yield pool


def request_lines(tag: str, *lines: str, path: str = "/pay") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", "Authorization: alice", f"X-Tag: {tag}", "Connection: close"]
    return "\r\n".join([*head, *lines, "", ""]).encode("latin-1")


# -- two at a time


def test_fifty_equal_requests_to_many_processes_run_once(service: Service, pool: ThreadPoolExecutor, tag: str) -> None:
    answers = list(pool.map(lambda _: service.ask(key=tag, tag=tag), range(50)))
    assert len(service.runs(tag)) == 1
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    firsts = [a for a in answers if a.status_code == 201 and "Idempotent-Replayed" not in a.headers]
    assert len(firsts) == 1


def test_fifty_keys_at_once_each_run_once_and_get_their_own_answer(
    service: Service, pool: ThreadPoolExecutor, tag: str
) -> None:
    keys = [f"{tag}-{n % 25}" for n in range(50)]
    answers = list(pool.map(lambda key: service.ask("/waiting", key=key, tag=key), keys))
    assert {answer.status_code for answer in answers} == {201}
    assert {len(service.runs(key)) for key in keys} == {1}
    assert all(n == 2 for n in Counter(answer.content for answer in answers).values())


def test_a_duplicate_while_the_first_runs_is_409_and_another_payload_422(
    service: Service, pool: ThreadPoolExecutor, tag: str
) -> None:
    with service.gate() as gate:
        path = f"/pay?gate={gate.name}"
        first = pool.submit(service.ask, path, key=tag, tag=tag)
        gate.reached()
        second = service.ask(path, key=tag, tag=tag)
        other = service.ask(path, key=tag, tag=tag, body=b"{}")
    assert second.status_code == 409
    assert second.json()["code"] == "idempotency_key_in_use"
    assert second.json()["retryable"] is True
    assert int(second.headers["Retry-After"]) == second.json()["retry_after"] >= 1
    assert second.headers["Cache-Control"] == "no-store"
    assert other.status_code == 422
    assert "Retry-After" not in other.headers
    assert first.result().status_code == 201
    third = service.ask(path, key=tag, tag=tag)
    assert (third.status_code, third.content) == (201, first.result().content)
    assert len(service.runs(tag)) == 1


def test_a_duplicate_waits_for_the_winner(service: Service, pool: ThreadPoolExecutor, tag: str) -> None:
    with service.gate() as gate:
        path = f"/waiting?gate={gate.name}"
        first = pool.submit(service.ask, path, key=tag, tag=tag)
        gate.reached()
        second = pool.submit(service.ask, path, key=tag, tag=tag)
    assert second.result().content == first.result().content
    assert second.result().headers["Idempotent-Replayed"] == "true"
    assert len(service.runs(tag)) == 1


# -- raw sockets


@pytest.mark.parametrize(
    ("one", "two"), [("a", "b"), ("same", "same"), ('"a', 'b"')], ids=["other", "equal", "halves of one string"]
)
def test_two_key_lines_are_refused_even_where_they_join_into_one_key(
    service: Service, tag: str, one: str, two: str
) -> None:
    sent = request_lines(tag, f"Idempotency-Key: {one}", f"Idempotency-Key: {two}", "Content-Length: 0")
    answer = read_all(service.raw(sent))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"idempotency_key_invalid" in answer
    assert service.runs(tag) == []


def test_a_key_beyond_ascii_is_refused(service: Service, tag: str) -> None:
    answer = read_all(service.raw(request_lines(tag, "Idempotency-Key: caf\xe9", "Content-Length: 0")))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"idempotency_key_invalid" in answer
    assert service.runs(tag) == []


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def test_a_chunked_body_counts_by_its_bytes_not_by_its_chunks(service: Service, tag: str) -> None:
    head = request_lines(tag, f"Idempotency-Key: {tag}", "Transfer-Encoding: chunked", path="/digest")
    first = read_all(service.raw(head + chunked(b"abc", b"def")))
    again = read_all(service.raw(head + chunked(b"abcdef")))
    other = read_all(service.raw(head + chunked(b"abcdeF")))
    plain = read_all(
        service.raw(request_lines(tag, f"Idempotency-Key: {tag}", "Content-Length: 6", path="/digest") + b"abcdef")
    )
    assert [answer[9:12] for answer in (first, again, other, plain)] == [b"200", b"200", b"422", b"200"]
    assert b"idempotent-replayed: true" in again.lower()
    assert b"idempotent-replayed: true" in plain.lower()
    assert len(service.runs(tag)) == 1


def test_chunks_that_cannot_be_read_are_the_clients_mistake(service: Service, tag: str) -> None:
    lines = request_lines(tag, f"Idempotency-Key: {tag}", "Transfer-Encoding: chunked")
    with service.raw(lines + b"zz\r\n{}\r\n0\r\n\r\n") as connection:
        assert b" 400 " in read_all(connection).split(b"\r\n", 1)[0]
    assert service.runs(tag) == []


def test_half_a_body_claims_nothing(service: Service, tag: str) -> None:
    head = request_lines(tag, f"Idempotency-Key: {tag}", "Content-Length: 6", path="/digest")
    connection = service.raw(head + b"abc")
    connection.shutdown(1)
    assert b"200 OK" not in read_all(connection)
    assert service.runs(tag) == []
    assert read_all(service.raw(head + b"abcdef")).startswith(b"HTTP/1.1 200 ")
    assert len(service.runs(tag)) == 1


def test_a_client_that_hangs_up_finds_its_answer_later(service: Service, tag: str) -> None:
    with service.gate() as gate:
        path = f"/pay?gate={gate.name}"
        lines = (f"Idempotency-Key: {tag}", "Content-Length: 0", "Content-Type: text/plain")
        connection = service.raw(request_lines(tag, *lines, path=path))
        gate.reached()
        connection.close()
    retry = until_free(service, path, tag, body=b"", Content_Type="text/plain")
    assert retry.status_code == 201
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert len(service.runs(tag)) == 1


def test_a_client_that_hangs_up_before_its_body_was_read_finds_its_answer_later(service: Service, tag: str) -> None:
    with service.gate() as gate:
        path = f"/digest?gate={gate.name}"
        lines = (f"Idempotency-Key: {tag}", "Content-Length: 6", "Content-Type: text/plain")
        connection = service.raw(request_lines(tag, *lines, path=path) + b"abcdef")
        gate.reached()
        connection.close()
    retry = until_free(service, path, tag, body=b"abcdef", Content_Type="text/plain")
    assert (retry.status_code, retry.json()[0]) == (200, 6)
    assert retry.headers["Idempotent-Replayed"] == "true"
    assert len(service.runs(tag)) == 1


def test_a_client_that_hangs_up_midway_in_a_large_answer_has_it_stored(service: Service, tag: str) -> None:
    path = "/large?size=30000000"
    lines = (f"Idempotency-Key: {tag}", "Content-Length: 0", "Content-Type: text/plain")
    connection = service.raw(request_lines(tag, *lines, path=path))
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    connection.close()
    retry = until_free(service, path, tag, body=b"", Content_Type="text/plain")
    assert retry.status_code == 200
    assert (retry.headers["Idempotent-Replayed"], retry.content) == ("omitted", b"")
    assert len(service.runs(tag)) == 1


def until_free(service: Service, path: str, tag: str, **asked: object) -> httpx.Response:
    """Retry as a client would, until the answer is not 409. The server, not a timer, says when."""
    deadline = time.monotonic() + PATIENCE
    while (answer := service.ask(path, key=tag, tag=tag, **asked)).status_code == 409:  # type: ignore[arg-type]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return answer


# -- a process that dies


def killed_midway(service: Service, pool: ThreadPoolExecutor, route: str, tag: str) -> str:
    """Have a worker killed in the middle of a handler; the path that it was asked for."""
    with service.gate() as gate:
        path = f"{route}?gate={gate.name}"
        lost = pool.submit(service.ask, path, key=tag, tag=tag)
        gate.reached()
        (worker,) = service.runs(tag)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            lost.result()
    return path


@pytest.mark.faults
def test_a_crashed_process_does_not_block_the_key_and_the_retry_runs(
    service: Service, pool: ThreadPoolExecutor, tag: str
) -> None:
    path = killed_midway(service, pool, "/retrying", tag)
    answer = until_free(service, path, tag)
    assert answer.status_code == 201
    assert "Idempotent-Replayed" not in answer.headers
    again = service.ask(path, key=tag, tag=tag)
    assert (again.content, again.headers["Idempotent-Replayed"]) == (answer.content, "true")
    assert len(service.runs(tag)) == 2


@pytest.mark.faults
@pytest.mark.parametrize("route", ["/rejecting", "/once/pay"], ids=["reject", "at_most_once"])
def test_a_crashed_process_leaves_the_outcome_unknown_where_the_route_says_so(
    service: Service, pool: ThreadPoolExecutor, tag: str, route: str
) -> None:
    path = killed_midway(service, pool, route, tag)
    for _ in range(2):
        answer = until_free(service, path, tag)
        assert answer.status_code == 500
        assert answer.json()["code"] == "idempotency_outcome_unknown"
        assert answer.json()["retryable"] is False
    assert len(service.runs(tag)) == 1


def stopped(process: int) -> None:
    """Wait until all threads of a process stand still."""
    deadline = time.monotonic() + PATIENCE
    tasks = Path(f"/proc/{process}/task")
    while any(task.joinpath("stat").read_text().rpartition(") ")[2][0] != "T" for task in tasks.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to know that a process stands still")
def test_a_paused_owner_comes_back_and_does_not_overwrite_the_finished_record(
    service: Service, pool: ThreadPoolExecutor, tag: str
) -> None:
    with service.gate() as gate:
        path = f"/retrying?gate={gate.name}"
        late = pool.submit(service.ask, path, key=tag, tag=tag)
        gate.reached()
        (worker,) = service.runs(tag)
        freeze(worker)
        try:
            stopped(worker)
            gate.open()
            answer = until_free(service, path, tag)
        finally:
            os.kill(worker, signal.SIGCONT)
    assert answer.status_code == 201
    assert "Idempotent-Replayed" not in answer.headers
    assert late.result().content == answer.content
    assert late.result().headers["Idempotent-Replayed"] == "true"
    assert service.ask(path, key=tag, tag=tag).content == answer.content
    assert len(service.runs(tag)) == 2


def test_a_handler_longer_than_its_lease_keeps_it(service: Service, pool: ThreadPoolExecutor, tag: str) -> None:
    """The keeper's thread lives in each worker, after the fork too."""
    with service.gate() as gate:
        path = f"/retrying?gate={gate.name}"
        first = pool.submit(service.ask, path, key=tag, tag=tag)
        gate.reached()
        service.renewed(tag)
    assert first.result().status_code == 201
    assert service.ask(path, key=tag, tag=tag).content == first.result().content
    assert len(service.runs(tag)) == 1
