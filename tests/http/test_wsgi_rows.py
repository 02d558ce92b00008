"""The contract's rows for WSGI, as data, against plain WSGI, Flask and Django, each served for real
by gunicorn; and Django also by uvicorn.

A row is a list of requests that share a key; each says what is expected of its answer, and the row how often a handler
ran. The rows that need two requests at a time, raw sockets or a killed process are in ``test_wsgi_races.py``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.http.apps_wsgi import DOCS
from tests.http.apps_wsgi_server import Service, read_all

pytestmark = pytest.mark.process

GTHREAD = ("--workers=2", "--threads=4", "--preload")
SERVICES: dict[str, tuple[str, ...]] = {
    "plain-edge-sync": ("edge()", "--workers=2"),
    "plain-endpoint-gthread": ("endpoint()", "--workers=2", "--threads=4"),
    "flask-gthread-preload": ("flask_app()", *GTHREAD),
    "django-functions": ("tests.http.apps_django:wsgi('function')", *GTHREAD),
    "django-rest-framework": ("tests.http.apps_django:wsgi('drf')", *GTHREAD),
    "django-async-on-wsgi": ("tests.http.apps_django:wsgi('async')", *GTHREAD),
    "django-async-on-asgi": ("tests.http.apps_django async_loop",),
    "django-classes-on-asgi": ("tests.http.apps_django class",),
}
ALL_ROWS = ("plain-edge-sync", "flask-gthread-preload", "django-async-on-asgi")
"""The services that get every row: in front of an application, within a framework, and in an event loop."""


@pytest.fixture(scope="module", params=SERVICES.values(), ids=SERVICES)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, starts_process: None
) -> Iterator[Service]:
    app, *options = request.param
    service = Service(app, tmp_path_factory.mktemp("service"), *options)
    yield service
    service.close()


KEY = "{key}"


@dataclass(frozen=True)
class Step:
    """One request and what is expected of its answer."""

    status: int
    code: str | None = None
    """Of the problem; None: it is no problem."""
    replayed: str | None = None
    path: str = "/pay"
    key: str | None = KEY
    method: str = "POST"
    body: bytes = b'{"amount": 1}'
    user: str | None = "alice"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    name: str
    steps: list[Step]
    runs: int


def first(status: int = 201, **asked: Any) -> Step:
    return Step(status, **asked)


def again(status: int = 201, replayed: str = "true", **asked: Any) -> Step:
    return Step(status, replayed=replayed, **asked)


def refused(status: int, code: str, **asked: Any) -> Step:
    return Step(status, "idempotency_" + code, **asked)


def bad_key(key: str | None, name: str, **asked: Any) -> Row:
    return Row(f"malformed: {name}", [refused(400, "key_invalid", key=key, **asked)], 0)


def released(status: int, path: str = "/status") -> Row:
    path = f"{path}?status={status}"
    return Row(f"{status} releases the key", [first(status, path=path), first(status, path=path)], 2)


def stored(status: int, path: str = "/status") -> Row:
    full = f"{path}?status={status}"
    return Row(f"{status} of {path} is stored", [first(status, path=full), again(status, path=full)], 1)


A, B = b'{"amount": 1, "note": "a"}', b'{"note": "b", "amount": 1}'
LARGE, BIG = b"y" * 5_000_000, "/large?size=1048577"
REUSED = refused(422, "key_reused", body=b'{"amount": 2}')

ROWS = [
    Row("no key where one is required", [refused(400, "key_missing", key=None)], 0),
    Row("no key where it is optional", [first(200, path="/optional", key=None)] * 2, 2),
    Row("an optional key counts", [first(200, path="/optional"), again(200, path="/optional")], 1),
    bad_key("", "empty"),
    bad_key('"open', "unterminated"),
    bad_key(r'"a\x"', "bad escape"),
    bad_key("a b", "blank"),
    bad_key("a;b", "semicolon"),
    bad_key("a,b", "comma, or two lines"),
    bad_key('"a,b"', "quoted comma: may have been two lines"),
    bad_key("x" * 256, "256 characters"),
    bad_key("bare", "bare in strict mode", path="/strict"),
    bad_key("bare", "no UUID where one is asked for", path="/uuid"),
    Row("255 characters", [first(key="x" * 223 + KEY), again(key="x" * 223 + KEY)], 1),
    Row("quoted and bare are one key", [first(key=KEY), again(key=f'"{KEY}"'), again(key=f'"{KEY}"; p=1')], 1),
    Row("first call, replay, replay", [first(), again(), again()], 1),
    Row("a replay header of another name", [first(path="/named"), first(path="/named")], 1),
    *[stored(status) for status in (200, 202, 301, 400, 404, 410, 422)],
    *[released(status) for status in (401, 403, 408, 409, 412, 423, 425, 428, 429, 500, 503)],
    *[stored(status, "/external/status") for status in (500, 503)],
    *[stored(status, "/once/status") for status in (500, 503)],
    released(409, "/once/status"),
    Row("raised, at most once", [first(500, path="/once/broken"), again(500, path="/once/broken")], 1),
    Row("a handler that raises leaves the key free", [first(500, path="/broken")] * 2, 2),
    Row("raised, with effects outside", [first(500, path="/external/broken"), again(500, path="/external/broken")], 1),
    Row("an answer that breaks midway leaves the key free", [first(500, path="/midway")] * 2, 2),
    Row("same key, other body", [first(), REUSED, again()], 1),
    Row("same key, other query", [first(path="/pay?a=1"), refused(422, "key_reused", path="/pay?a=2")], 1),
    Row("same key, other Content-Type", [first(), refused(422, "key_reused", headers={"Content-Type": "text/x"})], 1),
    Row("same key, other If-Match", [first(), refused(422, "key_reused", headers={"If-Match": '"1"'})], 1),
    Row("a new traceparent is the same request", [first(), again(headers={"Traceparent": "00-1", "Date": "now"})], 1),
    Row(
        "a header that the route names counts",
        [
            first(path="/headed", headers={"X-Currency": "EUR"}),
            refused(422, "key_reused", path="/headed", headers={"X-Currency": "USD"}),
            again(path="/headed", headers={"X-Currency": "EUR"}),
        ],
        1,
    ),
    Row("other payload as 409", [first(path="/reused409"), refused(409, "key_reused", path="/reused409", body=A)], 1),
    Row("other payload as 400", [first(path="/reused400"), refused(400, "key_reused", path="/reused400", body=A)], 1),
    Row("bytes count", [first(body=b'{"amount":1}'), refused(422, "key_reused", body=b'{"amount": 1}')], 1),
    Row(
        "JSON key order does not count in canonical JSON",
        [first(path="/canonical", body=b'{"a":1,"b":2}'), again(path="/canonical", body=b'{"b": 2, "a": 1}')],
        1,
    ),
    Row("fields left out", [first(path="/without", body=A), again(path="/without", body=B)], 1),
    Row("same key, other path", [first(), first(path="/refund"), again(), again(path="/refund")], 2),
    Row("same key, other method", [first(), first(method="PUT"), again(), again(method="PUT")], 2),
    Row(
        "same key, other path, in one scope",
        [first(path="/tenant/a"), refused(422, "key_reused", path="/tenant/b"), again(path="/tenant/a")],
        1,
    ),
    Row(
        "a retry of an applied change is not 412, and a 412 is not stored",
        [
            Step(412, path="/change", method="PUT", headers={"If-Match": '"9"'}),
            Step(200, path="/change", method="PUT", headers={"If-Match": '"0"'}),
            Step(200, path="/change", method="PUT", headers={"If-Match": '"0"'}, replayed="true"),
        ],
        2,
    ),
    Row("Bob does not get Alice's answer", [first(), first(user="bob"), again(), again(user="bob")], 2),
    Row(
        "a refreshed token does not run it again", [first(user="eve t1"), Step(201, replayed="true", user="eve t2")], 1
    ),
    Row("GET with a key", [first(method="GET")] * 2, 2),
    Row("PUT that is not declared", [first(method="PUT", path="/undeclared")] * 2, 2),
    Row("POST that is not declared", [first(path="/undeclared")] * 2, 2),
    Row("401 before the handler", [Step(401, user=None), first(), Step(401, user=None)], 1),
    Row("429 before the handler", [Step(429, headers={"X-Limited": "1"}), first()], 1),
    Row("a validation error before the handler", [Step(422, headers={"X-Invalid": "1"}), first()], 1),
    Row("a spoofed replay mark", [first(headers={"Idempotent-Replayed": "true"})], 1),
    Row("many chunks", [first(200, path="/chunks"), again(200, path="/chunks")], 1),
    Row("as large as may be", [first(200, path="/large?size=1048576"), again(200, path="/large?size=1048576")], 1),
    Row(
        "too large to keep", [first(200, path=BIG), again(200, "omitted", path=BIG), again(200, "omitted", path=BIG)], 1
    ),
    Row("204", [first(204, path="/empty"), again(204, path="/empty")], 1),
    Row("gzip", [first(200, path="/zipped"), again(200, path="/zipped")], 1),
    *[
        Row(f"falsy body {body!r}", [first(200, path=f"/falsy?body={body}"), again(200, path=f"/falsy?body={body}")], 1)
        for body in ("{}", "[]", "0", "false", "null", '""')
    ],
    Row("a body that must not be kept", [first(path="/secret"), again(replayed="omitted", path="/secret")], 1),
    Row("a path beyond ASCII", [first(path="/caf%C3%A9"), again(path="/caf%C3%A9")], 1),
    Row(
        "a large request body",
        [
            first(200, path="/digest", body=LARGE),
            refused(422, "key_reused", path="/digest", body=LARGE[:-1] + b"z"),
            again(200, path="/digest", body=LARGE),
        ],
        1,
    ),
    Row("a request as long as may be", [first(200, path="/bounded", body=LARGE[:5000])], 1),
]


# What a framework has a part in: the others are the shared contract's, and are asked of `ALL_ROWS` only.
FRAMEWORK_ROWS = {
    "no key where one is required",
    "first call, replay, replay",
    "same key, other body",
    "same key, other path",
    "same key, other method",
    "a retry of an applied change is not 412, and a 412 is not stored",
    "Bob does not get Alice's answer",
    "raised, at most once",
    "a handler that raises leaves the key free",
    "an answer that breaks midway leaves the key free",
    "GET with a key",
    "PUT that is not declared",
    "401 before the handler",
    "a validation error before the handler",
    "many chunks",
    "too large to keep",
    "204",
    "gzip",
    "falsy body 'null'",
    "a path beyond ASCII",
    "a large request body",
}
assert {row.name for row in ROWS} >= FRAMEWORK_ROWS


@pytest.mark.parametrize(
    ("service", "row"),
    [
        pytest.param(options, row, id=f"{name}-{row.name}")
        for name, options in SERVICES.items()
        for row in ROWS
        if name in ALL_ROWS or row.name in FRAMEWORK_ROWS
    ],
    indirect=["service"],
    scope="module",
)
def test_row(service: Service, row: Row, request: pytest.FixtureRequest) -> None:
    if "asgi" in request.node.callspec.id and "may have been two lines" in row.name:
        pytest.skip("ASGI tells two lines from one")
    tag = uuid.uuid4().hex
    answers: dict[tuple[str, str, str], httpx.Response] = {}
    for step in row.steps:
        key = None if step.key is None else step.key.replace(KEY, tag)
        who = (step.user or "").partition(" ")[0]
        answer = service.ask(
            step.path, key=key, tag=tag, method=step.method, body=step.body, user=step.user, **step.headers
        )
        assert answer.status_code == step.status, answer.text
        assert answer.headers.get("Idempotent-Replayed") == step.replayed
        if step.code is not None:
            check_problem(answer, step)
        elif step.replayed is not None:
            check_replay(answers[step.method, step.path, who], answer, omitted=step.replayed == "omitted")
        else:
            answers[step.method, step.path, who] = answer
    assert len(service.runs(tag)) == row.runs


def check_problem(answer: httpx.Response, step: Step) -> None:
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Link"] == f'<{DOCS}>; rel="describedby"'
    problem = json.loads(answer.content)
    assert problem["code"] == step.code
    assert problem["status"] == step.status
    assert problem["instance"] == step.path.partition("?")[0]
    assert problem["retryable"] is False
    assert "alice" not in answer.text


NEVER = ("Set-Cookie", "WWW-Authenticate", "X-Request-Id", "X-RateLimit-Remaining")
REPLAYED = ("Content-Type", "Content-Encoding", "Location", "ETag", "Link")


def check_replay(one: httpx.Response, two: httpx.Response, *, omitted: bool) -> None:
    assert two.content == (b"" if omitted else one.content)
    assert [name for name in NEVER if name in two.headers] == []
    for name in REPLAYED:
        assert two.headers.get_list(name) == one.headers.get_list(name)
    assert two.headers["Idempotency-Key"]
    assert one.headers["Idempotency-Key"] == two.headers["Idempotency-Key"]
    length = one.headers.get_list("Content-Length") if two.status_code == 204 else [str(two.num_bytes_downloaded)]
    assert two.headers.get_list("Content-Length") == length


def test_the_key_is_echoed_and_repeated_lines_stay_apart(service: Service) -> None:
    tag = uuid.uuid4().hex
    one, two = service.ask(key=tag, tag=tag), service.ask(key=tag, tag=tag)
    assert one.headers["Idempotency-Key"] == two.headers["Idempotency-Key"] == tag
    links = [value for name, value in two.headers.multi_items() if name == "link"]
    assert links == [value for name, value in one.headers.multi_items() if name == "link"]
    # Django itself has one line for a name.
    assert links in (["</a>; rel=a", "</b>; rel=b"], ["</a>; rel=a, </b>; rel=b"])
    assert [value for name, value in two.headers.raw if name.lower() == b"etag"] == [b'"caf\xe9"']
    assert "Set-Cookie" in one.headers


def test_the_headers_are_exposed_where_the_app_answers_cors(service: Service) -> None:
    tag = uuid.uuid4().hex
    answer = service.ask(key=tag, tag=tag)
    exposed = answer.headers["Access-Control-Expose-Headers"]
    assert {"idempotency-key", "idempotent-replayed", "retry-after"} <= set(exposed.lower().split(", "))


@pytest.mark.parametrize("chunked", [False, True], ids=["announced", "in chunks"])
def test_a_body_that_is_too_long_is_refused_and_no_more_of_it_read(service: Service, chunked: bool) -> None:
    """The rest of it is never sent, so whoever waits for it waits for ever; but Django reads all under ASGI."""
    tag = uuid.uuid4().hex
    whole = "tests.http.apps_django " in service.app
    line = "Transfer-Encoding: chunked" if chunked else "Content-Length: 5001"
    head = [
        "POST /bounded HTTP/1.1", "Host: h", f"X-Tag: {tag}", "Authorization: alice", f"Idempotency-Key: {tag}", line,
        "Connection: close", "", "",
    ]  # fmt: skip
    body = LARGE[:5001] if whole else b""
    if chunked:
        body = b"1389\r\n" + LARGE[:5001] + b"\r\n" + (b"0\r\n\r\n" if whole else b"")
    answer = read_all(service.raw("\r\n".join(head).encode() + body))
    assert answer.startswith(b"HTTP/1.1 413 ")
    lines, _, told = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in lines.lower()
    assert json.loads(told)["code"] == "idempotency_body_too_large"
    assert service.runs(tag) == []
    assert service.ask("/bounded", key=tag, tag=tag).status_code == 200


def test_a_dead_store_fails_closed(service: Service) -> None:
    tag = uuid.uuid4().hex
    with service.store_down():
        answer = service.ask(key=tag, tag=tag)
        assert service.runs(tag) == []
    assert answer.status_code == 503
    assert answer.json()["code"] == "idempotency_store_unavailable"
    assert answer.json()["retryable"] is True
    assert int(answer.headers["Retry-After"]) >= 1
    assert "secret-host" not in answer.text
    assert service.ask(key=tag, tag=tag).status_code == 201


@pytest.mark.parametrize("status", [200, pytest.param(503, id="503: nothing happened")])
def test_a_dead_store_fails_open_where_the_route_says_so(service: Service, status: int) -> None:
    tag = uuid.uuid4().hex
    with service.store_down():
        answer = service.ask(f"/open?status={status}", key=tag, tag=tag)
    assert answer.status_code == status
    assert "n" in answer.json()
    assert len(service.runs(tag)) == 1


def test_an_expired_key_is_a_new_request(service: Service) -> None:
    tag = uuid.uuid4().hex
    one = service.ask("/expiring", key=tag, tag=tag)
    while (two := service.ask("/expiring", key=tag, tag=tag)).headers.get("Idempotent-Replayed"):
        assert two.content == one.content
        time.sleep(0.05)
    assert two.status_code == 201
    assert two.content != one.content
    assert len(service.runs(tag)) == 2


def test_a_raw_route_takes_keys_as_they_stand_and_echoes_them_so(service: Service) -> None:
    tag = uuid.uuid4().hex
    for key in (tag, f'"{tag}"', f'"{tag}', f"{tag};a=1"):
        one, two = (service.ask("/verbatim", key=key, tag=tag) for _ in range(2))
        assert two.headers["Idempotent-Replayed"] == "true"
        assert one.headers["Idempotency-Key"] == two.headers["Idempotency-Key"] == key
    assert len(service.runs(tag)) == 4


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS"])
def test_methods_that_change_nothing_ignore_a_key(service: Service, method: str) -> None:
    """Whatever a framework answers to them by itself."""
    tag = uuid.uuid4().hex
    one, two = (service.ask(key=tag, tag=tag, method=method) for _ in range(2))
    assert one.status_code == two.status_code
    for name in ("Idempotency-Key", "Idempotent-Replayed"):
        assert name not in two.headers
    assert service.ask(key=tag, tag=tag).headers.get("Idempotent-Replayed") is None


def test_an_expired_key_may_be_refused_instead(service: Service) -> None:
    tag = uuid.uuid4().hex
    answer = one = service.ask("/no-return", key=tag, tag=tag)
    while answer.status_code == 201:
        assert answer.content == one.content
        answer = service.ask("/no-return", key=tag, tag=tag)
    assert answer.status_code == 422
    check_problem(answer, refused(422, "key_expired", path="/no-return"))
    assert len(service.runs(tag)) == 1


def test_the_handle_knows_its_key_tenant_and_attempt(service: Service) -> None:
    tag = uuid.uuid4().hex
    assert service.ask("/handle", key=tag, tag=tag, user="carol").json() == [tag, "carol", 1, 5]
    assert service.ask("/optional", key=None, tag=tag).json() is None


def test_a_body_is_whole_for_the_application_after_the_claim(service: Service) -> None:
    """Above a mebibyte it was spooled to a file."""
    import hashlib

    tag, body = uuid.uuid4().hex, bytes(range(256)) * 12_000
    size, digest, _ = service.ask("/digest", key=tag, tag=tag, body=body).json()
    assert (size, digest) == (len(body), hashlib.sha256(body).hexdigest())
    chunked = service.ask("/digest", key=tag, tag=tag, body=iter([body[:1000], body[1000:]]))
    assert chunked.headers["Idempotent-Replayed"] == "true"
    other = service.ask("/digest", key=tag, tag=tag, body=iter([body[:1000], body[1001:]]))
    assert other.status_code == 422
