"""Multipart and compressed bodies: a retry with a new boundary or time stamp is the same request, if the route asks."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from typing import Any

import flask
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import MemoryStore, Semel
from semel.http import flask as for_flask
from semel.http.contract.exchange import DOCUMENT_LIMIT, MOST_PARTS, Exchange, decompress
from semel.http.contract.rules import Idempotent, idempotent
from tests.http.asking import Counting, ask, at_the_edge, header, scope_of

PLAIN, PARTS = idempotent(), idempotent(compare_parts=True)
DECOMPRESSED = idempotent(compare_decompressed=True)
FORM = b"multipart/form-data; boundary="


def fingerprint(rule: Idempotent, body: bytes, *headers: tuple[bytes, bytes], cut: int = 1000) -> bytes:
    exchange = Exchange("POST", "/pay", b"", headers)
    for at in range(0, len(body), cut):
        exchange.feed(body[at : at + cut])
    return exchange.fingerprint(rule)


def multipart(boundary: bytes, *contents: bytes) -> bytes:
    parts = [b'--%b\r\nContent-Disposition: form-data; name="a"\r\n\r\n%b\r\n' % (boundary, each) for each in contents]
    return b"".join(parts) + b"--%b--\r\n" % boundary


def of_form(rule: Idempotent, boundary: bytes, *contents: bytes, cut: int = 1000) -> bytes:
    return fingerprint(rule, multipart(boundary, *contents), (b"content-type", FORM + boundary), cut=cut)


contents = st.lists(st.binary(max_size=30) | st.sampled_from([b"--", b"\r\n--", b"\r\n--b", b"\r\n"]), max_size=4)


@given(contents, contents, st.integers(1, 40), st.integers(1, 40))
def test_parts_are_compared_without_the_boundary(
    one: list[bytes], other: list[bytes], first_cut: int, second_cut: int
) -> None:
    first = of_form(PARTS, b"0123456789abcdef", *one, cut=first_cut)
    assert first == of_form(PARTS, b"another-boundary-of-another-length", *one, cut=second_cut)
    assert (first == of_form(PARTS, b"fedcba9876543210", *other, cut=second_cut)) == (one == other)


@given(contents, st.integers(1, 40))
def test_without_the_setting_the_boundary_counts_and_the_cut_does_not(parts: list[bytes], cut: int) -> None:
    assert of_form(PLAIN, b"one-boundary", *parts) == of_form(PLAIN, b"one-boundary", *parts, cut=cut)
    assert of_form(PLAIN, b"one-boundary", *parts) != of_form(PLAIN, b"two-boundary", *parts)


@pytest.mark.parametrize(
    "other",
    [
        b"multipart/form-data; boundary=two; charset=utf-8",
        b"multipart/mixed; boundary=two",
        b"application/octet-stream",
    ],
)
def test_the_rest_of_the_content_type_counts(other: bytes) -> None:
    body = multipart(b"two", b"x")
    assert of_form(PARTS, b"one", b"x") != fingerprint(PARTS, body, (b"content-type", other))


@pytest.mark.parametrize("spelling", [b'boundary="two"', b"Boundary=two", b'BOUNDARY="two"'])
def test_a_boundary_may_be_quoted(spelling: bytes) -> None:
    form = (b"content-type", b"multipart/form-data; " + spelling)
    assert fingerprint(PARTS, multipart(b"two", b"x"), form) == of_form(PARTS, b"one", b"x")


@pytest.mark.parametrize("form", [b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/"])
def test_a_body_without_a_boundary_is_compared_by_its_bytes(form: bytes) -> None:
    line = (b"content-type", form)
    assert fingerprint(PARTS, b"a", line) == fingerprint(PARTS, b"a", line) != fingerprint(PARTS, b"b", line)


def test_what_stands_before_behind_and_around_the_parts_counts() -> None:
    whole = multipart(b"one", b"x")
    bodies = [
        whole,
        b"before\r\n" + whole,
        whole + b"behind",
        whole[:-4],
        whole[:-6],
        whole.replace(b"--\r\n", b"\r\n"),
    ]
    line = (b"content-type", FORM + b"one")
    assert len({fingerprint(PARTS, body, line) for body in bodies}) == len(bodies)


def test_behind_ten_thousand_parts_the_boundary_counts() -> None:
    few, many = [b"x"] * (MOST_PARTS - 1), [b"x"] * (MOST_PARTS + 1)
    assert of_form(PARTS, b"one", *few, cut=65536) == of_form(PARTS, b"two", *few, cut=777)
    assert of_form(PARTS, b"one", *many, cut=65536) != of_form(PARTS, b"two", *many, cut=65536)
    assert of_form(PARTS, b"one", *many, cut=65536) == of_form(PARTS, b"one", *many, cut=777)


def zipped(body: bytes, time: int) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", mtime=time) as file:
        file.write(body)
    return out.getvalue()


GZIP = (b"content-encoding", b"gzip")


def test_compressed_bodies_are_compared_by_what_they_decompress_to() -> None:
    body = b"an order " * 100
    first = fingerprint(DECOMPRESSED, zipped(body, 1), GZIP)
    assert first == fingerprint(DECOMPRESSED, zipped(body, 2), GZIP, cut=7)
    assert first == fingerprint(DECOMPRESSED, zlib.compress(body), (b"content-encoding", b"deflate"))
    assert first == fingerprint(DECOMPRESSED, zipped(body[:50], 3) + zipped(body[50:], 4), GZIP)
    assert first == fingerprint(DECOMPRESSED, body)
    assert first != fingerprint(DECOMPRESSED, zipped(body + b"!", 1), GZIP)
    assert fingerprint(PLAIN, zipped(body, 1), GZIP) != fingerprint(PLAIN, zipped(body, 2), GZIP)


def test_json_and_parts_are_found_in_compressed_bodies() -> None:
    rule = idempotent(compare_decompressed=True, exclude=("sent_at",), compare_parts=True)
    one = fingerprint(rule, zipped(b'{"a": 1, "sent_at": 5}', 1), GZIP)
    assert one == fingerprint(rule, zipped(b'{"sent_at":6,"a":1}', 2), GZIP)
    assert one != fingerprint(rule, zipped(b'{"a":2}', 2), GZIP)
    forms = [
        fingerprint(rule, zipped(multipart(boundary, b"x"), 1), GZIP, (b"content-type", FORM + boundary))
        for boundary in (b"one", b"three")
    ]
    assert forms[0] == forms[1] == of_form(rule, b"two", b"x")


@pytest.mark.parametrize(
    "body",
    [
        b"no gzip at all",
        zipped(b"cut short", 1)[:-3],
        zipped(b"changed", 1)[:-1] + b"\x99",
        zipped(bytes(DOCUMENT_LIMIT + 1), 1),
        zipped(b"", 1) * 100,
        b"",
    ],
    ids=["foreign", "cut", "corrupt", "bomb", "members", "empty"],
)
def test_what_cannot_be_decompressed_is_compared_by_its_bytes(body: bytes) -> None:
    assert decompress(body, DOCUMENT_LIMIT) is None
    assert fingerprint(DECOMPRESSED, body, GZIP) == fingerprint(DECOMPRESSED, body, GZIP, cut=7)
    assert fingerprint(DECOMPRESSED, body, GZIP) != fingerprint(DECOMPRESSED, body + b"x", GZIP)


@pytest.mark.parametrize("coding", [b"br", b"gzip, gzip", b"identity"])
def test_other_codings_are_compared_by_their_bytes(coding: bytes) -> None:
    body = zipped(b"x", 1)
    assert fingerprint(DECOMPRESSED, body, (b"content-encoding", coding)) == fingerprint(PLAIN, body)


# On the wire


TRIES = {
    "parts": [(multipart(each, b"file"), [(b"content-type", FORM + each)]) for each in (b"first-try", b"second")],
    "gzip": [(zipped(b"order", time), [GZIP]) for time in (1, 2)],
}


@pytest.mark.parametrize("kind", ["parts", "gzip"])
@pytest.mark.parametrize("asked", [True, False])
def test_a_retry_is_replayed_where_the_route_asks_for_it(kind: str, asked: bool) -> None:
    rule = idempotent(compare_parts=asked, compare_decompressed=asked)
    app = Counting()
    guarded = at_the_edge(app, rule=rule)

    async def run() -> list[Any]:
        answers = []
        for body, headers in TRIES[kind]:
            scope = scope_of()
            scope["headers"] += headers
            answers.append(await ask(guarded, scope, body[:9], body[9:]))
        return answers

    first, second = asyncio.run(run())
    assert first[0]["status"] == 200
    assert second[0]["status"] == (200 if asked else 422)
    assert bool(header(second, b"idempotent-replayed")) is asked
    assert app.runs == 1


@pytest.mark.parametrize("kind", ["parts", "gzip"])
@pytest.mark.parametrize("asked", [True, False])
def test_in_flask_too_whose_handler_gets_the_body_as_it_was_sent(kind: str, asked: bool) -> None:
    app = flask.Flask("pay")
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=lambda request: "alice")
    seen: list[bytes] = []

    @app.post("/pay")
    @for_flask.idempotent(compare_parts=asked, compare_decompressed=asked)
    def pay() -> str:
        seen.append(flask.request.get_data())
        return "paid"

    answers = [
        app.test_client().post(
            "/pay",
            data=body,
            headers=[("Idempotency-Key", "k"), *((name.decode(), value.decode()) for name, value in headers)],
        )
        for body, headers in TRIES[kind]
    ]
    assert [answer.status_code for answer in answers] == [200, 200 if asked else 422]
    assert seen == [TRIES[kind][0][0]]
