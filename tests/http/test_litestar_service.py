"""What is Litestar's own on the wire; the rows of the contract run on its services with all the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.http.conftest import Served, request_bytes

pytestmark = pytest.mark.process


@pytest.mark.parametrize("kind", ["litestar", "litestar_sync"])
def test_a_request_that_is_not_valid_makes_no_claim(serving: Callable[[str], Served], kind: str, key: str) -> None:
    service = serving(kind)
    answer = service.post("/plain", key, ["no", "object"])
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert service.admin("record", operation="POST /plain", key=key) is None
    assert service.post("/plain", key, {}).status_code == 201


def test_a_path_is_the_same_with_its_closing_slash(serving: Callable[[str], Served], key: str, word: str) -> None:
    """As it is for Litestar's router."""
    service = serving("litestar")
    body = b'{"ledger": "%s"}' % word.encode()
    for path in ("/plain", "/plain/"):
        assert service.exchange(request_bytes(path, body, key=key))[0] == 201
    assert service.runs(word) == 1


def test_undeclared_routes_are_told_in_the_servers_log(serving: Callable[[str], Served]) -> None:
    service = serving("litestar")
    service.post("/undeclared", None)
    assert service.log.read_text().count("POST /undeclared (undeclared)") == 1
