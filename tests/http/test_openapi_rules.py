"""Rules by OpenAPI operation: from the program, from the document itself; and patterns that say what the code does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import KeyFormat, MemoryStore, Policy, Semel, Wait
from semel.core.keys import parse_header
from semel.errors import ConfigurationError, KeyInvalid, PreconditionInvalid
from semel.http.contract.conditional import preconditions
from semel.http.contract.rules import Idempotent, Rule, conditional, exempt, idempotent, natural
from semel.http.describe import document, rules_by_operation
from semel.http.describe.openapi import key_schema, tags_schema
from semel.http.describe.plain_rules import duration_text, plain_rule, rule_from_plain
from semel.http.wsgi import WSGIMiddleware


def spec() -> dict[str, Any]:
    def operation(name: str, **more: Any) -> dict[str, Any]:
        return {"operationId": name, "responses": {"200": {"description": "Done."}}, **more}

    return {
        "openapi": "3.1.0",
        "info": {"title": "Shop", "version": "1"},
        "paths": {
            "/payments": {"post": operation("createPayment"), "get": operation("listPayments")},
            "/payments/{payment-id}": {"patch": operation("changePayment")},
            "/search": {"post": operation("search")},
        },
    }


def test_rules_are_given_by_operation() -> None:
    pay, change = idempotent(ttl="7d"), conditional()
    routes = rules_by_operation(spec(), {"createPayment": pay, "changePayment": change})
    assert routes == {"POST /payments": pay, "PATCH /payments/{payment_id}": change}


def test_the_routes_are_ones_that_a_middleware_takes() -> None:
    routes = rules_by_operation(spec(), {"changePayment": conditional()}, prefix="/api")

    def application(environ: Any, start_response: Any) -> list[bytes]:
        raise AssertionError("it is refused before it gets here")

    with Semel(MemoryStore(), tenant="t") as guard:
        middleware = WSGIMiddleware(application, guard=guard, routes=routes)
    assert middleware.routes.find("PATCH", "/api/payments/42") is routes["PATCH /api/payments/{payment_id}"]


def test_an_unknown_operation_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="createPaymnet; the document has: changePayment, createPayment"):
        rules_by_operation(spec(), {"createPaymnet": idempotent()})
    with pytest.raises(ConfigurationError, match="no operationId at all"):
        rules_by_operation({"openapi": "3.1.0"}, {"createPayment": idempotent()})


def test_an_operation_id_that_is_there_twice_names_none() -> None:
    twice = spec()
    twice["paths"]["/search"]["post"]["operationId"] = "createPayment"
    with pytest.raises(ConfigurationError, match="several operations are called createPayment"):
        rules_by_operation(twice, {"createPayment": idempotent()})


def test_a_get_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="listPayments is a GET"):
        rules_by_operation(spec(), {"listPayments": idempotent()})


def test_the_document_itself_may_say_the_rule_and_the_program_wins() -> None:
    told = spec()
    told["paths"]["/payments"]["post"]["x-idempotency"] = {"class": "action", "ttl": "7d", "key_format": "uuid"}
    told["paths"]["/search"]["post"]["x-idempotency"] = {"class": "exempt", "reason": "reads only"}
    told["paths"]["/payments/{payment-id}"]["patch"]["x-idempotency"] = "conditional"
    routes = rules_by_operation(told)
    pay = routes["POST /payments"]
    assert isinstance(pay, Idempotent)
    assert (pay.under(Policy()).policy.ttl_seconds, pay.key_format.name) == (7 * 86400, "uuid")
    assert routes["POST /search"] == exempt("reads only")
    assert routes["PATCH /payments/{payment_id}"] == conditional()
    other = idempotent(scope="tenant")
    assert rules_by_operation(told, {"createPayment": other})["POST /payments"] is other


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (7, "a rule is an object"),
        ({"class": "reaction"}, "one of action, conditional"),
        ({"class": "action", "tll": "7d"}, "unknown setting tll"),
        ({"class": "action", "ttl": "soon"}, "not a duration"),
        ({"class": "action", "on_abandoned": "recover"}, "a recover hook is code"),
        ({"class": "action", "key_format": {"pattern": "("}}, "no regular expression"),
        ({"class": "action", "key_format": {"name": "uid"}}, "unknown key format 'uid'"),
        ({"class": "action", "key_format": 7}, "cannot be read as a rule"),
        ({"class": "action", "required": "yes"}, "required is a bool, not 'yes'"),
        ({"class": "action", "max_stored_body": "1 MiB"}, "max_stored_body is a int"),
        ({"class": "action", "on_duplicate": {"wait": []}}, "duration"),
        ({"class": "exempt"}, "cannot be read as a rule"),
        ({"class": "natural", "absent": 404}, "cannot be read as a rule"),
    ],
)
def test_a_rule_that_cannot_be_read_names_its_operation(said: Any, complaint: str) -> None:
    told = spec()
    told["paths"]["/payments"]["post"]["x-idempotency"] = said
    with pytest.raises(ConfigurationError, match=f"POST /payments: x-idempotency.*{complaint}"):
        rules_by_operation(told)


@pytest.mark.parametrize(
    "rule",
    [
        idempotent(),
        idempotent(ttl=None, lease="1h30m", guarantee="at_most_once"),
        idempotent(ttl="250ms", on_duplicate=Wait("5s"), on_store_error="open", reject_expired_for="7d"),
        idempotent(on_abandoned="reject", on_interrupted="release"),
        idempotent(required=False, key_mode="strict", key_format=KeyFormat.named("ulid", max_length=26)),
        idempotent(key_format=KeyFormat.matching("ord-[0-9]+", max_length=40), reused_status=409, scope="tenant"),
        idempotent(include=("amount",), fingerprint_headers=("X-Account",), canonical_json=True, external_effects=True),
        idempotent(exclude=("note",), released=frozenset({429}), replay_headers=frozenset({"etag"}), keep_body=False),
        idempotent(replay_marker="x-again", max_stored_body=10),
        conditional(precondition_required=False, required=True),
        natural(absent=frozenset({404})),
        exempt("reads only"),
    ],
)
def test_a_rule_as_plain_data_is_the_same_rule_when_it_is_read_back(rule: Rule) -> None:
    again = rule_from_plain(plain_rule(rule))
    assert type(again) is type(rule)
    assert plain_rule(again) == plain_rule(rule)
    if isinstance(rule, Idempotent) and isinstance(again, Idempotent):
        under, back = rule.under(Policy()), again.under(Policy())
        for name in ("ttl_seconds", "lease_seconds", "wait_seconds", "takeover", "fails_open", "reject_seconds"):
            assert getattr(back.policy, name) == getattr(under.policy, name), name
        settings = set(Idempotent.__dataclass_fields__) - {"policy", "changes", "protect"}
        assert [name for name in settings if getattr(back, name) != getattr(under, name)] == []
    else:
        assert again == rule


def test_a_documented_document_gives_back_the_rules_it_was_made_with() -> None:
    routes: dict[str, Rule] = {
        "POST /payments": idempotent(ttl="7d", guarantee="at_most_once"),
        "PATCH /payments/{payment_id}": conditional(),
        "POST /search": exempt("reads only"),
    }
    again = rules_by_operation(document(spec(), routes))
    assert {place: plain_rule(rule) for place, rule in again.items()} == {
        place: plain_rule(rule) for place, rule in routes.items()
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(86400, "24h"), (172800, "2d"), (5400, "1h30m"), (90, "1m30s"), (0.25, "250ms"), (1.5, "1500ms"), (1e12, None)],
)
def test_durations_are_written_as_policies_read_them(seconds: float, text: str | None) -> None:
    assert duration_text(seconds) == text
    assert Policy(ttl=text).ttl_seconds == Policy(ttl=None if text is None else seconds).ttl_seconds


# Patterns

FORMATS = [
    KeyFormat.named("any"),
    KeyFormat.named("any", max_length=5),
    KeyFormat.named("uuid"),
    KeyFormat.named("ulid"),
    KeyFormat.matching("ord-[0-9]+|x"),
]
PRINTABLE = st.text(st.characters(min_codepoint=32, max_codepoint=128), max_size=12)
KEYS = st.one_of(
    PRINTABLE,
    st.uuids().map(str),
    st.integers(0, 999).map(lambda n: f"ord-{n}"),
    st.from_regex(r"[0-7][0-9A-HJKMNP-TV-Z]{25}", fullmatch=True),
)
FIELDS = st.one_of(
    KEYS,
    KEYS.map(lambda key: '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    KEYS.map(lambda key: f'"{key}";a=1'),
    KEYS.map(lambda key: f'"{key}'),
)


@given(FIELDS, st.sampled_from(FORMATS), st.sampled_from(["auto", "strict", "raw"]))
def test_the_pattern_of_a_key_accepts_what_the_service_accepts(field: str, format: KeyFormat, mode: Any) -> None:
    schema = key_schema(idempotent(key_mode=mode, key_format=format))
    text = field.strip(" \t")  # which is no part of a field's value
    fits = (
        len(text) >= schema["minLength"]
        and len(text) <= schema.get("maxLength", len(text))
        and re.search(schema.get("pattern", ""), text) is not None
    )
    try:
        parse_header(text, mode, format)
    except KeyInvalid:
        if format.name == "any" and ";" not in text:  # elsewhere it may be wider
            assert not fits or text.strip('"').isspace(), schema
    else:
        assert fits, schema


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_a_pattern_that_only_python_reads_is_left_to_the_description(mode: Any) -> None:
    for pattern in (r"(?P<a>x)\Z", r"(?i:x)", r"(?i)x", r"x++"):
        try:
            format = KeyFormat.matching(pattern)
        except ConfigurationError:  # of a later Python
            continue
        assert "pattern" not in key_schema(idempotent(key_mode=mode, key_format=format))
    assert "pattern" in key_schema(idempotent(key_mode=mode, key_format=KeyFormat.matching("(?:x)(?=y)(?!z).*")))


@given(
    st.one_of(
        st.text(st.sampled_from('"W/*, a\t'), max_size=12),
        st.lists(st.from_regex(r'(W/)?"[a-z]{0,3}"', fullmatch=True), max_size=3).map(", ".join),
    )
)
def test_the_pattern_of_a_precondition_accepts_what_the_service_accepts(text: str) -> None:
    fits = re.search(tags_schema()["pattern"], text) is not None
    try:
        preconditions([(b"if-match", text.encode())])
    except PreconditionInvalid:
        assert not fits
    else:
        assert fits
