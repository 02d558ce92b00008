"""What happens on the connection: clients that hang up, bodies that end half way, and traffic that is not ours."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.http.conftest import Served, request_bytes

pytestmark = pytest.mark.process


def until(what: Any) -> None:
    """Wait until it is true; the test's own timeout ends it."""
    while not what():
        threading.Event().wait(0.01)


@pytest.mark.parametrize("chunks", [1, 4])
def test_when_the_client_hangs_up_the_handler_finishes_and_the_retry_replays(
    service: Served, key: str, word: str, chunks: int
) -> None:
    body = b'{"ledger": "%s", "gate": "%s", "size": 3000, "chunks": %d}' % (word.encode(), key.encode(), chunks)
    connection = service.raw(request_bytes("/plain", body, key=key))
    service.admin("came", gate=key)
    connection.close()
    service.admin("open", gate=key)
    until(lambda: service.admin("record", operation="POST /plain", key=key)["state"] == "DONE")
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    answer = service.client.post("/plain", content=body, headers=headers)
    assert answer.status_code == 201
    assert answer.headers["idempotent-replayed"] == "true"
    assert len(answer.content) == 3000
    assert service.runs(word) == 1


@pytest.mark.parametrize("kind", ["wrapped", "nested"])
def test_also_under_middlewares_that_stop_at_a_hang_up(serving: Any, kind: str, key: str, word: str) -> None:
    test_when_the_client_hangs_up_the_handler_finishes_and_the_retry_replays(serving(kind), key, word, 4)


@pytest.mark.parametrize("path", ["/plain", "/raw"])
def test_half_a_request_is_none(service: Served, key: str, word: str, path: str) -> None:
    """The client hangs up before its body is whole: nothing is claimed, nothing runs, the retry is a first call."""
    whole = request_bytes(path, b'{"ledger": "%s"}' % word.encode(), key=key)
    service.raw(whole[:-10]).close()
    chunked = request_bytes(path, b'8\r\n{"ledger\r\n', "Transfer-Encoding: chunked", key=key)
    service.raw(chunked).close()
    answer = service.post("/other", key, {})  # comes after them
    assert answer.status_code == 201
    assert service.admin("record", operation=f"POST {path}", key=key) is None
    status, _ = service.exchange(whole)
    assert status == 201
    assert service.runs(word) == (0 if path == "/raw" else 1)


def test_routes_that_are_not_declared_pass_untouched(service: Served, key: str) -> None:
    before = service.lines().count("/undeclared ")
    for lines in ((), (f"Idempotency-Key: {key}",), (f"Idempotency-Key: {key}", "Idempotency-Key: x")):
        status, answer = service.exchange(request_bytes("/undeclared", b"", *lines))
        assert status == 200
        assert b"data: 1\n\n" in answer
        assert b"data: 2\n\n" in answer
        assert b"x-request-id: u" in answer.lower()
        assert b"idempotency-key" not in answer.lower()
    assert service.lines().count("/undeclared ") == before + 3


def test_lifespan_passes(service: Served) -> None:
    service.post("/undeclared", None)
    assert service.lines().count("lifespan startup") == 1
