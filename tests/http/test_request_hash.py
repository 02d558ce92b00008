"""The fingerprint of an HTTP request: the same for the same request only, however its body is cut into chunks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import MemoryStore, Semel
from semel.core.encoding.canonical import canonical_json, parse_json, select_fields
from semel.errors import PolicyError
from semel.http.contract.exchange import Exchange
from semel.http.contract.rules import Idempotent, idempotent

GUARD = Semel(MemoryStore(), sweep_every=None)
lines = st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=4)), max_size=3)
requests = st.tuples(
    st.text("abc:0123456789", max_size=4), st.text("/abé:0123456789", max_size=4), st.binary(max_size=4), lines,
    st.none() | st.binary(max_size=5), st.binary(max_size=5),
)  # fmt: skip
Request = tuple[str, str, bytes, list[tuple[bytes, bytes]], bytes | None, bytes]


def digest(*chunks: bytes, document: bytes | None = None, secret: bytes | None = None, path: str = "/pay") -> bytes:
    request = Exchange("POST", path, b"a=1", [], secret=secret)
    for chunk in chunks:
        request.feed(chunk)
    return request.digest([(b"content-type", b"text/plain")], document)


def digest_of(request: Request) -> bytes:
    method, path, query, headers, document, body = request
    exchange = Exchange(method, path, query, [])
    exchange.feed(body)
    return exchange.digest(headers, document)


def test_its_bytes_never_change() -> None:
    # Records outlive releases: another value here makes a conflict of every retry under way.
    assert digest(b"{", b"}").hex() == "25e9a5d9f44735de8251588972e1f9ac"
    assert digest(b"{}", secret=b"s").hex() == "c9bd0c3b35b47227f708e3f3134da3d3"
    assert digest(b"{}", document=b"{}").hex() == "82c59747c05b13e2268ee14573ff40fd"


@given(requests, requests)
def test_equal_requests_and_only_they_have_equal_digests(one: Request, other: Request) -> None:
    def counted(request: Request) -> Request:
        return request if request[4] is None else (*request[:5], b"")  # with a document, the body's bytes do not count

    assert (digest_of(one) == digest_of(other)) == (counted(one) == counted(other))


@given(st.lists(st.binary(max_size=50), max_size=6), st.sampled_from([None, b"secret"]))
def test_how_a_body_is_cut_does_not_matter(chunks: list[bytes], secret: bytes | None) -> None:
    assert digest(*chunks, secret=secret) == digest(b"".join(chunks), secret=secret)


def test_a_changed_body_is_another_request() -> None:
    bodies = [b"", b"a", b"ab", b"abc", b"ba", b"\x00", b"\x00\x00"]
    assert len({digest(body) for body in bodies}) == len(bodies)


def test_the_query_string_counts_apart_from_the_path() -> None:
    def of(path: str, query: bytes) -> bytes:
        return Exchange("POST", path, query, []).digest([], None)

    assert of("/a", b"x=1") != of("/a", b"x=2")
    assert of("/a?x=1", b"") != of("/a", b"x=1")


def test_a_body_cannot_pose_as_a_body_and_a_header() -> None:
    honest = Exchange("POST", "/pay", b"a=1", [])
    honest.feed(b"x")
    forged = [digest(b"x" + tail) for tail in (b"h4:type4:text", b"1:h4:type4:text", b"4:type4:text")]
    assert honest.digest([(b"type", b"text")], None) not in forged


def test_a_secret_makes_it_a_mac() -> None:
    secrets = [None, b"a", b"b", b"k" * 64, b"k" * 65, b"k" * 66, b"k" * 1000]
    assert len({digest(b"5", secret=secret) for secret in secrets}) == len(secrets)
    assert len({digest(document=b"5", secret=secret) for secret in secrets}) == len(secrets)


def test_an_empty_secret_is_a_policy_error() -> None:
    with pytest.raises(PolicyError, match="secret is empty"):
        Exchange("POST", "/pay", b"", [], secret=b"")


def test_the_order_of_names_in_a_json_document_does_not_count() -> None:
    def of(body: bytes) -> bytes:
        return digest(document=canonical_json(parse_json(body)))

    one, other, changed = b'{"a": 1, "b": [2.0]}', b'{"b":[2],"a":1}', b'{"b":[2],"a":2}'
    assert of(one) == of(other) != of(changed)


def test_an_excluded_field_does_not_count() -> None:
    def of(body: bytes) -> bytes:
        return digest(document=canonical_json(select_fields(parse_json(body), exclude=["trace"])))

    assert of(b'{"amount":5,"trace":"a"}') == of(b'{"amount":5,"trace":"b"}') == of(b'{"amount":5}')
    assert of(b'{"amount":5}') != of(b'{"amount":6}')


def exchange_of(body: bytes, rule: Idempotent, *headers: tuple[bytes, bytes]) -> bytes:
    exchange = Exchange("POST", "/pay", b"", headers)
    for at in range(0, len(body), 100):
        exchange.feed(body[at : at + 100])
    return exchange.fingerprint(rule)


@pytest.mark.parametrize(
    "rule", [idempotent(include=("amount",)), idempotent(exclude=("sent_at",))], ids=["include", "exclude"]
)
@pytest.mark.parametrize("depth", [100, 600, 5000, 100_000])
def test_a_deeply_nested_body_has_a_fingerprint_on_routes_with_chosen_fields(rule: Idempotent, depth: int) -> None:
    def nested(member: bytes, value: bytes) -> bytes:
        return b'{"%b":%b' % (member, value) + b',"a":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"

    one, other = nested(b"amount", b"5"), nested(b"amount", b"6")
    assert exchange_of(one, rule) == exchange_of(one, rule)
    assert exchange_of(one, rule) != exchange_of(other, rule)


def test_bodies_without_any_of_the_chosen_fields_are_compared_as_a_whole() -> None:
    rule = idempotent(include=("amount", "items.*.sku"))
    bodies = [b"{}", b'{"x":1}', b'{"x":2}', b'{"items":[{"n":1}]}', b'{"items":[{"n":2}]}', b"1", b"2", b"no json"]
    assert len({exchange_of(body, rule) for body in bodies}) == len(bodies)
    assert exchange_of(b'{"amount":5,"x":1}', rule) == exchange_of(b'{"amount":5,"x":2}', rule)


@pytest.mark.parametrize("path", ["items[0].sku", "items[", "a..b", ""])
@pytest.mark.parametrize("setting", ["include", "exclude"])
def test_a_field_that_cannot_be_named_so_is_refused_when_the_route_is_declared(path: str, setting: Any) -> None:
    with pytest.raises(PolicyError, match=r"items\.\*\.sku"):
        idempotent(**{setting: (path,)})


@given(
    st.text("/abé:0123456789", min_size=1, max_size=4),
    st.binary(max_size=4),
    st.lists(st.tuples(st.sampled_from([b"content-type", b"if-match", b"x-other"]), st.binary(max_size=4)), max_size=3),
    st.lists(st.binary(max_size=50), max_size=3),
)
def test_the_short_way_to_the_fingerprint_of_a_plain_rule_is_the_long_one(
    path: str, query: bytes, headers: list[tuple[bytes, bytes]], chunks: list[bytes]
) -> None:
    exchange, rule = Exchange("POST", path, query, headers), idempotent()
    for chunk in chunks:
        exchange.feed(chunk)
    assert exchange.call(GUARD, rule, "k", None).fingerprint == exchange.fingerprint(rule)
