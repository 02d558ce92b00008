"""The demo's own OpenAPI document, tried by schemathesis: nothing it says can be asked for ends in a 500, or in an
answer that it does not say.

Not asked for are checks of what a contract of keys and versions means otherwise: that each request which the document
allows is accepted (a key may have been used before, a version may be an old one), that a missing If-Match is 400 (it is
428), and that what was created is there (a replay tells of it, also after it was deleted).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.http.payments_service import ALICE, Payments, serving

pytestmark = [pytest.mark.slow]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
OPERATIONS = [
    ("GET", "/payments"),
    ("POST", "/payments"),
    ("GET", "/payments/{id}"),
    ("PATCH", "/payments/{id}"),
    ("DELETE", "/payments/{id}"),
    ("POST", "/refunds"),
    ("PUT", "/customers/{id}"),
    ("GET", "/stats"),
]
BOUNDED = settings(
    max_examples=15,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, starts_process: None) -> Iterator[Payments]:
    with serving(tmp_path_factory.mktemp("schemathesis")) as running:
        yield running


@pytest.fixture(scope="module")
def document(service: Payments) -> Any:
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


def test_all_operations_of_the_document_are_tried(document: Any) -> None:
    found = [each.ok() for each in document.get_all_operations()]
    assert sorted((each.method.upper(), each.path) for each in found) == sorted(OPERATIONS)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[" ".join(each) for each in OPERATIONS])
def test_whatever_is_sent_is_answered_as_the_document_says(
    document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and path == "/stats":
        return  # nothing can be said to it, and so nothing wrong

    @BOUNDED
    @given(case=document[path][method].as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        statuses.add(case.call_and_validate(headers=ALICE, checks=CHECKS).status_code)

    statuses: set[int] = set()
    holds()
    if mode is GenerationMode.POSITIVE and "{id}" not in path and path != "/refunds":
        assert statuses & {200, 201}, "what the document allows is hardly ever accepted"


@pytest.mark.parametrize("method", ["GET", "PATCH"])
def test_so_it_is_for_a_payment_that_is_there(document: Any, service: Payments, method: str) -> None:
    made = service.pay().json()["id"]
    statuses = set()

    @BOUNDED
    @given(case=document["/payments/{id}"][method].as_strategy(path_parameters={"id": made}))
    def holds(case: Any) -> None:
        statuses.add(case.call_and_validate(headers=ALICE, checks=CHECKS).status_code)

    holds()
    assert 404 not in statuses
    assert statuses & {200, 412}


def test_its_own_run_finds_nothing_either(service: Payments, tmp_path: Path) -> None:
    """Boundary values of every parameter, and calls that build on each other's answers."""
    names = [check.__name__ for check in CHECKS] + ["negative_data_rejection", "ignored_auth", "unsupported_method"]
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{service.url}/openapi.json", "--no-color"),
        *("--header", f"Authorization: {ALICE['Authorization']}", "--checks", ",".join(names)),
        *("--generation-deterministic", "--max-examples", "5", "--phases", "examples,coverage,stateful"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "Tested: 8" in run.stdout
