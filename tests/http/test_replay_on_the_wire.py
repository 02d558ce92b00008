"""The first answer, and the same answer again."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import pytest

from tests.http.conftest import Served, request_bytes, shown

pytestmark = pytest.mark.process

HEADERS = [
    ["Location", "/payments/7"],
    ["ETag", '"v1"'],
    ["Last-Modified", "Sun, 06 Nov 1994 08:49:37 GMT"],
    ["Content-Language", "de"],
    ["Content-Location", "/payments/7?full"],
    ["Content-Disposition", "inline"],
    ["Link", '</a>; rel="next"'],
    ["Link", '</b>; rel="prev"'],
]
NEVER = [
    ["Set-Cookie", "session=hunter2"],
    ["WWW-Authenticate", "Bearer"],
    ["X-Request-Id", "r1"],
    ["X-RateLimit-Remaining", "4"],
]


def test_the_first_answer_echoes_the_key_and_is_no_replay(service: Served, key: str) -> None:
    answer = service.post("/plain", key)
    assert answer.status_code == 201
    assert answer.headers["idempotency-key"] == key
    assert "idempotent-replayed" not in answer.headers


def test_a_replay_has_the_status_the_bytes_and_the_headers_of_the_first(service: Served, key: str, word: str) -> None:
    do = {"ledger": word, "status": 202, "headers": HEADERS + NEVER}
    first = service.post("/plain", key, do)
    again = service.post("/plain", key, do)
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["idempotency-key"] == key
    for name in {name for name, _ in HEADERS}:
        assert again.headers.get_list(name) == [value for n, value in HEADERS if n == name]
    assert again.headers["content-type"] == first.headers["content-type"]
    for name, value in NEVER:
        assert first.headers[name] == value
        assert name not in again.headers
    assert len(again.headers.get_list("date")) <= 1
    assert service.runs(word) == 1


def test_the_mark_of_a_replay_may_have_another_name(service: Served, key: str) -> None:
    service.post("/marked", key)
    again = service.post("/marked", key)
    assert again.headers["x-again"] == "true"
    assert "idempotent-replayed" not in again.headers


def test_a_first_answer_cannot_pass_for_a_replay(service: Served, key: str) -> None:
    """Hit state that is kept in a header could be spoofed, by the client or by the handler."""
    do = {"headers": [["Idempotent-Replayed", "true"], ["Idempotency-Key", "other"]]}
    answer = service.post("/plain", key, do, Idempotent_Replayed="true")
    assert "idempotent-replayed" not in answer.headers
    assert answer.headers.get_list("idempotency-key") == [key]


@pytest.mark.parametrize("text", ["{}", "[]", "0", "false", '""', "null", ""])
def test_falsy_answers_replay_as_they_are(service: Served, key: str, word: str, text: str) -> None:
    answers = [service.post("/plain", key, {"ledger": word, "text": text, "status": 200}) for _ in range(3)]
    assert [answer.text for answer in answers] == [text] * 3
    assert service.runs(word) == 1


def test_204_replays_without_a_body_or_a_length(service: Served, key: str, word: str) -> None:
    answers = [service.post("/plain", key, {"ledger": word, "status": 204}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 204]
    assert "content-length" not in answers[1].headers
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert service.runs(word) == 1


@pytest.mark.parametrize("chunks", [1, 7])
def test_binary_answers_replay_byte_for_byte(service: Served, key: str, word: str, chunks: int) -> None:
    do = {"ledger": word, "size": 100_000, "chunks": chunks}
    first, again = (service.post("/plain", key, do) for _ in range(2))
    assert len(first.content) == 100_000
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert service.runs(word) == 1


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_an_answer_above_the_cap_is_sent_through_and_remembered_without(
    service: Served, key: str, word: str, chunks: int
) -> None:
    do = {"ledger": word, "size": 5000, "chunks": chunks, "headers": [["ETag", '"big"'], ["Content-Encoding", "x"]]}
    first, again = (service.post("/capped", key, do) for _ in range(2))
    assert len(first.content) == 5000
    assert "idempotent-replayed" not in first.headers
    assert again.status_code == 201
    assert again.content == b""
    assert again.headers["idempotent-replayed"] == "omitted"
    assert again.headers["etag"] == '"big"'
    assert "content-encoding" not in again.headers
    assert service.runs(word) == 1


def test_an_answer_at_the_cap_is_kept(service: Served, key: str) -> None:
    first, again = (service.post("/capped", key, {"size": 1000, "chunks": 3}) for _ in range(2))
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"


def test_a_route_that_issues_secrets_keeps_no_body(service: Served, key: str, word: str) -> None:
    do = {"ledger": word, "text": "hunter2"}
    first, again = (service.post("/secret", key, do) for _ in range(2))
    assert first.text == "hunter2"
    assert (again.status_code, again.content) == (201, b"")
    assert again.headers["idempotent-replayed"] == "omitted"
    assert service.runs(word) == 1


@pytest.mark.parametrize("status", [400, 404, 410, 422])
def test_an_answer_that_refuses_is_stored(service: Served, key: str, word: str, status: int) -> None:
    first, again = (service.post("/plain", key, {"ledger": word, "status": status}) for _ in range(2))
    assert (first.status_code, again.status_code) == (status, status)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert service.runs(word) == 1


@pytest.mark.parametrize("status", [401, 403, 408, 409, 412, 423, 425, 428, 429, 500, 502, 503])
def test_an_answer_that_says_nothing_of_the_request_releases_the_key(
    service: Served, key: str, word: str, status: int
) -> None:
    first, again = (service.post("/plain", key, {"ledger": word, "status": status}) for _ in range(2))
    assert (first.status_code, again.status_code) == (status, status)
    assert again.content != first.content
    assert "idempotent-replayed" not in again.headers
    assert service.runs(word) == 2


def test_a_handler_that_raises_releases_the_key(service: Served, key: str, word: str) -> None:
    answers = [service.post("/plain", key, {"ledger": word, "raise": "before"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert all("hunter2" not in answer.text for answer in answers)
    assert service.runs(word) == 2
    assert service.admin("record", operation="POST /plain", key=key) is None


@pytest.mark.parametrize("path", ["/external", "/once"])
def test_effects_outside_of_the_database_store_a_5xx_answer(service: Served, key: str, word: str, path: str) -> None:
    first, again = (service.post(path, key, {"ledger": word, "status": 502}) for _ in range(2))
    assert (first.status_code, again.status_code) == (502, 502)
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert service.runs(word) == 1


@pytest.mark.parametrize("path", ["/external", "/once"])
def test_effects_outside_of_the_database_store_that_the_handler_raised(
    service: Served, key: str, word: str, path: str
) -> None:
    first, again = (service.post(path, key, {"ledger": word, "raise": "before"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (500, 500)
    assert again.content == first.content
    assert first.headers["idempotency-key"] == key
    assert again.headers["idempotent-replayed"] == "true"
    assert service.runs(word) == 1
    assert b"the handler broke" in service.log.read_bytes()


def test_an_error_after_the_answer_changes_nothing(service: Served, key: str, word: str) -> None:
    first, again = (service.post("/plain", key, {"ledger": word, "raise": "after"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert service.runs(word) == 1


def test_background_work_is_done_once(service: Served, key: str, word: str) -> None:
    for _ in range(3):
        service.post("/plain", key, {"ledger": word, "background": word})
    while f"background {word}" not in service.lines():  # it is done after the answer
        threading.Event().wait(0.01)
    assert service.lines().count(f"background {word}") == 1


def test_an_expired_key_is_a_new_request(service: Served, key: str, word: str) -> None:
    first = service.post("/short", key, {"ledger": word})
    answer = service.post("/short", key, {"ledger": word})
    while "idempotent-replayed" in answer.headers:
        answer = service.post("/short", key, {"ledger": word})
    assert answer.content != first.content
    assert service.runs(word) == 2


def test_an_expired_key_may_be_refused_instead(service: Served, key: str, word: str) -> None:
    answer = first = service.post("/no-return", key, {"ledger": word})
    while answer.status_code == first.status_code:
        assert answer.content == first.content
        answer = service.post("/no-return", key, {"ledger": word})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "idempotency_key_expired"
    assert answer.json()["retryable"] is False
    assert answer.headers["link"] == '<https://docs.example/idempotency>; rel="describedby"'
    assert service.runs(word) == 1


def test_large_chunked_request_bodies_are_fingerprinted_whole(service: Served, key: str) -> None:
    def chunked(last: bytes) -> bytes:
        chunks = [b"x" * 60_000] * 20 + [last]
        return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    def sent(last: bytes) -> tuple[int, bytes]:
        lines = ("Transfer-Encoding: chunked", "Content-Type: application/octet-stream")
        return service.exchange(request_bytes("/raw", chunked(last), *lines, key=key))

    first, again, other = sent(b"a"), sent(b"a"), sent(b"b")
    assert first[0] == again[0] == 201
    assert first[1].endswith(b"1200001")
    assert b"idempotent-replayed: true" in again[1]
    assert other[0] == 422


@pytest.mark.parametrize("kind", ["wrapped", "nested"])
class TestUnderOtherMiddlewares:
    """Each answer streamed by a BaseHTTPMiddleware, compressed, and given CORS lines: inside of ours, and around it."""

    def test_answers_are_stored_and_replayed(self, serving: Any, kind: str, key: str, word: str) -> None:
        service: Served = serving(kind)
        first, again = (service.post("/plain", key, {"ledger": word}) for _ in range(2))
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers.get_list("x-request-id") != first.headers.get_list("x-request-id")
        assert len(again.headers.get_list("x-request-id")) == 1
        assert service.runs(word) == 1

    def test_compressed_answers_replay(self, serving: Any, kind: str, key: str) -> None:
        service: Served = serving(kind)
        first, again = (service.post("/plain", key, {"text": "a" * 3000}, Accept_Encoding="gzip") for _ in range(2))
        assert first.text == again.text == "a" * 3000
        assert again.headers["content-encoding"] == "gzip"
        with service.client.stream(
            "POST",
            "/plain",
            json={"text": "a" * 3000},
            headers={"Idempotency-Key": key, "Accept-Encoding": "gzip"},
        ) as raw:
            assert gzip.decompress(b"".join(raw.iter_raw())) == b"a" * 3000

    def test_refusals_and_large_answers_pass(self, serving: Any, kind: str, key: str, word: str) -> None:
        service: Served = serving(kind)
        assert shown(service.post("/plain", None))["code"] == "idempotency_key_missing"
        do = {"ledger": word, "size": 5000, "chunks": 5}
        first, again = (service.post("/capped", key, do) for _ in range(2))
        assert len(first.content) == 5000
        assert again.headers["idempotent-replayed"] == "omitted"
        assert service.runs(word) == 1

    def test_a_handler_that_raises_releases_the_key(self, serving: Any, kind: str, key: str, word: str) -> None:
        service: Served = serving(kind)
        answers = [service.post("/plain", key, {"ledger": word, "raise": "before"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [500, 500]
        assert service.runs(word) == 2


def test_scripts_of_other_origins_may_read_our_headers(serving: Any, key: str) -> None:
    service: Served = serving("wrapped")
    answers = [service.post("/plain", key, Origin="https://shop.example") for _ in range(2)]
    answers.append(service.post("/plain", key, {"other": 1}, Origin="https://shop.example"))
    answers.append(service.post("/plain", None, Origin="https://shop.example"))
    assert [answer.status_code for answer in answers] == [201, 201, 422, 400]
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == "https://shop.example"
        exposed = answer.headers["access-control-expose-headers"].lower().replace(" ", "").split(",")
        wanted = ("x-request-id", "idempotency-key", "idempotent-replayed", "retry-after", "link")
        assert sorted(exposed) == sorted(wanted)
    plain = service.post("/plain", key)
    assert "access-control-expose-headers" not in plain.headers
    outside: Served = serving("nested")  # where CORS is answered around us
    for _ in range(2):
        answer = outside.post("/plain", key, Origin="https://shop.example")
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "Idempotent-Replayed" in answer.headers["access-control-expose-headers"]
    assert json.loads(plain.content) == json.loads(answers[0].content)
