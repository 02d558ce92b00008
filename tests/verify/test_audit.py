"""The audit of an OpenAPI document: how writes are classed, and what each rule finds and leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

from semel.errors import ConfigurationError
from semel.http.contract.rules import conditional, exempt, idempotent, natural
from semel.http.describe.openapi import document
from semel.verify.audit import Audit, audit
from semel.verify.findings import failed

KEY = {"in": "header", "name": "Idempotency-Key", "required": True, "schema": {"type": "string"}}
MATCH = {"in": "header", "name": "If-Match", "schema": {"type": "string"}}
ANSWERS: dict[str, Any] = {status: {"description": "…"} for status in ("200", "400", "409", "422")}


def judged(method: str, path: str = "/payments", *, components: Any = None, **operation: Any) -> Audit:
    spec: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Shop", "version": "1"},
        "components": components or {},
    }
    return audit({**spec, "paths": {path: {method: {"responses": ANSWERS, **operation}}}})


def rules(result: Audit) -> list[str]:
    return [finding.rule for finding in result.findings]


def body(*names: str, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}
    return {"content": {"application/json": {"schema": schema}}}


def test_an_action_without_a_key_is_an_error() -> None:
    result = judged("post")
    assert rules(result) == ["key-missing"]
    assert failed(result.findings)
    assert result.writes[0].kind == "action"


def test_an_action_with_a_required_key_is_fine() -> None:
    assert rules(judged("post", parameters=[KEY])) == []


def test_the_parameters_of_the_path_and_references_count() -> None:
    spec = {
        "openapi": "3.0.3",
        "info": {},
        "components": {"parameters": {"a/b~c": {**KEY, "name": "X-Idempotency-Key"}}},
        "paths": {
            "/payments": {
                "parameters": [{"$ref": "#/components/parameters/a~1b~0c"}],
                "post": {"responses": ANSWERS},
            }
        },
    }
    assert rules(audit(spec)) == []


def test_an_optional_key_is_a_warning() -> None:
    result = judged("post", parameters=[{**KEY, "required": False}])
    assert rules(result) == ["key-optional"]
    assert not failed(result.findings)


def test_a_key_in_the_body_is_a_key() -> None:
    assert rules(judged("post", requestBody=body("amount", "idempotency_key", required=["idempotency_key"]))) == []
    assert rules(judged("post", requestBody=body("amount", "idempotency_key"))) == ["key-optional"]


def test_another_header_can_be_named() -> None:
    spec = {
        "openapi": "3.1.0",
        "paths": {"/p": {"post": {"parameters": [{**KEY, "name": "Request-Id"}], "responses": ANSWERS}}},
    }
    assert rules(audit(spec)) == ["key-missing"]
    assert rules(audit(spec, header="request-ID")) == []


@pytest.mark.parametrize("statuses", [["200"], ["200", "400"], ["200", "409", "422"]])
def test_errors_of_a_key_that_are_not_documented_are_a_warning(statuses: list[str]) -> None:
    result = judged("post", parameters=[KEY], responses={status: {} for status in statuses})
    assert rules(result) == ["errors-undocumented"]
    missing = {"400", "409", "422"} - set(statuses)
    assert all(status in result.findings[0].message for status in missing)


@pytest.mark.parametrize("status", ["default", "4XX", "4xx"])
def test_a_range_of_statuses_documents_them(status: str) -> None:
    assert rules(judged("post", parameters=[KEY], responses={"200": {}, status: {}})) == []


def test_a_patch_needs_a_version_or_a_key() -> None:
    assert rules(judged("patch")) == ["patch-unconditional"]
    assert rules(judged("patch", parameters=[MATCH])) == []
    assert rules(judged("patch", parameters=[KEY])) == []


@pytest.mark.parametrize("name", ["delta", "quantity_delta", "incrementBy", "addItems", "adjustment", "remove-tags"])
def test_a_put_that_takes_a_change_is_an_error(name: str) -> None:
    result = judged("put", "/stock/{id}", requestBody=body("sku", name))
    assert rules(result) == ["put-delta"]
    assert name in result.findings[0].message


@pytest.mark.parametrize("name", ["address", "additional_info", "quantity", "deltas_seen_at", "removed", "add"])
def test_a_put_that_takes_a_state_is_fine(name: str) -> None:
    assert rules(judged("put", "/stock/{id}", requestBody=body("sku", name))) == []


def test_a_change_is_found_in_the_parts_of_a_schema() -> None:
    schemas = {
        "Stock": {"allOf": [{"$ref": "#/components/schemas/Change"}, {"$ref": "#/components/schemas/Stock"}]},
        "Change": {"properties": {"increment": {}}},
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Stock"}}}
    result = judged("put", components={"schemas": schemas}, requestBody={"content": content})
    assert rules(result) == ["put-delta"]


@pytest.mark.parametrize(
    ("method", "path", "name", "kind"),
    [
        ("post", "/orders", "createOrder", "action"),
        ("post", "/orders/search", "", "query"),
        ("post", "/accounts/get", "", "query"),
        ("post", "/v1/orders", "findOrders", "query"),
        ("post", "/CredentialLists", "CreateCredentialList", "action"),
        ("post", "/check-suites", "checks/create-suite", "action"),
        ("post", "/signal/evaluate", "signalEvaluate", "query"),
        ("post", "/b/{bucket}/o", "storage.objects.insert", "action"),
        ("post", "/Messages/{Sid}.json", "UpdateMessage", "conditional"),
        ("post", "/item/webhook/update", "itemWebhookUpdate", "conditional"),
        ("post", "/item/remove", "itemRemove", "natural"),
        ("post", "/runners/remove-token", "actions/create-remove-token", "action"),
        ("put", "/orders/{id}", "", "natural"),
        ("delete", "/orders/{id}", "", "natural"),
        ("patch", "/orders/{id}", "", "conditional"),
    ],
)
def test_writes_are_classed_by_method_and_names(method: str, path: str, name: str, kind: str) -> None:
    assert judged(method, path, operationId=name).writes[0].kind == kind


def test_a_post_with_a_key_is_an_action_whatever_its_name_is() -> None:
    assert judged("post", "/items/remove", parameters=[KEY]).writes[0].kind == "action"


def test_references_that_go_round_end() -> None:
    again = {"$ref": "#/components/schemas/A"}
    schemas = {"A": {"allOf": [again] * 20, "properties": {"delta": {}}}}
    content = {"application/json": {"schema": again}}
    result = judged("put", components={"schemas": schemas}, requestBody={"content": content})
    assert rules(result) == ["put-delta"]


def test_an_operation_is_found_behind_a_reference_of_its_path() -> None:
    document = {
        "openapi": "3.1.0",
        "paths": {"/pay": {"$ref": "#/components/pathItems/Pay"}, "/odd": {"$ref": "#/paths/~1odd"}},
        "components": {"pathItems": {"Pay": {"post": {}}}},
    }
    assert rules(audit(document)) == ["key-missing"]


def test_a_class_that_is_declared_counts_more_than_names() -> None:
    result = judged("post", **{"x-idempotency": {"class": "natural"}})
    assert (result.writes[0].kind, rules(result)) == ("natural", [])
    assert rules(judged("post", "/search", **{"x-idempotency": {"class": "action"}})) == ["key-missing"]


def test_reads_are_left_alone() -> None:
    assert judged("get").writes == ()


def test_what_is_in_other_files_is_reported_once_and_not_judged() -> None:
    spec = {
        "openapi": "3.0.0",
        "paths": {
            "/a": {"post": {"$ref": "a.yaml"}, "put": {"$ref": "b.yaml"}},
            "/b": {"$ref": "c.yaml"},
        },
    }
    result = audit(spec)
    assert rules(result) == ["elsewhere"]
    assert "3 parts" in result.findings[0].message
    assert result.writes == ()


def test_what_semel_writes_into_a_document_passes() -> None:
    def plain() -> dict[str, Any]:
        return {"responses": {"200": {"description": "fine"}}}

    spec = {
        "openapi": "3.1.0",
        "info": {"title": "Shop", "version": "1"},
        "paths": {
            "/payments": {"post": plain()},
            "/search": {"post": plain()},
            "/orders/{id}": {"patch": plain(), "put": plain()},
        },
    }
    routes = {
        "POST /payments": idempotent(),
        "POST /search": exempt("it reads only"),
        "PATCH /orders/{id}": conditional(),
        "PUT /orders/{id}": natural(),
    }
    result = audit(document(spec, routes))
    assert rules(result) == []
    assert [each.kind for each in result.writes] == ["action", "exempt", "natural", "conditional"]


@pytest.mark.parametrize("wrong", [[], {"swagger": "2.0"}, {"openapi": "2.0"}, "text", None])
def test_what_is_no_document_of_version_3_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        audit(wrong)


@pytest.mark.parametrize(
    "paths",
    [
        None,
        {"/a": None},
        {"/a": {"post": None}},
        {"/a": {"post": {"parameters": [None, "x", {"$ref": "#/nowhere"}], "responses": [], "requestBody": 3}}},
        {"/a": {"put": {"requestBody": {"content": {"x": {"schema": {"allOf": [1], "properties": []}}}}}}},
    ],
)
def test_a_malformed_document_does_not_break_the_audit(paths: Any) -> None:
    audit({"openapi": "3.0.0", "paths": paths})
