"""The demo's payments service over a socket: every endpoint, what it makes of bad requests, and of dying workers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openapi_spec_validator import validate

from semel.demo.payments import data
from semel.demo.payments.data import Books
from semel.demo.run import welcome
from semel.sql.program import Program, Query
from semel.testing.faults import until
from tests.http.payments_service import BOB, Payments, new_key, order, serving

# Starting it takes a second or two.
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module", params=[pytest.param("postgres", marks=pytest.mark.postgres)])
def payments(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, starts_process: None
) -> Iterator[Payments]:
    store = None
    if request.param == "postgres":
        store = request.getfixturevalue("postgres").create_database()
    with serving(tmp_path_factory.mktemp("service"), store, workers=2) as running:
        yield running


def problem_of(answer: Any) -> str:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    code: str = answer.json()["code"]
    return code


def test_a_payment_happens_once_and_its_replay_is_the_same_answer(payments: Payments) -> None:
    key, before = new_key(), payments.stats()
    first, again = (payments.pay(key) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    for name in ("Location", "ETag", "Content-Type"):
        assert first.headers[name] == again.headers[name]
    after = payments.stats()
    assert (after["executions"], after["payments"]) == (before["executions"] + 1, before["payments"] + 1)
    found = payments.ask("GET", first.headers["Location"])
    assert (found.json(), found.headers["ETag"]) == (first.json(), first.headers["ETag"])


def test_the_lines_that_are_printed_to_be_pasted_are_the_api(payments: Payments) -> None:
    lines = [line.strip() for line in welcome(payments.url, storm=True).splitlines() if "curl -i" in line]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    answers = [subprocess.run(shlex.split(line), capture_output=True, text=True).stdout for line in lines]
    assert all(answer.startswith("HTTP/1.1 201") for answer in answers), answers
    assert [("idempotent-replayed: true" in answer.lower()) for answer in answers] == [False, True]
    assert answers[0].split("\n")[-1] == answers[1].split("\n")[-1] != ""


def test_without_a_key_of_a_tenant_it_is_401_and_nothing_is_claimed(payments: Payments) -> None:
    key, before = new_key(), payments.stats()
    for headers in ({}, {"Authorization": "Bearer sk_eve"}, {"Authorization": "Basic c2tfYWxpY2U6"}):
        answer = payments.client.post("/payments", json=order(), headers={"Idempotency-Key": key, **headers})
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    for method, path in (("GET", "/payments"), ("PUT", "/customers/a"), ("DELETE", f"/payments/pay_{'0' * 32}")):
        assert payments.client.request(method, path, json={"name": "a"}).status_code == 401
    assert payments.stats() == before
    assert "Idempotent-Replayed" not in payments.pay(key, amount=7).headers


def test_tenants_never_meet(payments: Payments) -> None:
    key = new_key()
    hers, his = payments.pay(key), payments.ask("POST", "/payments", order(amount=5), key=key, **BOB)
    assert (hers.status_code, his.status_code) == (201, 201)
    assert hers.json()["id"] != his.json()["id"]
    where = hers.headers["Location"]
    assert payments.ask("GET", where, **BOB).status_code == 404
    assert payments.ask("PATCH", where, {"note": "mine"}, If_Match="*", **BOB).status_code == 404
    assert payments.ask("DELETE", where, **BOB).status_code == 204
    refund = payments.ask("POST", "/refunds", {"payment": hers.json()["id"]}, key=key, **BOB)
    assert refund.status_code == 404
    assert payments.ask("GET", where).json() == hers.json()
    listed = payments.ask("GET", "/payments?limit=100", **BOB).json()["payments"]
    assert hers.json()["id"] not in [each["id"] for each in listed]


def test_keys_are_needed_and_good_for_one_request(payments: Payments) -> None:
    key = new_key()
    assert payments.pay(key).status_code == 201
    assert problem_of(payments.pay(key, amount=1)) == "idempotency_key_reused"
    assert problem_of(payments.ask("POST", "/payments", order())) == "idempotency_key_missing"
    assert problem_of(payments.ask("POST", "/payments", order(), key='"half')) == "idempotency_key_invalid"


def test_the_newest_payments_are_listed_first(payments: Payments) -> None:
    made = [payments.pay().json()["id"] for _ in range(3)]
    listed = payments.ask("GET", "/payments?limit=3").json()["payments"]
    assert [each["id"] for each in listed] == made[::-1]
    for limit in ("0", "101", "x", "9" * 400):
        assert payments.ask("GET", f"/payments?limit={limit}").status_code == 422


def test_a_change_needs_the_version_that_was_read(payments: Payments) -> None:
    made = payments.pay()
    where, tag = made.headers["Location"], made.headers["ETag"]
    assert problem_of(payments.ask("PATCH", where, {"note": "a"})) == "precondition_required"
    changed = payments.ask("PATCH", where, {"note": "a", "amount": 1300}, If_Match=tag)
    assert (changed.status_code, changed.json()["note"], changed.json()["amount"]) == (200, "a", 1300)
    assert changed.headers["ETag"] != tag
    assert problem_of(payments.ask("PATCH", where, {"note": "b"}, If_Match=tag)) == "precondition_failed"
    key = new_key()
    first, again = (
        payments.ask("PATCH", where, {"note": "c"}, key=key, If_Match=changed.headers["ETag"]) for _ in range(2)
    )
    assert (first.status_code, again.status_code) == (200, 200), "a retry of a change that was made is not 412"
    assert again.headers["Idempotent-Replayed"] == "true"
    assert payments.ask("GET", where).json() == first.json() == again.json()
    same = payments.ask("PATCH", where, {}, If_Match=first.headers["ETag"])
    assert (same.status_code, same.json()) == (200, first.json())
    assert payments.ask("PATCH", f"/payments/pay_{'0' * 32}", {"note": "a"}, If_Match="*").status_code == 404


def test_of_changes_to_the_same_version_one_is_made(payments: Payments) -> None:
    made = payments.pay()
    where, tag = made.headers["Location"], made.headers["ETag"]
    with ThreadPoolExecutor(8) as threads:
        changes = threads.map(lambda n: payments.ask("PATCH", where, {"note": f"n{n}"}, If_Match=tag), range(8))
        answers = list(changes)
    assert sorted(answer.status_code for answer in answers) == [200] + [412] * 7
    winner = next(answer for answer in answers if answer.status_code == 200)
    assert payments.ask("GET", where).json() == winner.json()


def test_the_write_itself_compares_versions_and_finds_what_was_inserted(payments: Payments) -> None:
    """What two workers that meet between look and write rely on."""
    books = Books(payments.service.settings["books"])
    try:
        id = f"pay_{uuid.uuid4().hex}"
        row, new = books.run(data.insert_payment(id, "alice", 100, "EUR", "ada"))
        assert new
        assert books.run(data.insert_payment(id, "alice", 999, "USD", "bea")) == (row, False)
        changed = books.run(data.change_payment(row._replace(note="a"), "alice", "me"))
        assert changed is not None
        assert (changed.note, changed.version, changed.changed_by) == ("a", 2, "me")
        assert books.run(data.change_payment(row._replace(note="b"), "alice", "you")) is None
        assert books.run(data.change_payment(changed._replace(note="b"), "bob", "you")) is None
        refund = f"ref_{uuid.uuid4().hex}"
        made, new = books.run(data.insert_refund(refund, "alice", id, 60), atomic=True)
        assert new
        assert books.run(data.insert_refund(refund, "alice", id, 60), atomic=True) == (made, False)
        other = f"ref_{uuid.uuid4().hex}"
        with pytest.raises(data.NothingLeft):
            books.run(data.insert_refund(other, "alice", id, 60), atomic=True)
        assert books.run(data.find_refund(other, "alice")) is None, "a refund without its money stayed"
        found = books.run(data.find_payment(id, "alice"))
        assert found is not None
        assert (found.note, found.refunded) == ("a", 60)
    finally:
        books.close()


def test_a_customer_is_put_and_a_payment_deleted_as_often_as_one_likes(payments: Payments) -> None:
    id, before = new_key(), payments.stats()["customers"]
    answers = [payments.ask("PUT", f"/customers/{id}", {"name": "Ada", "email": "a@b.example"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json() == {"id": id, "name": "Ada", "email": "a@b.example"}
    assert payments.stats()["customers"] == before + 1
    where = payments.pay().headers["Location"]
    assert [payments.ask("DELETE", where).status_code for _ in range(2)] == [204, 204]
    assert payments.ask("GET", where).status_code == 404
    assert payments.ask("DELETE", "/payments/nonsense").status_code == 422


def test_no_more_is_refunded_than_was_paid(payments: Payments) -> None:
    made = payments.pay(amount=100).json()["id"]
    key = new_key()
    first, again = (payments.ask("POST", "/refunds", {"payment": made, "amount": 40}, key=key) for _ in range(2))
    assert (first.status_code, first.content) == (201, again.content)
    with ThreadPoolExecutor(6) as threads:
        wanted = {"payment": made, "amount": 25}
        answers = list(threads.map(lambda _: payments.ask("POST", "/refunds", wanted, key=new_key()), range(6)))
    assert sorted(answer.status_code for answer in answers) == [201] * 2 + [409] * 4
    rest = payments.ask("POST", "/refunds", {"payment": made}, key=new_key())
    assert (rest.status_code, rest.json()["amount"]) == (201, 10)
    assert payments.ask("POST", "/refunds", {"payment": made}, key=new_key()).status_code == 409
    assert payments.ask("GET", f"/payments/{made}").json()["refunded"] == 100
    unknown = payments.ask("POST", "/refunds", {"payment": f"pay_{'0' * 32}"}, key=new_key())
    assert unknown.status_code == 404
    tag = payments.ask("GET", f"/payments/{made}").headers["ETag"]
    assert payments.ask("PATCH", f"/payments/{made}", {"amount": 99}, If_Match=tag).status_code == 409


BAD_BODIES = {
    "nothing": b"",
    "cut off": b'{"amount": 1',
    "not an object": b"[]",
    "bytes that are no text": b"\xff\xfe{}",
    "nested without end": b"[" * 50_000,
    "not a number": b'{"amount": NaN, "currency": "EUR", "customer": "a"}',
    "without end": b'{"amount": Infinity, "currency": "EUR", "customer": "a"}',
    "beyond floats": b'{"amount": 1e999, "currency": "EUR", "customer": "a"}',
    "thousands of digits": b'{"amount": ' + b"9" * 5000 + b', "currency": "EUR", "customer": "a"}',
    "beyond a bigint": b'{"amount": 99999999999999999999, "currency": "EUR", "customer": "a"}',
    "nothing to pay": b'{"amount": 0, "currency": "EUR", "customer": "a"}',
    "half a cent": b'{"amount": 0.5, "currency": "EUR", "customer": "a"}',
    "a text for a number": b'{"amount": "5", "currency": "EUR", "customer": "a"}',
    "true for a number": b'{"amount": true, "currency": "EUR", "customer": "a"}',
    "no currency": b'{"amount": 5, "currency": "euro", "customer": "a"}',
    "a NUL": b'{"amount": 5, "currency": "EUR", "customer": "a\\u0000b"}',
    "half a character": b'{"amount": 5, "currency": "EUR", "customer": "\\ud800"}',
    "half a character in a name": b'{"amount": 5, "currency": "EUR", "simulate": {"crash": "\\ud800"}, "\\udfff": 1}',
    "a long text": b'{"amount": 5, "currency": "EUR", "customer": "' + b"a" * 101 + b'"}',
    "a status that is none": b'{"amount": 5, "currency": "EUR", "customer": "a", "simulate": {"status": 99}}',
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_bad_body_is_a_documented_refusal_and_claims_nothing(payments: Payments, what: str) -> None:
    key, before = new_key(), payments.stats()
    answer = payments.client.post(
        "/payments",
        content=BAD_BODIES[what],
        headers={"Authorization": "Bearer sk_alice", "Idempotency-Key": key, "Content-Type": "application/json"},
    )
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["detail"]
    assert payments.stats() == before
    assert "Idempotent-Replayed" not in payments.pay(key).headers


def test_simulated_refusals_are_remembered_and_simulated_failures_are_not(payments: Payments) -> None:
    before = payments.stats()
    for status, runs in ((402, 1), (500, 2), (503, 2), (429, 2), (204, 1), (202, 1)):
        key, executions = new_key(), payments.stats()["executions"]
        answers = [payments.pay(key, simulate={"status": status}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [status, status]
        assert payments.stats()["executions"] == executions + runs
    assert payments.stats()["payments"] == before["payments"] + 2  # those of 204 and 202


def test_simulated_sizes_and_streams_are_replayed(payments: Payments) -> None:
    for simulate in ({"body_bytes": 100_000}, {"stream": True}, {"stream": True, "body_bytes": 300_000}):
        key = new_key()
        first, again = (payments.pay(key, simulate=simulate) for _ in range(2))
        assert first.content == again.content
        assert again.headers["Idempotent-Replayed"] == "true"
        assert len(first.content) >= simulate.get("body_bytes", 0)
        assert ("Transfer-Encoding" in first.headers) == ("stream" in simulate)
        assert first.json()["amount"] == 1250
    key, executions = new_key(), payments.stats()["executions"]
    first, again = (payments.pay(key, simulate={"body_bytes": 2_000_000}) for _ in range(2))
    assert len(first.content) == 2_000_000
    assert (again.content, again.headers["Idempotent-Replayed"]) == (b"", "omitted")
    assert payments.stats()["executions"] == executions + 1


@pytest.mark.faults
@pytest.mark.parametrize("crash", ["before", "after", True])
def test_a_worker_that_dies_in_the_handler_costs_no_payment_and_makes_no_second(payments: Payments, crash: Any) -> None:
    key, before, kills = new_key(), payments.stats(), payments.service.workers.kills
    answer = payments.until_answered(lambda: payments.pay(key, customer=key, simulate={"crash": crash}))
    assert answer.status_code == 201
    after = payments.stats()
    assert payments.service.workers.kills == kills + 1
    assert after["payments"] == before["payments"] + 1
    assert (after["executions"], after["taken_over"]) == (before["executions"] + 2, before["taken_over"] + 1)
    assert after["found_done"] == before["found_done"] + (crash != "before")
    again = payments.pay(key, customer=key, simulate={"crash": crash})
    assert (again.content, again.headers["Idempotent-Replayed"]) == (answer.content, "true")


def test_a_handler_that_is_run_again_finds_what_it_did_and_answers_alike(payments: Payments) -> None:
    """The record is lost with its worker and the row is committed: what a re-run in leased mode must be ready for."""
    paid = payments.pay(customer="eve", key="again-1")
    tag = paid.headers["ETag"]
    where, made = paid.headers["Location"], paid.json()["id"]
    change = payments.ask("PATCH", where, {"note": "once"}, key="again-2", If_Match=tag)
    before = payments.stats()
    lose_record(payments, "again-2")
    again = payments.ask("PATCH", where, {"note": "once"}, key="again-2", If_Match=tag)
    assert "Idempotent-Replayed" not in again.headers
    assert (again.status_code, again.content) == (200, change.content), "a change that was made is not 412"
    refund = payments.ask("POST", "/refunds", {"payment": made}, key="again-3")
    lose_record(payments, "again-3")
    again = payments.ask("POST", "/refunds", {"payment": made}, key="again-3")
    assert (again.status_code, again.content) == (201, refund.content), "all that is left, once"
    lose_record(payments, "again-1")
    again = payments.pay(customer="eve", key="again-1")
    assert (again.status_code, again.json()["id"]) == (201, made)
    after = payments.stats()
    assert (after["payments"], after["refunds"]) == (before["payments"], before["refunds"] + 1)
    assert after["found_done"] == before["found_done"] + 3
    lose_record(payments, "again-1")
    assert payments.pay(customer="eve", key="again-1", currency="USD").status_code == 409


def lose_record(payments: Payments, key: str) -> None:
    query = Query("lose", "DELETE FROM semel_record WHERE key = :key RETURNING key", True)

    def lose() -> Program[int]:
        return len((yield query(key=key)))

    books = Books(payments.service.settings["books"])
    assert books.run(lose()) == 1
    books.close()


@pytest.mark.faults
def test_the_port_outlives_all_processes(payments: Payments) -> None:
    made = payments.pay()
    for process in payments.service.workers.running:
        process.kill()
        process.wait()
    found = payments.until_answered(lambda: payments.ask("GET", made.headers["Location"]))
    assert found.json() == made.json()


def test_the_document_is_valid_and_says_what_each_write_is(payments: Payments) -> None:
    document = payments.client.get("/openapi.json").json()
    validate(document)
    declared = {
        f"{method.upper()} {path}": operation["x-idempotency"]["class"]
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if "x-idempotency" in operation
    }
    assert declared == {
        "POST /payments": "action",
        "PATCH /payments/{id}": "conditional",
        "DELETE /payments/{id}": "natural",
        "POST /refunds": "action",
        "PUT /customers/{id}": "natural",
    }
    wanted = document["paths"]["/payments"]["post"]["parameters"]
    assert "Idempotency-Key" in json.dumps(wanted)
    assert "simulate" not in document["components"]["schemas"]["NewPayment"]["properties"]
    assert payments.client.get("/docs").status_code == 200


def test_the_first_page_needs_nothing_from_the_internet(payments: Payments) -> None:
    page = payments.client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "POST /payments" in page.text
    # Without a history, the page shows how to keep one, with a URL that nobody loads.
    assert "://" not in page.text.replace("postgresql://…", "")
    for path in re.findall('href="([^"]*)"', page.text):
        assert payments.client.get(path).status_code == 200


def test_prometheus_finds_what_all_processes_have_counted(payments: Payments) -> None:
    def found(event: str) -> float:
        text = payments.client.get("/metrics").text
        series = f'semel_events_total{{event="{event}",route="POST /payments"}} '
        return sum(float(line.removeprefix(series)) for line in text.splitlines() if line.startswith(series))

    started, replayed = found("started"), found("replayed")
    for _ in range(10):
        key = new_key()
        payments.pay(key)
        payments.pay(key)

    def counted() -> bool:  # and perhaps what earlier tests did: a process writes about once a second
        return found("started") >= started + 10 and found("replayed") >= replayed + 10

    until(counted, 20, "all is counted")
    until(lambda: "\nsemel_store_up 1.0" in payments.client.get("/metrics").text, 20, "the store was measured")
