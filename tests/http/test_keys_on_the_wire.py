"""The Idempotency-Key header, as clients send it."""

from __future__ import annotations

import pytest

from tests.http.conftest import Served, request_bytes, shown

pytestmark = pytest.mark.process


def test_a_route_that_needs_a_key_refuses_a_request_without(service: Served, word: str) -> None:
    answer = service.post("/plain", None, {"ledger": word})
    assert answer.status_code == 400
    assert shown(answer)["code"] == "idempotency_key_missing"
    assert service.runs(word) == 0


@pytest.mark.parametrize(
    "value",
    [
        pytest.param("", id="empty"),
        pytest.param('""', id="an empty string"),
        pytest.param('"unterminated', id="unterminated"),
        pytest.param('"bad\\escape"', id="bad escape"),
        pytest.param('"a" b', id="goes on after the quote"),
        pytest.param("two words", id="a blank"),
        pytest.param("a,b", id="a comma"),
        pytest.param("clé", id="not ASCII"),
        pytest.param("k" * 256, id="256 characters"),
    ],
)
def test_a_malformed_key_is_refused_and_nothing_runs(service: Served, word: str, value: str) -> None:
    body = b'{"ledger": "%s"}' % word.encode()
    status, answer = service.exchange(request_bytes("/plain", body, key=value))
    assert status == 400
    assert b'"code": "idempotency_key_invalid"' in answer
    assert service.runs(word) == 0


def test_255_characters_are_a_key(service: Served, key: str, word: str) -> None:
    longest = (key * 10)[:255]
    assert [service.post("/plain", longest, {"ledger": word}).status_code for _ in range(2)] == [201, 201]
    assert service.runs(word) == 1


def test_two_lines_are_refused_even_if_equal(service: Served, key: str, word: str) -> None:
    body = b'{"ledger": "%s"}' % word.encode()
    for other in (key, "another"):
        status, answer = service.exchange(request_bytes("/plain", body, f"Idempotency-Key: {other}", key=key))
        assert status == 400
        assert b'"code": "idempotency_key_invalid"' in answer
    halves = service.exchange(request_bytes("/plain", body, 'Idempotency-Key: b"', key='"a'))
    assert halves[0] == 400
    assert service.runs(word) == 0


def test_quoted_and_bare_are_the_same_key(service: Served, key: str, word: str) -> None:
    first = service.post("/plain", key, {"ledger": word})
    for quoted in (f'"{key}"', f'"{key}";v=1'):
        again = service.post("/plain", quoted, {"ledger": word})
        assert again.content == first.content
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["idempotency-key"] == key
    assert service.runs(word) == 1


def test_the_key_is_echoed_quoted_where_it_must_be(service: Served, key: str) -> None:
    answer = service.post("/plain", f'"a b {key}"')
    assert answer.status_code == 201
    assert answer.headers["idempotency-key"] == f'"a b {key}"'


def test_a_strict_route_takes_quoted_keys_only(service: Served, key: str) -> None:
    assert service.post("/strict", key).status_code == 400
    assert service.post("/strict", f'"{key}"').status_code == 201


def test_a_raw_route_takes_keys_as_they_stand_and_echoes_them_so(service: Served, key: str, word: str) -> None:
    for sent in (key, f'"{key}"', f'"{key}', f"{key};a=1, b"):
        first, again = (service.post("/verbatim", sent, {"ledger": word}) for _ in range(2))
        assert again.headers["idempotent-replayed"] == "true"
        assert first.headers["idempotency-key"] == again.headers["idempotency-key"] == sent
    assert service.runs(word) == 4


def test_a_route_may_ask_for_a_format(service: Served, key: str) -> None:
    assert shown(service.post("/uuid", "order-7"))["code"] == "idempotency_key_invalid"
    assert service.post("/uuid", key).status_code == 201


def test_an_optional_key_left_out_runs_unprotected_and_is_told(service: Served, word: str) -> None:
    service.admin("events")
    answers = [service.post("/optional", None, {"ledger": word}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content != answers[1].content
    assert service.runs(word) == 2
    told = [event for event in service.admin("events") if event[0] == "unkeyed"]
    assert [event[1] for event in told] == ["POST /optional"] * 2


def test_an_optional_key_that_is_given_counts(service: Served, key: str, word: str) -> None:
    answers = [service.post("/optional", key, {"ledger": word}) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert service.runs(word) == 1
    assert service.post("/optional", '"x').status_code == 400


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_methods_that_change_nothing_ignore_a_key(service: Served, key: str, method: str) -> None:
    answers = [service.post("/undeclared", key, method=method) for _ in range(2)]
    for answer in answers:
        assert "idempotency-key" not in answer.headers
        assert "idempotent-replayed" not in answer.headers
    assert service.admin("record", operation=f"{method} /undeclared", key=key) is None


def test_a_declared_endpoint_that_also_answers_get_runs_each_time(serving, key: str, word: str) -> None:
    service: Served = serving("starlette")
    answers = [service.post("/plain", key, {"ledger": word}, method="GET") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert service.runs(word) == 2


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_put_and_delete_take_part_where_they_are_declared(service: Served, key: str, word: str, method: str) -> None:
    answers = [service.post("/plain", key, {"ledger": word}, method=method) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[1].headers["idempotent-replayed"] == "true"
    assert service.runs(word) == 1
