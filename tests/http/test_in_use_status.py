"""The status of a duplicate while the first request still runs: as the route says, and always retryable."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import flask
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from semel import AsyncMemoryStore, AsyncSemel, MemoryStore, Semel
from semel.http import fastapi as for_starlette
from semel.http import flask as for_flask
from semel.http.contract.rules import Idempotent, idempotent
from semel.http.describe import document
from tests.http.asking import Counting, ask, at_the_edge, body_of, header

STATUSES: list[Any] = [409, 425, 429, 503]


class Held(Counting):
    """A handler that waits until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.came, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.came.set()
        await self.go_on.wait()
        await super().__call__(scope, receive, send)


def decorated(handler: Held, rule: Idempotent) -> Any:
    @for_starlette.idempotent(rule)
    async def pay(request: Request) -> JSONResponse:
        handler.runs += 1
        handler.came.set()
        await handler.go_on.wait()
        return JSONResponse({"run": handler.runs})

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    for_starlette.install(app, guard=AsyncSemel(AsyncMemoryStore()), tenant=lambda request: "alice")
    return app


@pytest.mark.parametrize("status", STATUSES)
@pytest.mark.parametrize("place", ["edge", "endpoint"])
def test_a_duplicate_gets_the_status_of_the_route_and_may_retry(place: str, status: Any) -> None:
    async def run() -> None:
        handler = Held()
        rule = idempotent(in_use_status=status)
        app = at_the_edge(handler, rule=rule) if place == "edge" else decorated(handler, rule)
        first = asyncio.create_task(ask(app))
        await handler.came.wait()
        duplicate = await ask(app)
        handler.go_on.set()
        assert (await first)[0]["status"] == 200
        assert duplicate[0]["status"] == status
        told = json.loads(body_of(duplicate))
        assert (told["status"], told["code"], told["retryable"]) == (status, "idempotency_key_in_use", True)
        assert int(header(duplicate, b"retry-after")[0]) == told["retry_after"] >= 1
        assert (await ask(app))[0]["status"] == 200
        assert handler.runs == 1

    asyncio.run(run())


@pytest.mark.parametrize("status", STATUSES)
def test_in_flask_too(status: Any) -> None:
    app = flask.Flask("pay")
    for_flask.install(app, guard=Semel(MemoryStore()), tenant=lambda request: "alice")
    duplicates: list[Any] = []

    def send() -> Any:
        return app.test_client().post("/pay", headers={"Idempotency-Key": "k"})

    @app.post("/pay")
    @for_flask.idempotent(in_use_status=status)
    def pay() -> str:
        duplicates.append(send())
        return "paid"

    assert send().status_code == 200
    [duplicate] = duplicates
    assert duplicate.status_code == status
    assert duplicate.json["code"] == "idempotency_key_in_use"
    assert int(duplicate.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("status", [400, 408, 422, 500, "409", None])
def test_no_other_status_can_be_declared(status: Any) -> None:
    from semel import PolicyError

    with pytest.raises(PolicyError, match="in_use_status is 409, 425, 429 or 503"):
        idempotent(in_use_status=status)


@pytest.mark.parametrize("status", STATUSES)
def test_the_document_has_it(status: Any) -> None:
    spec = {
        "openapi": "3.1.0",
        "info": {"title": "Pay", "version": "1"},
        "paths": {"/pay": {"post": {"responses": {"201": {"description": "Paid."}}}}},
    }
    described = document(spec, {"POST /pay": idempotent(in_use_status=status)})["paths"]["/pay"]["post"]
    assert described["x-idempotency"].get("in_use_status", 409) == status
    answer = described["responses"][str(status)]
    assert (
        answer["content"]["application/problem+json"]["examples"]["idempotency_key_in_use"]["value"]["status"] == status
    )
    assert "Retry-After" in answer["headers"]
