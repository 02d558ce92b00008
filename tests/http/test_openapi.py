"""What is written into an OpenAPI document: parameters, errors, extensions; and what of the document stays as it is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from openapi_spec_validator import validate

from semel import KeyFormat, MemoryStore, Policy, Semel, Wait
from semel.core.quota import Quota
from semel.errors import ConfigurationError
from semel.http.contract.routes import Endpoint
from semel.http.contract.rules import Rule, conditional, exempt, idempotent, natural
from semel.http.describe import document

VERSIONS = ("3.0.3", "3.1.0", "3.1.1")


def spec_of(*operations: str, version: str = "3.1.0", **more: Any) -> dict[str, Any]:
    """A valid document with these operations, like ``post /orders/{id}``."""
    paths: dict[str, Any] = {}
    for each in operations:
        method, path = each.split()
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        inside = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        operation: dict[str, Any] = {"responses": {"201": {"description": "Made."}}}
        if inside:
            operation["parameters"] = inside
        paths.setdefault(path, {})[method] = operation
    return {"openapi": version, "info": {"title": "Shop", "version": "1"}, "paths": paths, **more}


def documented(rule: Rule, *, method: str = "post", guard: Any = None, **settings: Any) -> dict[str, Any]:
    """One operation under this rule."""
    spec = document(spec_of(f"{method} /orders"), {f"{method.upper()} /orders": rule}, guard=guard, **settings)
    validate(spec)
    found: dict[str, Any] = spec["paths"]["/orders"][method]
    return found


def header(operation: dict[str, Any], name: str) -> dict[str, Any]:
    found = [each for each in operation["parameters"] if each["name"] == name and each["in"] == "header"]
    assert len(found) == 1
    return dict(found[0])


def codes(operation: dict[str, Any]) -> set[tuple[str, str]]:
    """(status, code) of all errors."""
    return {
        (status, code)
        for status, response in operation["responses"].items()
        for code in response.get("content", {}).get("application/problem+json", {}).get("examples", {})
    }


ALWAYS = {
    ("400", "idempotency_key_missing"),
    ("400", "idempotency_key_invalid"),
    ("409", "idempotency_key_in_use"),
    ("413", "idempotency_body_too_large"),
    ("422", "idempotency_key_reused"),
    ("503", "idempotency_store_unavailable"),
}
UNKNOWN = {("500", "idempotency_outcome_unknown")}


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (idempotent(), ALWAYS),
        (idempotent(required=False), ALWAYS - {("400", "idempotency_key_missing")}),
        (
            idempotent(reused_status=409),
            (ALWAYS - {("422", "idempotency_key_reused")}) | {("409", "idempotency_key_reused")},
        ),
        (idempotent(guarantee="at_most_once"), ALWAYS | UNKNOWN),
        (idempotent(on_abandoned="reject"), ALWAYS | UNKNOWN),
        (idempotent(recover=lambda: None), ALWAYS | UNKNOWN),
        (idempotent(on_store_error="open"), ALWAYS - {("503", "idempotency_store_unavailable")}),
        (idempotent(reject_expired_for="7d"), ALWAYS | {("422", "idempotency_key_expired")}),
        (
            conditional(),
            (ALWAYS - {("400", "idempotency_key_missing")})
            | {("400", "precondition_invalid"), ("412", "precondition_failed"), ("428", "precondition_required")},
        ),
        (idempotent(connection=Semel), ALWAYS | {("503", "idempotency_transaction_conflict")}),
        (natural(), set()),
        (exempt("a search"), set()),
    ],
)
def test_an_operation_lists_every_error_that_its_rule_can_answer_with(
    rule: Rule, expected: set[tuple[str, str]]
) -> None:
    assert codes(documented(rule)) == expected


def test_too_many_keys_is_listed_only_where_the_guard_has_a_quota() -> None:
    error = ("429", "idempotency_too_many_keys")
    with Semel(MemoryStore()) as guard, Semel(MemoryStore(), quota=Quota(live_keys=9)) as limited:
        assert error not in codes(documented(idempotent(), guard=guard))
        operation = documented(idempotent(), guard=limited)
    assert error in codes(operation)
    assert "Retry-After" in operation["responses"]["429"]["headers"]


def test_the_policy_of_the_guard_counts() -> None:
    with Semel(MemoryStore(), policy=Policy(guarantee="at_most_once", ttl="7d")) as guard:
        operation = documented(idempotent(), guard=guard)
    assert codes(operation) == ALWAYS | UNKNOWN
    assert operation["x-idempotency"]["ttl"] == "7d"
    assert codes(documented(idempotent(), policy=Policy(on_store_error="open"))) == ALWAYS - {
        ("503", "idempotency_store_unavailable")
    }


def test_errors_that_can_be_retried_have_a_retry_after() -> None:
    responses = documented(idempotent(guarantee="at_most_once"))["responses"]
    retried = {status for status, response in responses.items() if "Retry-After" in response.get("headers", {})}
    assert retried == {"409", "503"}


def test_the_page_of_the_errors_is_a_link() -> None:
    responses = documented(idempotent(), docs="https://docs.example")["responses"]
    assert all("Link" in responses[status]["headers"] for status in ("400", "409", "422", "503"))
    assert "Link" not in documented(idempotent())["responses"]["409"]["headers"]


# The request


def test_the_key_is_required_as_the_rule_says() -> None:
    parameter = header(documented(idempotent()), "Idempotency-Key")
    assert parameter["required"] is True
    assert parameter["example"]
    assert "24h" in parameter["description"]
    optional = header(documented(idempotent(required=False)), "Idempotency-Key")
    assert optional["required"] is False
    assert "not protected" in optional["description"]


def test_a_window_without_end_is_said() -> None:
    assert "for ever" in header(documented(idempotent(ttl=None)), "Idempotency-Key")["description"]


def test_an_example_is_left_out_where_only_the_author_knows_one() -> None:
    parameter = header(documented(idempotent(key_format=KeyFormat.matching("ord-[0-9]+"))), "Idempotency-Key")
    assert "example" not in parameter
    assert "ord-[0-9]+" in parameter["description"]


def test_strict_keys_are_shown_in_quotes() -> None:
    assert header(documented(idempotent(key_mode="strict")), "Idempotency-Key")["example"].startswith('"')


def test_if_match_is_required_of_changes() -> None:
    operation = documented(conditional(), method="patch")
    assert header(operation, "If-Match")["required"] is True
    assert header(operation, "Idempotency-Key")["required"] is False
    assert not [each for each in operation["parameters"] if each["name"] == "If-None-Match"]


def test_a_put_may_also_make_what_is_not_there() -> None:
    operation = documented(conditional(), method="put")
    assert header(operation, "If-Match")["required"] is False
    assert "428" in header(operation, "If-Match")["description"]
    assert header(operation, "If-None-Match")["required"] is False


def test_a_key_that_is_described_already_keeps_its_words_and_gets_the_rules_schema() -> None:
    spec = spec_of("post /orders")
    theirs = {"name": "idempotency-key", "in": "header", "description": "Ours.", "schema": {"type": "integer"}}
    spec["paths"]["/orders"]["post"]["parameters"] = [theirs]
    spec = document(spec, {"POST /orders": idempotent(key_format=KeyFormat.named("uuid"))})
    validate(spec)
    (parameter,) = spec["paths"]["/orders"]["post"]["parameters"]
    assert (parameter["name"], parameter["description"]) == ("idempotency-key", "Ours.")
    assert parameter["required"] is True
    assert parameter["schema"]["type"] == "string"


def test_a_key_that_the_whole_path_shares_is_overridden_for_the_operation_alone() -> None:
    shared = {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}
    spec = spec_of("post /orders", components={"parameters": {"Key": shared}})
    spec["paths"]["/orders"]["parameters"] = [{"$ref": "#/components/parameters/Key"}]
    result = document(spec, {"POST /orders": idempotent()})
    validate(result)
    assert result["paths"]["/orders"]["parameters"] == spec["paths"]["/orders"]["parameters"]
    assert result["components"]["parameters"]["Key"] == shared
    assert header(result["paths"]["/orders"]["post"], "Idempotency-Key")["required"] is True


# The answers


def test_success_shows_the_echo_and_the_mark_of_a_replay() -> None:
    headers = documented(idempotent(replay_marker="x-again"))["responses"]["201"]["headers"]
    assert headers["Idempotency-Key"]
    assert headers["X-Again"]["schema"]["enum"] == ["true", "omitted"]


def test_a_response_that_is_described_already_is_kept_beside_ours() -> None:
    spec = spec_of("post /orders")
    validation = {"description": "Validation Error", "content": {"application/json": {"schema": {"type": "object"}}}}
    spec["paths"]["/orders"]["post"]["responses"]["422"] = validation
    spec = document(spec, {"POST /orders": idempotent()})
    validate(spec)
    response = spec["paths"]["/orders"]["post"]["responses"]["422"]
    assert response["content"]["application/json"] == validation["content"]["application/json"]  # type: ignore[index]
    assert set(response["content"]) == {"application/json", "application/problem+json"}
    assert response["description"].startswith("Validation Error; or ")


def test_problems_of_the_services_own_are_kept_beside_ours() -> None:
    spec = spec_of("post /orders")
    own = {"schema": {"type": "object", "title": "Own"}, "example": {"title": "no funds"}}
    spec["paths"]["/orders"]["post"]["responses"]["409"] = {
        "description": "Conflict.",
        "content": {"application/problem+json": own},
    }
    spec = document(spec, {"POST /orders": idempotent()})
    validate(spec)
    content = spec["paths"]["/orders"]["post"]["responses"]["409"]["content"]["application/problem+json"]
    assert content["schema"]["anyOf"] == [own["schema"], {"$ref": "#/components/schemas/IdempotencyProblem"}]
    assert {"value": {"title": "no funds"}} in content["examples"].values()
    assert "idempotency_key_in_use" in content["examples"]
    assert document(spec, {"POST /orders": idempotent()}) == spec


def test_a_response_that_operations_share_is_not_changed_for_the_others() -> None:
    shared = {"description": "Conflict."}
    spec = spec_of("post /orders", "post /other", components={"responses": {"Conflict": shared}})
    for path in ("/orders", "/other"):
        spec["paths"][path]["post"]["responses"]["409"] = {"$ref": "#/components/responses/Conflict"}
    result = document(spec, {"POST /orders": idempotent()})
    validate(result)
    assert result["components"]["responses"]["Conflict"] == shared
    assert result["paths"]["/other"] == spec["paths"]["/other"]
    assert ("409", "idempotency_key_in_use") in codes(result["paths"]["/orders"]["post"])


def test_a_response_in_another_document_is_left_alone() -> None:
    spec = spec_of("post /orders")
    spec["paths"]["/orders"]["post"]["responses"]["409"] = {"$ref": "shared.json#/Conflict"}
    result = document(spec, {"POST /orders": idempotent()})
    assert result["paths"]["/orders"]["post"]["responses"]["409"] == {"$ref": "shared.json#/Conflict"}


def test_a_delete_of_what_is_not_there_is_a_204() -> None:
    assert "204" in documented(natural(), method="delete")["responses"]
    assert "204" not in documented(natural(absent=frozenset()), method="delete")["responses"]
    assert "204" not in documented(natural(), method="put")["responses"]


# The document


@pytest.mark.parametrize("version", VERSIONS)
def test_the_result_is_valid_in_each_version_and_twice_is_as_once(version: str) -> None:
    spec = spec_of("post /orders", "patch /orders/{id}", "put /orders/{id}", "delete /orders/{id}", version=version)
    routes: dict[str, Rule] = {
        "POST /orders": idempotent(guarantee="at_most_once", on_duplicate=Wait("5s"), reject_expired_for="1h"),
        "PATCH /orders/{id}": conditional(),
        "PUT /orders/{id}": conditional(precondition_required=False, key_mode="raw"),
        "DELETE /orders/{id}": natural(),
    }
    before = copy.deepcopy(spec)
    once = document(spec, routes, docs="https://docs.example")
    assert spec == before, "the given document was changed"
    validate(once)
    assert document(once, routes, docs="https://docs.example") == once
    assert json.loads(json.dumps(once)) == once
    assert once["openapi"] == version


def test_operations_that_are_not_declared_stay_as_they_are() -> None:
    spec = spec_of("post /orders", "post /undeclared", "get /orders")
    endpoints = [
        Endpoint("POST", "/orders", idempotent()),
        Endpoint("POST", "/undeclared", None),
        Endpoint("GET", "/orders", idempotent()),  # the same view, which is never claimed for a GET
    ]
    result = document(spec, endpoints)
    assert result["paths"]["/undeclared"] == spec["paths"]["/undeclared"]
    assert result["paths"]["/orders"]["get"] == spec["paths"]["/orders"]["get"]
    assert "x-idempotency" in result["paths"]["/orders"]["post"]


def test_a_document_without_protected_operations_gets_no_schema() -> None:
    assert "components" not in document(spec_of("post /search"), {"POST /search": exempt("reads only")})


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/orders/{id}", "/orders/{order_id}"),
        ("/orders/{id}", "/orders/{id:int}"),
        ("/orders/{order-id}/x", "/orders/{id}/x"),
        ("/files/{name}", "/files/{name:path}"),
        ("/orders/{id}", "/orders/<int:id>"),
        ("/v1/orders", "/{version}/orders"),
    ],
)
def test_an_endpoint_is_found_whatever_its_parts_are_called(path: str, endpoint: str) -> None:
    result = document(spec_of(f"post {path}"), [Endpoint("POST", endpoint, idempotent())], strict=True)
    assert "x-idempotency" in result["paths"][path]["post"]


def test_a_path_of_its_own_is_no_case_of_one_with_parts() -> None:
    spec = spec_of("post /orders/{id}", "post /orders/search")
    endpoints = [Endpoint("POST", "/orders/{id}", idempotent()), Endpoint("POST", "/orders/search", None)]
    result = document(spec, endpoints)
    assert "x-idempotency" not in result["paths"]["/orders/search"]["post"]
    assert (
        "x-idempotency" not in document(spec_of("post /orders/1/items"), endpoints)["paths"]["/orders/1/items"]["post"]
    )


@pytest.mark.parametrize(
    "servers",
    [
        [{"url": "/api/v1"}],
        [{"url": "https://api.example/api/v1/"}],
        [{"url": "https://{host}/{base}", "variables": {"host": {"default": "h"}, "base": {"default": "api/v1"}}}],
        [{"url": "https://staging.example"}, {"url": "https://api.example/api/v1"}],
    ],
)
def test_what_the_servers_url_says_is_no_part_of_the_path(servers: list[Any]) -> None:
    result = document(spec_of("post /orders", servers=servers), {"POST /api/v1/orders": idempotent()}, strict=True)
    assert "x-idempotency" in result["paths"]["/orders"]["post"]


def test_an_application_that_is_mounted_says_where() -> None:
    result = document(spec_of("post /shop/orders"), {"POST /orders": idempotent()}, prefix="/shop", strict=True)
    assert "x-idempotency" in result["paths"]["/shop/orders"]["post"]


def test_a_protected_endpoint_that_the_document_lacks_is_an_error_when_asked_for() -> None:
    endpoints = [Endpoint("POST", "/hidden", idempotent(), "hide"), Endpoint("PUT", "/plain", natural())]
    assert document(spec_of("post /orders"), endpoints)
    with pytest.raises(ConfigurationError, match=r"POST /hidden \(hide\)"):
        document(spec_of("post /orders"), endpoints, strict=True)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"swagger": "2.0", "paths": {}}, "swagger: '2.0'"),
        ({"openapi": "2.0"}, "not an OpenAPI document"),
        ({"openapi": 3.1}, "not an OpenAPI document"),
        ("openapi: 3.1.0", "not str"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_openapi_document_is_refused(spec: Any, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        document(spec, [])


def test_a_schema_of_the_same_name_is_not_overwritten() -> None:
    spec = spec_of("post /orders", components={"schemas": {"IdempotencyProblem": {"type": "string"}}})
    with pytest.raises(ConfigurationError, match="IdempotencyProblem"):
        document(spec, {"POST /orders": idempotent()})


def test_what_a_yaml_reader_makes_of_a_document_is_taken() -> None:
    spec = spec_of("post /orders", components=None)
    spec["paths"]["/orders"]["post"] = {
        "parameters": None,
        "responses": {201: {"description": "Made.", "headers": None}, 409: {"description": "Taken.", "content": None}},
    }
    result = document(spec, {"POST /orders": idempotent()})
    validate(result)
    responses = result["paths"]["/orders"]["post"]["responses"]
    assert responses["409"]["description"].startswith("Taken; or ")
    assert document(result, {"POST /orders": idempotent()}) == result


def test_a_reference_to_nothing_is_named() -> None:
    spec = spec_of("post /orders")
    spec["paths"]["/orders"]["post"]["responses"]["201"] = {"$ref": "#/components/responses/Made"}
    with pytest.raises(ConfigurationError, match="#/components/responses/Made"):
        document(spec, {"POST /orders": idempotent()})
