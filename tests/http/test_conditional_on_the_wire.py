"""Conditional and natural routes, and the report of undeclared ones, over a socket, in each framework."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.apps_documents import ASGI, WSGI
from tests.http.apps_wsgi_server import QUIET

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


class Documents:
    """The service of one framework in a process of its own."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        descriptor = self._socket.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.http.apps_documents", kind, str(descriptor)],
            cwd=ROOT, pass_fds=[descriptor], stdout=self._log, stderr=self._log,
            env={**os.environ, "GUNICORN": json.dumps(QUIET)},
        )  # fmt: skip
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self._socket.getsockname()[1]}", timeout=30, trust_env=False
        )

    def stop(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.wait(20)
        self._socket.close()
        self._log.close()

    def ask(self, method: str, path: str, *, key: str | None = None, **headers: str) -> httpx.Response:
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            lines["Idempotency-Key"] = key
        return self.client.request(method, path, headers=lines)

    def logged(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()


@pytest.fixture(scope="module", params=[*ASGI, *WSGI])
def served(request: pytest.FixtureRequest, starts_process: None) -> Iterator[Documents]:
    served = Documents(request.param)
    yield served
    served.stop()


@pytest.fixture
def id(served: Documents) -> str:
    """A document, in version 1."""
    id = uuid.uuid4().hex
    assert served.ask("PUT", f"/documents/{id}").status_code == 201
    return id


@pytest.fixture
def key() -> str:
    return str(uuid.uuid4())


def problem(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/problem+json", response.text
    assert response.headers["cache-control"] == "no-store"
    found: dict[str, Any] = response.json()
    assert found["status"] == response.status_code
    return found


def test_without_if_match_it_is_428_and_says_how_to_resubmit(served: Documents, id: str) -> None:
    answer = served.ask("PATCH", f"/documents/{id}")
    assert answer.status_code == 428
    found = problem(answer)
    assert found["code"] == "precondition_required"
    assert "If-Match" in found["detail"]
    assert not found["retryable"]
    assert served.ask("GET", f"/documents/{id}").text == '"1"'


def test_428_claims_nothing(served: Documents, id: str, key: str) -> None:
    assert served.ask("PATCH", f"/documents/{id}", key=key).status_code == 428
    assert served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"1"').status_code == 200


def test_the_version_named_is_changed(served: Documents, id: str) -> None:
    answer = served.ask("PATCH", f"/documents/{id}", If_Match='"1"')
    assert (answer.status_code, answer.text, answer.headers["etag"]) == (200, "version 2", '"2"')


@pytest.mark.parametrize("tag", ['"0"', 'W/"1"', '"1x"', '"0", W/"1"'])
def test_another_version_is_412_and_nothing_changes(served: Documents, id: str, tag: str) -> None:
    answer = served.ask("PATCH", f"/documents/{id}", If_Match=tag)
    assert answer.status_code == 412
    assert problem(answer)["code"] == "precondition_failed"
    assert served.ask("GET", f"/documents/{id}").text == '"1"'


@pytest.mark.parametrize("tag", ["*", '"0", "1"', '"1" ,'])
def test_any_of_the_tags_will_do(served: Documents, id: str, tag: str) -> None:
    assert served.ask("PATCH", f"/documents/{id}", If_Match=tag).status_code == 200


def test_nothing_matches_what_is_not_there(served: Documents) -> None:
    assert served.ask("PATCH", "/documents/absent", If_Match="*").status_code == 412


@pytest.mark.parametrize("tag", ["1", '"1', '"1" "2"', ""])
def test_a_malformed_precondition_is_400(served: Documents, id: str, tag: str) -> None:
    answer = served.ask("PATCH", f"/documents/{id}", If_Match=tag)
    assert answer.status_code == 400
    assert problem(answer)["code"] == "precondition_invalid"


def test_a_retry_of_an_applied_change_is_replayed_and_not_412(served: Documents, id: str, key: str) -> None:
    first = served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"1"')
    again = served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"1"')
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content
    assert again.headers["etag"] == first.headers["etag"]
    assert again.headers["idempotent-replayed"] == "true"
    assert served.ask("GET", f"/documents/{id}").text == '"2"'


def test_412_is_never_stored(served: Documents, id: str, key: str) -> None:
    refused = served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"2"')
    assert refused.status_code == 412
    assert refused.headers["idempotency-key"] == key
    assert served.ask("PATCH", f"/documents/{id}", If_Match='"1"').status_code == 200
    answer = served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"2"')
    assert (answer.status_code, answer.text) == (200, "version 3")


def test_the_same_key_with_another_precondition_is_another_request(served: Documents, id: str, key: str) -> None:
    assert served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"1"').status_code == 200
    answer = served.ask("PATCH", f"/documents/{id}", key=key, If_Match='"2"')
    assert answer.status_code == 422
    assert problem(answer)["code"] == "idempotency_key_reused"


def test_where_the_route_allows_it_no_precondition_is_needed(served: Documents, id: str) -> None:
    assert served.ask("PATCH", f"/lenient/{id}").status_code == 200
    assert served.ask("PATCH", f"/lenient/{id}", If_Match='"1"').status_code == 412


def test_where_the_route_wants_a_key_as_well_both_are_needed(served: Documents, id: str, key: str) -> None:
    assert problem(served.ask("PATCH", f"/keyed/{id}", If_Match='"1"'))["code"] == "idempotency_key_missing"
    assert problem(served.ask("PATCH", f"/keyed/{id}", key=key))["code"] == "precondition_required"
    assert served.ask("PATCH", f"/keyed/{id}", key=key, If_Match='"1"').status_code == 200


def test_the_handlers_clean_up_hears_of_a_refusal(served: Documents, id: str) -> None:
    if not served.kind.startswith("fastapi"):
        pytest.skip("has no dependencies that clean up")
    before = int(served.ask("GET", "/failed").text)
    assert served.ask("PATCH", f"/documents/{id}", If_Match='"0"').status_code == 412
    assert int(served.ask("GET", "/failed").text) == before + 1


def test_a_precondition_of_one_request_is_not_the_next_ones(served: Documents, id: str) -> None:
    for _ in range(5):  # over one connection, so that threads are used again
        assert served.ask("PATCH", f"/documents/{id}", If_Match='"0"').status_code == 412
        assert served.ask("PATCH", f"/lenient/{id}").status_code == 200


@pytest.mark.parametrize("with_key", [False, True])
def test_a_second_put_and_a_second_delete_change_nothing(served: Documents, key: str, with_key: bool) -> None:
    sent = key if with_key else None
    id = uuid.uuid4().hex
    assert served.ask("PUT", f"/documents/{id}", key=sent).status_code == 201
    second = served.ask("PUT", f"/documents/{id}", key=sent)
    assert (second.status_code, second.headers["etag"]) == (200, '"1"')
    assert "idempotent-replayed" not in second.headers
    assert served.ask("DELETE", f"/documents/{id}", key=sent).status_code == 204
    absent = served.ask("DELETE", f"/documents/{id}", key=sent)
    assert (absent.status_code, absent.content) == (204, b"")
    assert "content-type" not in absent.headers
    assert served.ask("GET", f"/documents/{id}").status_code == 404


def test_where_the_route_says_so_a_deletion_of_the_absent_is_404(served: Documents) -> None:
    assert served.ask("DELETE", "/strict/absent").status_code == 404


def test_undeclared_routes_are_reported_once_and_exempt_ones_are_not(served: Documents) -> None:
    for _ in range(2):
        assert served.ask("POST", "/documents").text == "posted"
        assert served.ask("POST", "/search").text == "found"
    told = [line for line in served.logged().splitlines() if "will run again if a client retries" in line]
    if served.kind in ("asgi", "wsgi", "wsgi_endpoint"):  # nobody can list the routes of these
        assert told == []
        return
    assert len(told) == 1
    assert "POST /documents" in told[0]
    assert "/search" not in told[0]
    assert "PATCH" not in told[0]
    assert "PUT" not in told[0]
