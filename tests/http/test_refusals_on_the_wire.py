"""Who is turned away, with what words, and that a refusal changes nothing."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.http.conftest import Served, request_bytes, shown

pytestmark = pytest.mark.process


class Held:
    """A first request whose handler waits at a gate."""

    def __init__(self, service: Served, path: str, key: str, do: dict[str, Any]) -> None:
        self.service, self.gate = service, key
        self.do = {**do, "gate": key}
        self._pool = ThreadPoolExecutor(8)
        self.path, self.key = path, key
        self.first = self.again()
        service.admin("came", gate=key)

    def again(self) -> Any:
        return self._pool.submit(self.service.post, self.path, self.key, self.do)

    def open(self) -> httpx.Response:
        self.service.admin("open", gate=self.gate)
        answer: httpx.Response = self.first.result()
        return answer


def test_a_duplicate_in_flight_is_turned_away_and_told_when_to_come_back(service: Served, key: str, word: str) -> None:
    held = Held(service, "/plain", key, {"ledger": word})
    answer = service.post("/plain", key, held.do)
    other = service.post("/plain", key, {"ledger": word, "text": "other"})
    first = held.open()
    assert answer.status_code == 409
    assert int(answer.headers["retry-after"]) >= 1
    told = shown(answer)
    assert told["code"] == "idempotency_key_in_use"
    assert told["retryable"] is True
    assert told["retry_after"] == int(answer.headers["retry-after"])
    assert other.status_code == 422  # which wins over 409
    assert first.status_code == 201
    assert service.post("/plain", key, held.do).content == first.content
    assert service.runs(word) == 1


def test_a_duplicate_may_wait_for_the_winner(service: Served, key: str, word: str) -> None:
    held = Held(service, "/wait", key, {"ledger": word})
    waiting = [held.again() for _ in range(3)]
    assert service.post("/wait", key, {"other": 1}).status_code == 422
    first = held.open()
    answers = [answer.result() for answer in waiting]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert {answer.content for answer in answers} == {first.content}
    assert {answer.headers["idempotent-replayed"] for answer in answers} == {"true"}
    assert service.runs(word) == 1


@pytest.mark.parametrize(("path", "status"), [("/plain", 422), ("/reused-409", 409), ("/reused-400", 400)])
def test_another_payload_is_refused_and_the_record_untouched(
    service: Served, key: str, word: str, path: str, status: int
) -> None:
    first = service.post(path, key, {"ledger": word, "text": "one"})
    before = service.admin("record", operation=f"POST {path}", key=key)
    answer = service.post(path, key, {"ledger": word, "text": "two"})
    assert answer.status_code == status
    assert shown(answer)["code"] == "idempotency_key_reused"
    assert shown(answer)["status"] == status
    assert service.admin("record", operation=f"POST {path}", key=key) == before
    assert service.post(path, key, {"ledger": word, "text": "one"}).content == first.content
    assert service.runs(word) == 1


def test_another_path_or_method_is_another_operation(service: Served, key: str, word: str) -> None:
    answers = [
        service.post("/plain", key, {"ledger": word}),
        service.post("/other", key, {"ledger": word}),
        service.post("/plain", key, {"ledger": word}, method="PUT"),
    ]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert len({answer.content for answer in answers}) == 3
    assert service.runs(word) == 3


def test_a_key_may_be_good_for_one_request_in_all_of_the_service(service: Served, key: str, word: str) -> None:
    first = service.post("/wide-a", key, {"ledger": word})
    assert service.post("/wide-b", key, {"ledger": word}).status_code == 422
    assert service.post("/wide-a", key, {"ledger": word}).content == first.content
    assert service.runs(word) == 1


def test_another_tenant_sees_nothing_of_the_first(service: Served, key: str, word: str) -> None:
    """A scope of nothing at all, or of the path alone, gives Bob Alice's answer."""
    alice = service.post("/plain", key, {"ledger": word})
    bob = service.post("/plain", key, {"ledger": word}, Authorization="Bearer bob")
    assert bob.status_code == 201
    assert bob.content != alice.content
    assert "idempotent-replayed" not in bob.headers
    assert service.post("/plain", key, {"other": 1}, Authorization="Bearer carol").status_code == 201
    assert service.runs(word) == 2


@pytest.mark.parametrize(("user", "status"), [("", 401), ("nobody", 401), ("forbidden", 403), ("hasty", 429)])
def test_who_is_turned_away_before_makes_no_claim_and_gets_no_replay(
    service: Served, key: str, word: str, user: str, status: int
) -> None:
    refused = service.post("/plain", key, {"ledger": word}, Authorization=f"Bearer {user}".strip())
    assert refused.status_code == status
    assert "idempotency-key" not in refused.headers
    first = service.post("/plain", key, {"ledger": word})
    assert first.status_code == 201
    again = service.post("/plain", key, {"ledger": word}, Authorization=f"Bearer {user}".strip())
    assert again.status_code == status  # authorised anew
    assert first.content not in (again.content or b"-")
    assert service.runs(word) == 1


@pytest.mark.parametrize("kind", ["fastapi", "fastapi_sync"])
def test_a_request_that_is_not_valid_makes_no_claim(serving: Callable[[str], Served], kind: str, key: str) -> None:
    service = serving(kind)
    answer = service.post("/plain", key, ["no", "object"])
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/json"
    assert service.admin("record", operation="POST /plain", key=key) is None
    assert service.post("/plain", key, {}).status_code == 201


def test_a_store_that_is_down_refuses_and_nothing_runs(service: Served, key: str, word: str) -> None:
    service.admin("switch", down=True)
    try:
        answer = service.post("/plain", key, {"ledger": word})
    finally:
        service.admin("switch", down=False)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    told = shown(answer)
    assert told["code"] == "idempotency_store_unavailable"
    assert told["retryable"] is True
    assert "hunter2" not in answer.text
    assert "db.internal" not in answer.text
    assert service.runs(word) == 0
    assert service.post("/plain", key, {"ledger": word}).status_code == 201


@pytest.mark.parametrize("status", [201, 429, 500])
def test_a_route_may_run_while_the_store_is_down_and_says_so(service: Served, key: str, word: str, status: int) -> None:
    service.admin("events")
    service.admin("switch", down=True)
    try:
        answers = [service.post("/open", key, {"ledger": word, "status": status}) for _ in range(2)]
    finally:
        service.admin("switch", down=False)
    assert [answer.status_code for answer in answers] == [status] * 2
    assert all("idempotent-replayed" not in answer.headers for answer in answers)
    assert service.runs(word) == 2
    told = [event[0] for event in service.admin("events") if event[3] == key]
    assert told.count("unprotected") == 2
    assert "store_failed" in told


def test_an_answer_is_delivered_although_the_store_dies_before_it_is_stored(
    service: Served, key: str, word: str
) -> None:
    held = Held(service, "/plain", key, {"ledger": word})
    service.admin("switch", down=True)
    try:
        answer = held.open()
    finally:
        service.admin("switch", down=False)
    assert (answer.status_code, answer.headers["idempotent-stored"]) == (201, "false")
    for _ in range(200):  # it is stored later, and the key is in use until then
        again = service.post("/plain", key, held.do)
        if again.status_code != 409:
            break
        time.sleep(0.05)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert again.content == answer.content
    assert service.runs(word) == 1


def test_a_problem_says_what_it_is_and_nothing_that_is_stored(service: Served, key: str) -> None:
    service.post("/plain", key, {"text": "stored-hunter2"})
    answer = service.post("/plain", key, {"text": "other"})
    told = shown(answer)
    assert set(told) == {"type", "title", "status", "detail", "instance", "code", "retryable"}
    assert told["type"] == "urn:semel:problem:key-reused"
    assert told["status"] == answer.status_code == 422
    assert told["instance"] == "/plain"
    assert told["retryable"] is False
    assert "retry-after" not in answer.headers
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["link"] == '<https://docs.example/idempotency>; rel="describedby"'
    assert answer.headers["idempotency-key"] == key
    assert "idempotent-replayed" not in answer.headers
    for secret in ("hunter2", "alice", key):
        assert secret not in answer.text


class TestFingerprint:
    """What makes it another request, and what does not."""

    def test_the_query_does(self, service: Served, key: str) -> None:
        assert service.post("/plain?a=1", key).status_code == 201
        assert service.post("/plain?a=2", key).status_code == 422
        assert service.post("/plain", key).status_code == 422
        assert service.post("/plain?a=1", key).headers["idempotent-replayed"] == "true"

    @pytest.mark.parametrize(
        ("name", "one", "two"),
        [
            ("If-Match", '"v1"', '"v2"'),
            ("If-None-Match", "*", '"v1"'),
            ("Content-Type", "application/json", "application/json; charset=utf-8"),
        ],
    )
    def test_what_the_content_and_the_preconditions_are_does(
        self, service: Served, key: str, name: str, one: str, two: str
    ) -> None:
        assert service.post("/plain", key, **{name: one}).status_code == 201
        assert service.post("/plain", key, **{name: two}).status_code == 422
        assert service.post("/plain", key, **{name: one}).status_code == 201

    def test_what_only_this_exchange_has_does_not(self, service: Served, key: str) -> None:
        """All headers in the fingerprint: a new traceparent, or a refreshed token, is a conflict or runs again."""
        first = service.post("/plain", key, traceparent="00-1", Date="Mon", User_Agent="a", X_Account="1")
        again = service.post("/plain", key, traceparent="00-2", Date="Tue", User_Agent="b", X_Account="2")
        assert again.content == first.content

    def test_headers_that_the_route_names_do(self, service: Served, key: str) -> None:
        assert service.post("/account", key, X_Account="1").status_code == 201
        assert service.post("/account", key, X_Account="2").status_code == 422

    def test_json_is_compared_by_its_bytes_unless_the_route_says_otherwise(self, service: Served, key: str) -> None:
        one, two = b'{"text": "x", "status": 200}', b'{ "status":200.0 ,"text":"x"}'
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        for path, status in (("/plain", 422), ("/canonical", 200)):
            assert service.client.post(path, content=one, headers=headers).status_code == 200
            assert service.client.post(path, content=two, headers=headers).status_code == status

    def test_chosen_fields_count_alone(self, service: Served, key: str) -> None:
        assert service.post("/only", key, {"text": "x", "note": 1}).status_code == 201
        assert service.post("/only", key, {"text": "x", "note": 2}).headers["idempotent-replayed"] == "true"
        assert service.post("/only", key, {"text": "y", "note": 1}).status_code == 422

    def test_fields_may_be_left_out(self, service: Served, key: str) -> None:
        assert service.post("/without", key, {"text": "x", "note": 1}).status_code == 201
        assert service.post("/without", key, {"text": "x", "note": 2}).headers["idempotent-replayed"] == "true"
        assert service.post("/without", key, {"text": "y", "note": 1}).status_code == 422

    def test_equal_payloads_under_two_keys_are_two_requests(self, service: Served, key: str, word: str) -> None:
        service.post("/plain", key, {"ledger": word})
        service.post("/plain", key + "2", {"ledger": word})
        assert service.runs(word) == 2


@pytest.mark.parametrize("kind", ["asgi", "fastapi"])
def test_what_is_stored_can_be_sealed(own: Callable[..., Served], serving: Any, kind: str, key: str) -> None:
    """Encrypted bodies, keys as hashes only, and fingerprints that cannot be guessed."""
    sealed = own(kind, SEALED=base64.b64encode(bytes(range(32))).decode())
    do = {"text": "hunter2 and more"}
    first, again = (sealed.post("/plain", key, do) for _ in range(2))
    assert again.content == first.content == b"hunter2 and more"
    assert again.headers["idempotent-replayed"] == "true"
    hidden = sealed.admin("record", operation="POST /plain", key=key)
    assert hidden["key"] is None
    assert b"hunter2" not in base64.b64decode(hidden["snapshot"])
    clear: Served = serving(kind)
    clear.post("/plain", key, do)
    open_record = clear.admin("record", operation="POST /plain", key=key)
    assert open_record["key"] == key
    assert b"hunter2" in base64.b64decode(open_record["snapshot"])
    assert open_record["fingerprint"] != hidden["fingerprint"]


class TestLeaseLost:
    """Another owner has taken over while the handler still runs."""

    def test_the_client_gets_the_new_owners_answer(self, service: Served, key: str, word: str) -> None:
        held = Held(service, "/leased", key, {"ledger": word})
        service.admin("steal", operation="POST /leased", key=key, text="of the new owner")
        if service.kind.endswith("_sync"):  # a thread cannot be stopped: its answer is refused
            service.admin("open", gate=key)
        answer = held.first.result()
        assert (answer.status_code, answer.text) == (202, "of the new owner")
        assert answer.headers["idempotent-replayed"] == "true"
        stopped = service.lines().count(f"cancelled {word}")
        assert stopped == (0 if service.kind.endswith("_sync") else 1)
        assert service.post("/leased", key, held.do).text == "of the new owner"

    def test_or_a_409_while_there_is_none(self, service: Served, key: str, word: str) -> None:
        held = Held(service, "/leased", key, {"ledger": word})
        service.admin("steal", operation="POST /leased", key=key)
        if service.kind.endswith("_sync"):
            service.admin("open", gate=key)
        answer = held.first.result()
        assert answer.status_code == 409
        assert shown(answer)["retryable"] is True
        assert int(answer.headers["retry-after"]) >= 1

    def test_also_under_a_middleware_with_a_task_group(self, serving: Any, key: str, word: str) -> None:
        service: Served = serving("wrapped")
        held = Held(service, "/leased", key, {"ledger": word})
        service.admin("steal", operation="POST /leased", key=key, text="of the new owner")
        answer = held.first.result()
        assert (answer.status_code, answer.text) == (202, "of the new owner")
        assert f"cancelled {word}" in service.lines()


def test_a_lease_is_kept_while_the_handler_runs(service: Served, key: str, word: str) -> None:
    service.admin("events")
    held = Held(service, "/leased", key, {"ledger": word})
    renewed = 0
    while renewed < 11:  # longer than the lease
        renewed += sum(event[0] == "renewed" for event in service.admin("events"))
        threading.Event().wait(0.1)
    assert service.post("/leased", key, held.do).status_code == 409
    assert held.open().status_code == 201
    assert service.runs(word) == 1


class TestLongBodies:
    """A body above ``max_request_body``: 413, nothing run, nothing claimed."""

    def test_what_is_announced_is_refused_unread(self, service: Served, key: str) -> None:
        """The body itself is never sent: whoever waits for it waits for ever."""
        status, answer = service.exchange(request_bytes("/bounded", b"", "Content-Length: 5001", key=key))
        assert status == 413
        assert b"content-type: application/problem+json" in answer
        told = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (told["code"], told["status"], told["retryable"]) == ("idempotency_body_too_large", 413, False)
        assert service.admin("record", operation="POST /bounded", key=key) is None

    def test_what_comes_in_chunks_is_read_no_further(self, service: Served, key: str) -> None:
        """Its end is never sent either."""

        def sent(size: int, end: bytes) -> tuple[int, bytes]:
            chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
            lines = ("Transfer-Encoding: chunked", "Content-Type: application/octet-stream")
            return service.exchange(request_bytes("/bounded", chunk + end, *lines, key=key))

        assert sent(5001, b"")[0] == 413
        assert service.admin("record", operation="POST /bounded", key=key) is None
        status, answer = sent(5000, b"0\r\n\r\n")
        assert status == 201
        assert answer.endswith(b"5000")

    def test_what_the_framework_has_read_is_refused_as_well(self, service: Served, key: str, word: str) -> None:
        assert shown(service.post("/parsed", key, {"ledger": word, "note": "x" * 5000}))["status"] == 413
        assert service.runs(word) == 0
        assert service.post("/parsed", key, {"ledger": word}).status_code == 201

    def test_a_request_without_a_key_is_not_ours_to_bound(self, service: Served, word: str) -> None:
        assert service.post("/optional", None, {"ledger": word, "note": "x" * 5000}).status_code == 201


def test_the_details_are_json(service: Served, key: str) -> None:
    answer = service.post("/plain", "a,b")
    assert json.loads(answer.content)["detail"]
    assert answer.headers["content-length"] == str(len(answer.content))
