"""A document held against a running service: what it answers is what was documented."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from fastapi import FastAPI, Header

from semel import AsyncMemoryStore, AsyncSemel, Policy
from semel.core.quota import Quota
from semel.http.contract.conditional import check_match, etag
from semel.http.describe import document
from semel.http.fastapi import conditional, idempotent, install
from tests.http.apps_asgi import DOCS
from tests.http.behaviour import table
from tests.http.conftest import Served


def documented_service() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for method, path in map(str.split, table()):
        paths.setdefault(path, {})[method.lower()] = {"responses": {"201": {"description": "Made."}}}
    spec = {"openapi": "3.1.0", "info": {"title": "Test", "version": "1"}, "paths": paths}
    return document(spec, table(), policy=Policy(completion_timeout="100ms"), docs=DOCS, strict=True)


SPEC = documented_service()


@pytest.fixture(params=["starlette", "asgi"])
def served(request: pytest.FixtureRequest, serving: Callable[..., Served]) -> Served:
    return serving(request.param)


def hold(spec: dict[str, Any], path: str, answer: httpx.Response, code: str, method: str = "post") -> None:
    """The answer is a problem with this code, and the operation says so, with an example that is like it."""
    response = spec["paths"][path][method]["responses"][str(answer.status_code)]
    content = response["content"]["application/problem+json"]
    assert content["schema"] == {"$ref": "#/components/schemas/IdempotencyProblem"}
    assert answer.headers["Content-Type"] == "application/problem+json", answer.text
    real = answer.json()
    assert real["code"] == code
    schema = {**spec["components"]["schemas"]["IdempotencyProblem"], "additionalProperties": False}
    jsonschema.validate(real, schema, format_checker=jsonschema.FormatChecker())
    example = content["examples"][code]["value"]
    jsonschema.validate(example, schema)
    apart = {"instance", "retry_after"} | ({"detail"} if code == "idempotency_key_invalid" else set())
    assert {k: v for k, v in example.items() if k not in apart} == {k: v for k, v in real.items() if k not in apart}
    assert set(example) == set(real)
    assert content["examples"][code]["summary"] == real["title"]
    headers = response.get("headers", {})
    assert ("Retry-After" in headers) >= ("Retry-After" in answer.headers)
    assert ("Link" in headers) == ("Link" in answer.headers)


def test_refusals_of_keys(served: Served, key: str) -> None:
    hold(SPEC, "/plain", served.post("/plain", None), "idempotency_key_missing")
    hold(SPEC, "/plain", served.post("/plain", '"half'), "idempotency_key_invalid")
    hold(SPEC, "/uuid", served.post("/uuid", "no-uuid"), "idempotency_key_invalid")
    hold(SPEC, "/strict", served.post("/strict", "bare"), "idempotency_key_invalid")


@pytest.mark.parametrize("path", ["/plain", "/reused-409", "/reused-400"])
def test_a_key_that_comes_with_another_request(served: Served, key: str, path: str) -> None:
    assert served.post(path, key, {"text": "one"}).status_code == 201
    hold(SPEC, path, served.post(path, key, {"text": "two"}), "idempotency_key_reused")


def test_a_body_that_is_too_long(served: Served, key: str) -> None:
    answer = served.post("/parsed", key, {"note": "x" * 5000})
    hold(SPEC, "/parsed", answer, "idempotency_body_too_large")
    assert SPEC["paths"]["/parsed"]["post"]["x-idempotency"]["max_request_body"] == 5000


def test_the_first_answer_and_its_replay_have_the_documented_headers(served: Served, key: str) -> None:
    headers = SPEC["paths"]["/marked"]["post"]["responses"]["201"]["headers"]
    first, again = served.post("/marked", key), served.post("/marked", key)
    assert "Idempotency-Key" in headers
    assert first.headers["Idempotency-Key"] == again.headers["Idempotency-Key"] == key
    assert again.headers["X-Again"] in headers["X-Again"]["schema"]["enum"]


def test_a_duplicate_that_comes_too_early(served: Served, key: str) -> None:
    first = threading.Thread(target=served.post, args=("/plain", key, {"gate": key}))
    first.start()
    served.admin("came", gate=key)
    try:
        hold(SPEC, "/plain", served.post("/plain", key, {"gate": key}), "idempotency_key_in_use")
    finally:
        served.admin("open", gate=key)
        first.join()


def test_a_store_that_is_down(own: Callable[..., Served], key: str) -> None:
    served = own("starlette")
    served.admin("switch", down=True)
    hold(SPEC, "/plain", served.post("/plain", key), "idempotency_store_unavailable")
    assert served.post("/open", key).status_code == 201
    assert "503" not in SPEC["paths"]["/open"]["post"]["responses"]


def test_an_outcome_that_is_not_known(own: Callable[..., Served], key: str, tmp_path: Any) -> None:
    served = own("starlette", STORE=str(tmp_path / "records.db"))
    first = threading.Thread(target=_let_down, args=(served, "/rejected", key))
    first.start()
    served.admin("came", gate=key)
    served.kill()
    first.join()
    served.start()
    end = time.monotonic() + 20
    while (answer := served.post("/rejected", key, {"gate": key})).status_code == 409:  # until its lease ends
        assert time.monotonic() < end
        time.sleep(0.05)
    hold(SPEC, "/rejected", answer, "idempotency_outcome_unknown")
    assert "500" not in SPEC["paths"]["/plain"]["post"]["responses"]


def _let_down(served: Served, path: str, key: str) -> None:
    with pytest.raises(httpx.TransportError):
        served.post(path, key, {"gate": key})


def test_preconditions_quotas_and_expired_keys() -> None:
    app = FastAPI()
    guard = AsyncSemel(AsyncMemoryStore(), quota=Quota(live_keys=2))
    install(app, guard=guard, tenant=lambda request: "alice")

    @app.patch("/orders/{id}")
    @conditional()
    async def change(id: str, if_match: str = Header("")) -> None:
        check_match(etag(8))

    @app.post("/orders")
    @idempotent(ttl="1ms", reject_expired_for="1h")
    async def order() -> None: ...

    async def ask(method: str, path: str, **headers: str) -> httpx.Response:
        lines = {name.replace("_", "-"): value for name, value in headers.items()}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return await client.request(method, path, headers=lines)

    async def main() -> None:
        spec = app.openapi()
        path = "/orders/{id}"
        hold(spec, path, await ask("PATCH", "/orders/1"), "precondition_required", "patch")
        hold(spec, path, await ask("PATCH", "/orders/1", If_Match="7"), "precondition_invalid", "patch")
        hold(spec, path, await ask("PATCH", "/orders/1", If_Match='"7"'), "precondition_failed", "patch")
        assert (await ask("POST", "/orders", Idempotency_Key="a")).status_code == 200
        await asyncio.sleep(0.01)  # the ttl, which no event ends
        hold(spec, "/orders", await ask("POST", "/orders", Idempotency_Key="a"), "idempotency_key_expired")
        assert (await ask("POST", "/orders", Idempotency_Key="b")).status_code == 200
        hold(spec, "/orders", await ask("POST", "/orders", Idempotency_Key="c"), "idempotency_too_many_keys")
        parameters = {each["name"].lower() for each in spec["paths"][path]["patch"]["parameters"]}
        assert parameters == {"id", "if-match", "idempotency-key"}, "a header is described once"

    asyncio.run(main())
